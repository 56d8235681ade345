"""torch.compile of the decode step: one graph for every length, the same results as eager, buffers updated in place."""

from __future__ import annotations

import pytest
import torch
from nn_models import converted, forward, prompt
from torch._dynamo.backends.registry import lookup_backend

import torch_witcert


class CountingBackend:
    """A compiler backend that counts the graphs it is given."""

    def __init__(self, name: str) -> None:
        self.compile = lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self.compile(graph, inputs)


def compiled_step(model, backend):
    torch._dynamo.reset()

    def step(token, position, cache, mask=None):
        return forward(model, token, cache, position_ids=position, attention_mask=mask)

    return torch.compile(step, fullgraph=True, backend=backend)


def assert_same_state(one, other) -> None:
    for a, b in zip(one.tensors(), other.tensors(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("window", [None, 50])
def test_one_graph_from_length_1_to_600(window):
    model = converted("mistral", heads=2, kv_heads=1, window=window)
    backend = CountingBackend("aot_eager")
    step = compiled_step(model, backend)
    ours, eager = (torch_witcert.CertifiedCache(model, 608) for _ in range(2))
    addresses = [tensor.data_ptr() for tensor in ours.tensors()]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(600):
            token, position = prompt(1, seed=length), torch.tensor([[length]])
            logits = step(token, position, ours)
            assert torch.equal(logits, forward(model, token, eager, position_ids=position)), length
    assert backend.graphs == 1
    assert int(ours.lengths) == int(ours.get_seq_length()) == 600
    assert_same_state(ours, eager)
    assert [tensor.data_ptr() for tensor in ours.tensors()] == addresses
    assert torch_witcert.telemetry(ours) == torch_witcert.telemetry(eager)


@pytest.mark.parametrize(("family", "head_dim"), [("gemma2", 256), ("gpt_oss", 64), ("phi3", 96), ("qwen3", 128)])
def test_every_family_decodes_in_one_graph(family, head_dim):
    """Soft capping, sinks and windows included."""
    model = converted(family, heads=2, kv_heads=1, head_dim=head_dim, window=30 if family != "phi3" else None)
    backend = CountingBackend("aot_eager")
    step = compiled_step(model, backend)
    ours, eager = (torch_witcert.CertifiedCache(model, 128) for _ in range(2))
    for cache in (ours, eager):
        forward(model, prompt(60), cache)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(60, 84):
            token, position = prompt(1, seed=length), torch.tensor([[length]])
            assert torch.equal(step(token, position, ours), forward(model, token, eager, position_ids=position))
    assert backend.graphs == 1
    assert_same_state(ours, eager)


def test_inductor_equals_eager_and_copies_no_store():
    model = converted(heads=2, kv_heads=1)
    step = compiled_step(model, "inductor")
    ours, eager = (torch_witcert.CertifiedCache(model, 128, 2) for _ in range(2))
    for cache in (ours, eager):
        forward(model, prompt(70, 2), cache)
    sources = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(70, 100):
            token, position = prompt(1, 2, seed=length), torch.full((2, 1), length)
            if length == 70:
                logits, sources = torch._inductor.utils.run_and_get_code(step, token, position, ours)
            else:
                logits = step(token, position, ours)
            expected = forward(model, token, eager, position_ids=position)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        torch_witcert.certificates(ours).tv, torch_witcert.certificates(eager).tv, rtol=1e-2, atol=1e-5
    )
    assert ours.lengths.tolist() == [100, 100]
    (source,) = sources
    assert source.count("torch_witcert.kv_write.default(") == 2
    assert ".clone(" not in source
    assert f"empty_strided_cpu(({ours.layers[0].shape.num_pages}, " not in source, "no buffer as large as a store"


def test_idle_rows_share_the_graph():
    model = converted(heads=2, kv_heads=1)
    backend = CountingBackend("aot_eager")
    step = compiled_step(model, backend)
    ours, eager = (torch_witcert.CertifiedCache(model, 128, 2) for _ in range(2))
    for cache in (ours, eager):
        forward(model, prompt(70, 2), cache)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for active in ([True, True], [True, False], [False, True], [False, False]):
            mask = torch.tensor(active)[:, None, None, None]
            token, position = prompt(1, 2), torch.full((2, 1), 70)
            logits = step(token, position, ours, mask)
            assert torch.equal(logits, forward(model, token, eager, position_ids=position, attention_mask=mask))
    assert backend.graphs == 1
    assert ours.lengths.tolist() == [72, 72]
    assert_same_state(ours, eager)


def test_compiled_chunks():
    """A chunk over a past is one graph, and reading it costs no graph break; the empty cache has one of its own."""
    model = converted(heads=2, kv_heads=1)
    backend = CountingBackend("aot_eager")
    step = compiled_step(model, backend)
    ours, eager = (torch_witcert.CertifiedCache(model, 256) for _ in range(2))
    for number in range(6):
        ids = prompt(32, seed=number)
        position = torch.arange(32)[None] + 32 * number
        assert torch.equal(step(ids, position, ours), forward(model, ids, eager, position_ids=position))
    assert backend.graphs == 2
    assert_same_state(ours, eager)
    # A compiled step may have run unseen, so the host no longer knows the length; an eager chunk asks the device.
    assert ours.state.longest is None
    with pytest.raises(ValueError, match="row 0 holds 192 of 256 tokens and cannot take 70 more"):
        forward(model, prompt(70), ours)
    forward(model, prompt(64), ours)
    assert int(ours.lengths) == 256


def test_a_second_cache_needs_no_new_graph():
    model = converted(heads=2, kv_heads=1)
    backend = CountingBackend("aot_eager")
    step = compiled_step(model, backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            cache = torch_witcert.CertifiedCache(model, 128)
            step(prompt(1), torch.tensor([[0]]), cache)
    assert backend.graphs == 1
