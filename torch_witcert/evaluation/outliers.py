"""Why outlier channels must be left out of the range: WitCert's controlled experiment, and what outlier pairs cost in memory.

Random keys with a few massive RoPE pairs are stored per token and group of 32 channels. The massive pairs are kept exact, once with
scales that still cover them and once, as the library does it, with scales that do not.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace

import torch

from ..ops.formats import KeyFormat, StoreFormat, ValueFormat
from ..ops.quantize import outlier_mask
from ..ops.storage import HEAD_DIMS, StoreShape
from ..policy.outliers import choose_outlier_channels
from .arguments import whole_number
from .capture import AttentionInputs
from .coverage import BOUNDS, RADII, certify, layer_reads, read_radius, request_log_risk
from .layouts import KeyLayout, StoredKeys, store_keys
from .output import print_table, write_json

#: Query and KV heads of the experiment, and queries.
HEADS, KV_HEADS, QUERIES = 8, 2, 32
PAGE_SIZE = 16
BOUND = "e-form/sub-gaussian"
#: Outlier pairs of the memory account.
ACCOUNT_PAIRS = (0, 4, 8, 16)


@dataclass(frozen=True)
class BypassFigures:
    """What keeping the massive pairs exact does to the certificate of a read.

    Args:
        radius: median sub-Gaussian radius of a token.
        certificate: median of WitCert's certificate (e-form).
        violations: reads whose true total variation exceeds the certificate; must be 0.
    """

    radius: float
    certificate: float
    violations: int


def massive_inputs(
    tokens: int, head_dim: int, pairs: int, factor: float, device: torch.device | str = "cpu", seed: int = 0
) -> AttentionInputs:
    """Standard normal queries, keys and values; `pairs` RoPE pairs of each KV head's keys, drawn at random, are `factor` times larger.

    Returns:
        float32 inputs of one row; the scores have the standard deviation 1 without the factor.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, heads, count, head_dim, generator=generator)
        for heads, count in ((HEADS, QUERIES), (KV_HEADS, tokens), (KV_HEADS, tokens))
    )
    drawn = torch.rand(KV_HEADS, head_dim // 2, generator=generator).argsort(-1)[:, :pairs]
    massive = torch.cat([drawn, drawn + head_dim // 2], -1).to(torch.int32)
    k = torch.where(outlier_mask(massive, head_dim)[:, None], k * factor, k)
    return AttentionInputs(q.to(device), k.to(device), v.to(device), head_dim**-0.5)


def without_exclusion(stored: StoredKeys, k: torch.Tensor, layout: KeyLayout) -> StoredKeys:
    """Keys that were stored without outlier pairs, with their outlier channels put back exact and every scale as it was.

    No format of the library stores that. Norms of K - K^ still hold the outlier channels, so residual radii say nothing here.

    Args:
        stored: keys in the same layout without outlier pairs.
        k: the exact keys.
        layout: with outlier pairs.
    """
    channels = choose_outlier_channels(k, None, layout.key.outlier_pairs)
    keys = torch.where(outlier_mask(channels, k.shape[-1])[:, None], k.to(stored.keys.dtype), stored.keys)
    return replace(stored, layout=layout, keys=keys, outlier_channels=channels)


def measure_bypass(
    tokens: int, head_dim: int, pairs: int, factor: float, device: torch.device | str = "cpu"
) -> dict[str, BypassFigures]:
    """Figures without bypass, with bypass but not out of the range, and with both.

    Args:
        tokens: S, a multiple of PAGE_SIZE.
        head_dim: D, a multiple of 32.
        pairs: massive RoPE pairs, all of them kept exact.
        factor: how many times larger they are.
        device: to compute on.

    Returns:
        by "stored", "exact, in the range" and "exact, out of the range".
    """
    reads = layer_reads(0, massive_inputs(tokens, head_dim, pairs, factor, device))
    plain, bypassing = (KeyLayout(PAGE_SIZE, KeyFormat("int8", "token", m, "stream")) for m in (0, pairs))
    stored = store_keys(reads.k, 0, plain)
    cases = {
        "stored": stored,
        "exact, in the range": without_exclusion(stored, reads.k, bypassing),
        "exact, out of the range": store_keys(reads.k, 0, bypassing),
    }
    log_risk = request_log_risk(1, HEADS)
    figures = {}
    for name, case in cases.items():
        found = certify(reads, case, {BOUND: BOUNDS[BOUND]}, log_risk)
        radius = read_radius(reads, case, RADII["sub-gaussian"], log_risk)
        figures[name] = BypassFigures(
            radius=float(radius[radius > 0].median()),
            certificate=float(found[BOUND].median()),
            violations=int((found["true"] > found[BOUND]).sum()),
        )
    return figures


@dataclass(frozen=True)
class ServingAccount:
    """Memory of a cache with keys scaled per token, as paged serving needs it: a token's scale does not depend on later tokens.

    Args:
        pairs: m, outlier pairs of the keys.
        key_bytes: of one token in one KV head, without notes and page key.
        page_bytes: of one token in one KV head with values, notes and page key.
        capacity: tokens that fit into the memory of one token of a 16-bit cache.
    """

    pairs: int
    key_bytes: float
    page_bytes: float
    capacity: float


def serving_account(head_dim: int, page_size: int) -> list[ServingAccount]:
    """The account for each number of outlier pairs, bf16 model, dithered int8 keys and values."""
    rows = []
    for pairs in ACCOUNT_PAIRS:
        key = KeyFormat("int8", "token", pairs, "stream")
        shape = StoreShape(
            1, 1, 1, page_size, head_dim, torch.bfloat16, StoreFormat(key, ValueFormat("int8", "stream"))
        )
        page_bytes = shape.page_nbytes() / page_size
        key_bytes = KeyLayout(page_size, key).key_bytes(head_dim, torch.bfloat16)
        rows.append(ServingAccount(pairs, key_bytes, page_bytes, 4 * head_dim / page_bytes))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=whole_number(PAGE_SIZE), default=2048, help=f"a multiple of {PAGE_SIZE} (2048)"
    )
    parser.add_argument(
        "--head-dim", type=int, default=128, choices=[d for d in HEAD_DIMS if d % 32 == 0], help="D (128)"
    )
    parser.add_argument("--pairs", type=whole_number(1), default=4, help="massive RoPE pairs (4)")
    parser.add_argument("--factor", type=whole_number(1), default=22, help="how many times larger they are (22)")


@torch.no_grad()
def run(options: argparse.Namespace) -> dict:
    """Run the command; returns what it printed, as data."""
    figures = measure_bypass(options.tokens, options.head_dim, options.pairs, options.factor, options.device)
    before = figures["stored"]
    print(
        f"{options.pairs} RoPE pairs {options.factor} times larger than the other {options.head_dim // 2 - options.pairs}, "
        f"normal keys, {options.tokens} tokens; medians over {HEADS * QUERIES} reads"
    )
    print_table(
        ["massive pairs", "radius", "less by", "certificate (e-form)", "less by", "violations"],
        [
            [
                name,
                f"{row.radius:.4f}",
                f"{before.radius / row.radius:.3f}x",
                f"{row.certificate:.4f}",
                f"{before.certificate / row.certificate:.3f}x",
                row.violations,
            ]
            for name, row in figures.items()
        ],
    )
    account = serving_account(options.head_dim, PAGE_SIZE)
    print(
        f"\nbytes of a token in one KV head, D = {options.head_dim}, bf16 model, keys scaled per token; pages of {PAGE_SIZE}"
    )
    print_table(
        ["outlier pairs", "key", "key, value, notes", "tokens in the memory of a 16-bit cache"],
        [[row.pairs, f"{row.key_bytes:g}", f"{row.page_bytes:g}", f"{row.capacity:.3f}x"] for row in account],
    )
    result = {
        "command": "outliers",
        "tokens": options.tokens,
        "head_dim": options.head_dim,
        "pairs": options.pairs,
        "factor": options.factor,
        "bypass": {name: asdict(row) for name, row in figures.items()},
        "account": [asdict(row) for row in account],
    }
    write_json(options.json, result)
    return result
