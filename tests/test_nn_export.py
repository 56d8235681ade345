"""The file of a cache: what is refused, so that no read goes astray, and how it is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nn_copies import CASES, DITHERED, INDICES, assert_same, contents, filled, model_of
from nn_models import RECIPE, converted, forward, prompt, tiny_model
from safetensors import safe_open
from safetensors.torch import save, save_file

import torch_witcert
from torch_witcert.nn import export

# --- files that do not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: converted(recipe=replace(RECIPE, tau=0.1)), r"recipe\.tau: expected 0\.1, found 0\.2$"),
        (lambda: converted(recipe=DITHERED), "recipe.recipe: expected 'WitCertConfig', found 'CertifiedInt8Config'"),
        (lambda: converted(recipe=replace(RECIPE, page_size=32)), r"recipe\.page_size: expected 32, found 16"),
        (
            lambda: converted(layers=3),
            r"model\.num_hidden_layers: expected 3, found 2; layers: expected 3 .*, found 2 ",
        ),
        (lambda: converted(heads=8), r"model\.num_attention_heads: expected 8, found 4$"),
        (lambda: converted(kv_heads=1), r"model\.num_key_value_heads: expected 1, found 2; layers\.0\.shape"),
        (lambda: converted(head_dim=128), r"layers\.0\.shape\.head_dim: expected 128, found 64"),
        (lambda: converted(hidden_size=128), r"model\.hidden_size: expected 128, found 96$"),
        (
            lambda: converted(dtype=torch.bfloat16),
            r"layers\.0\.shape\.dtype: expected 'torch.bfloat16', found 'torch.float32'",
        ),
        (lambda: converted("qwen3"), r"model\.config: expected 'Qwen3Config', found 'LlamaConfig'; model"),
        (
            lambda: converted(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            r"model\.rope_parameters\.rope_theta: expected 500000\.0, found 10000\.0$",
        ),
        (
            lambda: torch_witcert.convert(
                tiny_model(), RECIPE, filter_fn=lambda _, name: ".1." not in name, strict=False
            ),
            r"layers\.1\.kind: expected 'dense', found 'certified'; layers\.1\.shape\.pool_pages",
        ),
        (lambda: converted(rms_norm_eps=1e-5), r"model\.rms_norm_eps: expected 1e-05, found 1e-06$"),
        (tiny_model, r"is not converted"),
    ],
)
def test_another_model_is_refused(make, match, tmp_path):
    filled(converted()).save(tmp_path / "cache")
    with pytest.raises(ValueError, match=match):
        torch_witcert.CertifiedCache.load(tmp_path / "cache", make())


def test_other_windows_are_refused(tmp_path):
    window = converted("qwen2", window=20)
    torch_witcert.CertifiedCache(window, 64).save(tmp_path / "cache")
    with pytest.raises(
        ValueError, match=r"num_pages\.20: expected None, found 4; .*layers\.1\.window: expected 36, found 20"
    ):
        torch_witcert.CertifiedCache.load(tmp_path / "cache", converted("qwen2", window=36))


def test_a_model_of_another_kind():
    with pytest.raises(TypeError, match="PreTrainedModel"):
        torch_witcert.CertifiedCache.load("cache", torch.nn.Linear(1, 1))


def rewrite(path: Path, change) -> None:
    """Change a file's tensors and its description in place, with the checksum of what is written."""
    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()[export.ENTRY])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(tensors, description)
    description["sha256"] = export.checksum(tensors)
    save_file(tensors, path, metadata={export.ENTRY: json.dumps(description)})


def setting(name: str, value: object, index: object = ...):
    """A change that puts a value into a tensor."""

    def change(tensors: dict, _: dict) -> None:
        tensors[name][index] = value

    return change


def describing(path: str, value: object):
    """A change that puts a value into the description."""

    def change(_: dict, description: dict) -> None:
        *outer, last = path.split(".")
        for name in outer:
            description = description[name]
        description[last] = value

    return change


FULL = "groups.0.page_table"
WINDOW = "groups.20.page_table"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (describing("format_version", 2), r"format version 2 \(written by torch_witcert .*\); expected 1"),
        (lambda _, description: description.pop("format_version"), r"no complete file .*KeyError: 'format_version'"),
        (describing("recipe", None), "recipe: d must be a dict"),
        (describing("recipe.horizon", -1), "horizon must be a positive int"),
        (describing("recipe.unknown", 1), "has no field 'unknown'"),
        (describing("surprise", 1), "surprise: expected None, found 1"),
        (describing("batch_size", 2), r"layers\.0\.shape\.batch_size: expected 2, found 3"),
        (describing("batch_size", "3"), "batch_size must be a positive int, got '3'"),
        (describing("batch_size", 10**15), "page tables of 1000000000000000 rows and 8 pages do not fit"),
        (describing("pages_per_row", 0), "pages_per_row must be a positive int, got 0"),
        (describing("num_pages.0", 13), r"layers\.0\.shape\.pool_pages: expected 13, found 14"),
        (describing("num_pages", 13), r"num_pages: expected .*, found 13"),
        (describing("layers", []), "layers: expected 3 entries, found 0 entries"),
        (describing("host.empty", True), r"host\.empty: .* False; found True"),
        (describing("host.untouched", True), r"host\.untouched: .* False; found True"),
        (describing("host.empty", 0), r"host\.empty: .*; found 0"),
        (describing("host", None), r"host\.empty: .*; found None"),
        (lambda tensors, _: tensors.pop("layers.1.v_tail"), r"missing tensors: layers\.1\.v_tail$"),
        (lambda tensors, _: tensors.update(extra=torch.ones(1)), "superfluous tensors: extra$"),
        (
            lambda tensors, _: tensors.update(lengths=tensors["lengths"].long()),
            r"lengths: expected shape \[3\] and torch.int32, found \[3\] and torch.int64",
        ),
        (
            lambda tensors, _: tensors.update({"layers.0.k_codes": tensors["layers.0.k_codes"][1:].clone()}),
            r"layers\.0\.k_codes: expected shape \[14, 2, 16, 64\] .*, found \[13, 2, 16, 64\]",
        ),
        (setting("lengths", 129, 1), "lengths: expected 0 to 128, found 39 to 129"),
        (setting("lengths", -1, 0), "lengths: expected 0 to 128, found -1 to"),
        (setting("peak", 129, 0), "peak: expected 0 to 128"),
        (setting("column_count", 0), "column_count: expected 48 to .*, found 0 to 0"),
        (setting("spent", -1, 0), "spent: expected 0 to"),
        (setting("seeds", 2**32, 0), "seeds: expected 0 to 4294967295, found"),
        (setting("own_seeds", -1, 0), "own_seeds: expected 0 to"),
        (setting("limits", float("nan"), 0), r"limits: expected the recipe's \[0.2.*, found \[nan"),
        (setting("limits", 0.5, 0), r"limits: expected the recipe's \[0.2.*, found \[0.5"),
        (setting("total_variation", -0.1, 0), "total_variation: expected 0.0 to inf, found -0.1"),
        (setting("output", float("nan"), (0, 0, 0)), "output: expected 0.0 to inf, found nan to nan"),
        (setting("flags", 256, 0), "flags: expected 0 to 127, found"),
        (setting("counters.sums", -1.0, 0), r"counters\.sums: expected 0.0 to inf, found -1.0"),
        (setting("counters.maxima", float("nan"), 0), r"counters\.maxima: expected 0.0 to inf, found nan"),
        (setting("counters.overflow", -1), r"counters\.overflow: expected 0 to 16, found -1"),
        (setting("counters.counts", -1, (0, 0)), r"counters\.counts: expected 0 to"),
        (setting("counters.flagged_groups", -1, (0, 0)), r"counters\.flagged_groups: expected 0 to"),
        (setting(FULL, 14, (0, 7)), r"groups\.0\.page_table: expected -1 to 13, found -1 to 14"),
        (setting(FULL, -2, (0, 7)), r"groups\.0\.page_table: expected -1 to 13, found -2 to"),
        (setting(FULL, -1, (1, 0)), r"groups\.0\.page_table: expected a page in row 1, slot 0, .*found -1"),
        (setting(WINDOW, -1, (1, 2)), r"groups\.20\.page_table: expected a page in row 1, slot 2, .*found -1"),
        (
            lambda tensors, _: tensors[FULL][1].copy_(tensors[FULL][1, [0, 0, *range(2, 8)]]),
            r"groups\.0\.page_table: .* one slot only, found one in two slots",
        ),
        (
            lambda tensors, _: tensors[FULL][1].copy_(tensors[FULL][1, [1, 0, *range(2, 8)]]),
            r"groups\.0\.page_table: .* found one in two slots",
        ),
        (setting("layers.0.page_keys", 0), r"groups\.0\.page_table: .* found other page_keys"),
        (setting("seeds", 6, 0), "found other page_keys"),
        (
            setting("layers.1.outlier_channels", 64, (0, 0)),
            r"layers\.1\.outlier_channels: .* of KV head 0 must be distinct",
        ),
        (
            setting("layers.1.outlier_channels", -1, (1, 2)),
            r"layers\.1\.outlier_channels: .* of KV head 1 must be distinct",
        ),
        (
            lambda tensors, _: tensors["layers.0.outlier_channels"].copy_(torch.tensor([3, 35, 3, 35])),
            r"layers\.0\.outlier_channels: .* of KV head 0 must be distinct indices in \[0, 32\), got \(3, 3\)",
        ),
        (
            lambda tensors, _: tensors["layers.0.outlier_channels"].copy_(torch.tensor([3, 4, 5, 37])),
            r"layers\.0\.outlier_channels: expected both channels of each pair",
        ),
    ],
)
def test_a_file_that_would_be_unsafe_is_refused(change, match, saved, tmp_path):
    model, file = saved
    path = tmp_path / "cache"
    path.write_bytes(file)
    torch_witcert.CertifiedCache.load(path, model)
    rewrite(path, change)
    with pytest.raises(ValueError, match=match) as caught:
        torch_witcert.CertifiedCache.load(path, model)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["layers.0.k_codes", "layers.1.k_scale", "layers.0.page_notes", "layers.0.v_tail"])
def test_a_bit_that_flipped_is_noticed(name, saved, tmp_path):
    model, file = saved
    path = tmp_path / "cache"
    path.write_bytes(file)
    length = int.from_bytes(file[:8], "little")
    begin, end = json.loads(file[8 : 8 + length])[name]["data_offsets"]
    assert end > begin
    damaged = bytearray(file)
    damaged[8 + length + (begin + end) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="sha256: the tensors are not those that were saved; the file is damaged"):
        torch_witcert.CertifiedCache.load(path, model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple:
    """A model and the bytes of a file of a cache for it; rows 1 and 2 share their first pages, row 0 has its own."""
    case = CASES["dither, window, dense layer, few pages"]
    model = model_of(case)
    path = tmp_path_factory.mktemp("saved") / "cache"
    filled(model, case).save(path)
    return model, path.read_bytes()


def test_tables_without_pages_on_demand(tmp_path):
    """Free slots have pages of their own, too: the next forward writes there without looking."""
    model = converted()
    path = tmp_path / "cache"
    filled(model).save(path)
    file = path.read_bytes()

    def shared_free_page(tensors: dict, _: dict) -> None:
        tensors[FULL][0, 7] = tensors[FULL][1, 7]

    def held_free_page(tensors: dict, _: dict) -> None:
        tensors[FULL][0, 7] = tensors[FULL][1, 0]

    for change, match in (
        (shared_free_page, "found one in two slots"),
        (held_free_page, "found one in two slots"),
        (setting(FULL, -1, (0, 7)), r"groups\.0\.page_table: expected 0 to 23, found -1 to"),
    ):
        path.write_bytes(file)
        rewrite(path, change)
        with pytest.raises(ValueError, match=match):
            torch_witcert.CertifiedCache.load(path, model)


def test_outlier_channels_of_the_recipe(tmp_path):
    model = converted(recipe=replace(DITHERED, outlier_indices=INDICES))
    path = tmp_path / "cache"
    filled(model).save(path)
    rewrite(path, setting("layers.0.outlier_channels", torch.tensor([[2, 34, 5, 37], [0, 32, 31, 63]])))
    with pytest.raises(ValueError, match=r"layers\.0\.outlier_channels: expected .*\[\[1, 33, 5, 37\]"):
        torch_witcert.CertifiedCache.load(path, model)


def test_a_field_that_a_recipe_has_gained_since_has_its_default(saved, tmp_path):
    model, file = saved
    path = tmp_path / "cache"
    path.write_bytes(file)
    rewrite(path, lambda _, description: description["recipe"].pop("dither_values"))
    rewrite(path, describing("library_version", "0.0.1"))
    assert torch_witcert.CertifiedCache.load(path, model).config == model.model.layers[0].self_attn.certified_config


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda file: file[:-1], ValueError),
        (lambda file: file[: len(file) // 2], ValueError),
        (lambda file: b"", ValueError),
        (lambda file: b"no tensors at all", ValueError),
        (lambda file: file.replace(export.ENTRY.encode(), export.ENTRY.swapcase().encode(), 1), ValueError),
        (lambda file: file.replace(b'{\\"format_version\\"', b'[\\"format_version\\"', 1), ValueError),
        (lambda file: save({}, {export.ENTRY: "[" * 100_000}), ValueError),
    ],
)
def test_a_damaged_file_is_refused(damage, error, saved, tmp_path):
    model, file = saved
    assert damage(file) != file
    (tmp_path / "cache").write_bytes(damage(file))
    with pytest.raises(error, match="cache is no complete file of CertifiedCache.save"):
        torch_witcert.CertifiedCache.load(tmp_path / "cache", model)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        torch_witcert.CertifiedCache.load(tmp_path / "cache", converted())
    with pytest.raises(FileNotFoundError):
        filled(converted()).save(tmp_path / "folder" / "cache")


def test_a_path_is_a_path():
    model = converted()
    with pytest.raises(TypeError, match="path must be a str or os.PathLike, got NoneType"):
        filled(model).save(None)
    with pytest.raises(TypeError, match="path must be a str or os.PathLike, got int"):
        torch_witcert.CertifiedCache.load(3, model)


# --- writing -------------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_old_file(saved, tmp_path, monkeypatch):
    model, file = saved
    path = tmp_path / "cache"
    path.write_bytes(file)

    def half(_, written: Path, **__) -> None:
        Path(written).write_bytes(file[: len(file) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(export, "save_file", half)
    with pytest.raises(OSError, match="no space left"):
        torch_witcert.CertifiedCache(model, 32).save(path)
    assert path.read_bytes() == file
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_and_gets_ordinary_permissions(tmp_path):
    model = converted()
    cache = filled(model)
    path, plain = tmp_path / "cache", tmp_path / "plain"
    cache.save(str(path))
    forward(model, prompt(1, 3), cache)
    cache.save(path)
    assert_same(contents(torch_witcert.CertifiedCache.load(str(path), model)), contents(cache))
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    assert sorted(tmp_path.iterdir()) == [path, plain]


def test_the_file_says_what_it_is(saved, tmp_path):
    """Tools that know nothing of us can read it."""
    _, file = saved
    (tmp_path / "cache").write_bytes(file)
    with safe_open(tmp_path / "cache", framework="pt") as opened:
        description = json.loads(opened.metadata()[export.ENTRY])
        assert {"layers.1.k_codes", "layers.2.dense_keys", FULL, "counters.sums", "spent"} <= set(opened.keys())
    assert description["format_version"] == export.FORMAT_VERSION
    assert description["library_version"] == torch_witcert.__version__
    assert description["recipe"]["recipe"] == "WitCertConfig"
    assert [layer["kind"] for layer in description["layers"]] == ["certified", "certified", "dense"]
    assert [layer["window"] for layer in description["layers"]] == [0, 20, 0]
