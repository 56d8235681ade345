"""What is timed: certified reads, attention over bf16 keys and values, and how fast the memory is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..ops.formats import StoreFormat
from ..testing.harness import Operators
from .gate import GREEN, Verdict, check_input, check_scenarios, plan
from .inputs import Tokens, filled_cache, random_tokens, read_arguments
from .shapes import Shape
from .timer import Call, attempt

#: How query heads meet the KV head that they share: by the backend itself, or as rows of one longer query.
LAYOUTS = ("grouped heads", "folded")

Attention = Callable[..., torch.Tensor]


class Certified(NamedTuple):
    """Calls of `certified_attention` over inputs that passed the gate; none where it is red."""

    calls: list[Call]
    verdict: Verdict


class Rival(NamedTuple):
    """One way to run a bf16 kernel."""

    name: str
    layout: str  # one of LAYOUTS
    calls: list[Call]

    @property
    def key(self) -> str:
        return f"{self.name}, {self.layout}"


class Probe(NamedTuple):
    """Work that does nothing but move bytes."""

    key: str
    calls: list[Call]
    bytes_moved: int  # of one call


def certified_reads(
    shape: Shape,
    store_format: StoreFormat,
    page_size: int,
    inputs: int,
    operators: Operators,
    device: torch.device | str,
) -> Certified:
    """Reads that may be timed: the operators pass the scenarios, and every input passes its own check.

    Args:
        shape, store_format, page_size: of the cache.
        inputs: independent stores to fill, with seeds 0, 1, ..
        operators, device: as in `testing.harness`. An operator that raises is red.
    """
    verdict = check_scenarios(plan(shape, store_format, page_size), operators, device)
    if not verdict.green:
        return Certified([], verdict)

    def fill_and_check() -> Certified:
        calls: list[Call] = []
        for seed in range(inputs):
            tokens = random_tokens(shape, seed, device)
            cache = filled_cache(shape, tokens, store_format, page_size, operators)
            arguments = read_arguments(cache, tokens)
            verdict = check_input(cache, tokens, arguments, operators)
            if not verdict.green:
                return Certified([], verdict)
            calls.append(partial(operators.certified_attention, *arguments))
        return Certified(calls, GREEN)

    checked, reason = attempt(fill_and_check)
    return Certified([], Verdict(False, reason)) if checked is None else checked


def _sdpa(backend: SDPBackend) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)

    return attention


def _flex() -> Attention:
    # Imported late: only this rival needs the compiler.
    from torch.nn.attention.flex_attention import flex_attention

    # Code compiled for the shapes before would count towards the limit of recompilations.
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


#: Attention over bf16 K and V, by the name that the command takes.
RIVALS: dict[str, Callable[[], Attention]] = {
    "flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex": _flex,
}
TITLES = {"flash": "SDPA flash", "cudnn": "SDPA cuDNN", "flex": "FlexAttention"}


def rivals(names: Sequence[str], inputs: Sequence[Tokens]) -> Iterator[Rival]:
    """Rivals in both layouts, over the cached keys and values.

    They do not see the new token, which a certified read does: one token less, and lengths that suit their tiles.
    """
    for name in names:
        attend = RIVALS[name]()
        for layout in LAYOUTS:
            grouped = layout == "grouped heads"
            calls = [
                partial(attend, tokens.q if grouped else folded(tokens), tokens.k, tokens.v, enable_gqa=grouped)
                for tokens in inputs
            ]
            yield Rival(TITLES[name], layout, calls)


def folded(tokens: Tokens) -> torch.Tensor:
    """Queries [B, Hkv, H / Hkv, D]: the heads that share a KV head as its query tokens.

    K and V are then read once also by kernels that know nothing of groups. No cached token is hidden from the one new token,
    so no mask is needed.
    """
    return tokens.q.unflatten(1, (tokens.k.shape[1], -1)).squeeze(3)


def memory_probes(nbytes: int, device: torch.device | str) -> list[Probe]:
    """Large reads and copies of float32 buffers of `nbytes` each; the faster one is the memory's bandwidth.

    A sum of float32 has the least arithmetic a byte of torch's reductions; a copy moves every byte twice, in and out.
    """
    first, second = (torch.randn(nbytes // 4, device=device) for _ in range(2))
    return [
        Probe("sum of a float32 buffer", [first.sum, second.sum], nbytes),
        Probe("copy of a float32 buffer", [partial(second.copy_, first)], 2 * nbytes),
    ]
