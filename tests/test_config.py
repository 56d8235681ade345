from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch

from torch_witcert.config import (
    DITHERS,
    FOREIGN_CACHE,
    TAU_FLOOR,
    CertifiedInt8Config,
    PolicyLimits,
    Recipe,
    RiskBudget,
    WitCertConfig,
    recipe_from_dict,
    recipe_to_dict,
)
from torch_witcert.ops import storage
from torch_witcert.ops.arithmetic import Arithmetic
from torch_witcert.ops.certificate import Field, Groups, Read, certify
from torch_witcert.ops.formats import DEFAULT, KEY_ELEMENTS, KEY_SCALINGS, VALUE_ELEMENTS, KeyFormat, StoreFormat
from torch_witcert.ops.formats import ValueFormat as Values

torchao = pytest.importorskip("torchao")


def test_defaults():
    config = CertifiedInt8Config()
    assert dataclasses.asdict(config) == {
        "page_size": 64,
        "tau": 0.2,
        "output_limit": None,
        "foreign_cache": "refuse",
        "version": 1,
        "key_element": "int8",
        "key_scaling": "asymmetric",
        "value_element": "int8",
        "outlier_pairs": 0,
        "outlier_indices": None,
        "radii": "step+residual",
    }
    assert config.limits == PolicyLimits(0.2, None)
    assert config.store_format == DEFAULT
    assert config.budget is None


def test_defaults_of_the_paper():
    config = WitCertConfig()
    common = dataclasses.asdict(CertifiedInt8Config())
    assert dataclasses.asdict(config) == common | {
        "key_scaling": "token",
        "outlier_pairs": 4,
        "radii": "step+residual+probabilistic",
        "dither": "stream",
        "dither_values": True,
        "delta_req": 0.01,
        "horizon": 256,
        "seed": 0,
    }
    assert config.store_format == StoreFormat(KeyFormat("int8", "token", 4, "stream"), Values("int8", "stream"))
    assert config.budget == RiskBudget(0.01, 256)
    assert isinstance(config, Recipe) and isinstance(CertifiedInt8Config(), Recipe)


def test_the_common_part_is_no_recipe():
    with pytest.raises(TypeError, match="CertifiedInt8Config or WitCertConfig"):
        Recipe()


@pytest.mark.parametrize("recipe", [CertifiedInt8Config, WitCertConfig])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("page_size", -16),
        ("page_size", 48),
        ("page_size", 64.0),
        ("page_size", True),
        ("page_size", math.nan),
        ("page_size", None),
        ("tau", 0),
        ("tau", -0.1),
        ("tau", TAU_FLOOR / 2),
        ("tau", 1.5),
        ("tau", math.nan),
        ("tau", math.inf),
        ("tau", True),
        ("tau", "0.2"),
        ("tau", None),
        ("output_limit", 0),
        ("output_limit", -1.0),
        ("output_limit", math.nan),
        ("output_limit", math.inf),
        ("output_limit", False),
        ("foreign_cache", "allow"),
        ("foreign_cache", None),
        ("version", 0),
        ("version", 2),
        ("version", True),
        ("version", 1.0),
        ("key_element", "int3"),
        ("key_element", 8),
        ("key_scaling", "channel"),
        ("key_scaling", None),
        ("value_element", "int6"),
        ("value_element", 16),
        ("outlier_pairs", -1),
        ("outlier_pairs", 17),
        ("outlier_pairs", True),
        ("outlier_pairs", 4.0),
        ("radii", ""),
        ("radii", "step+step"),
        ("radii", "steps"),
    ],
)
def test_wrong_value_is_refused_by_name(recipe, field, value):
    with pytest.raises(ValueError, match=field) as error:
        recipe(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dither", "none"),
        ("dither", "philox"),
        ("dither", None),
        ("dither_values", 1),
        ("dither_values", None),
        ("delta_req", 0),
        ("delta_req", 1),
        ("delta_req", -0.5),
        ("delta_req", math.nan),
        ("delta_req", True),
        ("delta_req", "0.01"),
        ("horizon", 0),
        ("horizon", -1),
        ("horizon", 2.5),
        ("horizon", True),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", True),
        ("seed", 1.0),
        ("seed", None),
    ],
)
def test_wrong_value_of_the_paper_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field) as error:
        WitCertConfig(**{field: value})
    assert repr(value) in str(error.value)


def test_seeds_name_their_range():
    with pytest.raises(ValueError, match=r"seed must be an int in \[0, 2\^32\), got 4294967296"):
        WitCertConfig(seed=2**32)
    assert WitCertConfig(seed=2**32 - 1).seed == 2**32 - 1


def test_radii_are_a_name():
    with pytest.raises(TypeError, match=r'radii must be a str like "step\+residual", got \(\'step\',\)'):
        CertifiedInt8Config(radii=("step",))


@pytest.mark.parametrize(
    ("recipe", "fields", "message"),
    [
        (CertifiedInt8Config, {"radii": "probabilistic"}, "probabilistic radii need dithered keys"),
        (CertifiedInt8Config, {"radii": "step+probabilistic"}, "probabilistic radii need dithered keys"),
        (CertifiedInt8Config, {"key_element": "fp8"}, "'fp8' is supported with key scaling 'symmetric'"),
        (CertifiedInt8Config, {"key_element": "fp8", "key_scaling": "token"}, "got key scaling 'token'"),
        (
            WitCertConfig,
            {"key_element": "fp8", "key_scaling": "symmetric"},
            "without dither, got key scaling 'symmetric' and dither 'stream'",
        ),
        (WitCertConfig, {"value_element": "int4"}, "dithered values must be int8, got 'int4'"),
        (WitCertConfig, {"value_element": "exact"}, "dithered values must be int8, got 'exact'"),
    ],
)
def test_combinations_that_are_not_supported(recipe, fields, message):
    with pytest.raises(NotImplementedError, match=message):
        recipe(**fields)


def test_every_other_combination_has_a_format():
    """Each recipe that can be made gives the format of its own fields; those of the test above are all that cannot."""
    made = refused = 0
    for element, scaling, value, dither in itertools.product(
        KEY_ELEMENTS, KEY_SCALINGS, VALUE_ELEMENTS, (None, *DITHERS)
    ):
        fields = {"key_element": element, "key_scaling": scaling, "value_element": value}
        if dither:
            fields |= {"dither": dither, "dither_values": value == "int8"}
        try:
            config = (WitCertConfig if dither else CertifiedInt8Config)(**fields, outlier_pairs=2)
        except NotImplementedError:
            assert element == "fp8" and (dither or scaling != "symmetric")
            refused += 1
            continue
        made += 1
        values = Values(value, dither if dither and value == "int8" else "none")
        assert config.store_format == StoreFormat(KeyFormat(element, scaling, 2, dither or "none"), values)
        assert (config.budget is None) == (dither is None)
    assert (made, refused) == (3 * 3 * 4 * 3 + 4, 2 * 4 + 2 * 3 * 4)


@pytest.mark.parametrize("radii", ["step", "residual", "residual+step", "probabilistic", "probabilistic+residual"])
def test_budget_is_of_probabilistic_radii(radii):
    budget = WitCertConfig(radii=radii, delta_req=0.5, horizon=None).budget
    assert budget == (RiskBudget(0.5, None) if "probabilistic" in radii else None)


INDICES = (((0, 5), (1, 2)), ((3, 4), (7, 6)))


def test_outlier_indices_become_nested_tuples():
    lists = [[list(head) for head in layer] for layer in INDICES]
    config = WitCertConfig(outlier_pairs=2, outlier_indices=lists)
    assert config.outlier_indices == INDICES
    assert hash(config) == hash(WitCertConfig(outlier_pairs=2, outlier_indices=INDICES))


@pytest.mark.parametrize(
    ("pairs", "indices", "message"),
    [
        (0, INDICES, "outlier_indices needs outlier_pairs, got outlier_pairs=0"),
        (3, INDICES, r"outlier_pairs=3 distinct indices >= 0 for each KV head, got \(0, 5\)"),
        (2, (((0, 0),),), r"distinct .* got \(0, 0\)"),
        (2, (((0, -1),),), r"got \(0, -1\)"),
        (2, (((0, 1.0),),), r"got \(0, 1.0\)"),
        (2, (((0, True),),), r"got \(0, True\)"),
        (2, ((0, 1),), "its pairs are 0"),
        (2, (), r"its layers are \(\)"),
        (2, ((),), r"its heads are \(\)"),
        (2, "first", "its layers are 'first'"),
    ],
)
@pytest.mark.parametrize("recipe", [CertifiedInt8Config, WitCertConfig])
def test_wrong_outlier_indices(recipe, pairs, indices, message):
    with pytest.raises(ValueError, match=message):
        recipe(outlier_pairs=pairs, outlier_indices=indices)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("page_size", size) for size in storage.PAGE_SIZES),
        *(("foreign_cache", choice) for choice in FOREIGN_CACHE),
        ("tau", TAU_FLOOR),
        ("tau", 1),
        ("output_limit", 1e-3),
        ("output_limit", 3),
    ],
)
def test_supported_values(field, value):
    assert getattr(CertifiedInt8Config(**{field: value}), field) == value


def test_unknown_field_and_assignment():
    with pytest.raises(TypeError, match="bits"):
        CertifiedInt8Config(bits=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CertifiedInt8Config().tau = 0.5


@pytest.mark.parametrize("dtype", storage.MODEL_DTYPES)
@pytest.mark.parametrize("value", VALUE_ELEMENTS)
def test_tau_floor_is_below_every_read_of_codes_with_int8_or_fp8_values(value, dtype):
    """Without any quantization error such a read still costs more than TAU_FLOOR; int4 and exact values cost less."""
    store_format = StoreFormat(DEFAULT.key, Values(value))
    arithmetic = Arithmetic.of(
        64, 16, pages_per_row=1, pages_per_split=1, new_tokens=1, dtype=dtype, store_format=store_format, softcap=0.0
    )
    code, exact = torch.tensor([1.0, 0.0]), torch.zeros(2)
    read = Read(
        Groups(mass=code, radius=exact, top=code),
        value_norm=code,
        scaled_mass=exact,
        value_error_note=exact,
        output_norm=torch.tensor(1.0),
        code_tokens=torch.tensor(16.0),
        tokens=torch.tensor(16.0),
    )
    tv = certify(read, arithmetic)[Field.TV]
    assert TAU_FLOOR < tv < 1.5 * TAU_FLOOR if value in ("int8", "fp8") else 0 < tv < TAU_FLOOR / 100
    with pytest.raises(
        ValueError, match="what rounding alone costs a read of int8 or fp8 values; it is the same for all"
    ):
        CertifiedInt8Config(tau=TAU_FLOOR / 2, value_element=value)


SERIALIZED = [
    CertifiedInt8Config(),
    CertifiedInt8Config(page_size=16, tau=0.1, output_limit=2.0, foreign_cache="dense"),
    CertifiedInt8Config(key_element="int4", value_element="int4", outlier_pairs=3),
    CertifiedInt8Config(outlier_pairs=2, outlier_indices=INDICES, tau=1),
    WitCertConfig(),
    WitCertConfig(horizon=None, seed=9, dither="tile", radii="probabilistic", outlier_pairs=2, outlier_indices=INDICES),
]


@pytest.mark.parametrize("config", SERIALIZED)
def test_a_recipe_through_json(config):
    described = recipe_to_dict(config)
    assert described.pop("recipe") == type(config).__name__
    assert set(described) == {field.name for field in dataclasses.fields(config)}
    again = recipe_from_dict(json.loads(json.dumps(recipe_to_dict(config))))
    assert again == config and type(again) is type(config) and hash(again) == hash(config)
    assert (again.limits, again.budget, again.store_format) == (config.limits, config.budget, config.store_format)
    # Nothing in it is shared, and JSON changes nothing.
    assert json.loads(json.dumps(recipe_to_dict(config))) == recipe_to_dict(config)


def test_a_field_that_is_left_out_has_its_default():
    assert recipe_from_dict({"recipe": "WitCertConfig", "tau": 0.5}) == WitCertConfig(tau=0.5)


@pytest.mark.parametrize(
    ("described", "error", "match"),
    [
        ({"recipe": "Recipe"}, ValueError, "one of CertifiedInt8Config, WitCertConfig, got 'Recipe'"),
        ({"recipe": ["WitCertConfig"]}, ValueError, r"got \['WitCertConfig'\]"),
        ({}, ValueError, "got None"),
        (
            {"recipe": "CertifiedInt8Config", "seed": 3},
            ValueError,
            "CertifiedInt8Config has no field 'seed'; its fields are page_",
        ),
        ({"recipe": "WitCertConfig", "bits": 3, 4: 5}, ValueError, "WitCertConfig has no field '4', 'bits'"),
        ({"recipe": "WitCertConfig", "seed": -1}, ValueError, "seed must be an int"),
        ({"recipe": "CertifiedInt8Config", "radii": "probabilistic"}, NotImplementedError, "need dithered keys"),
        (CertifiedInt8Config(), TypeError, "d must be a dict .*, got CertifiedInt8Config"),
    ],
)
def test_what_is_no_recipe_is_refused(described, error, match):
    with pytest.raises(error, match=match):
        recipe_from_dict(described)


def test_only_recipes_that_can_be_read_are_described():
    class OwnConfig(CertifiedInt8Config):
        pass

    with pytest.raises(ValueError, match="recipe must be one of CertifiedInt8Config, WitCertConfig, got OwnConfig"):
        recipe_to_dict(OwnConfig())
    with pytest.raises(TypeError, match="recipe must be a recipe like .*, got dict"):
        recipe_to_dict({"recipe": "CertifiedInt8Config"})


# torchao writes no tuples.
@pytest.mark.parametrize("config", [config for config in SERIALIZED if config.outlier_indices is None])
def test_torchao_serializes_the_recipe(config):
    from torchao.core.config import AOBaseConfig, config_from_dict, config_to_dict

    assert isinstance(config, AOBaseConfig)
    assert config_from_dict(config_to_dict(config)) == config


def test_recipe_without_torchao():
    """Where torchao is missing the recipe has a base of its own and behaves the same."""
    code = (
        "import sys; sys.modules['torchao'] = None\n"
        "from torch_witcert.config import CertifiedInt8Config\n"
        "assert CertifiedInt8Config(tau=0.5).limits.tau == 0.5\n"
        "try: CertifiedInt8Config(tau=2)\n"
        "except ValueError: print('refused', CertifiedInt8Config.__mro__[1].__module__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["refused", "torch_witcert.config"]
