"""Formats of stored keys and values: one parametrised mechanism. A format has a name, which the operators take.

K^ = zero + scale * (value of the code - dither). What a code's value is, how many a byte holds and how far rounding can be off
is the format's :class:`Grid`; which elements share a scale is its granularity.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

#: Channels that share a scale where keys are scaled per token (WitCert, "paging-safe scale granularity": G_c = 32).
KEY_GROUP = 32
#: Channels that share a scale and a zero in int4 values.
VALUE_GROUP = 16
#: Most outlier RoPE pairs kept exact.
MOST_OUTLIER_PAIRS = 16

KEY_ELEMENTS = ("int8", "int6", "int4", "fp8")
KEY_SCALINGS = ("asymmetric", "symmetric", "token")
VALUE_ELEMENTS = ("int8", "int4", "fp8", "exact")
DITHERS = ("none", "stream", "tile")


@dataclass(frozen=True)
class Grid:
    """Values that a code can have, in units of the scale.

    Args:
        bits: of a stored code.
        levels: largest magnitude that is quantized without clipping.
        offset: a stored unsigned code u has the value u - offset; 0 for int8, which is stored signed, and for fp8.
        max_error: largest |value - x / scale|, dither included.
    """

    bits: int
    levels: float
    offset: float
    max_error: float

    @property
    def is_float(self) -> bool:
        return self.max_error != 0.5

    def row_bytes(self, count: int) -> int:
        """Bytes of a row of `count` codes; 6 bits are a row of low halves of bytes and then a row of high quarters."""
        return count * self.bits // 8


def _grid(element: str, centred: bool, dithered: bool) -> Grid:
    """Grid of an element type.

    Args:
        centred: a zero is stored, so no code needs to mean 0 and the grid may lie on half integers: 2^bits values.
        dithered: half a step less range, so that x / scale + dither never clips.
    """
    if element == "fp8":
        # e4m3: the step is 32 between 256 and 448.
        return Grid(8, 448.0, 0.0, 16.0)
    bits = int(element[3:])
    largest = 2 ** (bits - 1) - 1
    if dithered:
        return Grid(bits, largest - 0.5, 0.0 if bits == 8 else largest + 1.0, 0.5)
    if bits == 8:
        return Grid(bits, largest, 0.0, 0.5)
    return Grid(bits, largest + 0.5, largest + 0.5, 0.5) if centred else Grid(bits, largest, largest + 1.0, 0.5)


def _check(name: str, value: object, supported: tuple[str, ...]) -> None:
    if value not in supported:
        raise ValueError(f"{name} must be one of {supported}, got {value!r}")


@dataclass(frozen=True)
class KeyFormat:
    """How keys are stored.

    Args:
        element: "int8", "int6", "int4" or "fp8" (e4m3).
        scaling: "asymmetric" or "symmetric" per page and channel, or symmetric per "token" and group of 32 channels.
        outlier_pairs: m, RoPE pairs kept exact in the model's dtype and out of every range, 0 to 16.
        dither: subtractive dither; "none", "stream" (a fresh draw for every element) or "tile" (one tile for all pages).

    Raises:
        ValueError: naming the argument.
        NotImplementedError: a combination that is not supported.
    """

    element: str = "int8"
    scaling: str = "asymmetric"
    outlier_pairs: int = 0
    dither: str = "none"

    def __post_init__(self) -> None:
        _check("key element", self.element, KEY_ELEMENTS)
        _check("key scaling", self.scaling, KEY_SCALINGS)
        _check("key dither", self.dither, DITHERS)
        pairs = self.outlier_pairs
        if not isinstance(pairs, int) or isinstance(pairs, bool) or not 0 <= pairs <= MOST_OUTLIER_PAIRS:
            raise ValueError(f"outlier_pairs must be an int in [0, {MOST_OUTLIER_PAIRS}], got {pairs!r}")
        if self.element == "fp8" and (self.scaling != "symmetric" or self.dither != "none"):
            raise NotImplementedError(
                f"key element 'fp8' is supported with key scaling 'symmetric' and without dither, got key scaling {self.scaling!r} and "
                f"dither {self.dither!r}"
            )

    @property
    def grid(self) -> Grid:
        return _grid(self.element, self.is_asymmetric, self.is_dithered)

    @property
    def is_asymmetric(self) -> bool:
        return self.scaling == "asymmetric"

    @property
    def per_token(self) -> bool:
        return self.scaling == "token"

    @property
    def is_dithered(self) -> bool:
        return self.dither != "none"

    def check_head_dim(self, head_dim: int) -> None:
        """Raise NotImplementedError where keys of this many channels cannot be stored."""
        if self.per_token and head_dim % KEY_GROUP:
            raise NotImplementedError(
                f"key scaling 'token' needs a head_dim that is a multiple of {KEY_GROUP}, got {head_dim}; use 'asymmetric' or "
                "'symmetric'"
            )
        if 2 * self.outlier_pairs >= head_dim:
            raise NotImplementedError(f"{self.outlier_pairs} outlier pairs are all of head_dim {head_dim}")


@dataclass(frozen=True)
class ValueFormat:
    """How values are stored: "int8" and "fp8" per token, "int4" per token and group of 16 channels with a zero, or "exact".

    Args:
        element: one of those.
        dither: as for keys; int8 only.
    """

    element: str = "int8"
    dither: str = "none"

    def __post_init__(self) -> None:
        _check("value element", self.element, VALUE_ELEMENTS)
        _check("value dither", self.dither, DITHERS)
        if self.is_dithered and self.element != "int8":
            raise NotImplementedError(f"dithered values must be int8, got {self.element!r} with dither {self.dither!r}")

    @property
    def grid(self) -> Grid:
        """Grid of the codes; exact values, which have none, give that of int8."""
        return _grid("int8" if self.is_exact else self.element, self.is_grouped, self.is_dithered)

    @property
    def is_exact(self) -> bool:
        return self.element == "exact"

    @property
    def is_grouped(self) -> bool:
        return self.element == "int4"

    @property
    def is_dithered(self) -> bool:
        return self.dither != "none"

    def groups(self, head_dim: int) -> int:
        """Scales of a token; 0 for exact values."""
        if self.is_exact:
            return 0
        return head_dim // VALUE_GROUP if self.is_grouped else 1


@dataclass(frozen=True)
class StoreFormat:
    """Formats of keys and values of a store."""

    key: KeyFormat = KeyFormat()
    value: ValueFormat = ValueFormat()

    @property
    def name(self) -> str:
        """What the operators take, for example "int8/asymmetric/0/none+int8/none"."""
        return "+".join("/".join(str(getattr(part, f.name)) for f in fields(part)) for part in (self.key, self.value))

    @property
    def is_dithered(self) -> bool:
        return self.key.is_dithered or self.value.is_dithered

    @classmethod
    def parse(cls, name: str) -> StoreFormat:
        """The format of that name.

        Raises:
            ValueError: no format has that name.
        """
        return _parse(name)


@lru_cache(maxsize=256)
def _parse(name: str) -> StoreFormat:
    try:
        key, value = (part.split("/") for part in name.split("+"))
        element, scaling, pairs, dither = key
        result = StoreFormat(KeyFormat(element, scaling, int(pairs), dither), ValueFormat(*value))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"store_format must be the name of a StoreFormat, like {DEFAULT.name!r}, got {name!r}"
        ) from error
    return result


#: The default recipe's: int8 keys, asymmetric per page and channel, int8 values per token, plain rounding.
DEFAULT = StoreFormat()
