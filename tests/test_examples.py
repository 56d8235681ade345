"""Every example runs at toy size, prints what it promises and has --help."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import torch_witcert

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TOY = ["--toy", "--device", "cpu", "--new-tokens"]


def run_example(name: str, arguments: list[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](arguments)


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        run_example(name, ["--help"])
    assert stop.value.code == 0
    assert "--toy" in capsys.readouterr().out


def test_quickstart(tmp_path, capsys):
    run_example("quickstart", [*TOY, "12", "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert "prompt of 1200 tokens" in output
    checked = re.findall(r"\| *(?:total variation|output) \| +(\d+) \| +(\d+) \|", output)
    # 11 one-token forwards follow the prefill, 2 layers with 4 heads: all checked, none violated.
    assert checked == [("88", "0"), ("88", "0")]
    share = re.search(r"Tokens read as codes: ([\d.]+)%. Coverage at tau 0.2: ([\d.]+)", output)
    assert float(share[1]) > 90 and float(share[2]) == 1.0
    ratios = [float(ratio) for ratio in re.findall(r"MiB \| +([\d.]+) \|", output)]
    assert len(ratios) == 2 and 0.5 < ratios[1] < 0.6 < ratios[0] < 0.9
    assert (tmp_path / "bounds.png").stat().st_size > 10_000


def test_compiled_generate(capsys):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run_example("compiled_generate", [*TOY, "8"])
    output = capsys.readouterr().out
    assert "tokens equal to eager: 8 of 8" in output
    assert "graphs compiled: 1\n" in output
    assert float(re.search(r"largest difference of a bound: (\S+)", output)[1]) < 1e-3


def test_cuda_graph_decode_says_that_there_is_no_graph(capsys):
    run_example("cuda_graph_decode", [*TOY, "8"])
    output = capsys.readouterr().out
    assert "eager loop: 8 tokens" in output
    assert "no CUDA device here" in output
    with pytest.raises(SystemExit):
        run_example("cuda_graph_decode", [*TOY, "3"])


SHARED_PREFIX = [*TOY, "6", "--rows", "3", "--page-size", "16"]


def test_shared_prefix(capsys):
    run_example("shared_prefix", SHARED_PREFIX)
    output = capsys.readouterr().out
    system = int(re.search(r"system prompt of (\d+) tokens", output)[1])
    found = re.findall(r"\| +(?:shared|each its own) \| +(\d+) \| +([\d.]+) MiB \| +([\d.]+) \|", output)
    shared, alone = ([float(number) for number in row] for row in found)
    # Three rows at a time, each of which would store the complete pages of the system prompt once more.
    assert alone[0] - shared[0] == 2 * (system // 16) > 50
    assert shared[1] < 0.6 * alone[1]
    assert 0 < shared[2] < 0.2 and shared[2] == pytest.approx(alone[2], abs=1e-4)
    equal = re.search(r"(\d+) tokens equal to those without sharing, logits equal (bit for bit|up to (\S+),)", output)
    assert 8 <= int(equal[1]) <= 8 * 6 and float(equal[3] or 0) < 1e-3


def test_shared_prefix_notices_a_fork_that_is_none(monkeypatch):
    """Forks whose exact keys are in other places than the source's: other tokens come out, and the program says so."""
    fork = torch_witcert.CertifiedCache.fork

    def wrong(cache, source, targets):
        fork(cache, source, targets)
        cache.layers[1].store.k_tail[targets] = cache.layers[1].store.k_tail[targets].roll(1, 2)

    monkeypatch.setattr(torch_witcert.CertifiedCache, "fork", wrong)
    with pytest.raises(SystemExit, match="token . differs with and without sharing"):
        run_example("shared_prefix", SHARED_PREFIX)


@pytest.mark.gpu
def test_cuda_graph_decode_equals_the_eager_loop(capsys):
    run_example("cuda_graph_decode", ["--toy", "--device", "cuda", "--new-tokens", "140"])
    output = capsys.readouterr().out
    assert "replayed 137 times: tokens equal, certificates bit for bit equal" in output


@pytest.mark.gpu
def test_the_other_examples_on_the_gpu(tmp_path, capsys):
    run_example("quickstart", ["--toy", "--device", "cuda", "--new-tokens", "12", "--out", str(tmp_path)])
    run_example("compiled_generate", ["--toy", "--device", "cuda", "--new-tokens", "12"])
    run_example("shared_prefix", ["--toy", "--device", "cuda", "--dtype", "float32", "--new-tokens", "12"])
    output = capsys.readouterr().out
    assert re.findall(r"\| *(?:total variation|output) \| +(\d+) \| +(\d+) \|", output) == [("88", "0"), ("88", "0")]
    assert "graphs compiled: 1\n" in output
