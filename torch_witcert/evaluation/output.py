"""What the commands write: tables, progress, JSON."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from .. import __version__
from ..env import version_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Item = TypeVar("Item")
#: Seconds between two progress lines, on a terminal and where the output is a file.
REDRAW_INTERVAL = 0.2
LOG_INTERVAL = 15.0


def print_table(header: list[str], rows: Iterable[list]) -> None:
    """Print a Markdown table with aligned columns."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |", flush=True)


class Progress:
    """Says on stderr how far something is: one line redrawn on a terminal, elsewhere a line now and then.

    Args:
        total: steps in all.
        what: that is counted.
    """

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self.terminal = sys.stderr.isatty()
        self.start = self.shown = time.monotonic()

    def advance(self) -> None:
        """One step is done."""
        self.done += 1
        now = time.monotonic()
        due = now - self.shown >= (REDRAW_INTERVAL if self.terminal else LOG_INTERVAL)
        if due or (self.terminal and self.done == self.total):
            self.shown = now
            left = (now - self.start) / self.done * (self.total - self.done)
            line = f"{self.what} {self.done}/{self.total}, {left:.0f} s left"
            print(
                f"\r{line:<70}" if self.terminal else line,
                end="" if self.terminal else "\n",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """End the redrawn line."""
        if self.terminal and self.done:
            print(file=sys.stderr, flush=True)


def progress(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items and say how far it is."""
    steps = Progress(len(items), what)
    for item in items:
        yield item
        steps.advance()
    steps.close()


@contextmanager
def prefill_progress(model: PreTrainedModel) -> Iterator[None]:
    """Say on stderr how far the first forward of a Hugging Face causal LM is: every decoder layer counts one."""
    layers = model.get_decoder().layers
    steps = Progress(len(layers), "prefill: layer")

    def after_layer(*_) -> None:
        if steps.done < steps.total:
            steps.advance()
            if steps.done == steps.total:
                steps.close()

    handles = [layer.register_forward_hook(after_layer) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def quiet_libraries() -> None:
    """Silence what torchao logs when it is imported: binary extensions that do not load are not used here."""
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


@lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """What a figure was measured with: GPU, versions, and the commit of the checkout."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": version_of("triton") or "none",
        "transformers": version_of("transformers") or "none",
        "cuda": torch.version.cuda or "none",
        "torch_witcert": __version__,
        "commit": commit(Path(__file__)),
    }


def commit(file: Path) -> str:
    """Commit of the checkout that tracks a file, with "-dirty" where anything in it was changed; "unknown" without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An environment inside somebody's repository is no checkout of this one.
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_json(path: str | None, result: dict) -> None:
    """Write a result with the environment that it was measured in; None writes nothing.

    Raises:
        FileExistsError: the file is there already. A result is never overwritten.
    """
    if path is None:
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "x", encoding="utf-8") as file:
        json.dump(result | {"environment": environment()}, file, indent=1)
    print(f"wrote {path}")
