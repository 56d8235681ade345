"""Arguments that no model passes and that once broke a bound: tiny scales, hostile sinks, channels named twice."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import Case, make_case

from torch_witcert.ops.certificate import Field
from torch_witcert.ops.formats import KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.reference import certified_attention_reference
from torch_witcert.ops.storage import StoreShape
from torch_witcert.ops.triton.attention import certified_attention_triton
from torch_witcert.testing.harness import CacheHarness

BOUNDS = [Field.TV, Field.OUTPUT]


def both(case: Case, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    kernel = certified_attention_triton(*case.to(device).attention_arguments())
    return [tuple(x.cpu() for x in kernel), certified_attention_reference(*case.attention_arguments())]


@pytest.mark.parametrize("scaling", ["token", "symmetric"])
def test_scales_whose_squares_underflow_keep_their_radius(device, scaling):
    """Keys of 2^-75 read by queries of 2^59: squared apart, each would be lost, and the radii with them."""
    step, size, dim = 2.0**-75, 16, 256
    store_format = StoreFormat(KeyFormat("int8", scaling), ValueFormat("exact"))
    shape = StoreShape(1, 3, 1, size, dim, torch.float32, store_format)
    harness = CacheHarness(shape, sm_scale=dim**-0.5, device=device)
    keys = torch.full((1, 1, 2 * size, dim), 0.49 * step, device=device)
    keys[:, :, size:] *= -1
    keys[..., ::32] = 127 * step
    values = torch.randn(1, 1, 2 * size, dim, generator=torch.Generator().manual_seed(0)).to(device)
    harness.write(keys, values, torch.ones(1, 2 * size, dtype=torch.bool, device=device))
    q = torch.full((1, 1, 1, dim), 2.0**59, device=device)
    q[..., ::32] = 0
    fresh = torch.zeros(1, 1, 1, dim, device=device)
    read = harness.forward(q, fresh, fresh, torch.ones(1, 1, dtype=torch.bool, device=device))
    result = harness.check(read, one_hot=False)
    assert result.reads == 1 and result.unbounded == 0 and result.violations == 0
    # 2^59 * 0.49 * 2^-75 * 248 / 16: what every score of a page is off by.
    assert read.certificate[0, 0, 0, Field.RADIUS] >= 2.0**-16 * 0.49 * 248 / 16


@pytest.mark.parametrize("sink", [math.inf, math.nan])
def test_a_sink_that_is_no_number_bounds_nothing(device, sink):
    case = make_case([40], 1, group=2, sinks=True)
    case.sinks[0] = sink
    for out, _, certificate in both(case, device):
        assert certificate[0, 0, 0, BOUNDS].isinf().all()
        assert certificate[0, 1, 0].isfinite().all() and out[0, 1].isfinite().all()


@pytest.mark.parametrize("sink", [-1e4, -1e30, torch.finfo(torch.float32).min])
def test_a_sink_far_below_every_score_costs_nothing(device, sink):
    case = make_case([40], 1, group=2, sinks=True)
    case.sinks[:] = -math.inf
    without = both(case, device)
    case.sinks[:] = sink
    for found, expected in zip(both(case, device), without, strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("channels", [[5, 5, 6, 7], [0, 1, 2, 64], [-1, 1, 2, 3]])
def test_outlier_channels_that_do_not_exist_or_repeat_are_never_trusted(device, channels):
    """The reference refuses; a kernel cannot look before it runs, and marks every read."""
    case = make_case([40], 1, store_format=StoreFormat(KeyFormat(outlier_pairs=2)))
    case.outlier_channels[:] = torch.tensor(channels, dtype=torch.int32)
    with pytest.raises(ValueError, match="outlier_channels"):
        certified_attention_reference(*case.attention_arguments())
    _, _, certificate = certified_attention_triton(*case.to(device).attention_arguments())
    assert certificate[..., BOUNDS].isinf().all()


@pytest.mark.parametrize("factor,offset", [("sm_scale", -7), ("softcap", -5)])
@pytest.mark.parametrize("value", [1e-46, 1e-39, 2.0**-101])
def test_factors_that_float32_does_not_hold_are_refused(device, factor, offset, value):
    arguments = list(make_case([20], 1).to(device).attention_arguments())
    arguments[offset] = value
    with pytest.raises(ValueError, match=factor):
        torch.ops.torch_witcert.certified_attention(*arguments)
