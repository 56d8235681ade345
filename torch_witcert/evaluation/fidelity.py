"""A certified model against the dense one: prefill, then one-token forwards, teacher forced on the same text.

Only the one-token forwards count: the prefill's attention is exact. The dense model keeps its own cache in the model's
dtype (DynamicCache). At every N-th step the bounds of all reads are checked against exact attention in float64.
"""

from __future__ import annotations

import argparse
import copy
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

import torch_witcert

from ..config import PAGE_SIZES
from . import smollm2
from .arguments import fraction, whole_number
from .audit import Audit
from .forward import next_logits
from .output import print_table, progress, write_json
from .prompts import add_threads_argument
from .statistics import TAU, BoundFigures
from .text import licence_text, take_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import Recipe


@dataclass(frozen=True)
class Fidelity:
    """Figures over the one-token forwards.

    Args:
        steps: one-token forwards.
        code_share: share of the tokens read that were read as codes.
        coverage: share of the reads that used codes and were accepted by the gate.
        top1_agreement: share of steps at which both models rank the same token first.
        mean_kl, max_kl: KL(dense || certified) of the next-token distributions, in nats.
        median_bound, max_bound: bounds on total variation by layer, over heads and steps.
        total_variation, output: bounds of the checked reads against float64; None if no step was checked.
    """

    steps: int
    code_share: float
    coverage: float
    top1_agreement: float
    mean_kl: float
    max_kl: float
    median_bound: list[float]
    max_bound: list[float]
    total_variation: BoundFigures | None
    output: BoundFigures | None


@torch.no_grad()
def measure_fidelity(
    model: PreTrainedModel,
    ids: torch.Tensor,
    prefill: int,
    config: Recipe | None = None,
    check_every: int = 16,
) -> Fidelity:
    """Compare a dense model with a certified copy of it.

    Args:
        model: an unconverted causal LM; it stays as it is.
        ids: int64 [1, S], S > prefill; the last S - prefill tokens are fed one by one.
        prefill: tokens of the first forward.
        config: recipe of the copy; None for the default.
        check_every: check the bounds of every read at each such step; 0 never.

    Raises:
        ValueError: prefill is not in [1, S), or check_every is negative.
    """
    from transformers import DynamicCache

    steps = ids.shape[1] - prefill
    if not 1 <= prefill < ids.shape[1]:
        raise ValueError(f"prefill must be in [1, {ids.shape[1]}), the number of tokens, got {prefill}")
    if check_every < 0:
        raise ValueError(f"check_every must be 0 (never) or a positive int, got {check_every}")
    certified = torch_witcert.convert(copy.deepcopy(model), config)
    dense_cache = DynamicCache()
    cache = torch_witcert.CertifiedCache(certified, max_length=ids.shape[1], batch_size=1)

    divergences, agreements, bounds = [], [], []
    audit = Audit(enabled=False)
    with audit if check_every else nullcontext():
        for each, its_cache in ((model, dense_cache), (certified, cache)):
            next_logits(each, ids[:, :prefill], its_cache)
        for step in progress(range(steps), "one-token forwards"):
            audit.enabled = bool(check_every) and step % check_every == 0
            token = ids[:, prefill + step, None]
            reference = next_logits(model, token, dense_cache)[0].float().log_softmax(-1)
            logits = next_logits(certified, token, cache)[0].float().log_softmax(-1)
            divergences.append((reference.exp() * (reference - logits)).sum())
            agreements.append(reference.argmax() == logits.argmax())
            bounds.append(torch_witcert.certificates(cache).tv.clone())

    by_layer = torch.stack(bounds).flatten(2).transpose(0, 1).flatten(1)  # [L, steps * H]
    divergence = torch.stack(divergences)
    counted = torch_witcert.telemetry(cache)
    return Fidelity(
        steps=steps,
        code_share=counted.code_share,
        coverage=counted.coverage,
        top1_agreement=float(torch.stack(agreements).double().mean()),
        mean_kl=float(divergence.mean()),
        max_kl=float(divergence.max()),
        median_bound=by_layer.median(-1).values.tolist(),
        max_bound=by_layer.amax(-1).tolist(),
        total_variation=audit.total_variation_figures() if audit.reads else None,
        output=audit.output_figures() if audit.reads else None,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_threads_argument(parser)
    parser.add_argument(
        "--prefill", type=whole_number(1), default=2048, help="tokens of the first forward, not measured (2048)"
    )
    parser.add_argument(
        "--steps", type=whole_number(1), default=256, help="one-token forwards (256; 2048 for the figures on a GPU)"
    )
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=64, help="tokens in a page (64)")
    parser.add_argument("--tau", type=fraction, default=TAU, help="the gate's limit on total variation (0.2)")
    parser.add_argument(
        "--check-every",
        type=whole_number(0),
        default=16,
        help="check every read's bound against float64 at each such step (16; 0 never)",
    )


def run(options: argparse.Namespace) -> dict:
    """Run the command; returns what it printed, as data."""
    torch.set_num_threads(options.threads)
    text, source = licence_text(options.text)
    model, tokenizer = smollm2.load(options.device, options.dtype, options.model_dir)
    ids = take_tokens(tokenizer, text, options.prefill + options.steps, source).to(options.device)
    print(
        f"SmolLM2-135M-Instruct, {options.dtype}, {options.device}, {source}: prefill {options.prefill}, then "
        f"{options.steps} one-token forwards, int8 pages of {options.page_size} tokens",
        flush=True,
    )
    config = torch_witcert.CertifiedInt8Config(page_size=options.page_size, tau=options.tau)
    result = measure_fidelity(model, ids, options.prefill, config, options.check_every)
    print_table(
        ["layer", "median bound", "largest bound"],
        [
            [layer, f"{median:.4f}", f"{largest:.4f}"]
            for layer, (median, largest) in enumerate(zip(result.median_bound, result.max_bound, strict=True))
        ],
    )
    print(f"tokens read as codes   {result.code_share:.4f}")
    print(f"top-1 agreement        {result.top1_agreement:.4f}")
    print(f"KL(dense || certified) {result.mean_kl:.2e} nats on average, {result.max_kl:.2e} at most")
    print(f"coverage at tau {options.tau}    {result.coverage:.4f}")
    for name, figures in (("total variation", result.total_variation), ("output", result.output)):
        if figures is not None:
            print(
                f"{name} against float64: {figures.reads} reads checked, {figures.violations} violations, "
                f"bound / true {figures.tightness:.1f} (median)"
            )
    data = {
        "command": "fidelity",
        "text": source,
        "device": options.device,
        "dtype": str(options.dtype),
        "prefill": options.prefill,
        "page_size": options.page_size,
        "tau": options.tau,
    }
    write_json(options.json, data | asdict(result))
    return data | asdict(result)
