"""Launches of `certified_attention`: code pages, exact tokens, merge (reference: `certified_attention_reference`)."""

from __future__ import annotations

import torch

from ..arithmetic import OUTPUT_ROUNDING, Arithmetic, exact_tile, triton_block
from ..certificate import Field
from ..formats import StoreFormat
from ..radii import parse_radii
from .attend import QUERY_ROWS, attend_kernel
from .launch import CODE_OPERAND, format_parameters, on_device, unit_stride
from .merge import PAGE_BLOCK as MERGE_BLOCK
from .merge import merge_kernel
from .radii import PAGE_BLOCK as RADII_BLOCK
from .radii import radii_kernel
from .records import RECORDS, STATISTICS

#: Scratch that one launch may use for page records; longer chunks of queries are cut into launches.
SCRATCH_BYTES = 128 * 2**20
LOG2_E = 1.4426950408889634


def launch_options(entries: int, exact: bool) -> dict[str, int]:
    """Warps and pipeline stages of stage 1 for tiles of P * D entries."""
    if exact:
        return {"num_warps": 4, "num_stages": 2 if entries <= 16384 else 1}
    return {"num_warps": 8 if entries > 16384 else 4, "num_stages": 2 if entries <= 16384 else 1}


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
    row_bytes = batch * heads * ((pages_per_row + 1) * RECORDS + (code_splits + 1) * (head_dim + STATISTICS)) * 4
    chunk = max(1, min(new_tokens, SCRATCH_BYTES // row_bytes))
    scratch_blocks = -(-chunk * group // QUERY_ROWS)
    all_blocks = batch * kv_heads * scratch_blocks
    records = allocate_scratch(all_blocks, pages_per_row + 1, RECORDS, QUERY_ROWS, device=q.device)
    statistics = allocate_scratch(all_blocks, code_splits + 1, STATISTICS, QUERY_ROWS, device=q.device)
    accumulators = allocate_scratch(all_blocks, code_splits + 1, head_dim, QUERY_ROWS, device=q.device)
    exact_norms = allocate_scratch(all_blocks, QUERY_ROWS, device=q.device)
    # Run-time numbers, so that a cache of another capacity needs no other build.
    capacity = (pages_per_row, pages_per_split, code_splits)
    geometry = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "PAGE_SIZE": page_size,
    }
    parameters = format_parameters(parsed, head_dim)
    of_keys = ("HEAD_DIM", "DIM_BLOCK", "K_MAX_ERROR", "K_ASYMMETRIC", "K_PER_TOKEN", "OUTLIERS", "OUTLIER_BLOCK")
    key_parameters = {name: parameters[name] for name in of_keys}
    page_blocks = -(-pages_per_row // RADII_BLOCK)
    merge_block = min(MERGE_BLOCK, max(128, triton_block(pages_per_row)))
    entries = page_size * parameters["DIM_BLOCK"]
    to_dtype_relative, to_dtype_absolute = OUTPUT_ROUNDING[q.dtype]
    with on_device(q):
        for first_token in range(0, new_tokens, chunk):
            chunk_tokens = min(chunk, new_tokens - first_token)
            blocks = -(-chunk_tokens * group // QUERY_ROWS)
            chunk_sizes = (window, new_tokens, first_token, chunk_tokens, blocks)
            radii_kernel[(batch * kv_heads * blocks * page_blocks,)](
                q,
                positions,
                lengths,
                page_table,
                log_risk,
                outlier_channels,
                k_scale,
                k_zero,
                page_notes,
                records,
                sm_scale * LOG2_E,
                *chunk_sizes,
                scratch_blocks,
                *q.stride()[:3],
                arithmetic.code_step,
                arithmetic.code_zero,
                arithmetic.exact_dot,
                arithmetic.score_steps,
                pages_per_row,
                page_blocks,
                STEP_RADIUS=kinds.step,
                RESIDUAL_RADIUS=kinds.residual,
                PROBABILISTIC_RADIUS=kinds.probabilistic,
                ROWS=QUERY_ROWS,
                BLOCK=RADII_BLOCK,
                num_warps=4,
                **geometry,
                **key_parameters,
            )
            for exact in (False, True):
                programs = batch * kv_heads * blocks * (1 if exact else code_splits)
                attend_kernel[(programs,)](
                    q,
                    k,
                    v,
                    positions,
                    lengths,
                    page_table,
                    source_map,
                    sinks,
                    outlier_channels,
                    k_codes,
                    k_scale,
                    k_bypass,
                    v_codes,
                    v_scale,
                    v_zero,
                    page_keys,
                    k_tail,
                    v_tail,
                    accumulators,
                    statistics,
                    records,
                    exact_norms,
                    sm_scale * LOG2_E,
                    softcap * LOG2_E,
                    layer,
                    *chunk_sizes,
                    *q.stride()[:3],
                    *k.stride()[:3],
                    *v.stride()[:3],
                    scratch_blocks,
                    arithmetic.exact_dot,
                    arithmetic.score_steps,
                    *capacity,
                    EXACT=exact,
                    TILE=exact_tile(head_dim),
                    HAS_SOFTCAP=softcap > 0,
                    HAS_SINKS=sinks.numel() > 0,
                    ROWS=QUERY_ROWS,
                    OPERAND=CODE_OPERAND,
                    **launch_options(entries, exact),
                    **geometry,
                    **parameters,
                )
            merge_kernel[(batch * kv_heads * chunk_tokens * group,)](
                positions,
                lengths,
                page_table,
                source_map,
                page_notes,
                accumulators,
                statistics,
                records,
                exact_norms,
                out,
                lse,
                certificate,
                *chunk_sizes[:-1],
                scratch_blocks,
                arithmetic.sum_relative,
                arithmetic.code_values,
                arithmetic.exact_values,
                arithmetic.normaliser,
                to_dtype_relative,
                to_dtype_absolute,
                torch.finfo(q.dtype).max,
                arithmetic.lost_mass,
                arithmetic.weight_rounding / 2,
                *capacity,
                BLOCK=merge_block,
                ROWS=QUERY_ROWS,
                HEAD_DIM=head_dim,
                DIM_BLOCK=parameters["DIM_BLOCK"],
                num_warps=4 if merge_block <= 256 else 8,
                **geometry,
            )
    return out, lse, certificate
