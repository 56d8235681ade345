"""Which radii a recipe allows: every one bounds the error of a score, and a read takes the smallest."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .formats import StoreFormat


class Radii(NamedTuple):
    """Kinds of radii.

    step: sm_scale * sum |q_c| scale_c * max_error; deterministic.
    residual: from the norms of K - K^ that the page notes keep; deterministic.
    probabilistic: sub-Gaussian, from subtractive dither (WitCert, the certificate's radius); holds with the probability that the request's
        budget gives it, and only where the query does not depend on the dither of the keys that it reads.
    """

    step: bool
    residual: bool
    probabilistic: bool

    @property
    def name(self) -> str:
        """What the operators take, for example "step+residual"."""
        return "+".join(kind for kind, allowed in zip(self._fields, self, strict=True) if allowed)


DETERMINISTIC = Radii(step=True, residual=True, probabilistic=False)


@lru_cache(maxsize=256)
def parse_radii(name: str, store_format: StoreFormat) -> Radii:
    """Radii of a name, checked against the format of the store.

    Raises:
        ValueError: an unknown kind, or none.
        NotImplementedError: probabilistic radii over keys without dither: plain rounding errors are not independent of the keys.
    """
    kinds = name.split("+")
    if not set(kinds) <= set(Radii._fields) or len(set(kinds)) != len(kinds):
        raise ValueError(f"radii must be some of {Radii._fields}, joined by '+', got {name!r}")
    radii = Radii(*(kind in kinds for kind in Radii._fields))
    if radii.probabilistic and not store_format.key.is_dithered:
        raise NotImplementedError(
            f"probabilistic radii need dithered keys (dither 'stream' or 'tile'), got {store_format.key}"
        )
    return radii
