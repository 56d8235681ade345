"""Certified attention over five lengths and five batch sizes of one shape: is its time linear, and where is a cliff?

The sizes are fifths of the shape's, so most of them are no multiple of a page or a split. Every size passes the gate of the
command `attention` first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..evaluation.arguments import whole_number
from ..evaluation.output import print_table
from ..ops.formats import DEFAULT, StoreFormat
from .report import CsvFile, Row
from .results import Results, certified_key
from .session import Session, store_format
from .shapes import SHAPES, Shape

POINTS = 5
#: What is varied, a field of the shape, and what one more of it is.
AXES = {"tokens": "cached token", "batch": "row"}


class Line(NamedTuple):
    """A least-squares line through times in microseconds."""

    start: float  # at size 0
    slope: float  # of one more token, or row
    residuals: list[float]  # (time - line) / line of each size

    @classmethod
    def through(cls, sizes: Sequence[int], times: Sequence[float]) -> Line:
        """Fit two points or more of different sizes."""
        x = torch.tensor(sizes, dtype=torch.float64)
        y = torch.tensor(times, dtype=torch.float64)
        slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        start = y.mean() - slope * x.mean()
        line = start + slope * x
        return cls(float(start), float(slope), ((y - line) / line).tolist())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="S2", help="(default: %(default)s)")
    parser.add_argument("--format", type=store_format, default=DEFAULT, metavar="NAME", help=f"({DEFAULT.name})")
    parser.add_argument("--cached-tokens", type=whole_number(POINTS), metavar="S", help="largest, not the shape's own")
    parser.add_argument("--batch-size", type=whole_number(1), metavar="B", help="largest, not the shape's own")


def sizes(largest: int) -> list[int]:
    """Fifths of the largest size; 1 to 5 where it has not that many."""
    return [max(point, largest * point // POINTS) for point in range(1, POINTS + 1)]


def run(options: argparse.Namespace, session: Session) -> list[Row]:
    """Measure both axes; prints the points and the line of each.

    Raises:
        Refused: inputs do not fit in the memory allowed; nothing is measured then.
    """
    shape = SHAPES[options.shape]
    shape = replace(shape, tokens=options.cached_tokens or shape.tokens, batch=options.batch_size or shape.batch)
    swept = {axis: [replace(shape, **{axis: size}) for size in sizes(getattr(shape, axis))] for axis in AXES}
    inputs = {axis: session.inputs_of(shapes, [options.format]) for axis, shapes in swept.items()}
    file, rows = CsvFile(options.csv), []
    for axis, shapes in swept.items():
        print(f"\n{options.format.name}, {shape}; by {axis}", flush=True)
        measured = measure_axis(shapes, inputs[axis], options.format, session)
        print_axis(axis, measured)
        file.append(measured)
        rows += measured
    return rows


def measure_axis(shapes: Sequence[Shape], inputs: Sequence[int], chosen: StoreFormat, session: Session) -> list[Row]:
    """A row of each shape, all timed in turn.

    Args:
        shapes: that differ in size.
        inputs: of each, independent inputs to rotate over.
        chosen: format of the stores.
        session: how.
    """
    reads = {}
    for shape, count in zip(shapes, inputs, strict=True):
        reads[certified_key(shape, chosen)] = session.certified(shape, chosen, count)
    calls = {key: each.calls for key, each in reads.items() if each.verdict.green}
    results = Results(session, reads, session.measure(calls, session.rounds))
    return [results.of_certified(shape, chosen) for shape in shapes]


def print_axis(axis: str, rows: Sequence[Row]) -> None:
    """Print the points of one axis and the line through those that have a time."""
    timed = [row for row in rows if row.times is not None]
    header = [axis, "p20_us", "p50_us", "p80_us", "GB/s", "gate", "line", "residual"]
    cells = {
        row: [getattr(row.shape, axis), *(row.cells().get(name, "") for name in header[1:6]), "", ""] for row in rows
    }
    if len(timed) < 2:
        print_table(header, cells.values())
        print("no line: fewer than two sizes have a time")
        return
    points = [getattr(row.shape, axis) for row in timed]
    line = Line.through(points, [row.times.p50 for row in timed])
    for row, size, residual in zip(timed, points, line.residuals, strict=True):
        cells[row][-2:] = [f"{line.start + line.slope * size:.2f}", f"{residual:+.1%}"]
    print_table(header, cells.values())
    worst = max(range(len(timed)), key=lambda index: abs(line.residuals[index]))
    print(
        f"p50 = {line.start:.2f} us + {line.slope:.6g} us a {AXES[axis]}; "
        f"largest cliff {line.residuals[worst]:+.1%} at {points[worst]}"
    )
