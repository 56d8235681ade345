from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import torch

from torch_witcert.config import FOREIGN_CACHE, PAGE_SIZES, TAU_FLOOR, CertifiedInt8Config, PolicyLimits
from torch_witcert.ops import storage
from torch_witcert.ops.arithmetic import Arithmetic
from torch_witcert.ops.certificate import Field, Groups, Read, certify

torchao = pytest.importorskip("torchao")


def test_defaults():
    config = CertifiedInt8Config()
    assert dataclasses.asdict(config) == {
        "page_size": 64,
        "tau": 0.2,
        "output_limit": None,
        "foreign_cache": "refuse",
        "version": 1,
    }
    assert config.limits == PolicyLimits(0.2, None)


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
    ],
)
def test_wrong_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field) as error:
        CertifiedInt8Config(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("page_size", size) for size in PAGE_SIZES),
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


def test_page_sizes_are_those_of_the_storage():
    assert PAGE_SIZES == storage.PAGE_SIZES


@pytest.mark.parametrize("dtype", storage.MODEL_DTYPES)
def test_tau_floor_is_below_every_read_of_codes(dtype):
    """A read that is made of codes without any quantization error still costs more than TAU_FLOOR, so no limit under it works."""
    arithmetic = Arithmetic.of(64, 16, pages_per_row=1, pages_per_split=1, new_tokens=1, dtype=dtype)
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
    assert TAU_FLOOR < tv < 1.5 * TAU_FLOOR


def test_torchao_serializes_the_recipe():
    from torchao.core.config import AOBaseConfig, config_from_dict, config_to_dict

    config = CertifiedInt8Config(page_size=16, tau=0.1, output_limit=2.0, foreign_cache="dense")
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
