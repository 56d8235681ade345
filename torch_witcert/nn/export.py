"""A `CertifiedCache` as a safetensors file: every tensor under its name, and in the metadata, as JSON, what it was made for.

A file is looked at as a stranger: nothing of a cache exists before the checksum, the model, every shape and every number that
could lead a read astray have been checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .. import __version__
from ..config import Recipe, recipe_from_dict, recipe_to_dict
from ..ops.dither import SEEDS, page_key
from ..ops.storage import SOURCE_CODES
from ..policy.gate import Flag, make_limits
from ..policy.outliers import outlier_channels_of, outlier_indices_of
from .build import build_layers, check_positive, converted_modules, named_tensors_of
from .layers import CertifiedLayer, RaggedLayer
from .pages import PageGroup
from .step import CacheState

if TYPE_CHECKING:
    from .cache import CertifiedCache

FORMAT_VERSION = 1
#: Entry of the file's metadata.
ENTRY = "torch_witcert.CertifiedCache"
#: What of a model's config the keys and values of a cache depend on, besides the weights.
CONFIG_NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "intermediate_size",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "num_local_experts",
    "num_experts_per_tok",
    "swiglu_alpha",
    "swiglu_limit",
)
MOST_DIFFERENCES = 8


def model_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Facts by which a file recognizes a model, in JSON's types; its weights are not among them."""
    config = model.config
    facts = {"config": type(config).__name__} | {name: getattr(config, name, None) for name in CONFIG_NAMES}
    return json.loads(_json(facts))  # of its own, whatever becomes of the config


def save_cache(cache: CertifiedCache, path: str | os.PathLike) -> None:
    """See :meth:`CertifiedCache.save`."""
    state, path = cache.state, _as_path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path must be in a folder that exists, got {path}")
    tensors = cache.named_tensors() | {"peak": state.settled_peak()}
    contents = {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}
    description = _description(cache.layers, state, cache.config, cache.fingerprint) | {
        "library_version": __version__,
        "host": {"empty": state.is_empty(), "untouched": state.untouched},
        "sha256": checksum(contents),
    }
    # On the file system of the target, so that it can be moved there as a whole.
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as folder:
        written = Path(folder) / path.name
        written.touch()
        permissions = written.stat().st_mode  # of any new file; those of safetensors are narrower
        save_file(contents, written, metadata={ENTRY: _json(description)})
        written.chmod(permissions)
        with written.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(written, path)


def load_cache(cls: type[CertifiedCache], path: str | os.PathLike, model: PreTrainedModel) -> CertifiedCache:
    """See :meth:`CertifiedCache.load`."""
    modules, config = converted_modules(model)
    path = _as_path(path)
    found, tensors = _read(path)
    try:
        sizes = _sizes(found, path.stat().st_size)
        layout = build_layers(modules, config, *sizes[:2], model.dtype, torch.device("meta"), num_pages=sizes[2])
        _check_same(_description(*layout, config, model_fingerprint(model)), found)
        _check_shapes(named_tensors_of(*layout), tensors)
        if found.get("sha256") != checksum(tensors):
            raise ValueError("sha256: the tensors are not those that were saved; the file is damaged")
        empty, untouched = _host(found, tensors["lengths"])
        _check_contents(*layout, config, tensors)
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded for this model ({type(model).__name__}): {error}") from error
    pages, batch_size, num_pages = sizes
    cache = cls(model, pages * config.page_size, batch_size, num_pages=num_pages)
    for name, tensor in cache.named_tensors().items():
        tensor.copy_(tensors[name])
    cache.state.empty, cache.state.untouched = empty, untouched
    cache.state.longest = int(tensors["lengths"].max())
    return cache


def _description(
    layers: list[RaggedLayer], state: CacheState, config: Recipe, fingerprint: dict[str, Any]
) -> dict[str, Any]:
    """What must be the same for the tensors to mean the same."""
    return {
        "format_version": FORMAT_VERSION,
        "model": fingerprint,
        "recipe": recipe_to_dict(config),
        "batch_size": state.batch_size,
        "pages_per_row": state.pages_per_row,
        "num_pages": {str(window): group.num_pages for window, group in state.groups.items()},
        "layers": [
            {
                "kind": "certified" if isinstance(layer, CertifiedLayer) else "dense",
                "window": layer.window if isinstance(layer, CertifiedLayer) else 0,
                "shape": asdict(layer.shape),
            }
            for layer in layers
        ],
    }


def _json(value: Any) -> str:
    """With the names of dtypes."""
    return json.dumps(value, default=str)


def checksum(contents: dict[str, torch.Tensor]) -> str:
    """Of every tensor's name and bytes; of tensors on the CPU, contiguous."""
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(name.encode())
        digest.update(contents[name].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


# --- reading -------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Description and tensors of a file, the latter mapped into memory, not yet read."""
    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {})[ENTRY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        version = description["format_version"]
    except (SafetensorError, KeyError, TypeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is no complete file of CertifiedCache.save() ({type(error).__name__}: {error})"
        ) from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version!r} (written by torch_witcert {description.get('library_version')}); expected "
            f"{FORMAT_VERSION}, the only one that torch_witcert {__version__} reads"
        )
    return description, tensors


def _as_path(path: str | os.PathLike) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str or os.PathLike, got {type(path).__name__}")
    return Path(path)


def _sizes(found: dict[str, Any], nbytes: int) -> tuple[int, int, int | None]:
    """Pages per row, rows, and pages of the pool without a window, None where there is none."""
    pages, batch_size = found.get("pages_per_row"), found.get("batch_size")
    num_pages = found.get("num_pages")
    num_pages = num_pages.get("0") if isinstance(num_pages, dict) else None
    for name, value in (("pages_per_row", pages), ("batch_size", batch_size), ("num_pages", num_pages or 1)):
        check_positive(name, value)
    if pages * batch_size * torch.int32.itemsize > nbytes:
        raise ValueError(f"page tables of {batch_size} rows and {pages} pages do not fit into its {nbytes} bytes")
    return pages, batch_size, num_pages


def _host(found: dict[str, Any], lengths: torch.Tensor) -> tuple[bool, bool]:
    """Whether the cache is empty, and whether no forward has ever written to it."""
    host = found.get("host")
    values = tuple(host.get(name) if isinstance(host, dict) else None for name in ("empty", "untouched"))
    for name, value in zip(("empty", "untouched"), values, strict=True):
        if not isinstance(value, bool) or (value and bool(lengths.any())):
            raise ValueError(f"host.{name}: expected True or, because rows hold tokens, False; found {value!r}")
    return values


def _check_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    expected = json.loads(_json(expected))
    try:
        # A field that a later version adds to a recipe has its default.
        recipe = recipe_to_dict(recipe_from_dict(found.get("recipe")))
    except (TypeError, NotImplementedError) as error:
        raise ValueError(f"recipe: {error}") from error
    found = {name: value for name, value in found.items() if name not in ("library_version", "host", "sha256")}
    differences = list(_differences(expected, found | {"recipe": recipe}))
    if differences:
        more = len(differences) - MOST_DIFFERENCES
        raise ValueError("; ".join(differences[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else ""))


def _differences(expected: Any, found: Any, name: str = "") -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected | found:
            yield from _differences(expected.get(key), found.get(key), f"{name}.{key}" if name else key)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from _differences(one, other, f"{name}.{index}")
    elif expected != found or isinstance(expected, bool) != isinstance(found, bool):
        yield f"{name}: expected {_brief(expected)}, found {_brief(found)}"


def _brief(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, list | dict) else repr(value)


def _check_shapes(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    for what, names in (("missing", expected.keys() - found.keys()), ("superfluous", found.keys() - expected.keys())):
        if names:
            raise ValueError(f"{what} tensors: {', '.join(sorted(names))}")
    for name, tensor in expected.items():
        wanted, given = ([list(x.shape), x.dtype] for x in (tensor, found[name]))
        if wanted != given:
            raise ValueError(f"{name}: expected shape {wanted[0]} and {wanted[1]}, found {given[0]} and {given[1]}")


# --- contents ------------------------------------------------------------------------------------------------------------


def _check_contents(
    layers: list[RaggedLayer], state: CacheState, config: Recipe, tensors: dict[str, torch.Tensor]
) -> None:
    """Refuse numbers that would lead a read or a write astray; codes, scales and notes are taken at their word.

    Raises:
        ValueError: naming the tensor and what is wrong with it.
    """
    lengths = tensors["lengths"]
    top = torch.iinfo(torch.int64).max
    ranges: dict[str, tuple[float, float]] = {
        "lengths": (0, state.capacity),
        "peak": (0, state.capacity),
        "spent": (0, top),
        "seeds": (0, SEEDS - 1),
        "own_seeds": (0, SEEDS - 1),
        "counters.counts": (0, top),
        "counters.flagged_groups": (0, top),
        "counters.overflow": (0, Flag.OVERFLOW),
        "flags": (0, Flag.ALL),
        "counters.sums": (0.0, math.inf),
        "counters.maxima": (0.0, math.inf),
        "total_variation": (0.0, math.inf),
        "output": (0.0, math.inf),
    }
    for window, group in state.groups.items():
        ranges[f"groups.{window}.page_table"] = (-1 if group.on_demand else 0, group.num_pages - 1)
    for name, (low, high) in ranges.items():
        _check_range(name, tensors[name], low, high)
    _check_range("column_count", tensors["column_count"], int(lengths.max()), top)
    limits = make_limits(config.limits.tau, config.limits.output_limit, "cpu")
    if not torch.equal(tensors["limits"], limits):
        raise ValueError(f"limits: expected the recipe's {limits.tolist()}, found {tensors['limits'].tolist()}")
    for window, group in state.groups.items():
        name = f"groups.{window}.page_table"
        keys = [
            tensors[f"layers.{layer.index}.page_keys"]
            for layer in layers
            if isinstance(layer, CertifiedLayer) and layer.window == window and config.store_format.is_dithered
        ]
        _check_pages(name, group, tensors[name], lengths, tensors["seeds"], keys)
    for number, index in enumerate(state.counters.layers):
        fixed = config.outlier_indices and config.outlier_indices[number]
        if layers[index].pairs:
            name = f"layers.{index}.outlier_channels"
            _check_outliers(name, tensors[name], layers[index].shape.head_dim, fixed)


def _check_range(name: str, tensor: torch.Tensor, low: float, high: float) -> None:
    # A minimum that is NaN fails too.
    if tensor.numel() and not (low <= tensor.min().item() and tensor.max().item() <= high):
        raise ValueError(f"{name}: expected {low} to {high}, found {tensor.min().item()} to {tensor.max().item()}")


def _check_pages(
    name: str,
    group: PageGroup,
    table: torch.Tensor,
    lengths: torch.Tensor,
    seeds: torch.Tensor,
    page_keys: list[torch.Tensor],
) -> None:
    """Every page that a read needs is there, and none means two things.

    Args:
        group: on any device; only its sizes count.
        table: int32 [B, M], entries in the pool, or -1 for none.
        lengths: int32 [B].
        seeds: int64 [B], and page_keys: int64 [N, Hkv] of each of the group's layers; empty without dither.
    """
    group.page_table = table
    held = group.held(lengths)
    needed = group.source_map(lengths, 1)[:, 0] == SOURCE_CODES
    if (missing := (needed & ~held).nonzero()).numel():
        row, slot = missing[0].tolist()
        raise ValueError(f"{name}: expected a page in row {row}, slot {slot}, which reads need; found -1")
    rows, slots = held.nonzero(as_tuple=True)
    pages = table[held].to(torch.int64)
    slot_of = torch.zeros(group.num_pages, dtype=torch.int64).index_put((pages,), slots)
    own = torch.empty(0, dtype=torch.int64) if group.on_demand else table[~held].to(torch.int64)
    users = torch.bincount(torch.cat([pages.unique(), own]), minlength=group.num_pages)
    if bool((slot_of[pages] != slots).any()) or bool((users > 1).any()):
        raise ValueError(f"{name}: expected pages that are used in one slot only, found one in two slots")
    for keys in page_keys:
        if not torch.equal(keys[pages], page_key(seeds[rows], slots)[:, None].expand(-1, keys.shape[1])):
            raise ValueError(f"{name}: expected pages with the dither of their rows' seeds, found other page_keys")


def _check_outliers(
    name: str, channels: torch.Tensor, head_dim: int, fixed: tuple[tuple[int, ...], ...] | None
) -> None:
    try:
        expected = outlier_channels_of(fixed or outlier_indices_of(channels), head_dim)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not torch.equal(channels, expected):
        raise ValueError(f"{name}: expected both channels of each pair, {expected.tolist()}; found {channels.tolist()}")
