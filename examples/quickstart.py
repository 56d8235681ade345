"""The main job: a long prompt, a certified int8 KV cache, streamed text, and a report of every read's bound.

    python examples/quickstart.py            SmolLM2-135M-Instruct reads this project's licence and answers a question
    python examples/quickstart.py --toy      a tiny random Llama, without any download
    python examples/quickstart.py --recipe witcert      the WitCert paper's recipe: dithered codes, probabilistic bounds

`make demo` sets everything up and runs this file.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from transformers import TextStreamer

import torch_witcert
from torch_witcert.config import PAGE_SIZES
from torch_witcert.evaluation.arguments import fraction, whole_number
from torch_witcert.evaluation.audit import Audit
from torch_witcert.evaluation.heatmap import write_heat_map
from torch_witcert.evaluation.memory import allocated_bytes, dense_cache
from torch_witcert.evaluation.output import prefill_progress, print_table, quiet_libraries
from torch_witcert.evaluation.prompts import add_model_arguments, add_threads_argument, load_with_prompt

RECIPES = {"int8": torch_witcert.CertifiedInt8Config, "witcert": torch_witcert.WitCertConfig}
LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
#: Context at which the memory is measured besides that of the run.
LONG_CONTEXT = 8192


class CertificateStreamer(TextStreamer):
    """Streams the text and keeps the bounds of every one-token forward, [layers, H] each."""

    def __init__(self, model, tokenizer) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.model = model
        self.bounds: list[torch.Tensor] = []
        self.calls = 0

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        # The first call brings the prompt, the second the token that the prefill chose: its attention was exact.
        if self.calls >= 2:
            certificates = torch_witcert.certificates(torch_witcert.last_cache(self.model))
            self.bounds.append(certificates.tv[:, 0].clone())
        self.calls += 1


def print_memory(model, config, capacity: int) -> None:
    """Allocate both caches, certified and bf16, at two sizes and print what they take."""
    device, rows = model.device, []
    for tokens in (capacity, LONG_CONTEXT):
        ours = allocated_bytes(partial(torch_witcert.CertifiedCache, model, tokens, 1), device)
        dense = allocated_bytes(partial(dense_cache, model, tokens), device)
        rows.append([tokens, f"{ours / 2**20:.1f} MiB", f"{dense / 2**20:.1f} MiB", f"{ours / dense:.3f}"])
    print(f"\nMemory of the cache, as allocated ({model.dtype} model, pages of {config.page_size} tokens)")
    print_table(["tokens", "certified int8", "bf16", "ratio"], rows)


def print_bounds(bounds: torch.Tensor) -> None:
    """Median and largest candidate bound by layer; bounds [steps, layers, H]."""
    print(f"\nBound on total variation by layer, {bounds.shape[0]} one-token forwards and {bounds.shape[2]} heads")
    by_layer = bounds.transpose(0, 1).flatten(1)
    medians, maxima = by_layer.median(-1).values.tolist(), by_layer.amax(-1).tolist()
    rows = [[layer, f"{medians[layer]:.4f}", f"{maxima[layer]:.4f}"] for layer in range(len(medians))]
    print_table(["layer", "median", "largest"], rows)


def print_audit(audit: Audit) -> None:
    """Bounds of the checked reads against exact attention in float64."""
    print("\nCheck against exact attention in float64 (exact keys and values kept aside)")
    rows = []
    for name, figures in (("total variation", audit.total_variation_figures()), ("output", audit.output_figures())):
        rows.append([name, figures.reads, figures.violations, f"{figures.max_true:.4g}", f"{figures.tightness:.1f}"])
    print_table(["bound on", "reads checked", "violations", "largest true", "bound / true (median)"], rows)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a tiny random model: no download, seconds")
    parser.add_argument("--recipe", choices=RECIPES, default="int8", help="how keys and values are stored (int8)")
    parser.add_argument(
        "--new-tokens", type=whole_number(2), default=96, help="tokens to generate at most (default: %(default)s)"
    )
    parser.add_argument(
        "--page-size", type=int, choices=PAGE_SIZES, default=64, help="tokens in a page (default: %(default)s)"
    )
    parser.add_argument("--tau", type=fraction, default=0.2, help="limit on total variation (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the heat map (default: %(default)s)")
    add_model_arguments(parser)
    add_threads_argument(parser)
    options = parser.parse_args(arguments)
    quiet_libraries()
    torch.set_num_threads(options.threads)
    start = time.monotonic()

    print("Loading the model ...", flush=True)
    prompted = load_with_prompt(options, LICENSE, options.toy)
    length = prompted.input_ids.shape[1]

    config = RECIPES[options.recipe](page_size=options.page_size, tau=options.tau)
    model = torch_witcert.convert(prompted.model, config)
    print(f"{prompted.name}, {model.dtype} on {model.device}: prompt of {length} tokens", flush=True)

    streamer = CertificateStreamer(model, prompted.tokenizer)
    with Audit() as audit, prefill_progress(model):
        model.generate(
            prompted.input_ids,
            attention_mask=torch.ones_like(prompted.input_ids),
            max_new_tokens=options.new_tokens,
            do_sample=False,
            streamer=streamer,
            disable_compile=True,  # the audit watches eager operators
        )

    bounds = torch.stack(streamer.bounds).cpu()
    counted = torch_witcert.telemetry(model)
    print_memory(model, config, torch_witcert.last_cache(model).capacity_per_row)
    print_bounds(bounds)
    print(f"\nTokens read as codes: {counted.code_share:.1%}. Coverage at tau {options.tau}: {counted.coverage:.4f}")
    print_audit(audit)
    title = f"{prompted.name}: bound on total variation, prompt of {length} tokens, int8 pages of {config.page_size}"
    kv_heads = model.config.get_text_config().num_key_value_heads
    picture = write_heat_map(bounds, kv_heads, options.out / "bounds.png", title, options.tau)
    print(f"\nHeat map by layer and head: {picture}")
    print(f"Took {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
