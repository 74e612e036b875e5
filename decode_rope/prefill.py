"""`rope_append_prefill`: rotation and cache write for batches of long sequences."""

from torch import Tensor
from torch.compiler import is_compiling

from . import ops_prefill
from .dispatch_prefill import append
from .geometry_prefill import PrefillGeometry


def rope_append_prefill(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    cos_sin_cache,
    positions: Tensor,
    *,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    cache_positions: Tensor | None = None,
    tokens_per_request: int = 1,
    cu_seqlens_q: Tensor | None = None,
    is_neox: bool = True,
    kv_layout: str = "NHD",
    axis_map: Tensor | None = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    enable_pdl: bool | None = None,
    geometry: PrefillGeometry | None = None,
) -> Tensor:
    """Rotate `q` in place, and write rotated `k` and `v` into a paged cache, in one kernel launch, for batches
    of long sequences.

    `rope_append_decode` for a prefill, or a chunk of one: the same arguments, rows that are skipped, faults and
    bits. T tokens here leave exactly what T decode steps leave, however they are cut into calls. Its kernel is
    made for memory bandwidth, that of decode for latency; both are right for any number of tokens. Never waits
    for the device; safe in CUDA graphs.

    Args:
        q, k, v, k_cache, v_cache, cos_sin_cache, is_neox, kv_layout, slot_mapping, cache_positions, q_out,
            k_out: as in `rope_append_decode`. Give `k_out=k` to rotate k in place too, for attention over the
            live k. With `k_cache` and `v_cache` None, k is rotated into `k_out` and nothing is appended; v must
            then be None.
        positions: `[T]` int32 or int64, in tokens: row of the table, and by default the place in the sequence.
            Sequences may begin anywhere. Or `[axes, T]` with an axis map, any row stride: pair j turns by the
            position in row `axis_map[j]`. Row 0 decides what is padding (`< 0`) and is the default place in the
            sequence, so multi-axis models, whose positions run behind their tokens, pass `slot_mapping` or
            `cache_positions`. A position of any row in use that the table does not hold makes the row a bad
            one; negative ones of other rows are recorded as 4294967295.
        axis_map: int8 `[R/2]`, the row of `positions` of each pair (see `decode_rope.axes`); taken from a
            `RopeTable` that has one. Entries outside the rows count as the nearest one. Not needed, and not
            looked at, where positions are `[T]`.
        block_table: `[requests, max_pages]` int32 or int64. Its row r serves tokens `cu_seqlens_q[r]` …
            `cu_seqlens_q[r + 1] − 1`, or without `cu_seqlens_q` tokens `r · tokens_per_request` ….
        cu_seqlens_q: `[requests + 1]` int32 or int64, ascending. Read on the device only. Tokens before its
            first entry and from its last one on are padding rows. If it does not ascend, some tokens are not
            appended, and nothing worse happens.
        tokens_per_request: consecutive tokens that share a row of block_table, if `cu_seqlens_q` is not given.
        enable_pdl: as in `rope_append_decode`.
        geometry: a `PrefillGeometry` in place of the measured choice; changes time, never results.
    Returns:
        q, or `q_out` if given.
    Raises:
        TypeError, ValueError: an argument is at fault; it is named, and nothing has been written.
        RuntimeError: the first use of a configuration is inside a CUDA graph capture.
    Traffic:
        `itemsize · (2·Hq·D + 2·Hkv·(D + Dv)) + 4·R` bytes a token, and its index entries.
    Example:
        >>> import torch, decode_rope
        >>> q, k, v = torch.randn(5, 4, 64), torch.randn(5, 1, 64), torch.randn(5, 1, 64)
        >>> k_cache, v_cache = torch.zeros(8, 16, 1, 64), torch.zeros(8, 16, 1, 64)
        >>> angle = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
        >>> table = torch.cat([angle.cos(), angle.sin()], dim=1)
        >>> block_table = torch.tensor([[3, 5], [0, -1]], dtype=torch.int32)
        >>> cu_seqlens = torch.tensor([0, 3, 5])  # a chunk of three tokens, then one of two
        >>> positions = torch.tensor([15, 16, 17, 0, 1])
        >>> q = decode_rope.rope_append_prefill(
        ...     q, k, v, k_cache, v_cache, table, positions, block_table=block_table, cu_seqlens_q=cu_seqlens
        ... )
        >>> bool((v_cache[5, 1] == v[2]).all() and (v_cache[0, 1] == v[4]).all())
        True
    """
    cos_sin = cos_sin_cache
    if cos_sin is not None and not isinstance(cos_sin, Tensor):
        is_neox = getattr(cos_sin, "is_neox", is_neox)
        axis_map = getattr(cos_sin, "axis_map", None) if axis_map is None else axis_map
        cos_sin = getattr(cos_sin, "cos_sin_cache", cos_sin)
    if k is None and isinstance(k_cache, Tensor | None) and isinstance(v_cache, Tensor | None):
        k_cache = v_cache = None  # a KV-sharing layer may name its cache; it is not written
    run = ops_prefill.append if is_compiling() else append
    run(
        q, k, v, k_cache, v_cache, cos_sin, positions, block_table, slot_mapping, cache_positions, cu_seqlens_q, axis_map,
        q_out, k_out, tokens_per_request, is_neox, kv_layout, enable_pdl, geometry,
    )  # fmt: skip
    return q if q_out is None else q_out
