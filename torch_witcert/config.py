"""Recipes: what `convert` puts in the place of attention. Frozen, versioned dataclasses in the manner of torchao.

Where torchao is importable the recipes are `AOBaseConfig`s, so `torchao.quantization.quantize_` takes them too. This
module is loaded on the first use of a recipe, not by `import torch_witcert`. Loading torchao here costs nothing more:
transformers' model classes load it wherever it is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from .ops.dither import SEEDS
from .ops.formats import KEY_ELEMENTS, KEY_SCALINGS, VALUE_ELEMENTS, KeyFormat, StoreFormat, ValueFormat
from .ops.radii import parse_radii
from .ops.storage import PAGE_SIZES

try:
    from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig
    from torchao.quantization.transform_module import register_quantize_module_handler
except ImportError:
    ALLOWED_AO_MODULES, register_quantize_module_handler = set(), None

    class AOBaseConfig:
        """Stands in for torchao's base class where torchao is not installed."""


FOREIGN_CACHE = ("refuse", "dense")
VERSIONS = (1,)
#: Subtractive dither of :class:`WitCertConfig`.
DITHERS = ("stream", "tile")
#: Least tau. Before int8 and fp8 values are multiplied the weights are rounded, which costs a read that is made of codes only more
#: total variation than this, so that none would pass a smaller tau. Int4 and exact values cost less; their range is the same.
TAU_FLOOR = 2.0**-9


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
                f"tau must be a number in [{TAU_FLOOR:.6g}, 1], got {self.tau!r} (the lower end is what rounding alone costs a "
                "read of int8 or fp8 values; it is the same for all recipes)"
            )
        if self.output_limit is None:
            return
        if not _is_number(self.output_limit) or not 0 < self.output_limit < math.inf:
            raise ValueError(f"output_limit must be a positive finite number or None, got {self.output_limit!r}")


@dataclass(frozen=True)
class RiskBudget:
    """How a request shares its failure probability between its reads; see :mod:`torch_witcert.policy.budget`.

    Args:
        delta_req: failure probability of a whole request, in (0, 1).
        horizon: query tokens that share it equally, nothing is left afterwards; None for shares that fall and never end.

    Raises:
        ValueError: naming the argument.
    """

    delta_req: float
    horizon: int | None

    def __post_init__(self) -> None:
        if not _is_number(self.delta_req) or not 0 < self.delta_req < 1:
            raise ValueError(f"delta_req must be a probability in (0, 1), got {self.delta_req!r}")
        if self.horizon is not None and not (_is_int(self.horizon) and self.horizon >= 1):
            raise ValueError(
                f"horizon must be a positive int (query tokens) or None for a budget that never ends, got {self.horizon!r}"
            )


@dataclass(frozen=True)
class Recipe(AOBaseConfig):
    """What all recipes have; `CertifiedInt8Config` and `WitCertConfig` are made from it.

    Args:
        page_size: tokens in a page, 16, 32, 64 or 128. A page is one quantization block of keys that are scaled per channel.
        tau: the gate's limit on the total variation, in [2^-9, 1].
        output_limit: the gate's limit on the output error (Euclidean norm, in the values' units), or None.
        foreign_cache: what a converted model does with a cache that is not a `CertifiedCache`: "refuse" it, or read it
            "dense" as the unconverted model would, without certificates.
        version: of the recipe; 1.
        key_element: codes of the keys: "int8", "int6", "int4", or "fp8" (e4m3; needs key_scaling "symmetric", no dither).
        key_scaling: "asymmetric" or "symmetric" per page and channel; or per "token" and group of 32 channels, symmetric, for
            head dims that are multiples of 32.
        value_element: codes of the values: "int8" or "fp8" per token, "int4" per token and group of 16 channels with a zero, or
            "exact" in the model's dtype.
        outlier_pairs: RoPE pairs of each KV head whose two channels are kept exact, 0 to 16.
        outlier_indices: which pairs these are, [certified layer][KV head] -> `outlier_pairs` distinct indices; pair i of head
            dim D is the channels i and i + D / 2. None: those with the most energy in the first prompt of each cache, so that
            the codes depend on that prompt; `CertifiedCache.outlier_indices()` says which they were.
        radii: how the error of a score may be bounded, joined by "+"; a read takes the smallest. "step" and "residual" are
            deterministic, "probabilistic" needs dithered keys.

    Raises:
        ValueError: naming the field, its value and what is supported.
        NotImplementedError: fields that are not supported together.
        TypeError: `radii` is no str, or `Recipe` itself is constructed.
    """

    page_size: int = 64
    tau: float = 0.2
    output_limit: float | None = None
    foreign_cache: str = "refuse"
    version: int = 1
    key_element: str = "int8"
    key_scaling: str = "asymmetric"
    value_element: str = "int8"
    outlier_pairs: int = 0
    outlier_indices: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    radii: str = "step+residual"

    def __post_init__(self) -> None:
        if type(self) is Recipe:
            raise TypeError("Recipe is what recipes have in common: use CertifiedInt8Config or WitCertConfig")
        _check_choice("page_size", self.page_size, PAGE_SIZES)
        _check_choice("foreign_cache", self.foreign_cache, FOREIGN_CACHE)
        _check_choice("version", self.version, VERSIONS)
        _check_choice("key_element", self.key_element, KEY_ELEMENTS)
        _check_choice("key_scaling", self.key_scaling, KEY_SCALINGS)
        _check_choice("value_element", self.value_element, VALUE_ELEMENTS)
        PolicyLimits(self.tau, self.output_limit)
        if not isinstance(self.radii, str):
            raise TypeError(f'radii must be a str like "step+residual", got {self.radii!r}')
        parse_radii(self.radii, self.store_format)
        if self.outlier_indices is not None:
            object.__setattr__(self, "outlier_indices", _checked_indices(self.outlier_indices, self.outlier_pairs))

    @property
    def limits(self) -> PolicyLimits:
        return PolicyLimits(self.tau, self.output_limit)

    @property
    def store_format(self) -> StoreFormat:
        """How keys and values are stored."""
        return StoreFormat(
            KeyFormat(self.key_element, self.key_scaling, self.outlier_pairs), ValueFormat(self.value_element)
        )

    @property
    def budget(self) -> RiskBudget | None:
        """Of probabilistic radii; None where the recipe has none."""
        return None


@dataclass(frozen=True)
class CertifiedInt8Config(Recipe):
    """The default recipe: plain rounding and a deterministic certificate, which needs no assumption on the data.

    As it is, int8 keys, asymmetric per page and channel, and int8 values per token; other elements and scalings are options.

    Args and errors: those of :class:`Recipe`.
    """


@dataclass(frozen=True)
class WitCertConfig(Recipe):
    """The recipe of the WitCert paper: subtractive dither, probabilistic certificates and exact outlier pairs.

    K^ = scale (round(K / scale + dither) - dither). The dither is drawn anew from (seed, page, layer, head, token, channel) at
    every read, so that a page stores its key alone. It makes the error of a score a sum of independent terms, and the probabilistic
    radius bounds that sum: all bounds of a request that use it hold together with probability 1 - `delta_req` or more.

    The probabilistic radius ASSUMES that a query does not depend on the dither of the keys that it reads. Decoding breaks that
    in principle, because earlier reads of the same keys shaped the tokens that the query is made from. With dither "tile" the
    KEYS must not depend on the tile either, which every page of the request shares. A page that is cropped and filled again
    gets the same dither again, so that the new keys may depend on it through what was generated; so does the next request in a
    cache that is reset. "step" and "residual" radii assume nothing; where they are allowed as well, a read takes the smallest.

    Args:
        page_size, tau, output_limit, foreign_cache, version, key_element, key_scaling, value_element, outlier_pairs,
            outlier_indices, radii: as in :class:`Recipe`, with the paper's defaults. Key scaling "token" is the paper's serving
            layout, "symmetric" the one of its body. radii="probabilistic" is the paper's certificate alone.
        dither: "stream", a fresh draw for every element, or "tile", one tile for all pages of a request, layer and head.
        dither_values: dither int8 values as well; the bounds on values are deterministic either way.
        delta_req: failure probability of a whole request, in (0, 1).
        horizon: query tokens that the budget is for; later reads have only deterministic radii, or no guarantee where `radii`
            allows none. None: shares that fall and never end.
        seed: of the dither, in [0, 2^32); a cache may give each row another.

    Raises:
        ValueError: naming the field, its value and what is supported.
        NotImplementedError: fields that are not supported together.
    """

    key_scaling: str = "token"
    outlier_pairs: int = 4
    radii: str = "step+residual+probabilistic"
    dither: str = "stream"
    dither_values: bool = True
    delta_req: float = 1e-2
    horizon: int | None = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dither == "none":
            raise ValueError(f"dither must be one of {DITHERS}, got 'none'; plain rounding is CertifiedInt8Config")
        _check_choice("dither", self.dither, DITHERS)
        _check_choice("dither_values", self.dither_values, (True, False))
        check_seed("seed", self.seed)
        RiskBudget(self.delta_req, self.horizon)
        super().__post_init__()

    @property
    def store_format(self) -> StoreFormat:
        """How keys and values are stored."""
        return StoreFormat(
            KeyFormat(self.key_element, self.key_scaling, self.outlier_pairs, self.dither),
            ValueFormat(self.value_element, self.dither if self.dither_values else "none"),
        )

    @property
    def budget(self) -> RiskBudget | None:
        """Of probabilistic radii; None where the recipe has none."""
        radii = parse_radii(self.radii, self.store_format)
        return RiskBudget(self.delta_req, self.horizon) if radii.probabilistic else None


RECIPES: dict[str, type[Recipe]] = {recipe.__name__: recipe for recipe in (CertifiedInt8Config, WitCertConfig)}


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Every field of a recipe in JSON's types, tuples as lists, and the name of its class under "recipe".

    Raises:
        TypeError: not a recipe.
        ValueError: a class of recipe that :func:`recipe_from_dict` does not know.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a recipe like CertifiedInt8Config(), got {type(recipe).__name__}")
    name = type(recipe).__name__
    if RECIPES.get(name) is not type(recipe):
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name}")
    return {"recipe": name} | {field: _lists(value) for field, value in asdict(recipe).items()}


def recipe_from_dict(d: dict[str, Any]) -> Recipe:
    """The recipe that :func:`recipe_to_dict` was given; a field that is left out has its default.

    Raises:
        TypeError: `d` is no dict.
        ValueError: naming an unknown class or field, or a value that the recipe refuses.
        NotImplementedError: fields that are not supported together.
    """
    if not isinstance(d, dict):
        raise TypeError(f'd must be a dict like {{"recipe": "CertifiedInt8Config"}}, got {type(d).__name__}')
    if d.get("recipe") not in tuple(RECIPES):
        raise ValueError(f"recipe must be the name of one of {', '.join(RECIPES)}, got {d.get('recipe')!r}")
    recipe = RECIPES[d["recipe"]]
    values = {name: value for name, value in d.items() if name != "recipe"}
    names = [field.name for field in fields(recipe)]
    if unknown := sorted(str(name) for name in values.keys() - set(names)):
        raise ValueError(
            f"{recipe.__name__} has no field {', '.join(map(repr, unknown))}; its fields are {', '.join(names)}"
        )
    return recipe(**values)


def _lists(value: Any) -> Any:
    """`value` with lists in the place of tuples."""
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def check_seed(name: str, value: object) -> None:
    """Raise ValueError where `value` is no seed of a request."""
    if not _is_int(value) or not 0 <= value < SEEDS:
        raise ValueError(f"{name} must be an int in [0, 2^32), got {value!r}")


def _checked_indices(indices: object, pairs: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Nested tuples of an [layer][KV head][pair] sequence; how many layers and heads there are is the model's business."""

    def items(value: object, of: str) -> Sequence:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(
                f"outlier_indices must be nested tuples [layer][KV head][pair]; its {of} are {value!r}; get them from "
                "CertifiedCache.outlier_indices()"
            )
        return value

    if pairs == 0:
        raise ValueError("outlier_indices needs outlier_pairs, got outlier_pairs=0")
    result = []
    for layer in items(indices, "layers"):
        heads = tuple(tuple(items(head, "pairs")) for head in items(layer, "heads"))
        for head in heads:
            if len(head) != pairs or len(set(head)) != pairs or not all(_is_int(i) and i >= 0 for i in head):
                raise ValueError(
                    f"outlier_indices must hold outlier_pairs={pairs} distinct indices >= 0 for each KV head, got {head!r}"
                )
        result.append(heads)
    return tuple(result)


def _certify_module(module, config: Recipe):
    from .nn.convert import certify_module

    return certify_module(module, config)


ALLOWED_AO_MODULES.add(__name__)
if register_quantize_module_handler is not None:
    for _recipe in RECIPES.values():
        register_quantize_module_handler(_recipe)(_certify_module)
