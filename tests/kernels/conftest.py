"""The Triton kernels: compiled where there is a GPU, else under the interpreter (TRITON_INTERPRET=1) on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch

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


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
