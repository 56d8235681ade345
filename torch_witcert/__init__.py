"""A quantized KV cache for Hugging Face causal language models whose every attention read carries a sound error bound.

`import torch_witcert` loads nothing heavy: a public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import CertifiedInt8Config, WitCertConfig
    from .nn.cache import CertifiedCache
    from .nn.convert import convert, restore
    from .nn.generation import last_cache
    from .nn.report import report
    from .nn.telemetry import certificates, telemetry

__version__ = "0.1.0"

_MODULE_OF_NAME = {
    "CertifiedCache": ".nn.cache",
    "CertifiedInt8Config": ".config",
    "WitCertConfig": ".config",
    "certificates": ".nn.telemetry",
    "convert": ".nn.convert",
    "last_cache": ".nn.generation",
    "report": ".nn.report",
    "restore": ".nn.convert",
    "telemetry": ".nn.telemetry",
}

__all__ = [
    "CertifiedCache",
    "CertifiedInt8Config",
    "WitCertConfig",
    "__version__",
    "certificates",
    "convert",
    "last_cache",
    "report",
    "restore",
    "telemetry",
]


def __getattr__(name: str):
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF_NAME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
