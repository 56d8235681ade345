"""What the commands write: tables, progress, JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")
#: Seconds between two progress lines where the output is a file.
LOG_INTERVAL = 15.0


def print_table(header: list[str], rows: Iterable[list]) -> None:
    """Print a Markdown table with aligned columns."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |", flush=True)


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield the items and say on stderr how far it is: one line redrawn on a terminal, else a line now and then."""
    terminal, start, shown = sys.stderr.isatty(), time.monotonic(), time.monotonic()
    for index, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown >= (0.2 if terminal else LOG_INTERVAL) or (terminal and index == total):
            shown, left = now, (now - start) / index * (total - index)
            line = f"{what} {index}/{total}, {left:.0f} s left"
            print(f"\r{line:<60}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
    if terminal:
        print(file=sys.stderr)


def versions() -> dict[str, str]:
    """Versions and device that a figure was measured with."""
    found = {name: metadata.version(name) for name in ("torch", "transformers")}
    if torch.cuda.is_available():
        found |= {"triton": metadata.version("triton"), "gpu": torch.cuda.get_device_name()}
    return found


def write_json(path: str | None, result: dict) -> None:
    """Write a result with the versions it was measured with; None writes nothing.

    Raises:
        FileExistsError: the file is there already. A result is never overwritten.
    """
    if path is None:
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "x", encoding="utf-8") as file:
        json.dump(result | {"versions": versions()}, file, indent=1)
    print(f"wrote {path}")
