"""The process-wide precision of float32 matrix products, which the operators must neither obey nor change."""

from __future__ import annotations

import threading

import pytest
import torch

from torch_witcert.ops.library import _full_precision
from torch_witcert.testing.generators import Scenario
from torch_witcert.testing.harness import registered, run


@pytest.fixture(params=["medium", "high"])
def lowered(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def setting() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


def test_operators_run_in_ieee_and_restore_the_setting(lowered):
    """Also where one operator runs inside another's time, in another thread that ends later."""
    outside = setting()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with _full_precision(torch.empty(0)):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with _full_precision(torch.empty(0)):
        thread.start()
        assert entered.wait(10)
        assert setting() == "ieee"
    assert setting() == "ieee"
    leave.set()
    thread.join()
    assert setting() == outside != "ieee"


def test_bounds_hold_whatever_the_setting(lowered):
    """All tokens exact, where nothing but the arithmetic is in the bound. On a CPU without 16-bit products this cannot fail."""
    for seed in range(3):
        scenario = Scenario(seed, head_dim=128, page_size=128, dtype=torch.float32, chunks=(128,), strength=2.0)
        result = run(scenario, registered())
        assert result.reads > 200 and result.code_tokens == 0 and result.violations == 0
