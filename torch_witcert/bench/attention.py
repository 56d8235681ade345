"""Certified attention of one decode step against bf16 kernels, in one run.

Before a format is timed on a shape, its operators run against float64 with zero tolerance: scenarios of the same geometry,
and the very inputs that are timed. A red gate has no time and makes the command fail.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from ..evaluation.arguments import whole_number
from ..ops.formats import DEFAULT, KeyFormat, StoreFormat, ValueFormat
from .competitors import RIVALS, memory_probes, rivals
from .inputs import random_tokens
from .report import DENSE, CsvFile, Row, print_rows, write_plot
from .results import Results, certified_key
from .session import Session, say, store_format
from .shapes import SHAPES, Shape

#: Formats that are worth a comparison; `--formats all` takes them.
FORMATS = (
    DEFAULT,
    StoreFormat(value=ValueFormat("int4")),
    StoreFormat(KeyFormat("int4"), ValueFormat("int4")),
    StoreFormat(KeyFormat(scaling="token")),
    StoreFormat(KeyFormat(dither="tile"), ValueFormat(dither="tile")),
    StoreFormat(KeyFormat(dither="stream"), ValueFormat(dither="stream")),
)


def formats(text: str) -> tuple[StoreFormat, ...]:
    """The format of that name, or all of :data:`FORMATS`."""
    return FORMATS if text == "all" else (store_format(text),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="(default: all)")
    parser.add_argument(
        "--formats",
        nargs="+",
        type=formats,
        default=[(DEFAULT,)],
        metavar="NAME",
        help=f"formats of the stores, or 'all' for {', '.join(each.name for each in FORMATS)} (default: {DEFAULT.name})",
    )
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=list(RIVALS), help="(default: all)")
    parser.add_argument("--cached-tokens", type=whole_number(1), metavar="S", help="instead of the shapes' own")
    parser.add_argument("--batch-size", type=whole_number(1), metavar="B", help="instead of the shapes' own")
    parser.add_argument("--plot", metavar="PATH", help="also draw the ratios there, a PNG; must not exist")


def run(options: argparse.Namespace, session: Session) -> list[Row]:
    """Measure every shape; prints and writes the rows of each when it is done.

    Raises:
        Refused: inputs do not fit in the memory allowed; nothing is measured then.
    """
    chosen = list(dict.fromkeys(each for named in options.formats for each in named))
    shapes = [_overridden(SHAPES[name], options) for name in dict.fromkeys(options.shapes)]
    inputs = [session.inputs_of([shape], chosen)[0] for shape in shapes]
    file, rows = CsvFile(options.csv), []
    for shape, count in zip(shapes, inputs, strict=True):
        print(f"\n{shape}", flush=True)
        measured = measure_shape(shape, chosen, options.rivals, count, session)
        print_rows(measured)
        file.append(measured)
        rows += measured
    if options.plot and all(row.ratio is None for row in rows):
        say("no plot: no row has a ratio")
    elif options.plot:
        write_plot(options.plot, rows)
    return rows


def _overridden(shape: Shape, options: argparse.Namespace) -> Shape:
    return replace(shape, batch=options.batch_size or shape.batch, tokens=options.cached_tokens or shape.tokens)


def measure_shape(
    shape: Shape, chosen: Sequence[StoreFormat], rival_names: Sequence[str], inputs: int, session: Session
) -> list[Row]:
    """Rows of one shape: every format, its memory floor, every rival.

    Args:
        shape, chosen: what to measure, in which formats.
        rival_names: of `competitors.RIVALS`.
        inputs: independent inputs to rotate over.
        session: how.
    """
    reads = {certified_key(shape, each): session.certified(shape, each, inputs) for each in chosen}
    tokens = [random_tokens(shape, seed, session.device) for seed in range(inputs)]
    against = list(rivals(rival_names, tokens))
    probes = memory_probes(session.probe_bytes, session.device)
    calls = {key: each.calls for key, each in reads.items() if each.verdict.green}
    calls |= {rival.key: rival.calls for rival in against} | {probe.key: probe.calls for probe in probes}

    results = Results(session, reads, session.measure(calls, session.rounds))
    rows = [results.of_certified(shape, each) for each in chosen]
    moved = {row.store_format: row.bytes_moved for row in rows} | {DENSE: shape.dense_bytes + 2 * shape.query_bytes}
    rows += [results.of_memory(shape, name, nbytes, probes) for name, nbytes in moved.items()]
    competing = [
        results.of_rival(shape, [rival for rival in against if rival.name == title], moved[DENSE])
        for title in dict.fromkeys(rival.name for rival in against)
    ]
    fastest = min((row.times.p50 for row in competing if row.times), default=None)
    return [with_ratio(row, fastest) for row in rows + competing]


def with_ratio(row: Row, fastest: float | None) -> Row:
    """The row with its ratio to the fastest bf16 rival's p50; None where there is none."""
    return row if fastest is None or row.times is None else replace(row, ratio=row.times.p50 / fastest)
