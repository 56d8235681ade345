"""Correctness gate: what is not sound is not timed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..ops.formats import StoreFormat
from ..ops.radii import DETERMINISTIC
from ..testing.generators import Scenario, hot_entry
from ..testing.harness import CacheHarness, Operators, Read, Soundness, run
from .inputs import Tokens, timed_radii
from .shapes import DTYPE, Shape
from .timer import attempt

#: Cached tokens of a scenario at most: enough for a read of several splits.
MOST_TOKENS = 4096


class Verdict(NamedTuple):
    """Whether a configuration may be timed, and if not, why."""

    green: bool
    reason: str = ""


GREEN = Verdict(True)


def judge(counts: Soundness) -> Verdict:
    """Green if no bound was broken, a probabilistic one neither, and some reads have finite bounds."""
    broken = counts.violations + counts.probabilistic_violations
    if broken:
        return Verdict(False, f"{broken} violations in {counts.reads} reads: {counts}")
    if counts.unbounded == counts.reads:
        return Verdict(False, f"none of {counts.reads} reads has a finite bound")
    return GREEN


def plan(shape: Shape, store_format: StoreFormat, page_size: int) -> list[Scenario]:
    """Scenarios with a shape's heads, head dim, group and dtype: decoding over a page's end, an attack, a cache's first tokens."""
    geometry = {
        "num_kv_heads": shape.kv_heads,
        "group": shape.group,
        "page_size": page_size,
        "head_dim": shape.head_dim,
        "dtype": DTYPE,
        "store_format": store_format.name,
    }
    cached = min(shape.tokens, MOST_TOKENS) // page_size * page_size + page_size - 2
    values = "normal" if hot_entry(store_format.value) is None else "one_hot"
    decode = geometry | {"prefill": cached, "chunks": (1,) * 4, "value_kind": values}
    scenarios = [
        Scenario(seed=0, **decode),
        Scenario(seed=1, **decode | {"key_kind": "outlier_channel", "query_kind": "residual"}),
        Scenario(seed=2, **geometry, chunks=(2 * page_size + 1, 1, 1)),
    ]
    timed = timed_radii(store_format)
    if timed != DETERMINISTIC:
        scenarios.append(Scenario(seed=3, radii=timed.name, **decode))
    return scenarios


def check_scenarios(scenarios: Iterable[Scenario], operators: Operators, device: torch.device | str) -> Verdict:
    """Run scenarios with zero tolerance. An operator that raises is red."""

    def together() -> Soundness:
        return sum((run(scenario, operators, device) for scenario in scenarios), Soundness())

    counts, reason = attempt(together)
    return Verdict(False, reason) if counts is None else judge(counts)


def check_input(cache: CacheHarness, tokens: Tokens, arguments: tuple, operators: Operators) -> Verdict:
    """Hold a read that is about to be timed against float64, all rows and heads of it.

    Its token is written afterwards, as a decode step does. Reads that are timed go on with the lengths and the source map
    before it, which the write leaves valid: it takes a slot of the exact tail, and may fill a page, that they do not see.
    """
    q, _, _, positions, *_ = arguments
    read = Read(q, positions, *operators.certified_attention(*arguments))
    cache.write(tokens.new_k, tokens.new_v, torch.ones_like(positions, dtype=torch.bool))
    return judge(cache.check(read, one_hot=False))
