"""The certificate: bounds on total variation and on the output from page masses and radii.

Every function takes groups of tokens that share a radius (pages, or single tokens) in the last dimension, in float32 or
float64. With `arithmetic=None` the formulas are those of real arithmetic (an oracle in float64); with an
:class:`~torch_witcert.ops.arithmetic.Arithmetic` every sum is rounded in the safe direction, as the kernels do.
Source: DESIGN section 7; the forms T0, Th and their proofs extend WitCert, section "certificate".
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import arithmetic as ar
from .arithmetic import Arithmetic
from .dither import GRID_ERROR
from .formats import DEFAULT, KEY_GROUP, StoreFormat
from .quantize import outlier_mask
from .radii import DETERMINISTIC, Radii
from .storage import Note


class Field:
    """Index of a field in the last dimension of `certificate` [B, H, T, Field.COUNT]."""

    TV = 0  # bound on the total variation between the weights used and exact attention
    OUTPUT = 1  # bound on ||out - exact output||
    KEY_ERROR = 2  # the part of OUTPUT that keys and arithmetic cause
    VALUE_ERROR = 3  # the part of OUTPUT that quantized values cause (E_val)
    RADIUS = 4  # largest radius over the tokens read
    CODE_MASS = 5  # share of the attention mass that was read as codes
    CODE_TOKENS = 6  # tokens read as codes
    TOKENS = 7  # tokens read
    COUNT = 8


class TotalVariationBounds(NamedTuple):
    """The four bounds of a read; each is sound alone. Take :meth:`minimum`."""

    ratio: torch.Tensor  # T0 = 1 / (1 + A_ / E+)
    tanh: torch.Tensor  # Th = tanh(c_max / 2)
    pinsker: torch.Tensor  # Tp = sqrt(sum p~ (e^c - 1 - c) / 2)
    split: torch.Tensor  # Ts, the heaviest token apart

    def minimum(self) -> torch.Tensor:
        return torch.stack(torch.broadcast_tensors(*self)).amin(0)


class Groups(NamedTuple):
    """A read as groups of tokens, last dimension J. `mass` sums to 1 over the groups; unread groups have mass and radius 0."""

    mass: torch.Tensor  # sum of p~ over the group
    radius: torch.Tensor  # c >= |score error| of every token of the group
    top: torch.Tensor  # largest p~ in the group


def exponential_gap(radius: torch.Tensor) -> torch.Tensor:
    """e^c - 1 - c without cancellation, c >= 0."""
    series = torch.ones_like(radius)
    for order in range(12, 2, -1):
        series = 1 + series * radius / order
    return torch.where(radius < 0.5, radius * radius / 2 * series, torch.expm1(radius) - radius)


def total_variation_bounds(groups: Groups, arithmetic: Arithmetic | None = None) -> TotalVariationBounds:
    """Bounds T0, Th, Tp, Ts on the total variation between p~ and p (DESIGN section 7).

    Args:
        groups: tensors [..., J].
        arithmetic: rounds every sum in the safe direction; None for real arithmetic.

    Returns:
        Tensors [...], each in [0, 1] or +inf where a radius is above the limit or not finite.
    """
    mass, radius, top = groups
    relative = absolute = gap = 0.0
    # Masses are rounded sums: less their heaviest token they are off by an ulp or more, whatever made them.
    lost = 8 * torch.finfo(mass.dtype).eps
    if arithmetic is not None:
        relative, absolute, gap = arithmetic.sum_relative, ar.SUM_ABSOLUTE, ar.GAP_ABSOLUTE
        lost = arithmetic.lost_mass

    def above(total: torch.Tensor) -> torch.Tensor:
        return total.sum(-1) * (1 + relative) + gap

    def below(total: torch.Tensor) -> torch.Tensor:
        return (total.sum(-1) * (1 - relative) - absolute).clamp_min(0)

    grow, shrink = torch.expm1(radius), -torch.expm1(-radius)
    largest = radius.amax(-1)
    excess = above(mass * grow)
    excess = excess + absolute * (1 + excess)
    ratio = _ratio(excess, below(mass * torch.exp(-radius)))
    tanh = torch.tanh(largest / 2 * (1 + relative))
    pinsker = (above(mass * exponential_gap(radius)) / 2).sqrt()

    heaviest = top.argmax(-1, keepdim=True)
    x = (top.gather(-1, heaviest)[..., 0] * (1 + relative)).clamp_max(1)
    c1 = radius.gather(-1, heaviest)[..., 0]
    apart = torch.zeros_like(mass).scatter(-1, heaviest, top.gather(-1, heaviest))
    lost_mass = torch.zeros_like(mass).scatter(-1, heaviest, lost * mass.gather(-1, heaviest))
    rest_high = (mass - apart).clamp_min(0) + lost_mass
    rest_low = (mass - apart - lost_mass).clamp_min(0)
    y = above(rest_high).clamp_max(1)
    rest_excess = above(rest_high * grow)
    w = y * torch.expm1(c1) + torch.exp(c1) * rest_excess
    v = y * -torch.expm1(-c1) + torch.exp(-c1) * above(rest_high * shrink)
    moved = torch.maximum(x * w / (1 + w), torch.where(v < 1, x * v / (1 - v), 1.0))
    rest = torch.minimum(_ratio(rest_excess, below(rest_low * torch.exp(-radius))), tanh)
    rest = torch.minimum(y * rest, (y * above(rest_high * exponential_gap(radius)) / 2).sqrt())
    split = moved + rest

    # A NaN among the masses passes by the bounds that do not use it.
    guaranteed = (largest <= ar.RADIUS_LIMIT) & mass.sum(-1).isfinite()
    return TotalVariationBounds(
        *(torch.where(guaranteed & ~bound.isnan(), bound, float("inf")) for bound in (ratio, tanh, pinsker, split))
    )


def _ratio(excess: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """1 / (1 + A_ / E+), 0 where E+ is 0."""
    return torch.where(excess == 0, 0.0, 1 / (1 + lower / excess))


def output_bounds(
    groups: Groups,
    total_variation: torch.Tensor,
    value_norm: torch.Tensor,
    output_norm: torch.Tensor,
    value_error: torch.Tensor,
    arithmetic: Arithmetic | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bounds O1, O2, O3 on ||o^ - o|| (DESIGN section 7).

    Args:
        groups: tensors [..., J].
        total_variation: [...], any sound bound.
        value_norm: [..., J], max ||V_t|| over the group (0 where unread).
        output_norm: [...], ||o^||.
        value_error: [...], E_val: bound on ||o^ - sum p~ V||, arithmetic included.

    Returns:
        O1, O2, O3, each [...].
    """
    mass, radius, _ = groups
    relative, absolute, gap = (arithmetic.sum_relative, ar.SUM_ABSOLUTE, ar.GAP_ABSOLUTE) if arithmetic else (0.0,) * 3
    grow = torch.expm1(radius)
    excess = (mass * grow).sum(-1) * (1 + relative)
    excess = excess + absolute * (1 + excess)
    lower = ((mass * torch.exp(-radius)).sum(-1) * (1 - relative) - absolute).clamp_min(0)
    largest_norm = value_norm.amax(-1)
    weighted = (mass * grow * value_norm).sum(-1) * (1 + relative) + absolute * largest_norm
    square = (mass * value_norm.square()).sum(-1) * (1 + relative) + absolute * largest_norm.square()
    spread = (mass * grow.square()).sum(-1) * (1 + relative) + gap
    largest = radius.amax(-1) * (1 + relative)
    o1 = 2 * largest_norm * total_variation + value_error
    o2 = (weighted + excess * (output_norm + value_error)) / lower + value_error
    deviation = (square - (output_norm - value_error).clamp_min(0).square() * (1 - relative)).clamp_min(0).sqrt()
    o3 = torch.minimum(spread.sqrt() / lower, torch.sinh(largest)) * deviation + value_error
    return tuple(torch.where(bound.isnan(), float("inf"), bound) for bound in (o1, o2, o3))


class CodeRadius(NamedTuple):
    """What radii of code pages are made of, [..., R, J] for R query rows and J pages (or tokens)."""

    unit: torch.Tensor  # sm_scale * sum |q_c| scale_c
    square: torch.Tensor  # sm_scale * sqrt(sum q_c^2 scale_c^2)
    residual: torch.Tensor  # sm_scale * ||q|| * max ||K_t - K^_t||
    scaled_residual: torch.Tensor  # square * max ||(K_t - K^_t) / scale||
    zero: torch.Tensor  # sm_scale * sum |q_c zero_c|, no radius: for the arithmetic
    bypass: torch.Tensor  # sm_scale * ||q|| over the outlier channels * max ||K_t||, likewise
    finite: torch.Tensor  # False on a page that holds a NaN or an Inf: nothing bounds its error
    store_format: StoreFormat

    def total(
        self,
        arithmetic: Arithmetic | None = None,
        radii: Radii = DETERMINISTIC,
        log_risk: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The smallest of the radii allowed, with the arithmetic of a code page.

        Args:
            arithmetic: adds the rounding of scores; None for real arithmetic.
            radii: which kinds are allowed.
            log_risk: ln(2 / delta) of the read, broadcast to [..., R]; for probabilistic radii.
            tokens: quantized tokens that the read can see, likewise: the union that delta is shared by.
        """
        smallest = torch.full_like(self.unit, float("inf"))
        if radii.step:
            smallest = self.unit * self.store_format.key.grid.max_error
        if radii.residual:
            smallest = torch.minimum(smallest, torch.minimum(self.residual, self.scaled_residual))
        if radii.probabilistic:
            deviation = ((log_risk + tokens.to(log_risk.dtype).clamp_min(1).log()) / 6).sqrt()[..., None]
            probable = torch.where(deviation.isfinite(), self.square * deviation + self.unit * GRID_ERROR, float("inf"))
            smallest = torch.minimum(smallest, probable)
        radius = smallest * (1 + ar.RADIUS_RELATIVE)
        if arithmetic is not None:
            radius = radius + self.unit * arithmetic.code_step + self.zero * arithmetic.code_zero
            radius = radius + self.bypass * arithmetic.exact_dot + arithmetic.score_steps
        return torch.where(self.finite, radius, float("inf"))


def code_radius(
    q: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    page_notes: torch.Tensor,
    sm_scale: float,
    store_format: StoreFormat = DEFAULT,
    outlier_channels: torch.Tensor | None = None,
    by_token: bool = False,
) -> CodeRadius:
    """Radii of code pages (DESIGN section 7).

    Args:
        q: [..., Hkv, R, D].
        k_scale: [..., Hkv, M, D], or [..., Hkv, M, P, D / 32] where keys are scaled per token.
        k_zero: [..., Hkv, M, D], or empty.
        page_notes: [..., Hkv, M, Note.COUNT].
        sm_scale: softmax scale.
        store_format: of the store.
        outlier_channels: int32 [Hkv, 2m], where the format has outlier pairs.
        by_token: one radius for each token of a format that scales keys per token, J = M * P, instead of each page's largest.
    """
    key = store_format.key
    notes = page_notes.to(q.dtype)
    key_norm = notes[..., None, :, Note.KEY_NORM]
    magnitude = q.abs()
    bypass = torch.zeros_like(key_norm)
    if key.outlier_pairs:
        outlier = outlier_mask(outlier_channels, q.shape[-1])[:, None, :]
        norm = torch.where(outlier, magnitude, 0.0).clamp_min(ar.NORM_FLOOR).square().sum(-1, keepdim=True).sqrt()
        bypass = norm * key_norm * sm_scale
        magnitude = torch.where(outlier, 0.0, magnitude)
    square = magnitude.clamp_min(ar.NORM_FLOOR).square()
    plain = square.sum(-1, keepdim=True).sqrt() * sm_scale
    scale = k_scale.to(q.dtype)
    of_unit, of_square = magnitude, square
    if key.per_token:
        of_unit, of_square = (part.unflatten(-1, (-1, KEY_GROUP)).sum(-1) for part in (magnitude, square))
        scale = scale.flatten(-3, -2)
    unit = of_unit @ scale.mT * sm_scale
    square = (of_square @ scale.clamp_min(ar.NORM_FLOOR).square().mT).sqrt() * sm_scale
    if key.per_token:
        page_size = k_scale.shape[-2]
        if by_token:
            notes = notes.repeat_interleave(page_size, -2)
            bypass, key_norm = (part.repeat_interleave(page_size, -1) for part in (bypass, key_norm))
        else:
            unit, square = (part.unflatten(-1, (-1, page_size)).amax(-1) for part in (unit, square))
    zero = torch.zeros_like(unit)
    if key.is_asymmetric:
        zero = magnitude @ k_zero.to(q.dtype).abs().mT * sm_scale
    return CodeRadius(
        unit,
        square,
        plain * notes[..., None, :, Note.KEY_ERROR],
        square * notes[..., None, :, Note.KEY_ERROR_SCALED],
        zero,
        bypass,
        key_norm.isfinite(),
        store_format,
    )


def exact_radius(q: torch.Tensor, key_norm: torch.Tensor, sm_scale: float, arithmetic: Arithmetic) -> torch.Tensor:
    """Radius of tokens read exact: the arithmetic alone.

    Args:
        q: [..., R, D].
        key_norm: [..., R], the largest ||K_t|| that the row reads exact.

    Returns:
        [..., R].
    """
    norm = q.abs().clamp_min(ar.NORM_FLOOR).square().sum(-1).sqrt() * (1 + ar.NOTE_RELATIVE)
    return norm * key_norm * (sm_scale * arithmetic.exact_dot) + arithmetic.score_steps


class Read(NamedTuple):
    """What one attention read tells the certificate; leading dimensions [...], groups J = code pages and then one exact group."""

    groups: Groups
    value_norm: torch.Tensor  # [..., J] max ||V_t||
    scaled_mass: torch.Tensor  # [..., J] sum of p~ times value scale (0 for the exact group)
    value_error_note: torch.Tensor  # [..., J] max ||V_t - V^_t|| / v_scale_t
    output_norm: torch.Tensor  # [...] norm of the output before it is rounded to the model's dtype
    code_tokens: torch.Tensor  # [...]
    tokens: torch.Tensor  # [...]


def certify(read: Read, arithmetic: Arithmetic) -> torch.Tensor:
    """Certificate of a read, all arithmetic included.

    Returns:
        float32 [..., Field.COUNT]; +inf bounds where nothing can be guaranteed.
    """
    groups, relative = read.groups, arithmetic.sum_relative
    code_mass = groups.mass[..., :-1].sum(-1)
    tv = total_variation_bounds(groups, arithmetic).minimum() * (1 + 2.0**-20) + 2.0**-22
    rounded_tv = torch.where(tv.isinf(), tv, (tv + code_mass * (arithmetic.weight_rounding / 2)).clamp_max(1))

    e_val = (read.scaled_mass * read.value_error_note).sum(-1) * (1 + relative)
    norms = groups.mass * read.value_norm
    code_norm = norms[..., :-1].sum(-1) * (1 + relative) + e_val
    exact_norm = norms[..., -1] * (1 + relative)
    rounding = (
        arithmetic.code_values * code_norm
        + arithmetic.exact_values * exact_norm
        + arithmetic.normaliser * read.output_norm
        + ar.NORM_ABSOLUTE
    )
    o1, o2, o3 = output_bounds(groups, tv, read.value_norm, read.output_norm, e_val + rounding, arithmetic)
    to_dtype, absolute = ar.OUTPUT_ROUNDING[arithmetic.dtype]
    output = torch.minimum(o1, torch.minimum(o2, o3)) * (1 + 2.0**-20) + to_dtype * read.output_norm + absolute
    representable = read.output_norm < torch.finfo(arithmetic.dtype).max
    output = output.where(tv.isfinite() & representable, float("inf"))
    radius = groups.radius.amax(-1)
    fields = [
        rounded_tv,
        output,
        (output - e_val).clamp_min(0),
        e_val,
        radius,
        code_mass,
        read.code_tokens,
        read.tokens,
    ]
    return torch.stack([field.to(torch.float32) for field in torch.broadcast_tensors(*fields)], -1)
