"""Caches of every kind, the ways to copy one, and what is compared afterwards."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from nn_models import RECIPE, forward, prompt, tiny_model
from nn_rows import same_bits

import torch_witcert
from torch_witcert.config import Recipe

DITHERED = torch_witcert.WitCertConfig(page_size=16, outlier_pairs=2)
INDICES = (((1, 5), (0, 31)),) * 2


class Case(NamedTuple):
    recipe: Recipe
    family: str = "llama"
    window: int | None = None
    dtype: torch.dtype = torch.float32
    dense: bool = False  # a last layer that is not converted
    num_pages: int | None = None
    seeds: tuple[int, ...] | None = None


CASES = {
    "int8": Case(RECIPE),
    "dither, window, dense layer, few pages": Case(
        DITHERED, "qwen2", 20, dense=True, num_pages=14, seeds=(5, 2**32 - 1, 0)
    ),
    "tile dither, bf16, outliers of the recipe": Case(
        replace(DITHERED, dither="tile", outlier_indices=INDICES), dtype=torch.bfloat16
    ),
    "int4, windows only": Case(replace(RECIPE, key_element="int4", value_element="int4"), "mistral", 20),
    "fp8, exact values, few pages": Case(
        replace(RECIPE, key_element="fp8", key_scaling="symmetric", value_element="exact"), num_pages=14
    ),
}


def model_of(case: Case):
    model = tiny_model(case.family, layers=3 if case.dense else 2, window=case.window, dtype=case.dtype)
    return torch_witcert.convert(model, case.recipe, filter_fn=lambda _, name: ".2." not in name, strict=False)


def filled(model, case: Case = CASES["int8"]) -> torch_witcert.CertifiedCache:
    """Rows of different lengths, a shared prefix, a crop, a changed number of rows."""
    cache = torch_witcert.CertifiedCache(model, 128, 3, seeds=case.seeds, num_pages=case.num_pages)
    mask = torch.ones(3, 40, dtype=torch.int64)
    mask[1, :9] = 0
    forward(model, prompt(40, 3), cache, attention_mask=mask)
    cache.fork(0, [2])
    for seed in range(10):
        forward(model, prompt(1, 3, seed), cache)
    cache.batch_select_indices(torch.tensor([1, 0, 2]))
    cache.crop(-3)
    forward(model, prompt(1, 3, 11), cache)
    return cache


def contents(cache) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in cache.named_tensors().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same bits, NaN included."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert same_bits(found[name], tensor), name


def on(model, cache) -> dict[str, torch.Tensor]:
    """Logits and state after calls of every kind."""
    results = {}
    for number, call in enumerate(
        (
            lambda: forward(model, prompt(1, 3, 20), cache),
            lambda: forward(model, prompt(17, 3, 21), cache),
            lambda: cache.crop(-2),
            lambda: forward(model, prompt(5, 3, 22), cache),
            lambda: cache.reorder_cache(torch.tensor([2, 2, 0])),
            lambda: forward(model, prompt(1, 3, 23), cache),
            lambda: cache.release([1]),
            lambda: forward(model, prompt(3, 3, 24), cache),
            lambda: cache.reset(),
            lambda: forward(model, prompt(20, 3, 25), cache),
        )
    ):
        logits = call()
        results |= {f"{number}.{name}": tensor for name, tensor in contents(cache).items()}
        if logits is not None:
            results[f"{number}.logits"] = logits
    return results


def through_file(cache, model, folder: Path):
    cache.save(folder / "cache.safetensors")
    return torch_witcert.CertifiedCache.load(folder / "cache.safetensors", model)


def through_torch_save(cache, *_):
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


WAYS = {
    "file": through_file,
    "pickle": lambda cache, *_: pickle.loads(pickle.dumps(cache)),
    "torch.save": through_torch_save,
    "deepcopy": lambda cache, *_: copy.deepcopy(cache),
}
