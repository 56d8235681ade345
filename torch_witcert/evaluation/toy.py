"""A tiny random Llama with a byte tokenizer: the examples at toy size, without any download."""

from __future__ import annotations

import torch


class ByteTokenizer:
    """One token for each byte of UTF-8; a printable character comes back for each."""

    eos_token_id = pad_token_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids, **options) -> str:
        return "".join(chr(token) if 32 <= token < 127 else "." for token in map(int, ids))


def load(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
    """Random Llama with 2 layers, 4 query and 2 KV heads of 64 channels, and its tokenizer; always the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        # Wide enough that attention is not uniform.
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return model.to(device, dtype).eval(), ByteTokenizer()
