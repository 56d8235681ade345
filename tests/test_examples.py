"""Every example runs at toy size, prints what it promises and has --help."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

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


@pytest.mark.gpu
def test_cuda_graph_decode_equals_the_eager_loop(capsys):
    run_example("cuda_graph_decode", ["--toy", "--device", "cuda", "--new-tokens", "140"])
    output = capsys.readouterr().out
    assert "replayed 137 times: tokens equal, certificates bit for bit equal" in output


@pytest.mark.gpu
def test_quickstart_and_compiled_generate_on_the_gpu(tmp_path, capsys):
    run_example("quickstart", ["--toy", "--device", "cuda", "--new-tokens", "12", "--out", str(tmp_path)])
    run_example("compiled_generate", ["--toy", "--device", "cuda", "--new-tokens", "12"])
    output = capsys.readouterr().out
    assert re.findall(r"\| *(?:total variation|output) \| +(\d+) \| +(\d+) \|", output) == [("88", "0"), ("88", "0")]
    assert "graphs compiled: 1\n" in output
