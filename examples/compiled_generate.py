"""generate() with torch.compile and a certified cache: one graph for every length, the same tokens and bounds as eager.

    python examples/compiled_generate.py          SmolLM2-135M-Instruct (on a CPU the compilation takes about half a minute)
    python examples/compiled_generate.py --toy    a tiny random Llama

On a GPU generate() compiles the decode step by itself, with CUDA graphs, because the cache says that it can be compiled.
It resets and reuses its cache for requests of the same shape, so the second request is not captured again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import CompileConfig

import torch_witcert
from torch_witcert.evaluation.arguments import whole_number
from torch_witcert.evaluation.output import quiet_libraries
from torch_witcert.evaluation.prompts import add_model_arguments, load_with_prompt

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"


def compile_config(device: torch.device) -> CompileConfig:
    """On a GPU what generate() uses by default, CUDA graphs; elsewhere the compiler alone."""
    if device.type == "cuda":
        return CompileConfig(fullgraph=True)
    config = CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True  # generate() compiles on accelerators only, unless it is told otherwise
    return config


def _graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a tiny random model: no download")
    parser.add_argument(
        "--new-tokens", type=whole_number(1), default=32, help="tokens to generate (default: %(default)s)"
    )
    add_model_arguments(parser)
    options = parser.parse_args(arguments)
    quiet_libraries()

    print("Loading the model ...", flush=True)
    prompted = load_with_prompt(options, LICENSE, options.toy)
    model, ids = torch_witcert.convert(prompted.model), prompted.input_ids

    def generate(**extra) -> tuple[torch.Tensor, torch.Tensor, float]:
        """New tokens, bounds [L, H] of the last forward, and seconds."""
        start = time.monotonic()
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=options.new_tokens,
            max_new_tokens=options.new_tokens,
            do_sample=False,
            **extra,
        )[0, ids.shape[1] :]
        bounds = torch_witcert.certificates(torch_witcert.last_cache(model)).tv[:, 0].cpu()
        return tokens.cpu(), bounds, time.monotonic() - start

    print(f"{prompted.name}, {model.dtype} on {model.device}: prompt of {ids.shape[1]} tokens", flush=True)
    eager_tokens, eager_bounds, seconds = generate(disable_compile=True)
    print(
        f"eager               {seconds:6.1f} s, largest bound of the last forward {eager_bounds.max():.4f}", flush=True
    )
    before = _graphs()
    compiled = {"compile_config": compile_config(model.device)}
    for name in ("compiled, first run", "compiled, again"):
        tokens, bounds, seconds = generate(**compiled)
        print(f"{name:19} {seconds:6.1f} s, largest bound of the last forward {bounds.max():.4f}", flush=True)
    agree = int((tokens == eager_tokens).sum())
    difference = float((bounds - eager_bounds).abs().max())
    print(f"tokens equal to eager: {agree} of {len(tokens)}; largest difference of a bound: {difference:.2e}")
    print(f"graphs compiled: {_graphs() - before}")
    print(prompted.tokenizer.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
