"""Rows of results: table, CSV and picture."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..evaluation.output import environment, print_table
from .shapes import Shape
from .timer import Percentiles

COLUMNS = (
    "shape",
    "heads",
    "kv_heads",
    "head_dim",
    "batch",
    "cached_tokens",
    "page_size",
    "competitor",
    "format",
    "p20_us",
    "p50_us",
    "p80_us",
    "rounds",
    "bytes_moved",
    "GB/s",
    "ratio",
    "gate",
    "note",
    "gpu",
    "torch",
    "triton",
    "transformers",
    "cuda",
    "torch_witcert",
    "commit",
)
#: Stands for the format of rows that have no store.
DENSE = "bf16"
#: Columns of the table on the terminal.
SHOWN = ("competitor", "format", "p20_us", "p50_us", "p80_us", "GB/s", "ratio", "gate")


@dataclass(frozen=True)
class Row:
    """One competitor on one shape.

    Args:
        shape: that was measured.
        page_size, rounds: how.
        competitor: what was timed.
        store_format: name of the store's format, or :data:`DENSE`.
        bytes_moved: that one call must move.
        times: microseconds a call; None where there are none, and `note` says why.
        gate: "green", "red", or "-" where nothing is gated.
        ratio: p50 over that of the fastest bf16 rival of the run; below 1 is faster. None where there is no rival.
        note: what else there is to say.
    """

    shape: Shape
    page_size: int
    rounds: int
    competitor: str
    store_format: str
    bytes_moved: int
    times: Percentiles | None
    gate: str = "-"
    ratio: float | None = None
    note: str = ""

    def cells(self) -> dict[str, object]:
        """Everything but the environment, by the names in :data:`COLUMNS`; what is missing is empty."""
        cells = {
            "shape": self.shape.name,
            "heads": self.shape.heads,
            "kv_heads": self.shape.kv_heads,
            "head_dim": self.shape.head_dim,
            "batch": self.shape.batch,
            "cached_tokens": self.shape.tokens,
            "page_size": self.page_size,
            "rounds": self.rounds,
            "competitor": self.competitor,
            "format": self.store_format,
            "bytes_moved": self.bytes_moved,
            "gate": self.gate,
            "note": self.note,
        }
        if self.times is not None:
            cells |= {f"{name}_us": f"{value:.2f}" for name, value in self.times._asdict().items()}
            cells["GB/s"] = f"{self.bytes_moved / self.times.p50 / 1e3:.0f}"
        if self.ratio is not None:
            cells["ratio"] = f"{self.ratio:.4f}"
        return cells


def print_rows(rows: Sequence[Row]) -> None:
    """Print the rows of one shape, and below them each note once."""
    print_table(list(SHOWN), [[row.cells().get(name, "") for name in SHOWN] for row in rows])
    for note in dict.fromkeys(f"{row.competitor}: {row.note}" for row in rows if row.note):
        print(note, flush=True)


class CsvFile:
    """A CSV file that is made by the first rows and never overwrites another.

    Args:
        path: of the file; its folder is made. None writes nothing.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.mode = "x"

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows.

        Raises:
            FileExistsError: the file was there before the first of them.
        """
        if self.path is None:
            return
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, self.mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if self.mode == "x":
                writer.writeheader()
            writer.writerows(row.cells() | environment() for row in rows)
        self.mode = "a"


def write_plot(path: str | Path, rows: Sequence[Row]) -> None:
    """Write a PNG with the ratio of every timed row, grouped by shape.

    Raises:
        ImportError: matplotlib is missing. ValueError: no row has a ratio to draw.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error

    drawn = [row for row in rows if row.ratio is not None]
    if not drawn:
        raise ValueError(f"rows must have a ratio to draw, got {len(rows)} rows without one")
    groups = list(dict.fromkeys(row.shape for row in drawn))
    labels = list(dict.fromkeys(_label(row) for row in drawn))
    width = 0.8 / len(labels)
    figure = Figure(figsize=(3 + 0.35 * len(groups) * max(4, len(labels)), 5), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axis = figure.subplots()
    for index, label in enumerate(labels):
        of_label = [row for row in drawn if _label(row) == label]
        at = [groups.index(row.shape) + (index + 0.5) * width - 0.4 for row in of_label]
        color = colormaps["turbo"]((index + 0.5) / len(labels))
        axis.bar(at, [row.ratio for row in of_label], width, label=label, color=color)
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xticks(range(len(groups)), [f"{shape.name}\nB {shape.batch}\nS {shape.tokens}" for shape in groups])
    axis.set_ylabel("time / time of the fastest bf16 rival")
    axis.set_title(f"{environment()['gpu']}, one decode step, median", fontsize=10)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(path)


def _label(row: Row) -> str:
    """Rivals by name alone: which of their layouts is faster depends on the shape."""
    return row.competitor.split(",")[0] if row.store_format == DENSE else f"{row.competitor} {row.store_format}"
