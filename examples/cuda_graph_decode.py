"""A decode loop in one raw CUDA graph: captured once, replayed for every token; pages fill and certificates are made inside.

    python examples/cuda_graph_decode.py          SmolLM2-135M-Instruct
    python examples/cuda_graph_decode.py --toy    a tiny random Llama

The step reads its token and position from static tensors and updates them in place, so nothing changes between replays
but data. Without a GPU there is no graph: the same step runs eagerly, and the program says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

import torch_witcert
from torch_witcert.evaluation.forward import next_logits
from torch_witcert.evaluation.output import quiet_libraries
from torch_witcert.evaluation.prompts import add_model_arguments, load_with_prompt

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
#: Real decode steps that run before the capture, so that every kernel is compiled and loaded.
WARM_UP = 3


class DecodeStep:
    """One greedy decode step over static tensors.

    Args:
        model: converted.
        cache: its certified cache.
        ids: int64 [1, S], the prompt; the constructor runs the prefill.
    """

    def __init__(self, model, cache, ids: torch.Tensor) -> None:
        self.model, self.cache = model, cache
        self.token = next_logits(model, ids, cache).argmax(-1, keepdim=True)
        self.position = torch.full_like(self.token, ids.shape[1])

    def __call__(self) -> None:
        logits = next_logits(self.model, self.token, self.cache, self.position)
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.position += 1


def capture(step: DecodeStep) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Warm up on a side stream with real steps, then capture the step; returns the replay and the tokens of the warm-up."""
    tokens = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            tokens.append(step.token.clone())
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records the step, runs nothing
        step()
    return graph.replay, tokens


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a tiny random model: no download")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate (default: %(default)s)")
    add_model_arguments(parser)
    options = parser.parse_args(arguments)
    if options.new_tokens <= WARM_UP:
        parser.error(f"--new-tokens must be more than the {WARM_UP} of the warm-up, got {options.new_tokens}")
    quiet_libraries()

    print("Loading the model ...", flush=True)
    prompted = load_with_prompt(options, LICENSE, options.toy)
    model, ids = torch_witcert.convert(prompted.model), prompted.input_ids
    cache = torch_witcert.CertifiedCache(model, ids.shape[1] + options.new_tokens, 1)
    print(f"{prompted.name}, {model.dtype} on {model.device}: prompt of {ids.shape[1]} tokens", flush=True)

    def decode(use_graph: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [N] and bounds [N, L, H] of the forwards that followed each of them."""
        cache.reset()
        step = DecodeStep(model, cache, ids)
        advance, tokens = capture(step) if use_graph else (step, [])
        bounds = []
        while len(tokens) < options.new_tokens:
            tokens.append(step.token.clone())
            advance()
            bounds.append(torch_witcert.certificates(cache).tv[:, 0].clone())
        return torch.cat(tokens).flatten().cpu(), torch.stack(bounds).cpu()

    tokens, bounds = decode(use_graph=False)
    print(prompted.tokenizer.decode(tokens, skip_special_tokens=True))
    print(
        f"eager loop: {len(tokens)} tokens, bounds on total variation: median {bounds.median():.4f}, largest {bounds.max():.4f}"
    )
    if model.device.type != "cuda":
        print("no CUDA device here: there is no graph to capture, the step ran eagerly")
        return
    graph_tokens, graph_bounds = decode(use_graph=True)
    same_bounds = torch.equal(graph_bounds, bounds[WARM_UP:])
    print(
        f"CUDA graph captured once, replayed {len(graph_bounds)} times: tokens "
        f"{'equal' if torch.equal(graph_tokens, tokens) else 'DIFFER'}, certificates bit for bit "
        f"{'equal' if same_bounds else 'DIFFERENT'}"
    )


if __name__ == "__main__":
    main()
