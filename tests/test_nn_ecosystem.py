"""What is done around a converted model: checkpoints, chats, PEFT adapters, threads, modes of autograd."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from nn_models import RECIPE, converted, decisive_prompt, forward, greedy, prompt, stored_codes, tiny_model
from test_nn_generate import GAP, logit_error
from test_nn_generate_modes import word_tokenizer
from transformers import TextStreamer, pipeline
from transformers.generation import BaseStreamer
from transformers.models.llama.modeling_llama import LlamaAttention

import torch_witcert
from torch_witcert import CertifiedCache, CertifiedInt8Config, WitCertConfig
from torch_witcert.config import recipe_from_dict, recipe_to_dict
from torch_witcert.nn.compatibility import CACHE_ARGUMENT
from torch_witcert.nn.record import RECORD

#: Of peft, and of a name that only newer versions of transformers have a successor of.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

NEW_TOKENS = 12
WITCERT = WitCertConfig(page_size=16, tau=0.3, outlier_pairs=1, outlier_indices=[[[1], [2]], [[3], [0]]], horizon=None)
ANY_LAYER = WitCertConfig(page_size=16, tau=0.3, outlier_pairs=0)
RECIPES = {"int8": RECIPE, "witcert": WITCERT}


def traces(cache: CertifiedCache) -> list[torch.Tensor]:
    """What forwards leave behind: certificates, counters, lengths, codes."""
    kept = [*torch_witcert.certificates(cache), *cache.state.counters.tensors(), cache.lengths]
    codes = [part for row in range(cache.batch_size) for part in stored_codes(cache, row)]
    return [tensor.clone() for tensor in kept] + codes


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- checkpoints ---------------------------------------------------------------------------------------------------------


def reloaded(model, path: Path):
    model.save_pretrained(path)
    return type(model).from_pretrained(path)


def assert_converted_alike(model, other) -> None:
    """The same recipe in the same layers, and the same bits."""
    layers = [[(x.name, x.config) for x in torch_witcert.report(each).layers] for each in (model, other)]
    assert layers[0] == layers[1]
    outcomes = []
    for each in (model, other):
        cache = CertifiedCache(each, 96, 2)
        outcomes.append([forward(each, prompt(count, 2), cache) for count in (70, 1, 1)] + traces(cache))
    assert_same_bits(*outcomes)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        *(("llama", name) for name in RECIPES),
        *((family, "int8") for family in ("qwen2", "mistral", "qwen3", "phi3", "gemma2", "gpt_oss")),
    ],
)
def test_a_checkpoint_keeps_the_recipe(family, recipe, tmp_path):
    model = converted(family, recipe=RECIPES[recipe])
    loaded = reloaded(model, tmp_path)
    assert not any(hasattr(module, "certified_config") for module in loaded.modules())
    assert recipe_from_dict(loaded.config.torch_witcert["recipe"]) == RECIPES[recipe]
    with pytest.raises(ValueError, match="not converted, but its config names a recipe: call torch_witcert.convert"):
        CertifiedCache.capacity(loaded, 10**9)
    assert_converted_alike(model, torch_witcert.convert(loaded))
    # Nothing but the record says that the model was converted.
    torch_witcert.restore(loaded).save_pretrained(tmp_path / "plain")
    written, plain = (json.loads((path / "config.json").read_text()) for path in (tmp_path, tmp_path / "plain"))
    assert written.pop(RECORD) == {"recipe": recipe_to_dict(RECIPES[recipe]), "layers": [0, 1]}
    assert written == plain


def test_a_checkpoint_loads_where_torch_witcert_is_not_installed(tmp_path):
    model, ids = converted(), prompt(40)
    model.save_pretrained(tmp_path)
    program = (
        "import sys; sys.modules['torch_witcert'] = None\n"
        "import torch; from transformers import AutoModelForCausalLM\n"
        "model, info = AutoModelForCausalLM.from_pretrained('.', output_loading_info=True)\n"
        "assert not any(info.values()), info\n"
        "ids = torch.load('ids.pt')\n"
        "tokens = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)\n"
        "torch.save((model(ids, use_cache=False).logits, tokens, model.config._attn_implementation), 'out.pt')\n"
    )
    torch.save(ids, tmp_path / "ids.pt")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    logits, tokens, implementation = torch.load(tmp_path / "out.pt")
    dense = tiny_model()
    assert implementation == "sdpa"
    assert torch.equal(logits.detach(), forward(dense, ids))
    assert torch.equal(tokens[:, 40:], greedy(dense, ids, 4))


@pytest.mark.parametrize("left_out", [0, 2])
def test_a_checkpoint_keeps_which_layers_were_converted(left_out, tmp_path):
    model = tiny_model(layers=3)
    torch_witcert.convert(model, RECIPE, filter_fn=lambda module, _: module.layer_idx != left_out, strict=False)
    loaded = torch_witcert.convert(reloaded(model, tmp_path))
    assert_converted_alike(model, loaded)
    assert torch_witcert.report(loaded).layers[left_out].reason == "left out by model.config.torch_witcert"
    # A second checkpoint is as good as the first.
    assert_converted_alike(model, torch_witcert.convert(reloaded(loaded, tmp_path / "again")))


def test_what_is_given_wins_over_the_record(tmp_path):
    model = torch_witcert.convert(
        tiny_model(layers=3), ANY_LAYER, filter_fn=lambda m, _: m.layer_idx == 1, strict=False
    )
    loaded = reloaded(model, tmp_path)
    torch_witcert.convert(loaded, RECIPE)
    assert [layer.config for layer in torch_witcert.report(loaded).layers] == [RECIPE] * 3
    assert loaded.config.torch_witcert == {"recipe": recipe_to_dict(RECIPE), "layers": [0, 1, 2]}
    torch_witcert.restore(loaded)
    assert not hasattr(loaded.config, RECORD)
    torch_witcert.convert(loaded)
    assert {layer.config for layer in torch_witcert.report(loaded).layers} == {CertifiedInt8Config()}
    # A filter of one's own chooses layers; the recipe is still the recorded one, and strict is about the filter.
    loaded = type(model).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="strict=True refuses.*model.layers.0.self_attn: left out by filter_fn"):
        torch_witcert.convert(loaded, filter_fn=lambda module, _: module.layer_idx != 0)
    torch_witcert.convert(loaded, filter_fn=lambda module, _: module.layer_idx == 2, strict=False)
    assert [layer.config for layer in torch_witcert.report(loaded).layers] == [None, None, ANY_LAYER]


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"recipe": {"recipe": "Int3Config"}, "layers": [0]}, "one of CertifiedInt8Config, WitCertConfig, got 'Int3"),
        ({"recipe": recipe_to_dict(RECIPE) | {"bits": 3}, "layers": [0]}, "CertifiedInt8Config has no field 'bits'"),
        ({"recipe": recipe_to_dict(RECIPE) | {"version": 9}, "layers": [0]}, "version must be one of"),
        ({"recipe": recipe_to_dict(RECIPE), "layers": [1, 2]}, r"layers must be some of 0 to 1, got \[1, 2\]"),
        ({"recipe": recipe_to_dict(RECIPE), "layers": []}, r"layers must be some of 0 to 1, got \[\]"),
        ({"layers": [0]}, "KeyError: 'recipe'"),
        ("int8", "TypeError"),
    ],
)
def test_a_wrong_record_is_refused(record, match):
    model = tiny_model()
    model.config.torch_witcert = record
    modules = [id(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"model.config.torch_witcert cannot be applied .*{match}.*pass a recipe"):
        torch_witcert.convert(model)
    assert [id(module) for module in model.modules()] == modules
    assert model.config.torch_witcert == record
    torch_witcert.convert(model, RECIPE)
    assert torch_witcert.report(model).certified == 2


def test_a_recipe_of_ones_own_class_is_refused():
    class OwnConfig(CertifiedInt8Config):
        pass

    model = tiny_model()
    with pytest.raises(ValueError, match="recipe must be one of CertifiedInt8Config, WitCertConfig, got OwnConfig"):
        torch_witcert.convert(model, OwnConfig())
    assert not any(hasattr(module, "certified_config") for module in model.modules())
    assert not hasattr(model.config, RECORD)


@pytest.mark.parametrize("layers", [(0, 1), (1,)])
def test_quantize_records_too(layers, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")

    def chosen(module, _):
        return isinstance(module, LlamaAttention) and module.layer_idx in layers

    model = tiny_model()
    quantization.quantize_(model, ANY_LAYER, filter_fn=chosen)
    assert_converted_alike(model, torch_witcert.convert(reloaded(model, tmp_path)))
    # A checkpoint's record gives way to what quantize_ is told; a module that is converted already does not.
    loaded = type(model).from_pretrained(tmp_path)
    quantization.quantize_(loaded, RECIPE, filter_fn=lambda module, _: chosen(module, _) and module.layer_idx == 1)
    assert loaded.config.torch_witcert == {"recipe": recipe_to_dict(RECIPE), "layers": [1]}
    with pytest.raises(NotImplementedError, match=r"layer 0 cannot be converted with WitCertConfig.*layers \[1\] have"):
        quantization.quantize_(
            loaded, ANY_LAYER, filter_fn=lambda module, _: isinstance(module, LlamaAttention) and module.layer_idx == 0
        )
    assert [layer.config for layer in torch_witcert.report(loaded).layers] == [None, RECIPE]
    assert not hasattr(torch_witcert.restore(loaded).config, RECORD)


# --- chats ---------------------------------------------------------------------------------------------------------------


TEMPLATE = (
    "{% for message in messages %}{{ 'w1 ' if message.role == 'user' else 'w2 ' }}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)


def test_a_chat_on_one_cache_through_the_template_and_in_the_pipeline(capsys):
    """Three turns: the dense model's replies, the same on one cache and on fresh caches, which the pipeline makes."""
    dense, model, tokenizer = tiny_model(), converted(), word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    cache, messages = CertifiedCache(model, 256), []
    for words in (60, 9, 17):
        for seed in range(200):
            asked = [*messages, {"role": "user", "content": tokenizer.decode(prompt(words, seed=seed)[0])}]
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            reply = greedy(dense, ids, NEW_TOKENS)
            best = forward(dense, torch.cat([ids, reply], 1))[:, ids.shape[1] - 1 : -1].topk(2, -1).values
            if float((best[..., 0] - best[..., 1]).min()) > GAP and len(set(reply[0].tolist()) - {0}) > 4:
                break
        else:
            raise AssertionError("no question whose answer has wide gaps")
        assert 1e-4 < logit_error(dense, model, ids, reply) < GAP / 2
        (answered,) = generator([asked], max_new_tokens=NEW_TOKENS, do_sample=False)
        answer = tokenizer.decode(reply[0], skip_special_tokens=True)
        assert answered[0]["generated_text"] == [*asked, {"role": "assistant", "content": answer}]
        assert torch_witcert.last_cache(model) is not cache
        capsys.readouterr()
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        assert torch.equal(greedy(model, ids, NEW_TOKENS, streamer=streamer, **{CACHE_ARGUMENT: cache}), reply)
        assert capsys.readouterr().out.split() == answer.split()
        assert int(cache.lengths) == ids.shape[1] + NEW_TOKENS - 1
        messages = answered[0]["generated_text"]
    assert len(messages) == 6
    assert torch_witcert.telemetry(cache).code_share > 0.7


# --- modes of autograd ---------------------------------------------------------------------------------------------------


def worked(model, modes: list) -> list[torch.Tensor]:
    """Logits, tokens and traces of one cache on which every step runs under the next of `modes` in turn."""
    with modes[0]():
        cache = CertifiedCache(model, 128, 2)
    step = {
        count: lambda count=count: forward(model, prompt(count, cache.batch_size, seed=count), cache)
        for count in (1, 70)
    }
    steps = [
        step[70],
        step[1],
        lambda: cache.crop(-3),
        step[1],
        lambda: cache.reorder_cache(torch.tensor([1, 1])),
        step[1],
        lambda: cache.release([0]),
        step[1],
        lambda: cache.batch_select_indices(torch.tensor([1, 0])),
        step[1],
        lambda: cache.fork(0, [1]),
        step[1],
        lambda: cache.reset(),
        lambda: greedy(model, prompt(70, 2), 4, **{CACHE_ARGUMENT: cache}),
        step[1],
        lambda: greedy(model, prompt(70, 2), 4),
    ]
    found = []
    for number, act in enumerate(steps):
        with modes[number % len(modes)]():
            result = act()
        if result is not None:
            found += [result, *traces(cache)]
    return found


@pytest.mark.parametrize("case", ["int8", "witcert", "one layer dense", "window"])
def test_inference_mode_and_no_grad_take_turns(case):
    family = "qwen2" if case == "window" else "llama"
    model = tiny_model(family, window=40 if case == "window" else None)
    filter_fn = (lambda module, _: module.layer_idx == 0) if case == "one layer dense" else None
    torch_witcert.convert(model, RECIPES.get(case, RECIPE), filter_fn=filter_fn, strict=False)
    inference, no_grad = torch.inference_mode, torch.no_grad
    expected = worked(model, [no_grad])
    for modes in ([inference, no_grad], [no_grad, inference], [inference, inference, no_grad]):
        assert_same_bits(worked(model, modes), expected)


# --- PEFT ------------------------------------------------------------------------------------------------------------------


def with_lora(model):
    """Random adapters, the same for every model of one shape."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=2,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(5)
    return peft.get_peft_model(model, config).eval()


def lora_then_convert():
    model = with_lora(tiny_model())
    torch_witcert.convert(model.get_base_model(), RECIPE)
    return model


ORDERS = {"convert, then LoRA": lambda: with_lora(converted()), "LoRA, then convert": lora_then_convert}


def test_a_wrapped_model_is_refused_by_name():
    model = with_lora(tiny_model())
    match = r"got PeftModelForCausalLM: pass the model that it wraps, model.get_base_model\(\)"
    for call in (torch_witcert.convert, torch_witcert.report, torch_witcert.restore, torch_witcert.telemetry):
        with pytest.raises(TypeError, match=match):
            call(model)
    assert not any(hasattr(module, "certified_config") for module in model.modules())


@pytest.mark.parametrize("order", ORDERS)
def test_adapters_on_off_and_merged(order, tmp_path):
    dense, model = with_lora(tiny_model()), ORDERS[order]()
    base = model.get_base_model()
    ids = decisive_prompt(dense, 90, NEW_TOKENS, batch=1, gap=GAP)
    expected = greedy(dense, ids, NEW_TOKENS)
    assert 1e-4 < logit_error(dense, base, ids, expected) < GAP / 2
    assert torch.equal(greedy(model, ids, NEW_TOKENS), expected)
    assert torch_witcert.telemetry(base).code_share > 0.7
    assert torch_witcert.report(base).certified == 2
    with dense.disable_adapter(), model.disable_adapter():
        plain = decisive_prompt(dense, 90, NEW_TOKENS, batch=1, gap=GAP)
        off = greedy(dense, plain, NEW_TOKENS)
        assert torch.equal(greedy(model, plain, NEW_TOKENS), off)
        assert torch.equal(off, greedy(tiny_model(), plain, NEW_TOKENS))
    assert not torch.equal(greedy(dense, plain, NEW_TOKENS), off), "the adapters matter"
    merged = model.merge_and_unload()
    assert merged is base
    assert torch.equal(greedy(merged, ids, NEW_TOKENS), expected)
    assert_converted_alike(merged, torch_witcert.convert(reloaded(merged, tmp_path)))
    torch_witcert.restore(merged)
    assert torch.equal(forward(merged, ids), forward(dense.merge_and_unload(), ids))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_adapters_train_as_on_the_dense_model(order, checkpointing, tmp_path):
    dense, model, ids = with_lora(tiny_model()), ORDERS[order](), prompt(40, 2)
    steps = []
    for each in (dense, model):
        if checkpointing:
            each.enable_input_require_grads()
            each.gradient_checkpointing_enable()
        each.train()
        adapters = [parameter for parameter in each.parameters() if parameter.requires_grad]
        loss = each(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(parameter.grad is None for parameter in each.parameters() if not parameter.requires_grad)
        gradients = [parameter.grad.clone() for parameter in adapters]
        torch.optim.SGD(adapters, lr=0.1).step()
        steps.append([loss.detach(), *gradients, *(parameter.detach() for parameter in adapters)])
        each.eval()
    assert_same_bits(steps[1], steps[0])
    assert len(steps[0]) == 1 + 2 * 2 * 4 * 2
    assert all(gradient.abs().max() > 0 for gradient in steps[0][1:17])
    # Adapters that were trained on either model go onto either.
    peft = pytest.importorskip("peft")
    model.save_pretrained(tmp_path)
    onto_dense, onto_converted = (
        peft.PeftModel.from_pretrained(each, tmp_path) for each in (tiny_model(), converted())
    )
    assert torch.equal(forward(onto_dense, ids), forward(dense, ids))
    found = [greedy(each, ids, 4) for each in (model, onto_converted)]
    assert torch.equal(*found)


# --- threads ---------------------------------------------------------------------------------------------------------------


THREADS = 8


def in_threads(work: list, workers: int) -> list:
    """Results of the functions `work`, `workers` at a time, which all start at once.

    A single worker is a thread as well: torch's own pool may split a product another way in the main thread.
    """
    barrier = threading.Barrier(workers)

    def started(act):
        barrier.wait(60)
        return act()

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(started, work))


@pytest.mark.parametrize("recipe", RECIPES)
def test_threads_with_caches_of_their_own(recipe):
    """On one model, and on a model each: tokens, certificates, counters and codes have the bits of runs one after the other."""
    model, *others = (converted(recipe=RECIPES[recipe]) for _ in range(THREADS))
    prompts = [prompt(70 + 3 * number, seed=number) for number in range(THREADS)]

    def conversation(model, ids: torch.Tensor) -> list[torch.Tensor]:
        cache = CertifiedCache(model, 128)
        tokens = greedy(model, ids, NEW_TOKENS // 2, **{CACHE_ARGUMENT: cache})
        logits = [forward(model, piece, cache) for piece in (ids[:, :1], ids[:, :20])]
        return [tokens, *logits, *traces(cache)]

    def works(models: list) -> list:
        return [partial(conversation, *pair) for pair in zip(models, prompts, strict=True)]

    alone = in_threads(works([model] * THREADS), 1)
    assert len({tuple(found[0][0].tolist()) for found in alone}) == THREADS
    for models in ([model] * THREADS, [model, *others]):
        for found, expected in zip(in_threads(works(models), THREADS), alone, strict=True):
            assert_same_bits(found, expected)


def test_threads_that_pass_no_cache():
    """The model keeps one cache for generate(): a call that starts while another runs must not get it."""
    model = converted()
    prompts = [prompt(70, seed=number) for number in range(2 * THREADS)]
    work = [partial(greedy, model, ids, NEW_TOKENS // 2) for ids in prompts]
    expected = in_threads(work, 1)
    assert len({tuple(tokens[0].tolist()) for tokens in expected}) > THREADS, "a call that got another's tokens is seen"
    assert_same_bits(in_threads(work, THREADS), expected)
    # One cache stays, however many were in use.
    kept = torch_witcert.last_cache(model)
    greedy(model, prompts[0], NEW_TOKENS // 2)
    assert torch_witcert.last_cache(model) is kept


class Interrupting(BaseStreamer):
    """Calls `act` once, after some tokens."""

    def __init__(self, act) -> None:
        self.act = act
        self.results: list = []
        self.count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count == NEW_TOKENS // 2:
            self.results.append(self.act())

    def end(self) -> None:
        pass


@pytest.mark.parametrize("tokens", [70, 40])
def test_generate_inside_generate(tokens):
    model, ids, other = converted(), prompt(70, seed=1), prompt(tokens, seed=2)
    expected, inner = greedy(model, ids, NEW_TOKENS), greedy(model, other, NEW_TOKENS)
    first = torch_witcert.last_cache(model)
    streamer = Interrupting(lambda: (greedy(model, other, NEW_TOKENS), torch_witcert.last_cache(model)))
    assert torch.equal(greedy(model, ids, NEW_TOKENS, streamer=streamer), expected)
    ((found, cache),) = streamer.results
    assert torch.equal(found, inner)
    assert cache is not first


def test_generate_after_one_that_failed():
    """While its traceback is alive, so are the frames of the call that failed."""
    model, ids = converted(), prompt(70)
    expected = greedy(model, ids, NEW_TOKENS)

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:
        greedy(model, ids, NEW_TOKENS, streamer=Interrupting(fail))
    for _ in range(2):
        assert torch.equal(greedy(model, ids, NEW_TOKENS), expected)
        assert torch_witcert.telemetry(model).total("prefill_tokens") == 2 * 70
    assert error.traceback


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"num_beams": 3, "do_sample": False},
        {"prompt_lookup_num_tokens": 4, "do_sample": False},
        {"prefill_chunk_size": 32, "do_sample": False},
    ],
)
def test_every_mode_gives_its_cache_back(options):
    model, ids = converted(), prompt(70)
    caches = []
    for _ in range(2):
        model.generate(ids, max_new_tokens=4, pad_token_id=0, **options)
        caches.append(torch_witcert.last_cache(model))
    assert caches[0] is caches[1]
