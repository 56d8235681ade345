"""convert, restore, report, copies of converted models, torchao's quantize_."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from nn_models import RECIPE, converted, forward, greedy, prompt, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import torch_witcert
from torch_witcert.nn import compatibility
from torch_witcert.nn.attention import CertifiedAttention
from torch_witcert.nn.compatibility import CACHE_ARGUMENT
from torch_witcert.nn.families import CERTIFIED_CLASSES

FAMILIES = ["llama", "qwen2", "mistral", "qwen3", "phi3", "gemma2", "gpt_oss"]


def attentions(model) -> list[torch.nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


def snapshot(model) -> tuple:
    """Everything that a refusal must leave as it was."""
    return (
        [(name, id(module), type(module)) for name, module in model.named_modules()],
        [(name, id(parameter)) for name, parameter in model.named_parameters()],
        model.config._attn_implementation,
        sorted(model.__dict__),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_names_weights_and_hooks_stay(family):
    model = tiny_model(family)
    parameters = dict(model.named_parameters())
    modules = {name: module for name, module in model.named_modules() if not name.endswith("self_attn")}
    state = model.state_dict()
    calls = []
    attentions(model)[0].register_forward_hook(lambda module, *_: calls.append(module))
    model.model.layers[1].self_attn.train()
    assert torch_witcert.convert(model, RECIPE) is model
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert {n: m for n, m in model.named_modules() if not n.endswith("self_attn")} == modules
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    forward(model, prompt(5))
    assert calls == [attentions(model)[0]]
    assert [module.training for module in attentions(model)] == [False, True]
    original = next(cls for cls, certified in CERTIFIED_CLASSES.items() if type(attentions(model)[0]) is certified)
    assert all(isinstance(module, original) for module in attentions(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_restore_gives_back_the_same_modules_and_bits(family):
    model, ids = tiny_model(family), prompt(60)
    originals, expected = attentions(model), forward(model, ids)
    before = snapshot(model)
    tokens = greedy(model, ids, 8)
    torch_witcert.convert(model, RECIPE)
    greedy(model, ids, 8)
    model.train()
    assert torch_witcert.restore(model) is model
    assert attentions(model) == originals
    assert all(module.training for module in originals)
    model.eval()
    assert snapshot(model) == before
    assert torch.equal(forward(model, ids), expected)
    assert torch.equal(greedy(model, ids, 8), tokens)
    with pytest.raises(ValueError, match="not converted"):
        torch_witcert.restore(model)
    torch_witcert.convert(model, RECIPE)


def test_restore_keeps_what_happened_to_the_weights():
    model = converted()
    model.to(torch.bfloat16)
    attentions(model)[0].q_proj = torch.nn.Linear(96, 256, bias=False).to(torch.bfloat16)
    changed = attentions(model)[0].q_proj
    torch_witcert.restore(model)
    assert attentions(model)[0].q_proj is changed
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_without_a_cache_the_model_trains_as_before():
    model, dense, ids = converted(), tiny_model(), prompt(40, 2)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    gradients = []
    for each in (model, dense):
        loss = each(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        gradients.append([loss, *(parameter.grad for parameter in each.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert [layer.cacheless_forwards for layer in torch_witcert.report(model).layers] == [1, 1]


def test_report():
    model = converted("qwen2", layers=3)
    report = torch_witcert.report(model)
    assert report.certified == 3
    assert {layer.config for layer in report.layers} == {RECIPE}
    assert [layer.name for layer in report.layers] == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert {(layer.heads, layer.kv_heads, layer.head_dim) for layer in report.layers} == {(4, 2, 64)}
    assert "3 of 3 attention layers certified" in str(report)
    with pytest.raises(ValueError, match="not converted"):
        torch_witcert.report(tiny_model())


# --- partial conversion ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("left_out", ["0", "1", "2"])
def test_partial_conversion(family, left_out):
    options = {"layers": 3, "window": 40} if family == "mistral" else {"layers": 3}
    model, dense = tiny_model(family, **options), tiny_model(family, **options)
    torch_witcert.convert(model, RECIPE, filter_fn=lambda _, name: left_out not in name, strict=False)
    report = torch_witcert.report(model)
    assert [layer.certified for layer in report.layers] == [str(i) != left_out for i in range(3)]
    assert report.layers[int(left_out)].reason == "left out by filter_fn"
    rows = [prompt(90, seed=1), prompt(70, seed=2)]
    ids, mask = torch.cat([rows[0], torch.nn.functional.pad(rows[1], (20, 0))]), torch.ones(2, 90)
    mask[1, :20] = 0
    tokens = greedy(model, ids, 16, attention_mask=mask)
    cache = torch_witcert.last_cache(model)
    assert cache.certified_layers == tuple(i for i in range(3) if str(i) != left_out)
    assert torch_witcert.certificates(cache).tv.shape == (2, 2, 4)
    sequence = torch.cat([ids, tokens], 1)
    exact = forward(dense, sequence, attention_mask=torch.nn.functional.pad(mask, (0, 16), value=1))
    best = exact[:, 89:-1].topk(2, -1)
    decided = best.values[..., 0] - best.values[..., 1] > 0.04
    assert decided.float().mean() > 0.7
    assert torch.equal(best.indices[..., 0][decided], tokens[decided])
    torch_witcert.restore(model)
    assert torch.equal(forward(model, ids), forward(dense, ids))


def test_a_model_whose_layers_all_stay_dense_but_one_is_nearly_exact():
    """The dense layers themselves add no error: with exact values in the certified one nothing would be left."""
    model, dense = tiny_model(layers=3), tiny_model(layers=3)
    torch_witcert.convert(model, RECIPE, filter_fn=lambda _, name: "2" in name, strict=False)
    hidden = []
    for each in (model, dense):
        each.model.layers[1].register_forward_hook(lambda _, __, out: hidden.append(out))
    cache = torch_witcert.CertifiedCache(model, 128)
    for piece in (prompt(70), prompt(10, seed=2), prompt(1, seed=3)):
        forward(model, piece, cache)
    forward(dense, torch.cat([prompt(70), prompt(10, seed=2), prompt(1, seed=3)], 1))
    torch.testing.assert_close(torch.cat(hidden[:3], 1), hidden[3], rtol=1e-4, atol=1e-4)


def test_strict_lists_what_it_would_leave_out():
    model = tiny_model(layers=3)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn: left out by filter_fn.*strict=False"):
        torch_witcert.convert(model, RECIPE, filter_fn=lambda _, name: "1" not in name)
    with pytest.raises(ValueError, match="no attention module"):
        torch_witcert.convert(model, RECIPE, filter_fn=lambda *_: False, strict=False)
    assert snapshot(model) == before


# --- refusals ------------------------------------------------------------------------------------------------------------


class OddAttention(LlamaAttention):
    """An attention class of somebody's own."""


def with_odd_attention():
    model = tiny_model()
    attentions(model)[1].__class__ = OddAttention
    return model


def with_replaced_forward():
    model = tiny_model()
    module = attentions(model)[1]
    module.forward = module.forward
    return model


def compiled_in_place():
    model = tiny_model()
    model.model.compile()
    return model


def compiled_by_generate():
    model = tiny_model()
    model._compiled_call = model.__call__
    return model


def on_meta():
    with torch.device("meta"):
        return tiny_model()


def partly_on_meta():
    model = tiny_model()
    model.lm_head.to("meta")
    return model


def bidirectional():
    model = tiny_model()
    model.config.is_causal = False
    return model


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=1)),
            ValueError,
            "'gpt2'.*supported: llama, qwen2",
        ),
        (lambda: tiny_model(head_dim=32), ValueError, r"head_dim must be one of \(64, .*256\), got 32"),
        (lambda: tiny_model(dtype=torch.float64), ValueError, "dtype of model must be one of .*got torch.float64"),
        (with_odd_attention, ValueError, "layers.1.self_attn: attention class OddAttention is not supported"),
        (with_replaced_forward, ValueError, "layers.1.self_attn: its forward is replaced on the instance.*accelerate"),
        (converted, ValueError, "already converted.*restore"),
        (lambda: torch.compile(tiny_model()), ValueError, "already compiled"),
        (compiled_in_place, ValueError, r"already compiled \(model\)"),
        (compiled_by_generate, ValueError, r"already compiled \(by generate\(\)\)"),
        (on_meta, ValueError, r"on one device and loaded, got devices \['meta'\]"),
        (partly_on_meta, ValueError, r"got devices \['cpu', 'meta'\]"),
        (bidirectional, ValueError, "is_causal is False"),
        (lambda: torch.nn.Linear(2, 2), TypeError, "PreTrainedModel, got Linear"),
    ],
)
def test_refusal_leaves_the_model_as_it_was(make, error, match):
    model = make()
    plain = isinstance(model, transformers.PreTrainedModel)
    before = snapshot(model) if plain else None
    with pytest.raises(error, match=match):
        torch_witcert.convert(model)
    if plain:
        assert snapshot(model) == before


def test_config_must_be_a_recipe():
    with pytest.raises(TypeError, match=r"config must be a recipe like CertifiedInt8Config\(\), got dict"):
        torch_witcert.convert(tiny_model(), {"tau": 0.1})


def test_certified_module_is_not_called_directly():
    with pytest.raises(TypeError, match="convert"):
        CERTIFIED_CLASSES[LlamaAttention](tiny_model().config, 0)


@pytest.mark.parametrize(
    ("versions", "match"),
    [
        (("2.10.1", "5.24.0"), "torch must be at least 2.11, got 2.10.1"),
        (("2.11.0+cu130", "5.16.9"), "transformers must be at least 5.17 and below 6, got 5.16.9"),
        (("2.13.0", "6.0.0.dev0"), "below 6, got 6.0.0.dev0"),
        (("2.13.0", "4.57.1"), "got 4.57.1"),
    ],
)
def test_versions_that_cannot_work(versions, match):
    with pytest.raises(ValueError, match=match):
        compatibility.check_versions(*versions)


def test_untested_versions_warn_once(monkeypatch, recwarn):
    monkeypatch.setattr(compatibility, "_warned", False)
    compatibility.check_versions("2.11.0", "5.17.0")
    compatibility.check_versions("2.13.0+cpu", "5.24.3")
    assert not recwarn.list
    for _ in range(2):
        compatibility.check_versions("2.12.0", "5.20.0")
    (warning,) = recwarn.list
    assert str(warning.message).startswith("torch_witcert was not tested with torch 2.12.0")


def test_registration_adds_one_name_and_changes_no_other():
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS if name != "torch_witcert"}
    converted()
    after = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS}
    assert after.pop("torch_witcert").__module__ == "torch_witcert.nn.attention"
    assert after == before


# --- copies ------------------------------------------------------------------------------------------------------------


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded]
)
@pytest.mark.parametrize("used", [False, True])
def test_copies(make_copy, used):
    model, ids = converted(), prompt(70)
    expected = greedy(model, ids, 12)
    if not used:
        model = converted()
    twin = make_copy(model)
    assert all(isinstance(module, CertifiedAttention) for module in attentions(twin))
    with pytest.raises(ValueError, match="has not generated"):
        torch_witcert.last_cache(twin)
    assert torch.equal(greedy(twin, ids, 12), expected)
    assert torch_witcert.last_cache(twin) is not getattr(model._prepare_cache_for_generation, "own", None)
    with pytest.raises(ValueError, match="made for another model"):
        forward(model, ids, torch_witcert.last_cache(twin))
    torch_witcert.restore(twin)
    assert torch.equal(forward(twin, ids), forward(tiny_model(), ids))
    assert all(isinstance(module, CertifiedAttention) for module in attentions(model))


def test_pickled_model_generates_in_a_fresh_process(tmp_path):
    """Where nothing but the unpickling has imported our modules."""
    torch.save(converted(), tmp_path / "model.pt")
    program = (
        "import torch; model = torch.load('model.pt', weights_only=False)\n"
        "out = model.generate(torch.ones(1, 40, dtype=torch.int64), max_new_tokens=3, do_sample=False, pad_token_id=0)\n"
        "print(tuple(out.shape))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(torch_witcert.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "(1, 43)", done.stderr


def test_save_pretrained_gives_a_plain_model(tmp_path):
    model, ids = converted(), prompt(20)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert {type(module) for module in attentions(plain)} == {LlamaAttention}
    assert plain.config._attn_implementation == "sdpa"
    assert torch.equal(forward(plain, ids), forward(model, ids))


# --- torchao --------------------------------------------------------------------------------------------------------------


def is_attention(module, name):
    return isinstance(module, LlamaAttention)


def test_quantize_():
    quantization = pytest.importorskip("torchao.quantization")
    model, ids = tiny_model(), prompt(70)
    quantization.quantize_(model, RECIPE, filter_fn=is_attention)
    assert torch_witcert.report(model).certified == 2
    with pytest.raises(ValueError, match="DynamicCache.*torch_witcert.CertifiedCache"):
        greedy(model, ids, 4)
    cache = torch_witcert.CertifiedCache(model, 128)
    reference = converted()
    tokens = greedy(model, ids, 16, **{CACHE_ARGUMENT: cache})
    assert torch.equal(tokens, greedy(reference, ids, 16))
    assert torch_witcert.telemetry(cache).code_share > 0.7
    with pytest.raises(ValueError, match="already converted"):
        quantization.quantize_(model, RECIPE, filter_fn=is_attention)
    with pytest.raises(ValueError, match="already converted"):
        torch_witcert.convert(model)
    torch_witcert.restore(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(forward(model, ids), forward(tiny_model(), ids))


def test_quantize_refuses_other_modules():
    quantization = pytest.importorskip("torchao.quantization")
    with pytest.raises(ValueError, match="Linear cannot be converted: attention class Linear"):
        quantization.quantize_(tiny_model(), RECIPE, filter_fn=lambda module, _: isinstance(module, torch.nn.Linear))


def test_one_mapping_for_cache_and_weights():
    quantization = pytest.importorskip("torchao.quantization")
    model, ids = tiny_model(), prompt(70)
    recipes = {r"re:model\.layers\.1\.self_attn": RECIPE, r"re:.*_proj": quantization.Int8WeightOnlyConfig()}
    quantization.quantize_(model, quantization.FqnToConfig(recipes), filter_fn=None)
    report = torch_witcert.report(model)
    assert [(layer.certified, layer.reason) for layer in report.layers] == [
        (False, "not chosen by quantize_"),
        (True, ""),
    ]
    cache = torch_witcert.CertifiedCache(model, 128)
    greedy(model, ids, 8, **{CACHE_ARGUMENT: cache})
    assert cache.certified_layers == (1,)
    assert torch_witcert.telemetry(cache).total("code_reads") == 7 * 4


def test_quantized_weights_and_cache_compose_in_either_order():
    quantization = pytest.importorskip("torchao.quantization")
    weights = quantization.Int8WeightOnlyConfig()
    ids, outputs = prompt(70), []
    for order in ((weights, RECIPE), (RECIPE, weights)):
        model = tiny_model()
        for recipe in order:
            if recipe is weights:
                quantization.quantize_(model, weights)
            else:
                quantization.quantize_(model, recipe, filter_fn=is_attention)
        assert type(attentions(model)[0].q_proj.weight) is not torch.nn.Parameter
        cache = torch_witcert.CertifiedCache(model, 128)
        outputs.append([forward(model, ids, cache), forward(model, prompt(1), cache)])
        assert (torch_witcert.certificates(cache).tv > 0).all()
        torch_witcert.restore(model)
        torch_witcert.convert(model, RECIPE)
        cache = torch_witcert.CertifiedCache(model, 128)
        outputs.append([forward(model, ids, cache), forward(model, prompt(1), cache)])
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: torch_witcert.convert(wrong),
        lambda wrong: torch_witcert.restore(wrong),
        lambda wrong: torch_witcert.report(wrong),
        lambda wrong: torch_witcert.telemetry(wrong),
        lambda wrong: torch_witcert.last_cache(wrong),
        lambda wrong: torch_witcert.CertifiedCache(wrong, 100),
        lambda wrong: torch_witcert.CertifiedCache.capacity(wrong, 10**9),
    ],
)
@pytest.mark.parametrize("wrong", [None, "model", 3])
def test_what_is_no_model_is_named(call, wrong):
    with pytest.raises(TypeError, match=f"model must be a transformers.PreTrainedModel, got {type(wrong).__name__}"):
        call(wrong)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"config": torch_witcert.CertifiedInt8Config}, "got the class CertifiedInt8Config: call it"),
        ({"config": {"page_size": 16}}, "config must be a recipe like CertifiedInt8Config.*, got dict"),
        ({"filter_fn": "layers.0"}, "filter_fn must be a function"),
        ({"strict": "no"}, "strict must be True or False, got 'no'"),
    ],
)
def test_wrong_types_are_refused(arguments, message):
    model = tiny_model()
    before = snapshot(model)
    with pytest.raises(TypeError, match=message):
        torch_witcert.convert(model, **arguments)
    assert snapshot(model) == before


def test_where_nothing_can_be_converted_the_reason_is_given_once():
    with pytest.raises(ValueError, match="2 modules, model.layers.0.self_attn to .*: head_dim must be one of") as error:
        torch_witcert.convert(tiny_model(head_dim=48))
    assert "strict=False" not in str(error.value)


def test_each_generate_counts_anew():
    model, ids = converted(), prompt(70)
    counts = []
    for _ in range(2):
        greedy(model, ids, 5)
        counts.append(torch_witcert.telemetry(model).total("reads"))
    assert counts[0] == counts[1] > 0
