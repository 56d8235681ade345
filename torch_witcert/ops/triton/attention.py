"""Launches of `certified_attention`: splits, and their merge (reference: `certified_attention_reference`)."""

from __future__ import annotations

import torch

from ..arithmetic import EXACT_TILE, OUTPUT_ROUNDING, Arithmetic, triton_block
from ..certificate import Field
from ..formats import StoreFormat
from ..radii import parse_radii
from .attend import QUERY_ROWS, attend_kernel
from .launch import CODE_OPERAND, format_parameters, on_device, unit_stride
from .merge import SPLIT_BLOCK, merge_kernel
from .records import RECORDS, STATISTICS

#: Scratch that one launch may use for page records; longer chunks of queries are cut into launches.
SCRATCH_BYTES = 128 * 2**20
LOG2_E = 1.4426950408889634


def launch_options(store_format: StoreFormat, page_size: int, dim_block: int) -> dict[str, int]:
    """Warps and pipeline stages of stage 1: one warp where its registers hold a tile of P * D entries.

    Formats that unpack, draw or scale values in registers have no room for 8192 entries in one warp.
    """
    key, value = store_format.key, store_format.value
    is_plain = not (store_format.is_dithered or key.per_token or key.grid.is_float or value.grid.is_float)
    is_plain = is_plain and not (value.is_grouped or value.is_exact)
    of_one_warp = 2048 if not is_plain else 8192 if dim_block <= 128 else 4096
    warps = page_size * dim_block // of_one_warp
    return {"num_warps": min(8, max(1, warps)), "num_stages": 2 if page_size * dim_block <= 16384 else 1}


def allocate_scratch(*shape: int, device: torch.device) -> torch.Tensor:
    """Uninitialized float32 scratch of one launch."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def certified_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    source_map: torch.Tensor,
    log_risk: torch.Tensor,
    sinks: torch.Tensor,
    outlier_channels: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    k_bypass: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    page_notes: torch.Tensor,
    page_keys: torch.Tensor,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
    sm_scale: float,
    window: int,
    softcap: float,
    pages_per_split: int,
    layer: int,
    radii: str,
    store_format: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention with its certificate on the tensors' device and current stream. Shapes: DESIGN section 5."""
    batch, heads, new_tokens, head_dim = q.shape
    kv_heads, page_size, pages_per_row = k.shape[1], k_tail.shape[2] // 2, page_table.shape[1]
    parsed = StoreFormat.parse(store_format)
    kinds = parse_radii(radii, parsed)
    group = heads // kv_heads
    code_splits = -(-pages_per_row // pages_per_split)
    arithmetic = Arithmetic.of(
        head_dim, page_size, pages_per_row, pages_per_split, new_tokens, q.dtype, parsed, softcap
    )
    out = q.new_empty(q.shape)
    lse = q.new_empty((batch, heads, new_tokens), dtype=torch.float32)
    certificate = q.new_empty((batch, heads, new_tokens, Field.COUNT), dtype=torch.float32)
    if batch == 0 or new_tokens == 0:
        return out, lse, certificate

    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    positions, lengths = positions.contiguous(), lengths.contiguous()
    page_table, source_map = page_table.contiguous(), source_map.contiguous()
    log_risk, sinks, outlier_channels = log_risk.contiguous(), sinks.contiguous(), outlier_channels.contiguous()
    splits = code_splits + 1
    row_bytes = batch * heads * (pages_per_row * RECORDS + splits * (head_dim + STATISTICS)) * 4
    chunk = max(1, min(new_tokens, SCRATCH_BYTES // row_bytes))
    scratch_blocks = -(-chunk * group // QUERY_ROWS)
    all_blocks = batch * kv_heads * scratch_blocks
    records = allocate_scratch(all_blocks, pages_per_row, RECORDS, QUERY_ROWS, device=q.device)
    statistics = allocate_scratch(all_blocks, STATISTICS, QUERY_ROWS, splits, device=q.device)
    accumulators = allocate_scratch(all_blocks, splits, QUERY_ROWS, head_dim, device=q.device)
    # Run-time numbers, so that a cache of another capacity needs no other build.
    splitting = (pages_per_split, code_splits)
    geometry = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "PAGE_SIZE": page_size,
    }
    parameters = format_parameters(parsed, head_dim)
    merge_block = min(SPLIT_BLOCK, max(32, triton_block(splits)))
    to_dtype_relative, to_dtype_absolute = OUTPUT_ROUNDING[q.dtype]
    with on_device(q):
        for first_token in range(0, new_tokens, chunk):
            chunk_tokens = min(chunk, new_tokens - first_token)
            blocks = -(-chunk_tokens * group // QUERY_ROWS)
            row_blocks = batch * kv_heads * blocks
            chunk_sizes = (window, new_tokens, first_token, chunk_tokens)
            attend_kernel[(row_blocks * splits,)](
                q,
                k,
                v,
                positions,
                lengths,
                page_table,
                source_map,
                log_risk,
                sinks,
                outlier_channels,
                k_codes,
                k_scale,
                k_zero,
                k_bypass,
                v_codes,
                v_scale,
                v_zero,
                page_notes,
                page_keys,
                k_tail,
                v_tail,
                accumulators,
                statistics,
                records,
                sm_scale * LOG2_E,
                softcap * LOG2_E,
                layer,
                *chunk_sizes,
                blocks,
                row_blocks,
                *q.stride()[:3],
                *k.stride()[:3],
                *v.stride()[:3],
                scratch_blocks,
                arithmetic.code_step,
                arithmetic.code_fixed_point,
                arithmetic.code_zero,
                arithmetic.exact_dot,
                arithmetic.score_steps,
                arithmetic.lost_mass,
                pages_per_row,
                *splitting,
                TILE=EXACT_TILE,
                HAS_WINDOW=window > 0,
                HAS_SOFTCAP=softcap > 0,
                HAS_SINKS=sinks.numel() > 0,
                STEP_RADIUS=kinds.step,
                RESIDUAL_RADIUS=kinds.residual,
                PROBABILISTIC_RADIUS=kinds.probabilistic,
                ROWS=QUERY_ROWS,
                OPERAND=CODE_OPERAND,
                **launch_options(parsed, page_size, parameters["DIM_BLOCK"]),
                **geometry,
                **parameters,
            )
            merge_kernel[(batch * kv_heads * chunk_tokens * group,)](
                q,
                positions,
                lengths,
                accumulators,
                statistics,
                out,
                lse,
                certificate,
                sm_scale * LOG2_E,
                *chunk_sizes,
                scratch_blocks,
                *q.stride()[:3],
                arithmetic.exact_dot,
                arithmetic.score_steps,
                arithmetic.lost_mass,
                arithmetic.sum_relative,
                arithmetic.code_values,
                arithmetic.exact_values,
                arithmetic.normaliser,
                to_dtype_relative,
                to_dtype_absolute,
                torch.finfo(q.dtype).max,
                arithmetic.weight_rounding / 2,
                *splitting,
                BLOCK=merge_block,
                ROWS=QUERY_ROWS,
                HEAD_DIM=head_dim,
                DIM_BLOCK=parameters["DIM_BLOCK"],
                num_warps=4,
                **geometry,
            )
    return out, lse, certificate
