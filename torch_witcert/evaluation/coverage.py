"""Coverage and tightness of the certificate on real keys and queries, for several page sizes, in real arithmetic.

Every token is quantized, the unfinished page too, and nothing is read exact: what is measured is the certificate's
mathematics (radii and the four bounds of `ops.certificate`) on the pages of `ops.quantize`, without the exact tail.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from ..ops.certificate import Groups, TotalVariationBounds, code_radius, total_variation_bounds
from ..ops.quantize import dequantize_keys, quantize_page
from ..ops.storage import PAGE_SIZES
from . import smollm2
from .arguments import fraction, whole_number
from .capture import AttentionInputs, captured_attention
from .output import print_table, write_json
from .statistics import TAU, BoundFigures, bound_figures
from .text import licence_text, take_tokens

#: Which of the four bounds a row of the table takes the minimum of: the papers' two forms, and what the library returns.
FORMS = {"T0, Th": ("ratio", "tanh"), "all four": TotalVariationBounds._fields}


def certify_pages(inputs: AttentionInputs, page_size: int) -> tuple[TotalVariationBounds, torch.Tensor]:
    """Bounds and true total variations of one layer's reads with every token as codes.

    Args:
        inputs: one layer; S must be a multiple of page_size.
        page_size: P.

    Returns:
        bounds (each float64 [B, H, last]) and true total variations, float64 [B, H, last].

    Raises:
        ValueError: S is not a multiple of page_size.
    """
    batch, kv_heads, tokens, _ = inputs.k.shape
    if tokens % page_size:
        raise ValueError(f"the number of tokens must be a multiple of page_size {page_size}, got {tokens}")
    page = quantize_page(inputs.k.unflatten(2, (-1, page_size)), inputs.v.unflatten(2, (-1, page_size)))
    keys = inputs.k.double()
    stored = dequantize_keys(page.k_codes, page.k_scale, page.k_zero).flatten(2, 3)

    last = inputs.q.shape[2]
    q = inputs.q.double().unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [B, Hkv, G * last, D]
    at = torch.arange(tokens - last, tokens, device=q.device).repeat(q.shape[2] // last)
    hidden = torch.arange(tokens, device=q.device) > at[:, None]

    def attend(k: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT * inputs.sm_scale).masked_fill(hidden, float("-inf")).softmax(-1)

    exact, used = attend(keys), attend(stored)
    by_page = used.unflatten(-1, (-1, page_size))
    seen = ~hidden.unflatten(-1, (-1, page_size)).all(-1)
    radius = code_radius(q, page.k_scale, page.k_zero, page.page_notes, inputs.sm_scale).total()
    groups = Groups(by_page.sum(-1), torch.where(seen, radius, 0.0), by_page.amax(-1))
    bounds = total_variation_bounds(groups)
    true = (exact - used).abs().sum(-1) / 2
    shape = (batch, -1, last)
    return TotalVariationBounds(*(bound.reshape(shape) for bound in bounds)), true.reshape(shape)


def measure_coverage(
    layers: dict[int, AttentionInputs], page_sizes: tuple[int, ...], tau: float = TAU
) -> dict[tuple[int, str], BoundFigures]:
    """Figures over all layers, for each page size and each name in FORMS."""
    figures = {}
    for page_size in page_sizes:
        reads = [certify_pages(layers[index], page_size) for index in sorted(layers)]
        true = torch.stack([layer_true for _, layer_true in reads])
        for name, forms in FORMS.items():
            bound = torch.stack([getattr(bounds, form) for bounds, _ in reads for form in forms])
            bound = bound.unflatten(0, (len(reads), len(forms))).amin(1)
            figures[page_size, name] = bound_figures(bound, true, tau)
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=whole_number(128), default=4096, help="context length, a multiple of the page sizes (4096)"
    )
    parser.add_argument(
        "--last", type=whole_number(1), default=32, help="query positions at the end that are measured (32)"
    )
    parser.add_argument(
        "--page-sizes", type=int, nargs="+", default=[16, 64, 128], choices=PAGE_SIZES, help="P (16 64 128)"
    )
    parser.add_argument("--tau", type=fraction, default=TAU, help="limit that coverage counts against (0.2)")


@torch.no_grad()
def run(options: argparse.Namespace) -> dict:
    """Run the command; returns what it printed, as data."""
    text, source = licence_text(options.text)
    model, tokenizer = smollm2.load(options.device, options.dtype, options.model_dir)
    ids = take_tokens(tokenizer, text, options.tokens, source).to(options.device)
    print(f"SmolLM2-135M-Instruct, {options.dtype}, {options.device}: {options.tokens} tokens of {source}", flush=True)
    with captured_attention(model, options.last) as layers:
        model(ids, logits_to_keep=1, use_cache=False)
    figures = measure_coverage(layers, tuple(options.page_sizes), options.tau)

    heads = next(iter(layers.values())).q.shape[1]
    print(
        f"{len(layers)} layers, {heads} heads, the last {options.last} queries; all tokens as int8 codes, deterministic radii"
    )
    print_table(
        [
            "P",
            "bounds",
            "reads",
            f"coverage at {options.tau}",
            "bound / true",
            "median",
            "max",
            "max true",
            "violations",
            "Spearman",
        ],
        [
            [
                page_size,
                name,
                row.reads,
                f"{row.coverage:.4f}",
                f"{row.tightness:.1f}",
                f"{row.median_bound:.4f}",
                f"{row.max_bound:.3f}",
                f"{row.max_true:.4f}",
                row.violations,
                f"{row.spearman:.2f}",
            ]
            for (page_size, name), row in figures.items()
        ],
    )
    result = {
        "command": "coverage",
        "text": source,
        "tokens": options.tokens,
        "last": options.last,
        "tau": options.tau,
        "rows": [{"page_size": size, "bounds": name} | asdict(row) for (size, name), row in figures.items()],
    }
    write_json(options.json, result)
    return result
