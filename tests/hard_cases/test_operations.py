"""Hard cases of operation: recompiles, copies behind a custom op, CUDA graphs, threads, synchronization, options that
do nothing."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nn_models import RECIPE, converted, forward, left_padded, prompt, stored_codes, tiny_model
from test_nn_compile import CountingBackend, assert_same_state, compiled_step
from test_nn_gpu import Decoder, make_model, same
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaAttention

import torch_witcert
from torch_witcert import CertifiedCache, CertifiedInt8Config, WitCertConfig
from torch_witcert.nn.exact import Scores
from torch_witcert.ops.formats import DEFAULT
from torch_witcert.ops.splits import pages_per_split
from torch_witcert.ops.storage import PagedStore, StoreShape, derive_source_map

TESTS = Path(__file__).resolve().parent.parent
BATCHES = (1, 2, 3, 7, 8, 16, 17)


# --- H23 --------------------------------------------------------------------------------------------------------------


def test_h23_two_graphs_for_every_batch_and_length():
    """One for a batch of 1, one for all others, from the first token over a page boundary on; no more is ever built.

    Lengths up to 600 are in test_nn_compile; they are data on the device, so that 18, and 4 for most batches, show what
    there is.
    """
    model = converted(layers=1, heads=2, kv_heads=1)
    backend = CountingBackend("eager")
    step = compiled_step(model, backend)
    for batch in BATCHES:
        ours, eager = (CertifiedCache(model, 32, batch) for _ in range(2))
        with torch._dynamo.config.patch(error_on_recompile=batch > 2):
            for length in range(18 if batch in (1, 17) else 4):
                token, position = prompt(1, batch, seed=length), torch.full((batch, 1), length)
                assert torch.equal(step(token, position, ours), forward(model, token, eager, position_ids=position))
        assert_same_state(ours, eager)
    assert backend.graphs == 2


def test_h23_more_layers_than_the_recompile_limit():
    """Every layer has an index of its own: a guard on it would use up the limit (8), and the rest would silently be
    eager.

    Ten layers show it as well as the case's 32. The model is compiled as a whole; `fullgraph` raises where the limit is
    hit.
    """
    model = converted(layers=10, heads=2, kv_heads=1)
    assert model.config.num_hidden_layers > torch._dynamo.config.recompile_limit
    backend = CountingBackend("eager")
    step = compiled_step(model, backend)
    cache = CertifiedCache(model, 32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(4):
            step(prompt(1), torch.tensor([[length]]), cache)
    assert backend.graphs == 1
    assert int(cache.lengths) == 4


def at_offset(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values as a view that begins `offset` entries into its storage."""
    storage = tensor.new_zeros(tensor.numel() + offset)
    view = storage[offset:].view(tensor.shape)
    view.copy_(tensor)
    return view


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_h23_no_kernel_is_built_after_the_warm_up(dtype, monkeypatch):
    """Batches, lengths over page boundaries, and views of K that begin at odd addresses."""
    triton = pytest.importorskip("triton")
    builds = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **options: builds.append(options["repr"]))
    # A shape that no other test uses: its kernels are built here.
    model = converted(dtype=dtype, heads=6, kv_heads=1, head_dim=80).cuda()
    layers, generator = 2, torch.Generator("cuda").manual_seed(0)

    def step(cache: CertifiedCache, offset: int) -> list[torch.Tensor]:
        batch = cache.batch_size
        shapes = [(layers, batch, heads, 1, 80) for heads in (6, 1, 1)]
        q, k, v = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
        valid = torch.ones(batch, 1, dtype=torch.bool, device="cuda")
        return [
            layer.attend(*(at_offset(x[layer.index], offset) for x in (q, k, v)), valid, Scores(80**-0.5))
            for layer in cache.layers
        ]

    for batch in BATCHES:
        runs = []
        for offset in (0, 1, 8):
            generator.manual_seed(batch)
            cache = CertifiedCache(model, 80, batch)
            outputs = [step(cache, offset) for _ in range(40)]
            runs.append([x for out in outputs for x in out])
            if batch == 1 and offset == 0:
                assert builds, "the hook counts nothing"
                builds.clear()
        assert all(same(run, runs[0]) for run in runs)
    assert not builds


# --- H24 --------------------------------------------------------------------------------------------------------------


POOLS, ROWS, HEADS, KV_HEADS, DIM = 3, 2, 4, 2, 64


class Appended:
    """Pools of several layers as one tensor for each part, of which the middle layer is written and read."""

    def __init__(self, pages: int, slots: int, page_size: int = 16, device: str = "cpu") -> None:
        shape = StoreShape(ROWS, slots, KV_HEADS, page_size, DIM, torch.float32, DEFAULT, pages)
        self.pool = [torch.zeros(POOLS, *x.shape, dtype=x.dtype, device=device) for x in shape.allocate("meta")]
        self.table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[: ROWS * slots]
        self.table = self.table.view(ROWS, slots).int().to(device)
        self.lengths = torch.zeros(ROWS, dtype=torch.int32, device=device)
        self.slots, self.page_size, self.device = slots, page_size, device

    def fresh(self, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
        """q as a transposed view of [B, T, H, D], k the same for all rows by expand, v transposed as well."""
        generator = torch.Generator().manual_seed(seed)
        shapes = ((ROWS, tokens, HEADS, DIM), (1, tokens, KV_HEADS, DIM), (ROWS, tokens, KV_HEADS, DIM))
        q, k, v = (torch.randn(shape, generator=generator).to(self.device).transpose(1, 2) for shape in shapes)
        return q, k.expand(ROWS, -1, -1, -1), v

    def state(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Positions, source map, columns and counts of a forward of that many tokens in every row."""
        steps = torch.arange(tokens, dtype=torch.int32, device=self.device)
        sources = derive_source_map(self.lengths, KV_HEADS, self.slots, self.page_size)
        counts = torch.full_like(self.lengths, tokens)
        return self.lengths[:, None] + steps, sources, steps.repeat(ROWS, 1), counts

    def read_arguments(self, q, k, v, positions, sources, store) -> tuple:
        no_floats = torch.empty(0, device=self.device)
        splits = pages_per_split(self.page_size, self.slots)
        tables = (positions, self.lengths, self.table, sources)
        extras = (no_floats, no_floats, self.no_ints(torch.int32))
        return q, k, v, *tables, *extras, *store, DIM**-0.5, 0, 0.0, splits, 1, "step+residual", DEFAULT.name

    def write_arguments(self, k, v, columns, counts, store) -> tuple:
        extras = (self.no_ints(torch.int64), self.no_ints(torch.int32))
        return k, v, columns, self.lengths, counts, self.table, *extras, *store, 1, DEFAULT.name

    def no_ints(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self.device)

    def step(self, q, k, v, positions, sources, columns, counts) -> tuple[torch.Tensor, ...]:
        """Read, then append, by views of the pools that are made here."""
        store = PagedStore(*(part[1] for part in self.pool))
        found = torch.ops.torch_witcert.certified_attention(*self.read_arguments(q, k, v, positions, sources, store))
        torch.ops.torch_witcert.kv_write(*self.write_arguments(k, v, columns, counts, store))
        return found

    def run(self, step) -> list[torch.Tensor]:
        """Chunks that fill pages, by `step`: what it returned, and the pools."""
        self.lengths.zero_()
        found = []
        for number, tokens in enumerate((21, 1, 1, 13, 1)):
            found += step(*self.fresh(tokens, seed=number), *self.state(tokens))
            self.lengths += tokens
        return found + [part.clone() for part in self.pool]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_h24_compiled_equals_eager_bit_for_bit(backend):
    """Fullgraph, on views of the pools, transposed q and v, expanded k; what the other layers hold is not touched."""
    torch._dynamo.reset()
    eager, compiled = Appended(8, 3), Appended(8, 3)
    for case in (eager, compiled):
        for part in case.pool:
            part.view(torch.uint8)[::2] = 0xA5  # of the layers beside the one that is used
    expected = eager.run(eager.step)
    found = compiled.run(torch.compile(compiled.step, backend=backend, fullgraph=True))
    assert len(found) == len(expected) == 5 * 3 + 11
    for part, other in zip(found, expected, strict=True):
        assert part.stride() == other.stride()
        assert torch.equal(part.view(torch.uint8), other.view(torch.uint8))
    assert all((part.view(torch.uint8)[::2] == 0xA5).all() for part in compiled.pool)


def test_h24_inductor_copies_no_pool():
    """What is generated calls the operators on the pools themselves: no clone, and no buffer as large as a layer's
    codes."""
    torch._dynamo.reset()
    case = Appended(64, 3)
    step = torch.compile(case.step, fullgraph=True)
    _, (source,) = torch._inductor.utils.run_and_get_code(step, *case.fresh(21, 0), *case.state(21))
    assert source.count("torch_witcert.kv_write.default(") == 1
    assert ".clone(" not in source
    assert "empty_strided_cpu((64, " not in source


def test_h24_opcheck():
    """Schema, fakes and strides, with the layouts above; formats and offsets are in tests/kernels."""
    case = Appended(8, 3)
    case.run(case.step)
    store = PagedStore(*(part[1] for part in case.pool))
    q, k, v = case.fresh(3, seed=9)
    positions, sources, columns, counts = case.state(3)
    operators = torch.ops.torch_witcert
    torch.library.opcheck(
        operators.certified_attention.default, case.read_arguments(q, k, v, positions, sources, store)
    )
    torch.library.opcheck(operators.kv_write.default, case.write_arguments(k, v, columns, counts, store))


@pytest.mark.gpu
def test_h24_a_compiled_step_needs_no_memory_for_the_pool():
    """Pools of 1 GiB in three layers; less than 10 MiB for a step."""
    torch._dynamo.reset()
    pages = 2**30 // (POOLS * KV_HEADS * 64 * DIM * 2)
    case = Appended(pages, 8, page_size=64, device="cuda")
    assert sum(part.nbytes for part in case.pool) > 2**30
    step = torch.compile(case.step, fullgraph=True)
    for number in range(3):
        arguments = (*case.fresh(1, number), *case.state(1))
        if number == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        step(*arguments)
        case.lengths += 1
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 10 * 2**20


# --- H25 --------------------------------------------------------------------------------------------------------------


def test_h25_no_kernel_tunes_itself():
    """Autotuning runs a kernel many times over, on the live cache, at its first call: in a capture, say. Ours have
    fixed options."""
    pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    import torch_witcert.ops.triton as kernels

    found = []
    for module in pkgutil.iter_modules(kernels.__path__):
        parts = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        found += [part for part in parts.values() if isinstance(part, JITFunction | Autotuner)]
    assert len(found) > 20
    assert not any(isinstance(part, Autotuner) for part in found)


def test_h25_a_compiled_step_draws_anew_for_every_page():
    """Dither under torch.compile: step n has eager's bits; the same keys get other codes in another page, and the same
    ones with the same seed and page. The seed is data: after a change of it the same graph draws otherwise."""
    recipe = WitCertConfig(page_size=16, outlier_pairs=0)
    model = converted(layers=1, heads=2, kv_heads=1, recipe=recipe)
    # Keys and values that depend on nothing but a constant token: no position embedding.
    model.model.rotary_emb.register_forward_hook(
        lambda *arguments: (torch.ones_like(arguments[2][0]), torch.zeros_like(arguments[2][1]))
    )
    backend = CountingBackend("aot_eager")
    step = compiled_step(model, backend)
    codes = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (5, 6):
            ours, eager = (CertifiedCache(model, 64, seeds=seed) for _ in range(2))
            for length in range(40):
                token, position = torch.ones(1, 1, dtype=torch.int64), torch.tensor([[length]])
                assert torch.equal(step(token, position, ours), forward(model, token, eager, position_ids=position))
            assert_same_state(ours, eager)
            codes.append(stored_codes(ours, 0)[0])
    assert backend.graphs == 1
    (first, second), (other_seed, _) = codes
    assert (first != second).any()
    assert (first != other_seed).any()


FRESH_PROCESS = """
import torch
from nn_models import left_padded, prompt
from test_nn_gpu import Decoder, make_model, same
decoder = Decoder(make_model(), 1, 256)
plain, compiled = decoder.model, torch.compile(decoder.model, mode="reduce-overhead", fullgraph=True)
runs = []
for _ in range(2):
    decoder.cache.reset()
    decoder.model = plain
    decoder.prefill(*left_padded([prompt(70, seed=1)]))
    decoder.model, states = compiled, []
    for _ in range(20):
        torch.compiler.cudagraph_mark_step_begin()
        decoder.step()
        states.append(decoder.state())
    runs.append(states)
assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
print([same(*pair) for pair in zip(*runs, strict=True)].count(True))
"""


@pytest.mark.gpu
def test_h25_the_first_call_of_a_process_equals_the_second(tmp_path):
    """reduce-overhead, cold kernel cache: nothing was compiled, tuned or captured before. Replays of raw graphs, dither
    included, are compared with eager steps in test_nn_gpu."""
    assert run_fresh(FRESH_PROCESS, tmp_path) == "20"


# --- H28 --------------------------------------------------------------------------------------------------------------


def run_fresh(program: str, folder: Path, *arguments: str) -> str:
    """Output of a program in a new process whose kernel caches are empty."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(Path(torch_witcert.__file__).parents[1])]),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


#: Nothing of torch_witcert is loaded when the threads start: names, operators, kernels and their caches come up in all
#: at once.
COLD_THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
import torch
from transformers import LlamaConfig, LlamaForCausalLM
device = sys.argv[1]

def plain_model():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, initializer_range=0.3, pad_token_id=0, eos_token_id=None)
    return LlamaForCausalLM(config).eval().to(device)

models, barrier = [plain_model() for _ in range(8)], threading.Barrier(8)

def serve(number, together):
    if together:
        barrier.wait(60)
    import torch_witcert
    from torch_witcert.nn.compatibility import CACHE_ARGUMENT
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
        model = models[number] if together else plain_model()
        torch_witcert.convert(model, torch_witcert.WitCertConfig(page_size=16, outlier_pairs=1))
        cache = torch_witcert.CertifiedCache(model, 96, seeds=number)
        ids = torch.randint(1, 97, (1, 60), generator=torch.Generator().manual_seed(number)).to(device)
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, disable_compile=True,
            **{CACHE_ARGUMENT: cache})
        return [tokens.cpu(), *(x.cpu() for x in cache.tensors())]

if device == "cuda":
    torch.cuda.synchronize()
assert "torch_witcert" not in sys.modules
with ThreadPoolExecutor(8) as pool:
    cold = list(pool.map(serve, range(8), [True] * 8))
with ThreadPoolExecutor(1) as pool:
    serial = list(pool.map(serve, range(8), [False] * 8))
same = [all(torch.equal(*pair) for pair in zip(a, b, strict=True)) for a, b in zip(cold, serial, strict=True)]
print(same.count(True), len({tuple(found[0][0].tolist()) for found in cold}))
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_h28_eight_threads_start_cold(device, tmp_path):
    """Each with a model, a cache, a seed and a stream of its own: tokens, codes, counters, certificates as one after
    the other.

    Eight threads on one converted model are in test_nn_ecosystem.
    """
    assert run_fresh(COLD_THREADS, tmp_path, device) == "8 8"


# --- H29 --------------------------------------------------------------------------------------------------------------


class LooksAtData(TorchDispatchMode):
    """Names of the operators that would make the host wait for a GPU: their result on the host depends on data."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "item", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if any(name.startswith(waiting) for waiting in self.WAITING):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("recipe", [RECIPE, WitCertConfig(page_size=16, outlier_pairs=0)])
def test_h29_nothing_is_looked_at_in_a_step(recipe, batch):
    """Steps as a serving loop makes them, with certificates, gate and counters on; pages fill in between. Only the
    drain looks.

    The mask path asks the host on the CPU alone, so the validity of the columns is given as on a GPU. Certificates and
    counters have no switch, so there is no time with and without them to compare: the case's 2 % has nothing to be
    measured on.
    """
    model = converted(layers=1, recipe=recipe)
    cache = CertifiedCache(model, 64, batch)
    forward(model, prompt(14, batch), cache)
    valid = torch.ones(batch, 1, 1, 1, dtype=torch.bool)
    with LooksAtData() as seen:
        for number in range(32 if batch == 1 else 4):
            positions = torch.full((batch, 1), 14 + number)
            forward(model, prompt(1, batch), cache, attention_mask=valid, position_ids=positions)
            torch_witcert.certificates(cache)
        assert not seen.names
        torch_witcert.telemetry(cache)
    assert "_local_scalar_dense" in seen.names


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_h29_decode_does_not_synchronize(batch):
    """32 steps under the CUDA sync check; that telemetry counts under graph replay is in test_nn_gpu."""
    decoder = Decoder(make_model(), batch, 128)
    decoder.prefill(*left_padded([prompt(70, seed=seed) for seed in range(batch)]))
    decoder.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(32):
            decoder.step()
            torch_witcert.certificates(decoder.cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert decoder.cache.lengths.tolist() == [103] * batch
    assert torch_witcert.telemetry(decoder.cache).total("reads") == 33 * 2 * 4 * batch


# --- H30 --------------------------------------------------------------------------------------------------------------


class OddAttention(LlamaAttention):
    """A class that nobody knows: its forward may do anything."""


class LatentAttention(torch.nn.Module):
    """In the manner of MLA: keys and values are one narrow tensor, and there is no head that a cache of ours could
    hold."""

    def __init__(self, original: LlamaAttention) -> None:
        super().__init__()
        self.layer_idx, self.width = original.layer_idx, original.config.hidden_size
        self.mix = torch.nn.Linear(self.width, self.width, bias=False)

    def forward(self, hidden_states, *args, **kwargs):
        return self.mix(hidden_states), None


class LinearAttention(LatentAttention):
    """A recurrent state instead of a cache."""


INT4 = CertifiedInt8Config(key_element="int4", value_element="int4")


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_h30_int4_is_what_every_layer_has(implementation):
    """Whatever attention the model ran before: the report names the recipe, the bytes are those of 4 bits, the reads
    use codes."""
    model = torch_witcert.convert(tiny_model(layers=3, attn_implementation=implementation), INT4)
    report = torch_witcert.report(model)
    assert [layer.config for layer in report.layers] == [INT4] * 3
    assert all(not layer.reason for layer in report.layers)
    cache = CertifiedCache(model, 1024)
    codes = [(x.store.k_codes.nbytes, x.store.v_codes.nbytes) for x in cache.layers]
    assert codes == [(1024 * 2 * 64 // 2,) * 2] * 3
    forward(model, prompt(70), cache)
    forward(model, prompt(1), cache)
    assert [layer.code_tokens for layer in torch_witcert.telemetry(cache).layers] == [4 * 64] * 3


def test_h30_an_unknown_class_is_skipped_by_name_or_refused():
    model = tiny_model(layers=3)
    model.model.layers[1].self_attn.__class__ = OddAttention
    with pytest.raises(ValueError, match="strict=True refuses.*layers.1.self_attn: attention class OddAttention"):
        torch_witcert.convert(model, INT4)
    torch_witcert.convert(model, INT4, strict=False)
    report = torch_witcert.report(model)
    assert [layer.certified for layer in report.layers] == [True, False, True]
    assert "OddAttention is not supported" in report.layers[1].reason
    assert "2 of 3 attention layers certified" in str(report)
    cache = CertifiedCache(model, 1024)
    tokens = 1024 + 1  # a dense layer has one slot more
    assert cache.layers[1].dense_keys.nbytes + cache.layers[1].dense_values.nbytes == 2 * tokens * 2 * 64 * 4
    assert cache.layers[0].store.k_codes.nbytes == 1024 * 2 * 64 // 2
    assert cache.certified_layers == (0, 2)


@pytest.mark.parametrize("kind", [LatentAttention, LinearAttention])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_h30_a_layer_that_no_cache_of_ours_can_serve(place, strict, kind):
    """No attention of a supported class in a layer: `strict` or not, the model is not converted around it."""
    model = tiny_model(layers=3)
    model.model.layers[place].self_attn = kind(model.model.layers[place].self_attn)
    others = [layer for layer in range(3) if layer != place]
    match = rf"every layer.*LlamaAttention.*of layers \[0, 1, 2\] those with one are \{others}"
    with pytest.raises(NotImplementedError, match=match):
        torch_witcert.convert(model, INT4, strict=strict)
    with pytest.raises(NotImplementedError, match=match):
        CertifiedCache.capacity(model, 10**6, config=INT4)
    assert not any(hasattr(module, "certified_config") for module in model.modules())
    assert forward(model, prompt(20)).isfinite().all()
