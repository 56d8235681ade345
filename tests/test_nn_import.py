"""What an import costs and needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torch_witcert


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing_heavy():
    loaded = run(
        "import sys, torch_witcert\n"
        "print([name for name in ('torch', 'transformers', 'triton', 'torchao') if name in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_public_names():
    assert set(torch_witcert.__all__) <= set(dir(torch_witcert))
    for name in torch_witcert.__all__:
        assert getattr(torch_witcert, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(torch_witcert, "no_such" + "_name")


def test_everything_works_on_the_cpu_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch, torch_witcert
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
assert "torch_witcert" not in ALL_ATTENTION_FUNCTIONS
config = LlamaConfig(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
model = torch_witcert.convert(LlamaForCausalLM(config).eval(), torch_witcert.CertifiedInt8Config(page_size=16))
assert "torch_witcert" in ALL_ATTENTION_FUNCTIONS
model.generate(torch.randint(1, 50, (1, 70)), max_new_tokens=4, min_new_tokens=4, pad_token_id=0)
print(torch_witcert.telemetry(model).total("code_reads"))
"""
    assert run(code).strip() == "3"
