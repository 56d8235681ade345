"""Adversarial keys, values and queries, and scenarios that put them together.

A name, a shape and a `torch.Generator` make the numbers, on the generator's device; hypothesis only draws the
:class:`Scenario`. Kinds are those that break quantizers and bounds in practice: outlier and constant channels, one huge
token, attention sinks, denormals, zeros, magnitudes that overflow, heavy tails, queries aligned with an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: An entry that is exact as a value code: code 127 with the scale 2^-7.
HOT = 127 / 128


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _outlier_channel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Two channels far from zero, as the keys of Qwen2 have them."""
    x = _normal(shape, generator)
    x[..., 3] += 300
    x[..., shape[-1] // 2] -= 200
    return x


def _constant_channel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Channels without any spread: their range is zero."""
    x = _normal(shape, generator)
    x[..., 1::4] = 3.7
    return x


def _huge_token(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    x = _normal(shape, generator)
    x[..., shape[-2] // 2, :] *= 1e4
    return x


def _sink(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The first token is 60 times larger than the others."""
    x = _normal(shape, generator)
    x[..., 0, :] *= 60
    return x


def _heavy_tail(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Cauchy, cut where float16 ends."""
    return (_normal(shape, generator) / _normal(shape, generator)).clamp(-6e4, 6e4)


def _half_integer(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Zero points that are half integers of the step, and entries so small that x - zero must round: the ties."""
    x = torch.full(shape, 1e-9, device=generator.device)
    x[..., 0, :] = 2.0 * torch.randint(1, 128, shape[:-2] + shape[-1:], generator=generator, device=generator.device)
    return x


KEY_KINDS = {
    "normal": _normal,
    "outlier_channel": _outlier_channel,
    "constant_channel": _constant_channel,
    "huge_token": _huge_token,
    "sink": _sink,
    "denormal": lambda shape, generator: _normal(shape, generator) * 5e-36,
    "subnormal": lambda shape, generator: _normal(shape, generator) * 1e-39,
    "zeros": lambda shape, generator: torch.zeros(shape, device=generator.device),
    "huge": lambda shape, generator: _normal(shape, generator) * 7e4,
    "astronomic": lambda shape, generator: _normal(shape, generator) * 1e8,
    "heavy_tail": _heavy_tail,
    "half_integer": _half_integer,
}
VALUE_KINDS = dict(KEY_KINDS)
QUERY_KINDS = ("normal", "worst_channel", "residual", "token", "zeros", "large", "denormal")


def one_hot_values(positions: torch.Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Values [B, Hkv, T, D] that survive quantization exactly and show a kernel's own distribution.

    The token at position t is HOT in channel t mod D, so channel d of an output is HOT times the weight that the kernel
    gave to the tokens of that channel. Grouping can only lower a total variation, so a bound on the whole holds.
    """
    channel = positions.clamp_min(0).long() % head_dim
    hot = torch.nn.functional.one_hot(channel, head_dim).to(dtype) * HOT
    return hot[:, None].expand(-1, kv_heads, -1, -1).contiguous()


def make_queries(
    kind: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    keys: torch.Tensor,
    key_error: torch.Tensor,
    strength: float,
    sm_scale: float,
) -> torch.Tensor:
    """Queries [B, H, T, D] against keys that are already stored.

    Args:
        kind: one of QUERY_KINDS. `residual` is parallel to K_t - K^_t of some token, the worst that a query can do to one
            score; `worst_channel` looks at the channel with the largest range only; `token` makes one token dominate.
        keys: [B, Hkv, S, D], S >= 1.
        key_error: K - K^, [B, Hkv, S, D].
        strength: score error in natural-log units that `residual` aims at, a factor for the others.
        sm_scale: softmax scale.
    """
    batch, heads, new_tokens, dim = shape
    group = heads // keys.shape[1]
    noise = _normal(shape, generator)
    if kind == "normal":
        q = noise * strength
    elif kind == "large":
        q = noise * 100
    elif kind == "denormal":
        q = noise * 1e-39
    elif kind == "zeros":
        q = noise * 0
    elif kind == "worst_channel":
        spread = keys.double().nan_to_num(0.0, 0.0, 0.0)
        spread = spread.amax(2) - spread.amin(2)
        channel = spread.argmax(-1).repeat_interleave(group, 1)[:, :, None, None]
        q = 1e-3 * noise
        q.scatter_(-1, channel.expand(-1, -1, new_tokens, -1), 10.0 * strength)
    elif kind in ("residual", "token"):
        target = (key_error if kind == "residual" else keys).double().nan_to_num(0.0, 0.0, 0.0)
        token = torch.randint(target.shape[2], (batch, heads, new_tokens), generator=generator, device=generator.device)
        target = target.repeat_interleave(group, 1).gather(2, token[..., None].expand(-1, -1, -1, dim))
        length = target.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        wanted = strength if kind == "residual" else 20 * strength
        q = target / length * (wanted / (sm_scale * length))
    else:
        raise ValueError(f"kind must be one of {QUERY_KINDS}, got {kind!r}")
    largest = torch.finfo(dtype).max / 4
    return q.clamp(-largest, largest).to(dtype)


@dataclass(frozen=True)
class Scenario:
    """One randomised run of forwards over a cache; see `testing.harness.run`.

    Args:
        seed: of every number and every validity mask.
        batch_size, num_kv_heads, group, page_size, head_dim, dtype: as in `StoreShape`; query heads are num_kv_heads * group.
        prefill: tokens that every row holds before the first forward; written, not read.
        chunks: new tokens T of each forward. A row takes a random share of them; without a prefill the first are taken whole.
        spare_pages: pages of capacity beyond what the chunks need; negative makes rows overflow.
        key_kind, value_kind, query_kind: names in KEY_KINDS, VALUE_KINDS (or "one_hot"), QUERY_KINDS.
        strength: of `make_queries`.
        window: sliding window, 0 for none.
    """

    seed: int = 0
    batch_size: int = 2
    num_kv_heads: int = 1
    group: int = 1
    page_size: int = 16
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    prefill: int = 0
    chunks: tuple[int, ...] = (80, 1, 1)
    spare_pages: int = 0
    key_kind: str = "normal"
    value_kind: str = "normal"
    query_kind: str = "normal"
    strength: float = 1.0
    window: int = 0

    @property
    def pages_per_row(self) -> int:
        return max(1, -(-(self.prefill + sum(self.chunks)) // self.page_size) + self.spare_pages)

    @property
    def sm_scale(self) -> float:
        return self.head_dim**-0.5


def chunk_lengths(page_size: int) -> tuple[int, ...]:
    """Lengths where page logic goes wrong."""
    return (1, 2, page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size, 2 * page_size + 1)


def scenarios(**fixed):
    """Hypothesis strategy of :class:`Scenario`; keyword arguments fix a field. Needs the package `hypothesis`."""
    from hypothesis import strategies as st

    page_sizes = st.just(fixed["page_size"]) if "page_size" in fixed else st.sampled_from((16, 32))

    @st.composite
    def draw_scenario(draw):
        page_size = draw(page_sizes)
        first = draw(st.sampled_from((1, page_size - 1, 4 * page_size, 4 * page_size + 1, 5 * page_size - 1)))
        prefilled = draw(st.booleans())
        later = draw(st.lists(st.sampled_from(chunk_lengths(page_size)), min_size=1, max_size=3))
        drawn = {
            "seed": draw(st.integers(0, 2**31)),
            "batch_size": draw(st.integers(1, 3)),
            "num_kv_heads": draw(st.integers(1, 2)),
            "group": draw(st.sampled_from((1, 3, 4, 7))),
            "page_size": page_size,
            "head_dim": draw(st.sampled_from((64, 128))),
            "dtype": draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
            "prefill": first if prefilled else 0,
            "chunks": tuple(later) if prefilled else (first, *later),
            "spare_pages": draw(st.sampled_from((0, 0, 2, -1))),
            "key_kind": draw(st.sampled_from(sorted(KEY_KINDS))),
            "value_kind": draw(st.sampled_from(["one_hot"] * 6 + sorted(VALUE_KINDS))),
            "query_kind": draw(st.sampled_from(QUERY_KINDS)),
            "strength": 10 ** draw(st.floats(-3, 1)),
            "window": draw(st.sampled_from((0, 0, 1, page_size + 3, 3 * page_size))),
        }
        return Scenario(**(drawn | fixed))

    return draw_scenario()
