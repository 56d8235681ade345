"""The Hugging Face layer: certified attention modules, the cache, conversion and telemetry."""

from .attention import CertifiedAttention
from .cache import CertifiedCache

__all__ = ["CertifiedAttention", "CertifiedCache"]
