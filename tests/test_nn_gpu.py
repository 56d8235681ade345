"""Decode on the GPU: one captured graph, no host synchronization, reduce-overhead without skips, rows apart."""

from __future__ import annotations

import pytest
import torch
from nn_models import RECIPE, converted, greedy, left_padded, prompt

import torch_witcert
from torch_witcert.nn.compatibility import CACHE_ARGUMENT
from torch_witcert.policy.gate import Flag

pytestmark = pytest.mark.gpu
STEPS = 300


def make_model(dtype: torch.dtype = torch.bfloat16, **options):
    return converted(dtype=dtype, **options).cuda()


class Decoder:
    """Greedy steps over static tensors, B rows; rows where `active` is False are idle."""

    def __init__(self, model, batch: int, max_length: int) -> None:
        self.model = model
        self.cache = torch_witcert.CertifiedCache(model, max_length, batch)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        self.position = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        self.active = torch.ones(batch, 1, 1, 1, dtype=torch.bool, device="cuda")
        self.logits = None

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Prompt [B, S], padded on the left where mask is 0; a row without any token is idle from now on."""
        ids, mask = ids.cuda(), mask.cuda()
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        arguments = {CACHE_ARGUMENT: self.cache, "use_cache": True, "position_ids": positions}
        logits = self.model(input_ids=ids, attention_mask=mask, **arguments).logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.position.copy_(positions[:, -1:] + 1)
        self.active.copy_(mask.any(1)[:, None, None, None])

    @torch.no_grad()
    def step(self) -> None:
        arguments = {CACHE_ARGUMENT: self.cache, "use_cache": True, "position_ids": self.position}
        self.logits = self.model(input_ids=self.token, attention_mask=self.active, **arguments).logits[:, -1]
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    def capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph

    def state(self) -> list[torch.Tensor]:
        certificates = torch_witcert.certificates(self.cache)
        return [x.clone() for x in (self.logits, self.token, *certificates)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recipe", [RECIPE, torch_witcert.WitCertConfig(page_size=16)])
def test_captured_graph_equals_eager_steps_bit_for_bit(recipe):
    """One capture, 300 replays, pages fill inside and a budget of 256 tokens ends: everything, every byte of the store."""
    model = make_model(recipe=recipe)
    ids, mask = left_padded([prompt(70, seed=1), prompt(101, seed=2)])
    eager, graphed = Decoder(model, 2, 512), Decoder(model, 2, 512)
    for decoder in (eager, graphed):
        decoder.prefill(ids, mask)
    eager.step()
    graph = graphed.capture()
    for _ in range(STEPS):
        eager.step()
        graph.replay()
        assert same(eager.state(), graphed.state())
    assert eager.cache.lengths.tolist() == [70 + STEPS + 1, 101 + STEPS + 1]
    for mine, other in zip(eager.cache.tensors(), graphed.cache.tensors(), strict=True):
        assert torch.equal(mine, other)
    counted = torch_witcert.telemetry(graphed.cache)
    assert counted.total("code_reads") == (STEPS + 1) * 2 * 2 * 4
    assert counted.coverage == torch_witcert.telemetry(eager.cache).coverage


def test_decode_step_does_not_synchronize():
    decoder = Decoder(make_model(), 2, 256)
    decoder.prefill(*left_padded([prompt(70, seed=1), prompt(80, seed=2)]))
    decoder.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(32):
            decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert decoder.cache.lengths.tolist() == [103, 113]


def test_request_is_bit_equal_alone_and_with_neighbours_in_one_graph():
    """The same captured graph, once with the other rows idle, once with other requests in them."""
    decoder = Decoder(make_model(), 3, 256)
    mine, others = prompt(75, seed=1), [prompt(90, seed=2), prompt(66, seed=3)]
    ids, mask = left_padded([others[0], mine, others[1]])
    lone_mask = torch.zeros_like(mask)
    lone_mask[1] = mask[1]
    decoder.prefill(ids, mask)
    graph = decoder.capture()
    runs = []
    for used in (lone_mask, mask):
        decoder.cache.reset()
        decoder.prefill(ids, used)
        states = []
        for _ in range(40):
            graph.replay()
            logits, token, *certificates = decoder.state()
            states.append([logits[1], token[1], *(x[:, 1] for x in certificates)])
        runs.append(states)
        idle = torch_witcert.certificates(decoder.cache).flags[:, 0]
        assert ((idle & Flag.IDLE) != 0).all() == (used is lone_mask)
        lengths = decoder.cache.lengths.tolist()
        assert lengths == ([0, 115, 0] if used is lone_mask else [130, 115, 106])
    assert all(same(a, b) for a, b in zip(*runs, strict=True))


def test_captured_step_marks_a_full_row_and_the_drain_raises():
    decoder = Decoder(make_model(), 2, 112)
    decoder.prefill(*left_padded([prompt(70, seed=1), prompt(101, seed=2)]))
    graph = decoder.capture()
    for _ in range(20):
        graph.replay()
    certificates = torch_witcert.certificates(decoder.cache)
    assert decoder.cache.lengths.tolist() == [91, 112]
    assert certificates.tv[:, 1].isinf().all() and certificates.tv[:, 0].isfinite().all()
    with pytest.raises(RuntimeError, match="full"):
        torch_witcert.telemetry(decoder.cache)
    torch_witcert.telemetry(decoder.cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reduce_overhead_has_no_skips_and_one_graph(dtype):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_model(dtype)
    plain, compiled = Decoder(model, 1, 256), Decoder(model, 1, 256)
    for decoder in (plain, compiled):
        decoder.prefill(*left_padded([prompt(70, seed=1)]))
    compiled.model = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(40):
        plain.step()
        torch.compiler.cudagraph_mark_step_begin()
        compiled.step()
        # Inductor fuses the layers around the operators, so logits agree closely, not to the bit.
        assert torch.allclose(plain.logits.float(), compiled.logits.float(), rtol=0.1, atol=0.1)
        compiled.token.copy_(plain.token)
    counters = torch._dynamo.utils.counters
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
    assert compiled.cache.lengths.tolist() == [110]
    first, second = (torch_witcert.certificates(decoder.cache) for decoder in (plain, compiled))
    assert torch.allclose(first.tv, second.tv, rtol=0.1, atol=1e-3)


def test_generate_compiles_by_itself_and_agrees_with_eager():
    """float32, so that the same tokens come out whichever way the layers are fused."""
    model = make_model(torch.float32)
    ids = prompt(70, seed=1).cuda()
    eager = greedy(model, ids, 60, disable_compile=True)
    for _ in range(2):
        assert torch.equal(greedy(model, ids, 60), eager)
    assert torch_witcert.telemetry(model).code_share > 0.8
