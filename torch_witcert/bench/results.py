"""From gates and times to rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..ops.formats import StoreFormat
from .competitors import Certified, Probe, Rival
from .inputs import bytes_moved
from .report import DENSE, Row
from .session import Session
from .shapes import Shape
from .timer import Measured, Percentiles

Kind = TypeVar("Kind", Rival, Probe)


def certified_key(shape: Shape, store_format: StoreFormat) -> str:
    """What certified reads are called where they are timed."""
    return f"{store_format.name}, batch {shape.batch}, {shape.tokens} tokens"


@dataclass(frozen=True)
class Results:
    """Makes rows from what the gates said and what was measured.

    Args:
        session: how it was measured.
        reads: certified reads by :func:`certified_key`.
        measured: of their calls under the same keys, of rivals and probes under their own.
    """

    session: Session
    reads: Mapping[str, Certified]
    measured: Measured

    def of_certified(self, shape: Shape, store_format: StoreFormat) -> Row:
        """Row of one format; red, without a time, where its gate is red or where it could not be captured."""
        key = certified_key(shape, store_format)
        verdict = self.reads[key].verdict
        times = self.measured.times.get(key) if verdict.green else None
        note = verdict.reason or self.measured.refused.get(key, "")
        moved = bytes_moved(shape, store_format, self.session.page_size)
        row = self._row(shape, "certified", store_format.name, moved, times, note)
        return replace(row, gate="red" if times is None else "green")

    def of_memory(self, shape: Shape, name: str, nbytes: int, probes: Sequence[Probe]) -> Row:
        """Row of the time in which the fastest probe would move `nbytes`."""
        ran, note = self._ran(probes)
        if not ran:
            return self._row(shape, "memory floor", name, nbytes, None, note)
        best = min(ran, key=lambda probe: self.measured.times[probe.key].p50 / probe.bytes_moved)
        times = Percentiles(*(each * nbytes / best.bytes_moved for each in self.measured.times[best.key]))
        return self._row(shape, "memory floor", name, nbytes, times, f"as fast as a {best.key}")

    def of_rival(self, shape: Shape, layouts: Sequence[Rival], nbytes: int) -> Row:
        """Row of the fastest layout of one rival."""
        ran, note = self._ran(layouts)
        if not ran:
            return self._row(shape, layouts[0].name, DENSE, nbytes, None, note)
        best = min(ran, key=lambda rival: self.measured.times[rival.key].p50)
        return self._row(shape, best.key, DENSE, nbytes, self.measured.times[best.key], note)

    def _ran(self, competitors: Sequence[Kind]) -> tuple[list[Kind], str]:
        """Those that ran, and why the others did not."""
        refused = self.measured.refused
        reasons = [f"{each.key} not available: {refused[each.key]}" for each in competitors if each.key in refused]
        return [each for each in competitors if each.key not in refused], "; ".join(reasons)

    def _row(self, shape: Shape, competitor: str, name: str, nbytes: int, times: Percentiles | None, note: str) -> Row:
        how = (shape, self.session.page_size, self.session.rounds)
        return Row(*how, competitor, name, nbytes, times, note=note)
