"""Times of GPU work: CUDA graphs over rotating inputs, all competitors in turn, so that clocks drift alike for all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from ..evaluation.output import progress

#: One read of one of the rotating inputs.
Call = Callable[[], object]
Value = TypeVar("Value")

#: Calls that a graph holds at least: what it costs to launch a graph is shared by them.
LEAST_CALLS = 32
#: Rounds before the ones that count.
WARM_UP = 3
#: Calls of each input before its graph is captured: kernels compile, libraries choose theirs.
WARM_UP_CALLS = 2


class Percentiles(NamedTuple):
    """Of samples, in microseconds a call."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Percentiles:
        """Percentiles with linear interpolation of one sample or more."""
        wanted = torch.tensor((0.2, 0.5, 0.8), dtype=torch.float64)
        return cls(*torch.tensor(samples, dtype=torch.float64).quantile(wanted).tolist())


class Measured(NamedTuple):
    """Results by name: every name is in one of the two."""

    times: dict[str, Percentiles]
    refused: dict[str, str]  # why it could not run


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of many calls.

    Args:
        graph: to replay.
        count: calls in it.
        calls: they hold the tensors whose addresses the graph knows.
    """

    graph: torch.cuda.CUDAGraph
    count: int
    calls: Sequence[Call]


def attempt(work: Callable[[], Value]) -> tuple[Value | None, str]:
    """What `work` returns and "", or None and why it failed.

    PyTorch warns about each reason why a backend does not take its arguments and then raises a message without any, so
    the warnings are part of the reason.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return work(), ""
        except Exception as error:  # noqa: BLE001  whatever a backend raises is the reason that the table names
            kind, lines = type(error).__name__, [str(error)]
    lines += [str(warning.message) for warning in said]
    first = dict.fromkeys(line.strip().splitlines()[0] for line in lines if line.strip())
    return None, f"{kind}: {'; '.join(first)}"


def capture(calls: Sequence[Call]) -> Captured:
    """Capture calls of every input in turn, :data:`LEAST_CALLS` in all or more, after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    # An error of a kernel shows here, outside the capture.
    torch.cuda.synchronize()
    turns = -(-LEAST_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in calls:
                call()
    return Captured(graph, turns * len(calls), calls)


@torch.no_grad()
def measure(calls: Mapping[str, Sequence[Call]], rounds: int) -> Measured:
    """Time the competitors on the current GPU, one replay of each in every round.

    Args:
        calls: for each competitor, one call for each of its inputs. Calls must be capturable: no synchronization.
        rounds: samples of each; a sample is one replay, by CUDA events, over the calls in it.
    """
    captured: dict[str, Captured] = {}
    refused: dict[str, str] = {}
    for name, each in progress(list(calls.items()), "capture"):
        result, reason = attempt(partial(capture, each))
        if result is None:
            refused[name] = reason
        else:
            captured[name] = result
    samples: dict[str, list[float]] = {name: [] for name in captured}
    for index in progress(range(WARM_UP + rounds) if captured else (), "round"):
        # Not timed: the GPU is busy while the first graph that counts is launched.
        next(iter(captured.values())).graph.replay()
        events = {name: _replay(one.graph) for name, one in captured.items()}
        torch.cuda.synchronize()
        if index >= WARM_UP:
            for name, (start, end) in events.items():
                samples[name].append(start.elapsed_time(end) * 1e3 / captured[name].count)
    return Measured({name: Percentiles.of(each) for name, each in samples.items()}, refused)


def _replay(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Queue a replay between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    return start, end
