"""The Triton kernels: compiled where there is a GPU, else under the interpreter (TRITON_INTERPRET=1) on CPU tensors."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="the kernels need a CUDA device, or TRITON_INTERPRET=1")
    # numpy warns where the interpreter computes both sides of a `where`.
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")
    for item in items:
        if "tests/kernels" not in str(item.path).replace(os.sep, "/"):
            continue
        item.add_marker(quiet)
        if not (HAS_GPU or INTERPRETED):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def maximum_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's maximum and minimum drop a NaN; numpy's, which the interpreter uses, do not."""
    if INTERPRETED:
        builder = interpreter.InterpreterBuilder
        monkeypatch.setattr(builder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax))
        monkeypatch.setattr(builder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
