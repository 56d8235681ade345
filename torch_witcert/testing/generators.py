"""Adversarial keys, values and queries, and scenarios that put them together.

A name, a shape and a `torch.Generator` make the numbers, on the generator's device; hypothesis only draws the
:class:`Scenario`. Kinds are those that break quantizers and bounds in practice: outlier and constant channels, one huge
token, attention sinks, denormals, zeros, magnitudes that overflow, heavy tails, queries aligned with an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import torch

from torch_witcert.ops.formats import (
    DEFAULT,
    DITHERS,
    KEY_ELEMENTS,
    KEY_SCALINGS,
    VALUE_ELEMENTS,
    KeyFormat,
    StoreFormat,
    ValueFormat,
)
from torch_witcert.ops.radii import DETERMINISTIC, Radii, parse_radii
from torch_witcert.ops.storage import HEAD_DIMS

#: An entry that is exact as a value code of the default format: code 127 with the scale 2^-7.
HOT = 127 / 128
#: The same of every element without dither: 448 with the scale 2^-9, and half of 15 either way from its half with the scale 2^-4.
HOT_ENTRIES = {"int8": HOT, "exact": HOT, "fp8": 448 / 512, "int4": 15 / 16}

_Format = TypeVar("_Format", KeyFormat, ValueFormat)


def _constructible(kind: type[_Format], *choices: tuple) -> Iterator[_Format]:
    for arguments in product(*choices):
        try:
            yield kind(*arguments)
        except NotImplementedError:
            continue


#: Every supported combination, keys without outlier pairs and with two.
KEY_FORMATS = tuple(_constructible(KeyFormat, KEY_ELEMENTS, KEY_SCALINGS, (0, 2), DITHERS))
VALUE_FORMATS = tuple(_constructible(ValueFormat, VALUE_ELEMENTS, DITHERS))


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


def hot_entry(value: ValueFormat) -> float | None:
    """The entry of `one_hot_values`; None where no entry survives, because a dither moves even a zero."""
    return None if value.is_dithered else HOT_ENTRIES[value.element]


def one_hot_values(
    positions: torch.Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype, value: ValueFormat = DEFAULT.value
) -> torch.Tensor:
    """Values [B, Hkv, T, D] that survive quantization exactly and show a kernel's own distribution.

    The token at position t is hot in channel t mod D, so channel d of an output is the hot entry times the weight that the
    kernel gave to the tokens of that channel. Grouping can only lower a total variation, so a bound on the whole holds. In
    int4 a group of 16 zeros comes back as half of the smallest scale, 2^-101.

    Raises:
        ValueError: dithered values: none survive.
    """
    entry = hot_entry(value)
    if entry is None:
        raise ValueError(
            f"one-hot values are not exact with dither {value.dither!r}; use a value format without dither"
        )
    channel = positions.clamp_min(0).long() % head_dim
    hot = torch.nn.functional.one_hot(channel, head_dim).to(dtype) * entry
    return hot[:, None].expand(-1, kv_heads, -1, -1).contiguous()


def make_outlier_channels(key: KeyFormat, kv_heads: int, head_dim: int, generator: torch.Generator) -> torch.Tensor:
    """Outlier channels int32 [Hkv, 2m], distinct in a row; half of the heads have those of the kind `outlier_channel` among them."""
    noise = torch.rand(kv_heads, head_dim, generator=generator, device=generator.device)
    known = torch.rand(kv_heads, 1, generator=generator, device=generator.device) < 0.5
    outliers = [3, head_dim // 2]
    noise[:, outliers] = torch.where(known, -1.0, noise[:, outliers])
    return noise.argsort(-1)[:, : 2 * key.outlier_pairs].int()


def make_sinks(heads: int, generator: torch.Generator) -> torch.Tensor:
    """Sink logits float32 [H]: ordinary ones, now and then -inf, now and then above every ordinary score."""
    logits = 2 * _normal((heads,), generator)
    which = torch.rand(heads, generator=generator, device=generator.device)
    logits = torch.where(which < 0.2, float("-inf"), logits)
    return torch.where(which > 0.8, 60.0, logits)


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
        softcap: soft cap of the scores, 0 for none.
        sinks: every head has a sink, see `make_sinks`.
        store_format, radii, layer: as the operators take them.
        delta: risk of each read, for probabilistic radii. Queries then must not depend on the dither, so not `residual`.

    Raises:
        ValueError: probabilistic radii and queries that are aligned with an error.
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
    softcap: float = 0.0
    sinks: bool = False
    store_format: str = DEFAULT.name
    radii: str = DETERMINISTIC.name
    delta: float = 1e-4
    layer: int = 0

    def __post_init__(self) -> None:
        if self.is_probabilistic and self.query_kind == "residual":
            raise ValueError(
                "query_kind 'residual' depends on the dither, so that probabilistic radii do not hold for it"
            )

    @property
    def is_probabilistic(self) -> bool:
        return parse_radii(self.radii, self.formats).probabilistic

    @property
    def formats(self) -> StoreFormat:
        return StoreFormat.parse(self.store_format)

    @property
    def pages_per_row(self) -> int:
        return max(1, -(-(self.prefill + sum(self.chunks)) // self.page_size) + self.spare_pages)

    @property
    def sm_scale(self) -> float:
        return self.head_dim**-0.5


def chunk_lengths(page_size: int) -> tuple[int, ...]:
    """Lengths where page logic goes wrong."""
    return (1, 2, page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size, 2 * page_size + 1)


def fits(key: KeyFormat, head_dim: int) -> bool:
    """Whether keys of this many channels can be stored."""
    try:
        key.check_head_dim(head_dim)
    except NotImplementedError:
        return False
    return True


def scenarios(draw_options: bool = False, **fixed):
    """Hypothesis strategy of :class:`Scenario`; keyword arguments fix a field. Needs the package `hypothesis`.

    Args:
        draw_options: draw formats, radii, soft caps, sinks, layers and all head dims too; otherwise they are the defaults.
    """
    from hypothesis import strategies as st

    page_sizes = st.just(fixed["page_size"]) if "page_size" in fixed else st.sampled_from((16, 32))

    def draw_radii(draw, key: KeyFormat) -> str:
        kinds = [DETERMINISTIC, Radii(True, False, False), Radii(False, True, False)]
        if key.is_dithered:
            kinds += [Radii(True, True, True), Radii(False, False, True)]
        return draw(st.sampled_from(kinds)).name

    def options(draw) -> dict:
        if "store_format" in fixed:
            formats = StoreFormat.parse(fixed["store_format"])
        else:
            formats = StoreFormat(draw(st.sampled_from(KEY_FORMATS)), draw(st.sampled_from(VALUE_FORMATS)))
        return {
            "store_format": formats.name,
            "radii": draw_radii(draw, formats.key),
            "head_dim": draw(st.sampled_from([size for size in HEAD_DIMS if fits(formats.key, size)])),
            "softcap": draw(st.sampled_from((0.0, 0.0, 1.0, 30.0))),
            "sinks": draw(st.booleans()),
            "layer": draw(st.integers(0, 3)),
        }

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
        if draw_options:
            drawn |= options(draw)
        drawn |= fixed
        formats = StoreFormat.parse(drawn.get("store_format", DEFAULT.name))
        if drawn["value_kind"] == "one_hot" and hot_entry(formats.value) is None:
            drawn["value_kind"] = "normal"
        if drawn["query_kind"] == "residual" and "probabilistic" in drawn.get("radii", DETERMINISTIC.name):
            drawn["query_kind"] = "token"
        return Scenario(**drawn)

    return draw_scenario()
