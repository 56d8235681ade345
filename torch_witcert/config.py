"""Recipes: what `convert` puts in the place of attention. Frozen, versioned dataclasses in the manner of torchao.

Where torchao is importable the recipes are `AOBaseConfig`s, so `torchao.quantization.quantize_` takes them too. This
module is loaded on the first use of a recipe, not by `import torch_witcert`. Loading torchao here costs nothing more:
transformers' model classes load it wherever it is installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

try:
    from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig
    from torchao.quantization.transform_module import register_quantize_module_handler
except ImportError:
    ALLOWED_AO_MODULES, register_quantize_module_handler = set(), None

    class AOBaseConfig:
        """Stands in for torchao's base class where torchao is not installed."""


PAGE_SIZES = (16, 32, 64, 128)
FOREIGN_CACHE = ("refuse", "dense")
VERSIONS = (1,)
#: Rounding alone costs a read that is made of codes only this much total variation: no such read passes a smaller tau.
TAU_FLOOR = 2.0**-9


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choice(name: str, value: object, supported: tuple) -> None:
    if type(value) is not type(supported[0]) or value not in supported:
        raise ValueError(f"{name} must be one of {supported}, got {value!r}")


@dataclass(frozen=True)
class PolicyLimits:
    """What the gate accepts.

    Args:
        tau: largest bound on the total variation, in [TAU_FLOOR, 1].
        output_limit: largest bound on the error of the output vector (Euclidean norm, in the values' units), positive; None
            for no limit.

    Raises:
        ValueError: a limit is not a number or out of range.
    """

    tau: float = 0.2
    output_limit: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.tau) or not TAU_FLOOR <= self.tau <= 1:
            raise ValueError(
                f"tau must be a number in [{TAU_FLOOR:.6g}, 1] (the lower end is the arithmetic floor: rounding alone moves a "
                f"read that far), got {self.tau!r}"
            )
        if self.output_limit is None:
            return
        if not _is_number(self.output_limit) or not 0 < self.output_limit < math.inf:
            raise ValueError(f"output_limit must be a positive finite number or None, got {self.output_limit!r}")


@dataclass(frozen=True)
class CertifiedInt8Config(AOBaseConfig):
    """The default recipe: int8 keys, asymmetric per page and channel; int8 values per token; a deterministic certificate.

    Args:
        page_size: tokens in a page, 16, 32, 64 or 128. A page is one quantization block of the keys.
        tau: the gate's limit on the total variation, in [2^-9, 1].
        output_limit: the gate's limit on the output error (Euclidean norm, in the values' units), or None.
        foreign_cache: what a converted model does with a cache that is not a `CertifiedCache`: "refuse" it, or read it
            "dense" as the unconverted model would, without certificates.
        version: of the recipe; 1.

    Raises:
        ValueError: naming the field, its value and what is supported.
    """

    page_size: int = 64
    tau: float = 0.2
    output_limit: float | None = None
    foreign_cache: str = "refuse"
    version: int = 1

    def __post_init__(self) -> None:
        _check_choice("page_size", self.page_size, PAGE_SIZES)
        _check_choice("foreign_cache", self.foreign_cache, FOREIGN_CACHE)
        _check_choice("version", self.version, VERSIONS)
        PolicyLimits(self.tau, self.output_limit)

    @property
    def limits(self) -> PolicyLimits:
        return PolicyLimits(self.tau, self.output_limit)


def _certify_module(module, config: CertifiedInt8Config):
    from .nn.convert import certify_module

    return certify_module(module, config)


ALLOWED_AO_MODULES.add(__name__)
if register_quantize_module_handler is not None:
    register_quantize_module_handler(CertifiedInt8Config)(_certify_module)
