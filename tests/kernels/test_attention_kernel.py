"""The attention kernels: soundness against float64, agreement with the reference, invariance, contract of the operator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import Case, make_case

from torch_witcert.ops.certificate import Field
from torch_witcert.ops.reference import certified_attention_reference
from torch_witcert.ops.storage import MODEL_DTYPES, POSITION_OVERFLOW, POSITION_PADDING
from torch_witcert.ops.triton import attention
from torch_witcert.ops.triton.attention import certified_attention_triton
from torch_witcert.ops.triton.launch import INTERPRETED
from torch_witcert.testing.generators import Scenario, scenarios
from torch_witcert.testing.harness import Soundness, run, run_constant_pages

#: Scenarios that one test draws: the interpreter needs about a second for each.
EXAMPLES = 25 if INTERPRETED else 300

#: Where the operator's last arguments are.
NUMBERS = {
    name: index - 7
    for index, name in enumerate(("sm_scale", "window", "softcap", "pages_per_split", "layer", "radii", "store_format"))
}


def read(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return certified_attention_triton(*case.attention_arguments())


def assert_bit_equal(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=EXAMPLES)
@given(
    scenarios(page_size=16, head_dim=64, num_kv_heads=1).map(
        lambda scenario: Scenario(
            **{
                **scenario.__dict__,
                "batch_size": min(scenario.batch_size, 2),
                # Long chunks are cached first: the interpreter walks one program after the other.
                "prefill": scenario.prefill or 65,
                "chunks": tuple(min(chunk, 3) for chunk in scenario.chunks[-2:]),
            }
        )
    )
)
def test_bounds_hold_against_float64(scenario):
    """|exact - returned| <= bound in total variation and in output, zero tolerance, adversarial inputs."""
    device = "cpu" if INTERPRETED else "cuda"
    result = run(scenario, device=device)
    assert result.violations == 0, result


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 24])
def test_groups_against_reference(device, group):
    """Any GQA group, padding heads of a block included; error within what the certificate claims for arithmetic."""
    case = make_case([70, 97], 2, kv_heads=2, group=group, dtype=torch.float32)
    out, lse, certificate = read(case.to(device))
    expected_out, expected_lse, expected = certified_attention_reference(*case.attention_arguments())
    assert (out.cpu() - expected_out).abs().max() <= 2e-3 * expected_out.abs().max()
    assert (lse.cpu() - expected_lse).abs().max() <= 1e-5
    counts = [Field.CODE_TOKENS, Field.TOKENS]
    assert torch.equal(certificate.cpu()[..., counts], expected[..., counts])
    bounds = [Field.TV, Field.OUTPUT, Field.RADIUS, Field.VALUE_ERROR]
    assert torch.allclose(certificate.cpu()[..., bounds], expected[..., bounds], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("page_size,head_dim,window", [(32, 128, 0), (64, 64, 100), (128, 128, 0), (16, 64, 5)])
def test_shapes_against_reference(device, dtype, page_size, head_dim, window):
    lengths = [4 * page_size + 3, 5 * page_size]
    case = make_case(lengths, 1, group=3, page_size=page_size, head_dim=head_dim, dtype=dtype, window=window)
    out, lse, certificate = read(case.to(device))
    expected_out, expected_lse, expected = certified_attention_reference(*case.attention_arguments())
    tolerance = 2e-3 + torch.finfo(dtype).eps
    assert (out.cpu().float() - expected_out.float()).abs().max() <= tolerance * expected_out.abs().max()
    assert (lse.cpu() - expected_lse).abs().max() <= 1e-5
    assert torch.allclose(certificate.cpu(), expected, rtol=2e-3, atol=1e-6)
    if window:
        seen = torch.tensor([window, window], dtype=torch.float32)
        assert torch.equal(certificate[:, 0, 0, Field.TOKENS].cpu(), seen)


def test_row_is_bit_equal_alone_in_a_batch_in_other_slots_and_pages(device):
    """Four complete pages at least; capacity is the same, batch, slot, pages and neighbours are not."""
    common = {"group": 3, "pages_per_row": 9, "dtype": torch.bfloat16}
    alone = read(make_case([75], 2, seed=5, **common).to(device))
    table = torch.randperm(27, generator=torch.Generator().manual_seed(1)).int().view(3, 9)
    batch = read(make_case([130, 3, 75], 2, seed=3, page_table=table, **common).to(device))
    assert_bit_equal([x[0] for x in alone], [x[2] for x in batch])


def test_unused_bytes_never_reach_a_result(device):
    lengths = [70, 1, 0, 64]
    first = read(make_case(lengths, 2, unused_byte=0xFF).to(device))
    second = read(make_case(lengths, 2, unused_byte=0x00).to(device))
    assert_bit_equal(first, second)
    assert all(x.isfinite().all() for x in first)


def test_padding_and_overflow_rows(device):
    case = make_case([70, 70, 70], 2)
    case.positions[0] = POSITION_PADDING
    case.positions[1] = POSITION_OVERFLOW
    out, lse, certificate = read(case.to(device))
    assert (out[:2] == 0).all() and lse[:2].isneginf().all()
    assert (certificate[0] == 0).all()
    assert certificate[1][..., [Field.TV, Field.OUTPUT]].isinf().all()
    assert (certificate[1][..., Field.KEY_ERROR :] == 0).all()
    assert (out[2] != 0).any() and certificate[2].isfinite().all()


@pytest.mark.parametrize("where", ["k", "v", "k_tail", "v_tail", "page"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_marks_the_reads_that_see_it_and_no_other(device, where, poison):
    """NaN or Inf in a fresh token, in the tail or in a page: +inf bounds there; other rows and earlier queries bit-equal."""
    case = make_case([70, 70], 3, group=2)
    clean = read(case.to(device))
    if where == "page":
        case.store.page_notes[case.page_table[0, 1].long()] = float("inf")
    elif where.endswith("tail"):
        getattr(case.store, where)[0, 0, 66 % 32, 5] = poison
    else:
        getattr(case, where)[0, 0, 1, 5] = poison
    out, lse, certificate = read(case.to(device))
    sees = slice(1, None) if where in ("k", "v") else slice(None)
    assert certificate[0, :, sees][..., [Field.TV, Field.OUTPUT]].isinf().all()
    assert out.isfinite().all()
    assert_bit_equal([x[1] for x in clean], [x[1] for x in (out, lse, certificate)])
    assert_bit_equal(
        [x[0, :, : sees.start or 0] for x in clean], [x[0, :, : sees.start or 0] for x in (out, lse, certificate)]
    )


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("length", [0, 5, 70])
def test_query_that_is_not_finite_is_marked(device, length, poison, dtype):
    """Also where nothing is read as codes."""
    case = make_case([length], 2, group=2, dtype=dtype)
    clean = read(case.to(device))
    case.q[0, 1, 1, 0] = poison
    poisoned = read(case.to(device))
    assert poisoned[2][0, 1, 1, Field.TV].isinf() and poisoned[2][0, 1, 1, Field.OUTPUT].isinf()
    for head, token in ((0, 0), (0, 1), (1, 0)):
        assert_bit_equal([x[0, head, token] for x in clean], [x[0, head, token] for x in poisoned])


def poisoned_scratch(monkeypatch) -> None:
    """Scratch that no program has written is NaN."""
    monkeypatch.setattr(
        attention, "allocate_scratch", lambda *shape, device: torch.full(shape, torch.nan, device=device)
    )


@pytest.mark.parametrize("window,splits", [(0, 16), (700, 7), (1003, 1), (2100, 128)])
def test_long_rows_many_splits_and_windows_that_start_late(device, monkeypatch, window, splits):
    """300 pages: several blocks of the merge, several splits, and windows whose first split is not split 0."""
    poisoned_scratch(monkeypatch)
    case = make_case([300 * 16 + 5], 2, dtype=torch.float32, window=window)

    def with_splits(case: Case) -> list:
        arguments = list(case.attention_arguments())
        arguments[NUMBERS["pages_per_split"]] = splits
        return arguments

    expected = certified_attention_reference(*with_splits(case))
    actual = certified_attention_triton(*with_splits(case.to(device)))
    assert (actual[0].cpu() - expected[0]).abs().max() <= 2e-3 * expected[0].abs().max()
    assert torch.allclose(actual[2].cpu(), expected[2], rtol=2e-3, atol=1e-6)
    assert actual[2][0, 0, 0, Field.TOKENS] == (window or 300 * 16 + 6)


def test_chunk_of_several_exact_tiles(device, monkeypatch):
    """150 fresh tokens: three tiles of the exact pass, causal across them."""
    poisoned_scratch(monkeypatch)
    case = make_case([70], 150, dtype=torch.float32)
    expected = certified_attention_reference(*case.attention_arguments())
    actual = read(case.to(device))
    assert (actual[0].cpu() - expected[0]).abs().max() <= 2e-3 * expected[0].abs().max()
    assert torch.allclose(actual[2].cpu(), expected[2], rtol=2e-3, atol=1e-6)


def test_keys_far_from_zero_that_nearly_cancel_between_pages(device):
    seeds = range(4 if INTERPRETED else 20)
    total = sum((run_constant_pages(seed, device=device) for seed in seeds), Soundness())
    assert total.tv_reads == 8 * len(seeds)
    assert total.violations == 0


@pytest.mark.parametrize(
    "name,value",
    [
        ("sm_scale", -0.125),
        ("sm_scale", float("nan")),
        ("window", -1),
        ("window", 2**31),
        ("pages_per_split", 0),
        ("softcap", -1.0),
        ("softcap", float("inf")),
        ("layer", -1),
        ("radii", "steps"),
        ("store_format", "int9"),
    ],
)
def test_wrong_numbers_are_refused(device, name, value):
    arguments = list(make_case([70], 1).to(device).attention_arguments())
    arguments[NUMBERS[name]] = value
    with pytest.raises(ValueError, match=name):
        torch.ops.torch_witcert.certified_attention(*arguments)


def test_long_chunks_are_cut_without_changing_a_bit(device, monkeypatch):
    case = make_case([70], 5, group=3).to(device)
    whole = read(case)
    monkeypatch.setattr(attention, "SCRATCH_BYTES", 1)
    assert_bit_equal(whole, read(case))


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "offset"])
def test_opcheck(device, layout):
    def arrange(tensor: torch.Tensor) -> torch.Tensor:
        if layout == "permuted":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "offset":
            padded = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
            return padded.copy_(tensor)
        return tensor

    case = make_case([70, 65], 2, kv_heads=2, group=2).to(device)
    case = case._replace(**{name: arrange(getattr(case, name)) for name in ("q", "k", "v")})
    plain = read(case.to(device))
    torch.library.opcheck(torch.ops.torch_witcert.certified_attention.default, case.attention_arguments())
    assert_bit_equal(plain, read(case))
    torch.library.opcheck(torch.ops.torch_witcert.kv_write.default, case.write_arguments())


def test_cpu_dispatch_is_the_kernel_under_the_interpreter(device):
    case = make_case([70], 1).to(device)
    through_library = torch.ops.torch_witcert.certified_attention(*case.attention_arguments())
    assert_bit_equal(read(case), through_library)
