"""Coverage and tightness of the certificate on real keys and queries, by layout of the keys, in real arithmetic.

Every token is quantized, the unfinished page too, and nothing is read exact: what is measured is the certificate's
mathematics (radii and bounds of `ops.certificate`) on the pages of `ops.quantize`, without the exact tail. A bound is a form and
the radii that it takes the smallest of. WitCert's own is the e-form with the sub-Gaussian radius alone, for comparison; the others are
the papers' two forms ("T0-Th") and what the library returns ("four"), with deterministic radii, and with the sub-Gaussian one besides
("probabilistic"), which needs dithered keys.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch

from ..ops.arithmetic import RADIUS_LIMIT
from ..ops.certificate import Groups, TotalVariationBounds, total_variation_bounds
from ..ops.radii import DETERMINISTIC, Radii
from ..policy.budget import planned_budget
from . import smollm2
from .arguments import fraction, whole_number
from .capture import AttentionInputs, captured_attention
from .layouts import LAYOUTS, KeyLayout, StoredKeys, check_pages, store_keys
from .output import print_table, progress, write_json
from .statistics import TAU, BoundFigures, bound_figures
from .text import licence_text, take_tokens

#: WitCert's budget: failure probability of a request, and the query tokens that share it.
DELTA_REQ = 1e-2
HORIZON = 256


#: Forms that a bound is the minimum of.
FORMS = {"e-form": ("exponential",), "T0-Th": ("ratio", "tanh"), "four": TotalVariationBounds._fields}
#: Radii that a bound may take the smallest of.
RADII = {
    "step": Radii(step=True, residual=False, probabilistic=False),
    "residual": Radii(step=False, residual=True, probabilistic=False),
    "deterministic": DETERMINISTIC,
    "sub-gaussian": Radii(step=False, residual=False, probabilistic=True),
    "probabilistic": Radii(step=True, residual=True, probabilistic=True),
}


class Bound(NamedTuple):
    """A bound of the table."""

    forms: tuple[str, ...]
    radii: Radii


#: Every bound by its name, form/radii.
BOUNDS = {f"{form}/{kind}": Bound(FORMS[form], RADII[kind]) for form in FORMS for kind in RADII}
#: WitCert's own, the papers' two forms, and what the library returns.
DEFAULT_BOUNDS = (
    "e-form/sub-gaussian",
    "T0-Th/probabilistic",
    "four/probabilistic",
    "T0-Th/deterministic",
    "four/deterministic",
)


def choose_bounds(layouts: Sequence[str], bounds: Sequence[str], tokens: int) -> dict[KeyLayout, dict[str, Bound]]:
    """What is measured: for each layout those of the bounds that it has. Sub-Gaussian radii need dithered keys.

    Args:
        layouts: names in LAYOUTS.
        bounds: names in BOUNDS.
        tokens: S.

    Raises:
        ValueError: an unknown name, S is not a multiple of a page size, or a layout has none of the bounds.
    """
    for argument, names, known in (("layouts", layouts, LAYOUTS), ("bounds", bounds, BOUNDS)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"{argument} must be some of {list(known)}, got {unknown}")
    chosen = {}
    for layout in (LAYOUTS[name] for name in layouts):
        check_pages(tokens, layout)
        has = {name: BOUNDS[name] for name in bounds if layout.key.is_dithered or not BOUNDS[name].radii.probabilistic}
        if not has:
            raise ValueError(
                f"bounds {list(bounds)} all need dithered keys, which layout {layout.name!r} does not have"
            )
        chosen[layout] = has
    return chosen


def exponential_form(groups: Groups) -> torch.Tensor:
    """WitCert's bound TV <= ((1 + E+)^2 - 1) / 2, E+ = sum M_j (e^c_j - 1). Never below T0, so the library does not use it.

    Args:
        groups: tensors [..., J].

    Returns:
        [...], +inf where a radius is above the limit.
    """
    excess = (groups.mass * torch.expm1(groups.radius)).sum(-1)
    return torch.where(groups.radius.amax(-1) <= RADIUS_LIMIT, excess * (2 + excess) / 2, float("inf"))


class Reads(NamedTuple):
    """Reads of one layer, the last queries over all its keys; R = G * last query rows of a KV head."""

    layer: int
    q: torch.Tensor  # float64 [B, Hkv, R, D]
    k: torch.Tensor  # [B, Hkv, S, D] in the model's dtype
    hidden: torch.Tensor  # bool [R, S], tokens after the query
    exact: torch.Tensor  # float64 [B, Hkv, R, S], exact attention
    sm_scale: float

    def attend(self, k: torch.Tensor) -> torch.Tensor:
        """Attention over other keys, float64 [B, Hkv, R, S]."""
        return _attend(self.q, k, self.hidden, self.sm_scale)


def _attend(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, sm_scale: float) -> torch.Tensor:
    return (q @ k.mT * sm_scale).masked_fill(hidden, float("-inf")).softmax(-1)


def layer_reads(layer: int, inputs: AttentionInputs) -> Reads:
    """Reads of a captured layer."""
    kv_heads, tokens = inputs.k.shape[1:3]
    last = inputs.q.shape[2]
    q = inputs.q.double().unflatten(1, (kv_heads, -1)).flatten(2, 3)
    at = torch.arange(tokens - last, tokens, device=q.device).repeat(q.shape[2] // last)
    hidden = torch.arange(tokens, device=q.device) > at[:, None]
    exact = _attend(q, inputs.k.double(), hidden, inputs.sm_scale)
    return Reads(layer, q, inputs.k, hidden, exact, inputs.sm_scale)


def read_radius(reads: Reads, stored: StoredKeys, radii: Radii, log_risk: float) -> torch.Tensor:
    """Radii of reads whose tokens are all codes, float64 [B, Hkv, R, S / group_size]; 0 where every token of a group is hidden.

    Args:
        reads: of one layer.
        stored: its keys.
        radii: which kinds are allowed.
        log_risk: ln(2 / delta) of a read.
    """
    risk, tokens = reads.q.new_tensor(log_risk), reads.q.new_tensor(float(reads.k.shape[2]))
    radius = stored.radius(reads.q, reads.sm_scale).total(None, radii, risk, tokens)
    seen = ~reads.hidden.unflatten(-1, (-1, stored.group_size)).all(-1)
    return torch.where(seen, radius, 0.0)


def certify(reads: Reads, stored: StoredKeys, bounds: dict[str, Bound], log_risk: float) -> dict[str, torch.Tensor]:
    """Bounds of reads whose tokens are all codes, and the truth.

    Args:
        reads: of one layer.
        stored: its keys.
        bounds: to compute, by name.
        log_risk: ln(2 / delta) of a read.

    Returns:
        float64 [B, Hkv, R] for each bound, and "true": the total variation between exact attention and attention over K^.
    """
    used = reads.attend(stored.keys)
    by_group = used.unflatten(-1, (-1, stored.group_size))
    mass, top = by_group.sum(-1), by_group.amax(-1)
    result = {"true": (reads.exact - used).abs().sum(-1) / 2}
    for radii in dict.fromkeys(bound.radii for bound in bounds.values()):
        groups = Groups(mass, read_radius(reads, stored, radii, log_risk), top)
        wanted = {name: bound.forms for name, bound in bounds.items() if bound.radii == radii}
        forms = {"exponential": exponential_form(groups)}
        if any(names != FORMS["e-form"] for names in wanted.values()):
            forms |= total_variation_bounds(groups)._asdict()
        for name, names in wanted.items():
            result[name] = torch.stack([forms[form] for form in names]).amin(0)
    return result


def request_log_risk(layers: int, heads: int) -> float:
    """ln(2 / delta) of a read under WitCert's plan: delta = DELTA_REQ / (L H HORIZON)."""
    return math.log(2 / float(planned_budget(DELTA_REQ, layers, heads, HORIZON, torch.tensor(1))))


def measure_coverage(
    layers: dict[int, AttentionInputs],
    layouts: Sequence[str],
    bounds: Sequence[str] = DEFAULT_BOUNDS,
    tau: float = TAU,
) -> dict[tuple[str, str], BoundFigures]:
    """Figures over all layers, for each layout and each of the bounds that it has.

    Args:
        layers: captured inputs of every layer.
        layouts: names in LAYOUTS.
        bounds: names in BOUNDS.
        tau: limit that coverage counts against.

    Raises:
        ValueError: as :func:`choose_bounds`.
    """
    first = next(iter(layers.values()))
    chosen = choose_bounds(layouts, bounds, first.k.shape[2])
    reads = [layer_reads(index, layers[index]) for index in sorted(layers)]
    log_risk = request_log_risk(len(layers), first.q.shape[1])
    figures = {}
    for layout in progress(list(chosen), "layout"):
        by_layer = [certify(r, store_keys(r.k, r.layer, layout), chosen[layout], log_risk) for r in reads]
        true = torch.stack([found["true"] for found in by_layer])
        for name in chosen[layout]:
            figures[layout.name, name] = bound_figures(torch.stack([found[name] for found in by_layer]), true, tau)
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=whole_number(256), default=4096, help="context length, a multiple of the page sizes (4096)"
    )
    parser.add_argument(
        "--last", type=whole_number(1), default=32, help="query positions at the end that are measured (32)"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=list(LAYOUTS),
        choices=LAYOUTS,
        metavar="NAME",
        help=f"element-scaling-page size[-m outlier pairs][-dither], all by default: {', '.join(LAYOUTS)}",
    )
    parser.add_argument(
        "--bounds",
        nargs="+",
        default=list(DEFAULT_BOUNDS),
        choices=BOUNDS,
        metavar="NAME",
        help=f"form/radii, with forms {', '.join(FORMS)} and radii {', '.join(RADII)} ({' '.join(DEFAULT_BOUNDS)})",
    )
    parser.add_argument("--tau", type=fraction, default=TAU, help="limit that coverage counts against (0.2)")


@torch.no_grad()
def run(options: argparse.Namespace) -> dict:
    """Run the command; returns what it printed, as data."""
    choose_bounds(options.layouts, options.bounds, options.tokens)  # refuses before anything is loaded
    text, source = licence_text(options.text)
    model, tokenizer = smollm2.load(options.device, options.dtype, options.model_dir)
    ids = take_tokens(tokenizer, text, options.tokens, source).to(options.device)
    print(f"SmolLM2-135M-Instruct, {options.dtype}, {options.device}: {options.tokens} tokens of {source}", flush=True)
    with captured_attention(model, options.last) as layers:
        model(ids, logits_to_keep=1, use_cache=False)
    figures = measure_coverage(layers, options.layouts, options.bounds, options.tau)

    first = next(iter(layers.values()))
    heads, head_dim = first.q.shape[1], first.k.shape[-1]
    print(
        f"{len(layers)} layers, {heads} heads, the last {options.last} queries; all tokens as codes; probabilistic: "
        f"delta {DELTA_REQ} a request of {HORIZON} query tokens"
    )
    print_figures(figures, options.tau)
    print()
    print_summary(figures, options.tau, head_dim, options.dtype)
    result = {
        "command": "coverage",
        "text": source,
        "tokens": options.tokens,
        "last": options.last,
        "tau": options.tau,
        "delta_req": DELTA_REQ,
        "horizon": HORIZON,
        "rows": [{"layout": layout, "bound": bound} | asdict(row) for (layout, bound), row in figures.items()],
    }
    write_json(options.json, result)
    return result


def print_figures(figures: dict[tuple[str, str], BoundFigures], tau: float) -> None:
    """Print every figure, a row for each layout and bound."""
    header = f"layout,bound,reads,coverage at {tau},bound / true,median,largest,largest true,violations,Spearman"
    print_table(
        header.split(","),
        [
            [
                layout,
                bound,
                row.reads,
                f"{row.coverage:.4f}",
                f"{row.tightness:.1f}",
                f"{row.median_bound:.4f}",
                f"{row.max_bound:.3f}",
                f"{row.max_true:.4f}",
                row.violations,
                f"{row.spearman:.2f}",
            ]
            for (layout, bound), row in figures.items()
        ],
    )


def print_summary(figures: dict[tuple[str, str], BoundFigures], tau: float, head_dim: int, dtype: torch.dtype) -> None:
    """Print coverage and tightness, a row for each layout and a column for each bound."""

    layouts, bounds = (list(dict.fromkeys(names)) for names in zip(*figures, strict=True))

    def cell(layout: str, bound: str) -> str:
        row = figures.get((layout, bound))
        return f"{row.coverage:.3f} ({row.tightness:.1f}x)" if row else "-"

    print(f"coverage at {tau} (bound / true); bytes of a key in one KV head")
    print_table(
        ["layout", "bytes", *bounds],
        [
            [name, f"{LAYOUTS[name].key_bytes(head_dim, dtype):g}", *(cell(name, bound) for bound in bounds)]
            for name in layouts
        ],
    )
