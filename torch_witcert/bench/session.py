"""What the commands share: their options, the operators under test, and how much memory the inputs may take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..evaluation.arguments import whole_number
from ..ops.formats import StoreFormat
from ..ops.storage import PAGE_SIZES
from ..testing.harness import Operators, registered
from .competitors import Certified, certified_reads
from .inputs import l2_bytes, rotations, store_shape
from .shapes import Shape
from .timer import Call, Measured, measure

#: What filling and checking one input takes, in units of its bf16 keys and values: a copy of them, and copies in float64.
CHECK_FACTOR = 12


class Refused(ValueError):
    """A command cannot run here, or not with these options."""


@dataclass(frozen=True)
class Session:
    """How a command measures.

    Args:
        page_size: P of every store.
        rounds: samples of each competitor.
        memory: bytes that inputs may take.
        device: of everything; times need a CUDA device.
        operators: under test.
        measure: times calls; another one serves tests on a CPU.
        probe_bytes: size of the buffers that the memory's bandwidth is measured with.
    """

    page_size: int = 64
    rounds: int = 50
    memory: int = 40 * 10**9
    device: torch.device | str = "cuda"
    operators: Operators = field(default_factory=registered)
    measure: Callable[[Mapping[str, Sequence[Call]], int], Measured] = measure
    probe_bytes: int = 2**30

    @classmethod
    def of(cls, options: argparse.Namespace) -> Session:
        """The session that a command line asks for, on the current GPU.

        Raises:
            Refused: there is none.
        """
        if not torch.cuda.is_available():
            raise Refused(f"kernels are timed on a CUDA GPU, and torch {torch.__version__} finds none here")
        return cls(options.page_size, options.rounds, options.memory_gb * 10**9)

    def inputs_of(self, shapes: Sequence[Shape], formats: Sequence[StoreFormat]) -> list[int]:
        """Independent inputs of each shape to rotate over, if all of them, in all formats, are there at the same time.

        Raises:
            Refused: they would take more memory than is allowed.
        """
        counts, needed = [], 2 * self.probe_bytes + CHECK_FACTOR * max(shape.dense_bytes for shape in shapes)
        for shape in shapes:
            stores = [store_shape(shape, store_format, self.page_size).nbytes() for store_format in formats]
            counts.append(rotations(min(stores), l2_bytes(self.device)))
            needed += counts[-1] * (sum(stores) + shape.dense_bytes)
        if needed > self.memory:
            raise Refused(
                f"{shapes[-1]}: the inputs need {needed / 1e9:.1f} GB, more than --memory-gb {self.memory / 1e9:g}: choose "
                "fewer --formats, or a smaller --batch-size or --cached-tokens"
            )
        return counts

    def certified(self, shape: Shape, store_format: StoreFormat, inputs: int) -> Certified:
        """Checked reads of a shape; says on stderr how the gate is."""
        reads = certified_reads(shape, store_format, self.page_size, inputs, self.operators, self.device)
        gate = "green" if reads.verdict.green else f"RED, not timed: {reads.verdict.reason}"
        say(f"{store_format.name} on {shape}: gate {gate}")
        return reads


def say(line: str) -> None:
    """A line of progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def store_format(text: str) -> StoreFormat:
    """The format of that name."""
    try:
        return StoreFormat.parse(text)
    except (ValueError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that every command has."""
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=64, help="tokens of a page (64)")
    parser.add_argument("--rounds", type=whole_number(1), default=50, help="samples of each competitor (50)")
    parser.add_argument("--memory-gb", type=whole_number(1), default=40, help="GB that inputs may take (40)")
    parser.add_argument("--csv", metavar="PATH", help="also write every row there; must not exist")
