"""Soundness of the operators at scale: every read of many random and adversarial caches against float64, zero tolerance.

Deterministic bounds must never be broken. A probabilistic one may be, with probability delta a read: its violations are
counted apart and set against delta.

Half of the reads see 2,048 cached tokens or more, a third are adversarial (keys or queries made to break the bound), and at
least nine tenths of the tokens are read as codes. Where values are one-hot, the operator's own distribution is compared as
well; in every fourth scenario the output is also held against float64 over the operator's own store.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from ..ops.formats import DEFAULT, KeyFormat, StoreFormat, ValueFormat
from ..ops.radii import DETERMINISTIC, Radii
from ..ops.storage import MODEL_DTYPES
from ..testing.generators import KEY_KINDS, Scenario, hot_entry
from ..testing.harness import Soundness
from ..testing.harness import run as run_scenario
from .arguments import whole_number
from .output import print_table, write_json

LONG = 2048
STRENGTHS = (0.1, 0.3, 1.0, 3.0)
ADVERSARIAL_QUERIES = ("residual", "worst_channel", "token", "large")
#: (page size, head dim, KV heads, group, cached tokens, new tokens of each forward); decode and chunks, long and short.
GEOMETRIES = (
    (64, 128, 4, 8, LONG, (16,) * 4),
    (16, 64, 3, 3, 512, (8,) * 8),
    (64, 64, 3, 3, LONG + 63, (1,) * 16),
    (128, 128, 2, 4, 2 * LONG, (32,) * 2),
    (32, 128, 2, 7, 1024, (16,) * 4),
    (64, 128, 8, 4, LONG + 1, (1,) * 16),
)
#: Formats besides the default one: every key element, scaling, dither and value element, with and without outlier pairs.
FORMATS = tuple(
    StoreFormat(KeyFormat(*key), ValueFormat(*value))
    for key, value in (
        (("int8", "token", 4, "stream"), ("int8", "stream")),
        (("int8", "asymmetric"), ("int4",)),
        (("int4", "asymmetric"), ("int8",)),
        (("int8", "symmetric", 4, "stream"), ("int8",)),
        (("fp8", "symmetric"), ("fp8",)),
        (("int8", "asymmetric", 0, "tile"), ("int8", "tile")),
        (("int6", "asymmetric", 8), ("exact",)),
        (("int4", "token", 2), ("int4",)),
        (("int8", "token"), ("int8",)),
        (("int6", "symmetric", 0, "stream"), ("int8",)),
    )
)
#: Kinds of radii that dithered formats are run with, in turn: the smallest of all, and the paper's own alone.
DITHERED_RADII = (Radii(True, True, True), Radii(False, False, True))
CHOICES = {"default": (DEFAULT,), "others": FORMATS, "all": (DEFAULT, *FORMATS)}


def is_adversarial(scenario: Scenario) -> bool:
    return scenario.key_kind != "normal" or scenario.query_kind in ADVERSARIAL_QUERIES


def plan(batch_size: int, divide: int = 1, formats: tuple[StoreFormat, ...] = (DEFAULT,)) -> Iterator[Scenario]:
    """Endless scenarios: geometry, dtype and kinds cycle with different periods, so that every pair meets.

    Args:
        batch_size: rows of each cache.
        divide: divides cached tokens and page counts, for a small run on a CPU.
        formats: of the stores, in turn. The default one meets every geometry and dtype, another one a single pair, because
            each pair is a build of the kernels.
    """
    attacks = itertools.cycle(itertools.product(KEY_KINDS, ("normal", *ADVERSARIAL_QUERIES)))
    for seed in itertools.count():
        turn, store_format = seed // len(formats), formats[seed % len(formats)]
        pair = turn if store_format == DEFAULT else seed % len(formats) * 7
        page_size, head_dim, kv_heads, group, prefill, chunks = GEOMETRIES[pair % len(GEOMETRIES)]
        radii = DETERMINISTIC
        if store_format.key.is_dithered:
            radii = DITHERED_RADII[turn % len(DITHERED_RADII)]
        one_hot = hot_entry(store_format.value) is not None and turn % 5 != 4
        scenario = Scenario(
            seed=seed,
            batch_size=batch_size,
            num_kv_heads=kv_heads,
            group=group,
            page_size=max(16, page_size // divide),
            head_dim=head_dim,
            dtype=MODEL_DTYPES[pair // len(GEOMETRIES) % len(MODEL_DTYPES)],
            prefill=prefill // divide,
            chunks=chunks if divide == 1 else chunks[:2],
            value_kind="one_hot" if one_hot else "normal",
            strength=STRENGTHS[turn // 7 % len(STRENGTHS)],
            store_format=store_format.name,
            radii=radii.name,
        )
        if turn // len(GEOMETRIES) % 5 < 2 or (store_format != DEFAULT and turn % 3 == 0):
            key_kind, query_kind = next(attacks)
            # A query along an error knows the dither, which the probabilistic radius assumes it does not.
            query_kind = "token" if radii.probabilistic and query_kind == "residual" else query_kind
            scenario = replace(scenario, key_kind=key_kind, query_kind=query_kind)
        yield scenario


def measure_soundness(
    reads: int,
    device: torch.device | str,
    batch_size: int = 16,
    divide: int = 1,
    formats: tuple[StoreFormat, ...] = (DEFAULT,),
) -> dict[str, Soundness]:
    """Run scenarios until every class of reads has its share of `reads`.

    Returns:
        Counts of the classes "all", "long" (half of `reads` at least) and "adversarial" (a third at least), and of each format.
    """
    counts = {"all": Soundness(), "long": Soundness(), "adversarial": Soundness()}
    wanted = {"all": reads, "long": reads / 2, "adversarial": reads / 3}
    counts |= {store_format.name: Soundness() for store_format in formats}
    shown = 0.0
    for scenario in plan(batch_size, divide, formats):
        result = run_scenario(scenario, device=device, arithmetic=scenario.seed % 4 == 0)
        if result.violations:
            print(f"VIOLATION {scenario}: {result}", flush=True)
        counts["all"] += result
        counts[scenario.store_format] += result
        if scenario.prefill >= LONG // divide:
            counts["long"] += result
        if is_adversarial(scenario):
            counts["adversarial"] += result
        done = min(1.0, *(counts[name].reads / wanted[name] for name in wanted))
        if done >= shown + 0.1 or done == 1:
            shown = done
            print(f"{done:.0%}: {counts['all'].reads:,} reads, {counts['all'].violations} violations", flush=True)
        if done == 1:
            return counts
    raise AssertionError("the plan is endless")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reads", type=whole_number(1), default=100_000, help="head reads to check (1e5; 1e7 on a GPU)"
    )
    parser.add_argument("--batch-size", type=whole_number(1), default=16, help="rows of each cache (16)")
    parser.add_argument(
        "--formats",
        choices=CHOICES,
        default="default",
        help="formats of keys and values: the default recipe's, others, all",
    )
    parser.add_argument(
        "--divide", type=whole_number(1), default=1, help="divide cached tokens and pages, for a small run (1)"
    )


def run(options: argparse.Namespace) -> dict:
    """Run the command; returns what it printed, as data."""
    formats = CHOICES[options.formats]
    classes = measure_soundness(options.reads, options.device, options.batch_size, options.divide, formats)
    print_table(
        [
            "reads",
            "count",
            "bounded",
            "TV observed",
            "as codes",
            "TV violations",
            "output violations",
            "probabilistic",
            "violations",
        ],
        [
            [
                name,
                f"{counts.reads:,}",
                f"{counts.reads - counts.unbounded:,}",
                f"{counts.tv_reads:,}",
                f"{counts.code_share:.3f}",
                counts.tv_violations,
                counts.output_violations,
                f"{counts.probabilistic_reads:,}",
                counts.probabilistic_violations,
            ]
            for name, counts in classes.items()
        ],
    )
    everything = classes["all"]
    print(
        f"against float64 over the operator's own store: {everything.arithmetic_reads:,} reads, "
        f"{everything.arithmetic_violations} outside the claimed arithmetic"
    )
    if everything.probabilistic_reads:
        rate = everything.probabilistic_violations / everything.probabilistic_reads
        print(f"probabilistic bounds: observed violation rate {rate:.2g}, allowed {Scenario.delta:g} a read")
    result = {name: asdict(counts) for name, counts in classes.items()}
    write_json(options.json, result)
    return result
