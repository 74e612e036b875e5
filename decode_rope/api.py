"""The public functions. Each checks its arguments once per configuration, then launches a plan it keeps."""

from torch import Tensor
from torch.compiler import is_compiling

from . import ops
from .dispatch import check_call, decode_plans
from .plan import Call

_PLANS = decode_plans()


def rope_append_decode(
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
    is_neox: bool = True,
    kv_layout: str = "NHD",
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Rotate `q` in place, and write rotated `k` and `v` into a paged cache, in one kernel launch.

    For the decode step of a server: one token per request (or `tokens_per_request`, for speculative decoding). Safe in CUDA
    graphs: positions, block table and slots are read from memory at every replay. A configuration's first call compiles its
    kernel, so make it, or `DecodeRope.warmup`, before a capture. On CPU tensors `decode_rope.reference` runs instead.

    Rows that must not be written are skipped: `positions < 0` (padding: q passes through unrotated), and slots or pages `< 0` or
    past the end of a short `slot_mapping` (q is rotated). A position past the table, a page past the cache, a slot past its
    capacity or a block-table column past its width writes nothing either and is counted; see `decode_rope.check_faults`. If two
    tokens have one slot, each head of it holds one of them.

    Args:
        q: `[T, Hq, D]` fp16, bf16 or fp32; last dimension contiguous, other strides free. Rotated in place unless `q_out` is given.
        k: `[T, Hkv, D]`, dtype of q. Not modified unless `k_out` is `k`. With `v`, may be None: rotate q only, write no cache.
        v: `[T, Hkv, Dv]`, dtype of q. May share memory with k.
        k_cache: NHD `[pages, page_size, Hkv, D]`, HND `[pages, Hkv, page_size, D]`, or flat `[slots, Hkv, D]` (pages of one
            token); dtype of k, any strides with the last dimension contiguous. The addressed slots are written.
        v_cache: likewise with Dv, with strides of its own.
        cos_sin_cache: fp32 `[max_position, R]`, cosines then sines, contiguous, R even and at most D (the first R elements of a
            head rotate); or a `RopeTable`, whose own pairing then holds; or None: nothing rotates (NoPE), K and V are written.
        positions: `[T]` int32 or int64, in tokens. Row of the table, and by default the place in the sequence.
        block_table: `[requests, max_pages]` int32 or int64, any row stride. Token t goes to page
            `block_table[t // tokens_per_request, p // page_size]`, offset `p % page_size`, with `p = cache_positions[t]`.
        slot_mapping: `[at most T]` int32 or int64: `page · page_size + offset`. Exactly one of the two, or neither if k is None.
        cache_positions: `[T]` int32 or int64, with block_table: place in the sequence where it is not `positions`.
        tokens_per_request: consecutive tokens that share a row of block_table.
        is_neox: pairs are (i, i + R/2) if true (NeoX, Llama), else (2i, 2i + 1) (GPT-J).
        kv_layout: "NHD" or "HND"; says nothing about flat caches.
        q_out, k_out: outputs for rotated q and k, shapes and dtypes of q and k. `k_out` may be `k`, unless v shares its memory.
        enable_pdl: programmatic dependent launch (NVIDIA compute capability 9.0 and later). None: where measurements favour it.
            Everything is read after the wait for earlier kernels.
    Returns:
        q, or `q_out` if given.
    Raises:
        TypeError, ValueError: an argument is at fault; it is named, and nothing has been written.
        RuntimeError: the first use of a configuration is inside a CUDA graph capture.
    Traffic:
        `itemsize · (2·Hq·D + 2·Hkv·(D + Dv)) + 4·R` bytes a token, and its index entries.
    Example:
        >>> import torch, decode_rope
        >>> q, k, v = torch.randn(2, 4, 64), torch.randn(2, 1, 64), torch.randn(2, 1, 64)
        >>> k_cache, v_cache = torch.zeros(8, 16, 1, 64), torch.zeros(8, 16, 1, 64)
        >>> table = decode_rope.RopeTable.build(64, 4096)
        >>> block_table = torch.tensor([[3, 5], [0, -1]], dtype=torch.int32)
        >>> positions = torch.tensor([17, 2])
        >>> q = decode_rope.rope_append_decode(q, k, v, k_cache, v_cache, table, positions, block_table=block_table)
        >>> bool((v_cache[5, 1] == v[0]).all())
        True
    """
    if is_compiling():
        return ops.rope_append_decode(
            q, k, v, k_cache, v_cache, cos_sin_cache, positions, block_table=block_table, slot_mapping=slot_mapping,
            cache_positions=cache_positions, tokens_per_request=tokens_per_request, is_neox=is_neox, kv_layout=kv_layout,
            q_out=q_out, k_out=k_out, enable_pdl=enable_pdl,
        )  # fmt: skip
    cos_sin = cos_sin_cache
    if cos_sin is not None and not isinstance(cos_sin, Tensor):
        is_neox = getattr(cos_sin, "is_neox", is_neox)
        cos_sin = getattr(cos_sin, "cos_sin_cache", cos_sin)
    paged = slot_mapping is None
    index = block_table if paged else slot_mapping
    if q_out is None and k_out is None and cache_positions is None and k is not None and cos_sin is not None:
        given = (q, k, v, k_cache, v_cache, cos_sin, positions, index)
        pattern = paged
    else:
        if k is None and isinstance(k_cache, Tensor | None) and isinstance(v_cache, Tensor | None):
            k_cache = v_cache = None  # a KV-sharing layer may name its cache; it is not written
        everything = (q, k, v, k_cache, v_cache, cos_sin, positions, index, cache_positions, q_out, k_out)
        given = tuple([x for x in everything if x is not None])
        pattern = (paged, *[x is None for x in everything])
    # The types, because 1 == True: what the checks refuse once must not pass later.
    flags = (pattern, tokens_per_request, is_neox, kv_layout, enable_pdl, type(tokens_per_request), type(is_neox))
    plan = _PLANS.find(flags, given) if paged or block_table is None else None
    if plan is None or not plan.submit(q, k, v, k_cache, v_cache, cos_sin, positions, index, cache_positions, q_out, k_out):
        call = Call(
            q, k, v, k_cache, v_cache, cos_sin, positions, index, paged, cache_positions, q_out, k_out,
            tokens_per_request, is_neox, kv_layout, enable_pdl,
        )  # fmt: skip
        check_call(call, block_table=block_table, slot_mapping=slot_mapping)
        _PLANS.run_checked(call, flags, given)
    return q if q_out is None else q_out
