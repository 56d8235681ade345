"""Copies of a cache, in memory, in a file and in a pickle: the same bits, that go on the same and belong to the same model."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nn_copies import (
    CASES,
    DITHERED,
    WAYS,
    assert_same,
    contents,
    filled,
    model_of,
    on,
    through_file,
    through_torch_save,
)
from nn_models import converted, forward, greedy, prompt

import torch_witcert
from torch_witcert.nn.compatibility import CACHE_ARGUMENT

# --- every tensor has a name -------------------------------------------------------------------------------------------


def reachable_tensors(root: object) -> dict[int, torch.Tensor]:
    """Every tensor in the graph of objects below `root`, by its id."""
    found, seen, waiting = {}, set(), [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[id(thing)] = thing
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        elif type(thing).__module__.startswith(("torch_witcert", "transformers")):
            waiting.append(vars(thing))
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_has_a_name_of_its_own(case):
    cache = filled(model_of(CASES[case]), CASES[case])
    named = cache.named_tensors()
    assert {id(tensor) for tensor in named.values()} == reachable_tensors(cache).keys()
    assert len({id(tensor) for tensor in named.values()}) == len(named)
    addresses = [tensor.data_ptr() for tensor in named.values() if tensor.numel()]
    assert len(set(addresses)) == len(addresses)
    assert [id(tensor) for tensor in cache.tensors()] == [id(tensor) for tensor in named.values()]
    expected = {"lengths", "column_count", "limits", "counters.counts", "total_variation", "layers.0.k_codes"}
    assert expected <= named.keys()


def test_a_tensor_that_is_added_later_is_not_forgotten():
    cache = filled(model_of(CASES["dither, window, dense layer, few pages"]))
    state = cache.state
    owners = {"": state, "counters.": state.counters, "layers.1.": cache.layers[1], "layers.2.": cache.layers[2]}
    owners |= {f"groups.{window}.": group for window, group in state.groups.items()}
    before = cache.named_tensors().keys()
    for owner in owners.values():
        owner.added = torch.ones(1)
    assert cache.named_tensors().keys() - before == {f"{prefix}added" for prefix in owners}


# --- the same bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_cache_comes_back_and_goes_on(case, tmp_path):
    model = model_of(CASES[case])
    cache = filled(model, CASES[case])
    before = contents(cache)
    twins = {name: way(cache, model, tmp_path) for name, way in WAYS.items()}
    assert_same(contents(cache), before)
    for twin in twins.values():
        assert_same(contents(twin), before)
        assert repr(twin) == repr(cache)
        assert (twin.config, twin.dtype, twin.capacity_per_row) == (cache.config, cache.dtype, cache.capacity_per_row)
        for one, other in zip(parts(twin), parts(cache), strict=True):
            assert one == other
    expected = on(model, cache)
    for twin in twins.values():
        assert_same(on(model, twin), expected)


def parts(cache) -> list[dict]:
    """What the host knows. A file gives the sharper bound on the lengths, and no forward that a graph has captured."""
    owners = [cache.state, *cache.state.groups.values(), *cache.layers]
    left_out = ("longest", "captured")
    return [
        {
            name: value
            for name, value in vars(owner).items()
            if isinstance(value, bool | int | str | tuple | None) and name not in (*left_out, "store")
        }
        for owner in owners
    ]


def test_an_empty_cache_and_one_that_was_reset(tmp_path):
    """The outlier channels are chosen in the first forward of all, and by nothing else."""
    model = converted(recipe=DITHERED)
    ids = prompt(40, 3)
    for way in WAYS.values():
        fresh, reset = torch_witcert.CertifiedCache(model, 128, 3), filled(model)
        reset.reset()
        for cache in (fresh, reset):
            twin = way(cache, model, tmp_path)
            assert_same(contents(twin), contents(cache))
            assert torch.equal(forward(model, ids, twin), forward(model, ids, cache))
            assert_same(contents(twin), contents(cache))
    assert fresh.outlier_indices() != ((tuple(range(2)),) * 2,) * 2


def test_generate_goes_on(tmp_path):
    model = converted()
    ids, more = prompt(40), prompt(7, seed=2)
    cache = torch_witcert.CertifiedCache(model, 128)
    first = torch.cat([ids, greedy(model, ids, 12, **{CACHE_ARGUMENT: cache}), more], 1)
    twins = [way(cache, model, tmp_path) for way in WAYS.values()]
    expected = greedy(model, first, 12, **{CACHE_ARGUMENT: cache})
    for twin in twins:
        assert torch.equal(greedy(model, first, 12, **{CACHE_ARGUMENT: twin}), expected)
        assert_same(contents(twin), contents(cache))


def test_what_a_captured_graph_did_is_in_the_file(tmp_path):
    """The host does not see a replay; whether the cache is empty is then read off the lengths."""
    model = converted()
    cache = filled(model)
    cache.state.captured, cache.state.empty = True, True
    twin = through_file(cache, model, tmp_path)
    assert not twin.state.empty
    assert twin.state.longest == int(cache.lengths.max())


@pytest.mark.parametrize("way", WAYS)
def test_what_comes_back_under_inference_mode_goes_on_outside(way, tmp_path):
    model = converted()
    cache = filled(model)
    with torch.inference_mode():
        twin = WAYS[way](cache, model, tmp_path)
    assert not any(tensor.is_inference() for tensor in twin.tensors())
    assert_same(on(model, twin), on(model, cache))


# --- which model it belongs to -----------------------------------------------------------------------------------------


COPIERS = {"pickle": lambda thing: pickle.loads(pickle.dumps(thing)), "deepcopy": copy.deepcopy}


def belongs(cache, model) -> bool:
    module = model.model.layers[1].self_attn
    try:
        cache.check_made_for(module)
    except ValueError as error:
        assert "made for another model" in str(error)
        return False
    return True


@pytest.mark.parametrize("copier", COPIERS)
def test_copies_belong_where_they_were_made(copier):
    """A model that is copied alone is another one; a cache that is copied alone stays with its model; both copied in one call
    stay together, in any order."""
    copied = COPIERS[copier]
    model = converted()
    cache = filled(model)
    alone, twin = copied(cache), copied(model)
    assert belongs(alone, model) and not belongs(alone, twin) and not belongs(cache, twin)
    for source in (cache, alone, copied(alone)):
        for order in (1, -1):
            other_model, other = copied((model, source)[::order])[::order]
            assert belongs(other, other_model) and not belongs(other, model)
            assert not belongs(source, other_model) and belongs(source, model)
            assert_same(on(other_model, other), on(model, copied(source)))
    again, once_more = copied(copied((model, cache)))
    assert belongs(once_more, again) and not belongs(once_more, model)
    assert belongs(cache, model)


def test_a_shallow_copy_of_a_module_takes_nothing_from_it():
    model = converted()
    cache = filled(model)
    copy.copy(model.model.layers[1].self_attn)
    assert belongs(cache, model)


def test_a_file_belongs_to_the_model_that_it_is_loaded_for(tmp_path):
    model = converted()
    cache = filled(model)
    cache.save(tmp_path / "cache")
    for other in (copy.deepcopy(model), converted()):
        twin = torch_witcert.CertifiedCache.load(tmp_path / "cache", other)
        assert belongs(twin, other) and not belongs(twin, model)
        assert_same(on(other, twin), on(model, copy.deepcopy(cache)))


def test_a_fresh_process_goes_on(tmp_path):
    """From a pickle of model and cache, and from a file, where nothing but that has imported our modules."""
    model = converted(recipe=DITHERED)
    cache = filled(model)
    ids = prompt(9, 3, 7)
    torch.save((model, cache), tmp_path / "both.pt")
    cache.save(tmp_path / "cache.safetensors")
    expected = forward(model, ids, cache)
    torch.save((ids, expected, contents(cache)), tmp_path / "expected.pt")
    program = (
        "import torch; model, cache = torch.load('both.pt', weights_only=False)\n"
        "ids, expected, contents = torch.load('expected.pt')\n"
        "from nn_models import forward\n"
        "loaded = type(cache).load('cache.safetensors', model)\n"
        "for each in (cache, loaded):\n"
        "    assert torch.equal(forward(model, ids, each), expected)\n"
        "    assert all(torch.equal(x, contents[n]) for n, x in each.named_tensors().items() if not x.isnan().any())\n"
        "print('same')"
    )
    folders = (Path(torch_witcert.__file__).parents[1], Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "same", done.stderr


# --- forwards that are not complete ------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def interrupted(model, ids, cache, act) -> torch.Tensor:
    """A forward that does `act` after its first layer."""
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: act())
    try:
        return forward(model, ids, cache)
    finally:
        handle.remove()


def fail() -> None:
    raise Interrupted


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_failed_is_not_part_of_it(way, tmp_path):
    model = converted()
    cache = filled(model)
    with pytest.raises(Interrupted):
        interrupted(model, prompt(12, 3, 5), cache, fail)
    twin = WAYS[way](cache, model, tmp_path)
    cache.state.settle()
    assert twin.state.plan is None
    assert_same(contents(twin), contents(cache))
    assert_same(on(model, twin), on(model, cache))


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_has_destroyed_tokens_is_refused(way, tmp_path):
    model = converted()
    cache = filled(model)
    expected = contents(through_file(cache, model, tmp_path))
    with pytest.raises(Interrupted):
        interrupted(model, prompt(20, 3, 5), cache, fail)
    with pytest.raises(RuntimeError, match="failed half-way; its 20 new tokens .* reset"):
        WAYS[way](cache, model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]
    assert_same(contents(torch_witcert.CertifiedCache.load(tmp_path / "cache.safetensors", model)), expected)


@pytest.mark.parametrize("way", WAYS)
def test_in_the_middle_of_a_forward(way, tmp_path):
    """The copy is of before, and the forward goes on."""
    model = converted()
    cache = filled(model)
    before, straight = copy.deepcopy(cache), copy.deepcopy(cache)
    twins = []
    ids = prompt(3, 3, 5)
    logits = interrupted(model, ids, cache, lambda: twins.append(WAYS[way](cache, model, tmp_path)))
    assert torch.equal(logits, forward(model, ids, straight))
    assert_same(contents(cache), contents(straight))
    assert torch.equal(twins[0].lengths, before.lengths)
    assert torch.equal(forward(model, ids, twins[0]), logits)


# --- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_from_the_gpu_to_the_cpu_and_back(tmp_path):
    models = {device: converted(recipe=DITHERED).to(device) for device in ("cuda", "cpu")}
    cache = torch_witcert.CertifiedCache(models["cuda"], 128, 3)
    for seed, count in enumerate((40, 1, 9)):
        forward(models["cuda"], prompt(count, 3, seed).cuda(), cache)
    expected = {name: tensor.cpu() for name, tensor in cache.named_tensors().items()}
    cache.save(tmp_path / "cache")
    for device in ("cpu", "cuda"):
        twin = torch_witcert.CertifiedCache.load(tmp_path / "cache", models[device])
        assert {tensor.device.type for tensor in twin.tensors()} == {device}
        assert_same({name: tensor.cpu() for name, tensor in twin.named_tensors().items()}, expected)
        assert {layer.device.type for layer in twin.layers} == {device}
    ids = prompt(1, 3, 7).cuda()
    assert torch.equal(forward(models["cuda"], ids, twin), forward(models["cuda"], ids, cache))
    moved = through_torch_save(cache)
    assert torch.equal(forward(models["cuda"], ids, moved), forward(models["cuda"], ids, cache))
