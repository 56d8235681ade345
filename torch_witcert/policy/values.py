"""Which pages of a read deserve exact values, and what the others can do to the output.

Source: Runtime-Certified Bounded-Error Quantized Attention, sections "two-term error decomposition" (E_val) and "adaptive
precision and fallback ladder", rung 2. Everything is in the units of V: eta is absolute, as E_key is, so that both add up.
"""

from __future__ import annotations

import torch

from ..ops.arithmetic import Arithmetic
from ..ops.storage import Note
from .checks import check_limit, check_pages
from .coverage import FLOAT64_ABSOLUTE, FLOAT64_RELATIVE


def page_value_error(page_notes: torch.Tensor, v_scale: torch.Tensor) -> torch.Tensor:
    """eta: an upper bound of max ||V_t - V^_t|| over a page's tokens, in the units of V.

        eta = VALUE_ERROR * max over the page of v_scale,    VALUE_ERROR >= ||V_t - V^_t|| / (largest scale of V_t).

    Proof: ||V_t - V^_t|| <= VALUE_ERROR * (largest scale of V_t), and no token's scale is above the page's largest. The product
    of a float32 and a bfloat16 is exact in float64. V^ is what is read: made with the STORED scales.

    Args:
        page_notes: float32 [..., Note.COUNT].
        v_scale: bfloat16 [..., P, scales of a token], as stored; empty where values are exact, and then eta is the note itself: 0, or
            +inf for a page that holds a NaN or an Inf.

    Returns:
        float64 [...].

    Raises:
        ValueError: page_notes whose last dimension is not Note.COUNT.
    """
    if page_notes.shape[-1:] != (Note.COUNT,):
        raise ValueError(f"page_notes must end in a dimension of {Note.COUNT}, got shape {tuple(page_notes.shape)}")
    note = page_notes[..., Note.VALUE_ERROR].double()
    return note * v_scale.double().amax((-2, -1)) if v_scale.numel() else note


def choose_values(mass: torch.Tensor, eta: torch.Tensor, is_code: torch.Tensor, v_tol: float = 0.05) -> torch.Tensor:
    """Rung 2: code pages whose share in the bound on the value error is above v_tol.

        page j is promoted  where  not (M_j eta_j <= v_tol),

    so that a NaN or an infinite eta promotes. A heuristic choice: it bounds each page's share and not their sum;
    :func:`value_error_bound` says what is left. Source: the paper, fallback ladder, rung 2 (v_tol = 0.05).

    Args:
        mass: [..., J], mass of each group.
        eta: [..., J], max ||V_t - V^_t|| of each page in the units of V (:func:`page_value_error`). Or, for mass the sum of p~ times the
            value scale that a read has and for eta the note VALUE_ERROR: the product has the same unit and is never larger.
        is_code: bool [..., J], pages whose values are read as codes and can be read exact. The others may hold any bytes.
        v_tol: >= 0 and finite, in the units of V.

    Returns:
        bool [..., J].

    Raises:
        ValueError: an argument out of range.
    """
    check_limit("v_tol", v_tol, torch.finfo(torch.float32).max)
    check_pages({"is_code": is_code}, mass=mass, eta=eta)
    return is_code & ~(mass.double() * eta.double() <= v_tol)


def value_error_bound(
    mass: torch.Tensor, eta: torch.Tensor, as_codes: torch.Tensor, arithmetic: Arithmetic | None = None
) -> torch.Tensor:
    """E_val: a BOUND on what the values read as codes change in the output, for the weights w that the masses are of.

        || sum_t w_t (V^_t - V_t) || <= sum over pages read as codes of M_j eta_j,    M_j = sum of w_t over page j.

    Proof: the triangle inequality, and ||V_t - V^_t|| <= eta_j in page j; values read exact add nothing.

    It says nothing about other weights. Masses of the pass that made the output give the distance between that output and
    sum w V; masses of a scoring pass before it do not, because repair changes the weights. What w does to the
    output against exact attention is E_key's matter. Upper bounds of masses give the bound for all weights below them.

    Args:
        mass, eta: as in :func:`choose_values`.
        as_codes: bool [..., J], pages whose values were read as codes, those with exact keys included.
        arithmetic: of the pass, for masses from a kernel; None for real arithmetic, computed in float64.

    Returns:
        float64 [...] in the units of V, 0 where no page was read as codes; +inf where anything is not finite.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_pages({"as_codes": as_codes}, mass=mass, eta=eta)
    relative = FLOAT64_RELATIVE + (0.0 if arithmetic is None else arithmetic.sum_relative)
    total = torch.where(as_codes, mass.double() * eta.double(), 0.0).sum(-1)
    bound = torch.where(as_codes.any(-1), total * (1 + relative) + FLOAT64_ABSOLUTE, 0.0)
    return torch.where(bound.isnan(), float("inf"), bound)
