"""Many prompts under one system prompt: its pages are stored once, and every request goes on from a fork of them.

    python examples/shared_prefix.py          SmolLM2-135M-Instruct answers questions, four at a time
    python examples/shared_prefix.py --toy    a tiny random Llama

Row 0 of the cache holds the system prompt and nothing else. `fork` lets other rows begin where it ends: complete pages
are shared, only the exact tail is copied. Rows that are done are released, and the next prompts take their place. The
same requests are then served without sharing, where every row stores the system prompt for itself; the program ends
with an error if a token differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch

import torch_witcert
from torch_witcert.config import PAGE_SIZES
from torch_witcert.evaluation import smollm2, toy
from torch_witcert.evaluation.arguments import whole_number
from torch_witcert.evaluation.output import print_table, quiet_libraries
from torch_witcert.evaluation.prompts import add_model_arguments, add_threads_argument, chosen_dtype
from torch_witcert.nn.compatibility import CACHE_ARGUMENT

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
#: Characters of the licence that the system prompt quotes.
QUOTED = {"toy": 400, "SmolLM2-135M-Instruct": 1600}
QUESTIONS = (
    "What is this text?",
    "Who is the licensor, and what is meant by that word here?",
    "What does the word 'Work' mean?",
    "Name one thing that the text defines.",
    "What is a contribution, in one sentence?",
    "Is source code a source form?",
    "Summarize the text in one sentence.",
    "What does 'You' mean?",
)


class Served(NamedTuple):
    """What a run gave, and what it took."""

    logits: list[list[torch.Tensor]]  # of each request, [vocabulary] for each new token
    pages: int  # in use at most
    nbytes: int  # of the cache, as allocated
    bound: float  # largest bound on the total variation of a read

    def tokens(self, request: int) -> list[int]:
        return [int(logits.argmax()) for logits in self.logits[request]]


def prompts(tokenizer, name: str) -> tuple[list[int], list[list[int]]]:
    """Token ids of the system prompt, and of each question as it follows."""
    system = f"Answer questions about this text.\n\n{LICENSE.read_text(encoding='utf-8').strip()[: QUOTED[name]]}"
    if name == "toy":
        return tokenizer.encode(system), [tokenizer.encode(f"\n{question}\n") for question in QUESTIONS]
    chat = [{"role": "system", "content": system}]
    before = tokenizer.apply_chat_template(chat, tokenize=False)
    texts = [
        tokenizer.apply_chat_template(
            [*chat, {"role": "user", "content": q}], add_generation_prompt=True, tokenize=False
        )
        for q in QUESTIONS
    ]
    # The parts meet at a special token, so they can be tokenized one by one.
    parts = [before, *(text.removeprefix(before) for text in texts)]
    first, *others = (tokenizer(part, add_special_tokens=False).input_ids for part in parts)
    return first, others


class Server:
    """Greedy decoding in a cache whose row 0 keeps the system prompt.

    Args:
        model: converted.
        system: token ids of the system prompt.
        rows: requests at a time.
        longest: tokens of the longest request, without the system prompt, new ones included.
        share: requests fork row 0; or each row stores the system prompt for itself.
    """

    def __init__(self, model, system: list[int], rows: int, longest: int, share: bool) -> None:
        self.model, self.system, self.rows, self.share = model, system, rows, share
        size = torch_witcert.report(model).layers[0].config.page_size
        shared, total = len(system) // size, (len(system) + longest) // size
        # As many pages as all rows need at once. Both caches have the same capacity a row: splits depend on it.
        pages = shared + rows * (total - shared) if share else rows * total
        self.cache = torch_witcert.CertifiedCache(
            model, len(system) + longest, rows + 1, num_pages=max(pages, rows + 1)
        )
        self.pages, self.bound = 0, 0.0

    def forward(self, new: dict[int, list[int]]) -> torch.Tensor:
        """Rows take new tokens, padded on the left; the others are idle. Logits [rows + 1, vocabulary] of the last
        column."""
        width, device = max(map(len, new.values())), self.model.device
        ids = torch.zeros(self.cache.batch_size, width, dtype=torch.int64, device=device)
        valid = torch.zeros_like(ids, dtype=torch.bool)
        for row, tokens in new.items():
            ids[row, width - len(tokens) :] = torch.tensor(tokens, device=device)
            valid[row, width - len(tokens) :] = True
        positions = (self.cache.lengths[:, None] + valid.cumsum(1) - 1).clamp_min(0)
        options = {CACHE_ARGUMENT: self.cache, "use_cache": True, "logits_to_keep": 1, "position_ids": positions}
        logits = self.model(ids, attention_mask=valid[:, None, None], **options).logits[:, -1]
        self.bound = max(self.bound, float(torch_witcert.certificates(self.cache).tv.max()))
        self.pages = max(self.pages, self.cache.pages_in_use())
        return logits

    def begin(self, rows: list[int]) -> None:
        """Rows hold the system prompt and nothing else."""
        if not self.share:
            self.cache.reset()
            self.forward(dict.fromkeys(rows, self.system))
            return
        if int(self.cache.lengths[0]) == 0:
            self.forward({0: self.system})
        self.cache.fork(0, rows)

    def serve(self, requests: list[list[int]], new_tokens: int, end: int) -> Served:
        """Answer requests, `rows` at a time, each until `end` or for `new_tokens`."""
        logits: list[list[torch.Tensor]] = [[] for _ in requests]
        for first in range(0, len(requests), self.rows):
            numbers = range(first, min(first + self.rows, len(requests)))
            rows = {number: 1 + number - first for number in numbers}
            self.begin(list(rows.values()))
            new = {number: requests[number] for number in rows}
            while new:
                found = self.forward({rows[number]: tokens for number, tokens in new.items()})
                for number in list(new):
                    logits[number].append(found[rows[number]].float().cpu())
                    token = int(found[rows[number]].argmax())
                    new[number] = [token]
                    if token == end or len(logits[number]) == new_tokens:
                        del new[number]
            self.cache.release(list(rows.values()))
        return Served(logits, self.pages, self.cache.nbytes(), self.bound)


def check(shared: Served, alone: Served) -> str:
    """How far the two runs agree.

    Raises:
        SystemExit: a token differs.
    """
    largest = 0.0
    for request, (ours, theirs) in enumerate(zip(shared.logits, alone.logits, strict=True)):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            largest = max(largest, float((a - b).abs().max()))
            if a.argmax() != b.argmax():
                gap = float(b.max() - b[a.argmax()])
                raise SystemExit(
                    f"request {request}: token {step} differs with and without sharing; logits differ by {largest:.2e} "
                    f"until there, and the two tokens by {gap:.2e} without sharing"
                )
    count = sum(map(len, shared.logits))
    bits = (
        "bit for bit" if largest == 0 else f"up to {largest:.1e}, which is the rounding of the model's matrix products"
    )
    return f"{count} tokens equal to those without sharing, logits equal {bits}"


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a tiny random model: no download")
    parser.add_argument(
        "--new-tokens", type=whole_number(1), default=24, help="tokens of an answer at most (default: %(default)s)"
    )
    parser.add_argument("--rows", type=whole_number(1), default=4, help="requests at a time (default: %(default)s)")
    parser.add_argument(
        "--page-size", type=int, choices=PAGE_SIZES, default=64, help="tokens in a page (default: %(default)s)"
    )
    add_model_arguments(parser)
    add_threads_argument(parser)
    options = parser.parse_args(arguments)
    quiet_libraries()
    torch.set_num_threads(options.threads)

    print("Loading the model ...", flush=True)
    name, dtype = "toy" if options.toy else "SmolLM2-135M-Instruct", chosen_dtype(options)
    if options.toy:
        model, tokenizer = toy.load(options.device, dtype)
    else:
        model, tokenizer = smollm2.load(options.device, dtype, options.model_dir)
    torch_witcert.convert(model, torch_witcert.CertifiedInt8Config(page_size=options.page_size))
    system, requests = prompts(tokenizer, name)
    longest = max(map(len, requests)) + options.new_tokens
    print(
        f"{name}, {model.dtype} on {model.device}: system prompt of {len(system)} tokens, {len(requests)} requests of "
        f"{min(map(len, requests))} to {max(map(len, requests))} tokens, {options.rows} at a time",
        flush=True,
    )
    end = tokenizer.eos_token_id
    shared, alone = (
        Server(model, system, options.rows, longest, share).serve(requests, options.new_tokens, end)
        for share in (True, False)
    )
    for request, question in enumerate(QUESTIONS):
        answer = tokenizer.decode(shared.tokens(request), skip_special_tokens=True)
        print(f"\n{question}\n    {' '.join(answer.split())}")
    rows = [
        [label, run.pages, f"{run.nbytes / 2**20:.2f} MiB", f"{run.bound:.4f}"]
        for label, run in (("shared", shared), ("each its own", alone))
    ]
    print(f"\nThe system prompt's pages of {options.page_size} tokens, and what {options.rows} requests at a time take")
    print_table(["system prompt", "pages in use", "cache", "largest bound"], rows)
    print(check(shared, alone))


if __name__ == "__main__":
    main()
