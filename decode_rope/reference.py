"""The package's meaning in plain PyTorch: the oracle of the tests, and what runs when the tensors are on the CPU.

Nothing here is fused or in place until the last lines of a function, and nothing is imported but torch. Formula: RoPE (Su et al.
2021, arXiv:2104.09864), pair (x1, x2) at position p and frequency f turns by the angle p·f:
`y1 = x1·cos − x2·sin`, `y2 = x2·cos + x1·sin`, in fp32, rounded once to the output dtype.
"""

import os
import threading

import torch
from torch import Tensor

POSITION, COLUMN, PAGE_ID, SLOT = 1, 2, 3, 4  # fault kinds; 0 is none
NO_RECORD = 2**63 - 1
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}  # the largest number a code stands for
_PAST_ANY = 2**32 - 1  # how a negative position of an axis other than the first is recorded
_counting = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child forked while another thread counts must not wait for it
    os.register_at_fork(after_in_child=_counting._at_fork_reinit)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool = True) -> Tensor:
    """Rotate the first R elements of the last dimension of `x`; the rest pass through bit for bit.

    Args:
        x: `[..., D]`, any float dtype.
        cos, sin: `[..., R/2]` fp32, broadcast against the leading dimensions of `x`.
        is_neox: pairs are (i, i + R/2) if true, else (2i, 2i + 1).
    Returns:
        A new tensor of the shape and dtype of `x`.
    """
    first, second = pair_slices(2 * cos.shape[-1], is_neox)
    wide = torch.promote_types(x.dtype, torch.float32)
    x1, x2 = x[..., first].to(wide), x[..., second].to(wide)
    y = x.clone()
    y[..., first] = (x1 * cos - x2 * sin).to(x.dtype)
    y[..., second] = (x2 * cos + x1 * sin).to(x.dtype)
    return y


def rope_append_decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    cos_sin_cache,
    positions: Tensor,
    **options,
) -> Tensor:
    """`decode_rope.rope_append_decode`: a prefill whose requests have `tokens_per_request` tokens each. The same arguments, effects
    and `faults` as `rope_append_prefill`, without `cu_seqlens_q`."""
    return rope_append_prefill(q, k, v, k_cache, v_cache, cos_sin_cache, positions, **options)


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
    norm=None,
    q_token_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_dtype: torch.dtype | None = None,
    enable_pdl: bool | None = None,
    faults: Tensor | None = None,
) -> Tensor:
    """`decode_rope.rope_append_prefill`, same arguments and effects; `enable_pdl` is accepted and means nothing here.

    `faults` is an int64 `[2]` tensor: element 0 counts faulty rows, element 1 keeps the lowest one (see `record_faults`).
    """
    is_neox = getattr(cos_sin_cache, "is_neox", is_neox)
    axis_map = getattr(cos_sin_cache, "axis_map", None) if axis_map is None else axis_map
    table = getattr(cos_sin_cache, "cos_sin_cache", cos_sin_cache)
    pos = positions.long()
    request = torch.arange(q.shape[0], device=q.device) // tokens_per_request
    if cu_seqlens_q is not None:
        request = sequence_of(cu_seqlens_q, q.shape[0])
        pos = torch.where(request >= 0, pos, -1)
    first = pos if pos.dim() == 1 else pos[0]  # axis 0 says what is padding, and by default where in the sequence
    bad = past_table(table, pos, axis_map)
    turns = (first >= 0) & (bad < 0)
    kind, value = torch.where(bad >= 0, POSITION, 0), bad
    cos_sin = None if table is None else angles(table, pos, axis_map)
    out = q if q_out is None else q_out
    wide = torch.float32 if out.dtype != q.dtype else q.dtype  # codes are made of fp32 numbers
    q_changed = changed_heads(q, cos_sin, is_neox, norm, "q_weight", q_token_scale, wide)
    q_new = torch.where(turns[:, None, None], q_changed, q.to(wide))
    k_new = k
    if k_out is not None:
        k_new = torch.where(turns[:, None, None], changed_heads(k, cos_sin, is_neox, norm, "k_weight", None, k.dtype), k)
    if k_cache is not None and k is not None:
        k_pages, v_pages = pages_first(k_cache, kv_layout), pages_first(v_cache, kv_layout)
        num_pages, page_size = k_pages.shape[:2]
        if slot_mapping is not None:
            page, offset, fault, what = _from_slots(slot_mapping, first, num_pages, page_size)
        else:
            p = first if cache_positions is None else cache_positions.long()
            page, offset, fault, what = _from_table(block_table, request, first, p, num_pages, page_size)
        value = torch.where(kind == 0, what, value)
        kind = torch.where(kind == 0, fault, kind)
        write = turns & (page >= 0) & (page < num_pages)
        places = page[write], offset[write]
        k_wide = changed_heads(k, cos_sin, is_neox, norm, "k_weight", None, k.dtype if k_cache.dtype == k.dtype else torch.float32)
        v_wide = rms_norm(v.float(), None, norm.eps, 0.0, 0, is_neox) if norm is not None and norm.v_norm else v
        store(k_pages, places, k_wide[write], k_scale, kv_dtype)
        store(v_pages, places, v_wide[write], v_scale, kv_dtype)  # before k_out, whose memory v may alias
    if k_out is not None:
        k_out.copy_(k_new)
    if faults is not None:
        record_faults(faults, kind, value)
    if out.dtype != q.dtype:
        out.view(torch.uint8).copy_(quantise(q_new, out.dtype, q_scale).view(torch.uint8))
    elif q_new is not out:
        out.copy_(q_new)
    return out


def rope_append_mla_decode(q_pe: Tensor, k_pe: Tensor, kv_c: Tensor, cache, cos_sin_cache, positions: Tensor, **options) -> Tensor:
    """`decode_rope.rope_append_mla_decode`: as `rope_append_mla_prefill`, without `cu_seqlens_q`."""
    return rope_append_mla_prefill(q_pe, k_pe, kv_c, cache, cos_sin_cache, positions, **options)


def rope_append_mla_prefill(
    q_pe: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    cache,
    cos_sin_cache,
    positions: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    kv_norm=None,
    q_out: Tensor | None = None,
    interleaved_in: bool = True,
    interleaved_out: bool | None = None,
    **options,
) -> Tensor:
    """`decode_rope.rope_append_mla_prefill`, same arguments and effects; `faults` as in `rope_append_prefill`.

    A latent append is an append of one KV head, whose key is `k_pe` and whose value is the normalised latent."""
    interleaved_in = not getattr(cos_sin_cache, "is_neox", not interleaved_in)
    interleaved_out = interleaved_in if interleaved_out is None else interleaved_out
    table = getattr(cos_sin_cache, "cos_sin_cache", cos_sin_cache)
    size = kv_c.shape[-1]
    k, latents = k_pe.reshape(len(q_pe), 1, k_pe.shape[-1]), kv_c.reshape(len(q_pe), 1, size)
    if kv_norm is not None:
        latents = rms_norm(latents.float(), kv_norm.weight, kv_norm.eps, 0.0, 0, True).to(kv_c.dtype)
    latent_cache, rope_cache = cache if isinstance(cache, tuple | list) else (cache[..., :size], cache[..., size:])
    caches = [x.unsqueeze(2) if x.dim() == 3 else x for x in (rope_cache, latent_cache)]
    q, out = q_pe, q_pe if q_out is None else q_out
    if table is not None and interleaved_in != interleaved_out:  # rows that turn are brought into the order that is written
        request = torch.zeros_like(positions) if cu_seqlens_q is None else sequence_of(cu_seqlens_q, len(q))
        turns = (positions >= 0) & (positions < len(table)) & (request >= 0)
        read, written = pair_slices(q.shape[-1], not interleaved_in), pair_slices(q.shape[-1], not interleaved_out)
        q, k = q.clone(), k.clone()
        for source, place in zip(read, written, strict=True):
            q[..., place] = torch.where(turns[:, None, None], q_pe[..., source], q_pe[..., place])
            k[..., place] = k_pe.reshape(k.shape)[..., source]
    return rope_append_prefill(
        q, k, latents, *caches, table, positions, cu_seqlens_q=cu_seqlens_q, is_neox=not interleaved_out, q_out=out, **options
    )


def store(pages: Tensor, places: tuple[Tensor, Tensor], rows: Tensor, scale: Tensor | None, kv_dtype: torch.dtype | None) -> None:
    """Write rows `[n, H, D]` to their places in `[pages, page_size, H, D]`: rounded to its dtype, or as codes of it.

    `scale`: none, one, or one for each head; or `[pages, page_size, H]` or `[slots, H]`, which is written.
    """
    dtype = kv_dtype if pages.dtype == torch.uint8 else pages.dtype
    if dtype not in LIMITS:
        pages[places] = rows.to(dtype)
        return
    rows = rows.float()
    if scale is not None and scale.dim() >= 2:
        own = row_scale(rows, dtype)
        scale = scale.unsqueeze(1) if scale.dim() == 2 else scale
        scale[places] = own
        scale = own.unsqueeze(-1)
    elif scale is not None:
        scale = scale.reshape(-1, 1)
    pages.view(torch.uint8)[places] = quantise(rows, dtype, scale).view(torch.uint8)


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """`round_to_nearest_even(clamp(x / scale))` of fp32 numbers, as float8_e4m3fn, float8_e5m2 or int8. NaN is 0x7F in the 8-bit
    floats and 0 in int8. `scale` broadcasts; None is 1."""
    limit = LIMITS[dtype]
    q = (x if scale is None else x / scale).clamp(-limit, limit)
    if dtype == torch.int8:
        return torch.where(q.isnan(), 0, q.round()).to(torch.int8)
    return torch.where(q.isnan(), 0x7F, q.to(dtype).view(torch.uint8)).view(dtype)


def row_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each row of fp32 numbers `[..., D]`: its largest magnitude over the largest code, and at least 2^-80. NaN does
    not count; infinity counts as the largest fp32 number."""
    largest = torch.where(x.isnan(), 0, x.abs()).amax(-1).clamp(max=torch.finfo(torch.float32).max)
    return (largest / torch.full_like(largest, LIMITS[dtype])).clamp(min=2.0**-80)


def dequantise(cache: Tensor, scale: Tensor | None, kv_layout: str = "NHD", kv_dtype: torch.dtype | None = None) -> Tensor:
    """The fp32 numbers `[pages, page_size, H, D]` that a cache holds, native or quantised, for attention in PyTorch. `cache`,
    `scale` and `kv_dtype` are those of an append."""
    pages = pages_first(cache, kv_layout)
    x = (pages.view(kv_dtype) if pages.dtype == torch.uint8 else pages).float()
    if scale is None:
        return x
    if scale.dim() >= 2:
        return x * (scale.unsqueeze(1) if scale.dim() == 2 else scale).unsqueeze(-1)
    return x * scale.reshape(-1, 1)


def changed_heads(x: Tensor, cos_sin, is_neox: bool, norm, weight: str, scale: Tensor | None, dtype) -> Tensor:
    """Heads `[T, H, D]` normalised, rotated and scaled, in fp32 until they are rounded to `dtype`.

    Args:
        cos_sin: cos and sin `[T, R/2]`, or None: nothing rotates.
        norm: a `QKNorm` or None; `weight` is the name of the one of its weights that counts.
        scale: fp32 `[T]` or None.
    """
    if norm is None and scale is None and dtype == x.dtype:  # elements that do not rotate keep their bits
        return x if cos_sin is None else rotate(x, *(a.unsqueeze(1) for a in cos_sin), is_neox)
    y = x.float()
    rotary_dim = 0 if cos_sin is None else 2 * cos_sin[0].shape[-1]
    steps = ["rotate"] if norm is None else ["norm", "rotate"] if norm.order == "before" else ["rotate", "norm"]
    for step in steps:
        if step == "norm":
            y = rms_norm(y, getattr(norm, weight), norm.eps, norm.weight_offset, rotary_dim, is_neox)
        elif cos_sin is not None:
            y = rotate(y, *(a.unsqueeze(1) for a in cos_sin), is_neox)
        if norm is not None and norm.rounded and step == steps[0] and (step == "norm" or cos_sin is not None):
            y = y.to(x.dtype).float()
    if scale is not None:
        y = y * scale[:, None, None]
    return y.to(dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, rotary_dim: int, is_neox: bool) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · (weight + weight_offset)` of fp32 heads `[..., D]`, in one fixed order of fp32 operations.

    Squares of the two members of a rotated pair are added first, then all pairs by a tree, and the squares of the tail by another.
    Squares are of `x · 2^-20`, so that large elements do not overflow.
    """
    first, second = pair_slices(rotary_dim, is_neox)
    scale = 2.0**-20
    squares = (x * scale) ** 2
    total = torch.zeros_like(x[..., :1])
    if rotary_dim:
        total = tree_sum(squares[..., first] + squares[..., second])
    if rotary_dim < x.shape[-1]:
        tail = tree_sum(squares[..., rotary_dim:])
        total = total + tail if rotary_dim else tail
    # Divisors are tensors, because PyTorch multiplies by the reciprocal of a number on the GPU. The root of a float64, rounded, is
    # the correctly rounded root of the fp32 number; PyTorch's own fp32 root on the CPU is not.
    mean = total / torch.full_like(total, x.shape[-1])
    root = torch.sqrt((mean + eps * scale * scale).double()).float()
    y = x * (torch.full_like(total, scale) / root)
    if weight is None:
        return y
    return y * (weight.float() if weight_offset == 0 else weight.float() + weight_offset)


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, kept: neighbours first, then neighbouring sums; zeros fill it up to a power of two."""
    size = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def pair_slices(rotary_dim: int, is_neox: bool) -> tuple[slice, slice]:
    """Where the first and the second members of all pairs are."""
    if is_neox:
        return slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    return slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)


def apply_rope(
    x: Tensor,
    cos_sin_cache,
    positions: Tensor | None = None,
    *,
    is_neox: bool = True,
    axis_map: Tensor | None = None,
    inverse: bool = False,
    out: Tensor | None = None,
    layout: str = "NHD",
    faults: Tensor | None = None,
) -> Tensor:
    """`decode_rope.apply_rope`, same arguments and effects; x may be float64 too. Differentiable by autograd
    where `out` is None."""
    is_neox = getattr(cos_sin_cache, "is_neox", is_neox)
    axis_map = getattr(cos_sin_cache, "axis_map", None) if axis_map is None else axis_map
    table = getattr(cos_sin_cache, "cos_sin_cache", cos_sin_cache)
    rows = x.unsqueeze(0) if x.dim() == 3 else x.transpose(1, 2) if layout == "HND" else x  # [B, S, H, D]
    batch, seq_len = rows.shape[:2]
    pos = torch.arange(seq_len, device=x.device) if positions is None else positions.long()
    if pos.dim() < x.dim() - 1:
        axis_map = None
    elif x.dim() == 3:
        pos = pos.unsqueeze(1)
    bad = past_table(table, pos, axis_map)
    turns = ((pos if axis_map is None else pos[0]) >= 0) & (bad < 0)
    cos, sin = angles(table, pos, axis_map)
    turned = rotate(rows, cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2), is_neox)
    y = torch.where(turns[..., None, None], turned, rows)
    y = y.squeeze(0) if x.dim() == 3 else y.transpose(1, 2) if layout == "HND" else y
    if faults is not None:
        bad = bad.expand(batch, seq_len).flatten()
        record_faults(faults, torch.where(bad >= 0, POSITION, 0), bad)
    return y if out is None else out.copy_(y)


def sequence_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Which of the sequences `cu_seqlens[r]` … `cu_seqlens[r + 1] − 1` each of `num_tokens` tokens is in; −1:
    none."""
    bounds = cu_seqlens.long()
    token = torch.arange(num_tokens, device=bounds.device)
    if len(bounds) < 2:
        return torch.full_like(token, -1)
    request = (torch.searchsorted(bounds, token, right=True) - 1).clamp(0, len(bounds) - 2)
    inside = (bounds[request] <= token) & (token < bounds[request + 1])
    return torch.where(inside, request, -1)


def past_table(table: Tensor | None, pos: Tensor, axis_map: Tensor | None) -> Tensor:
    """The first position of each row that `table` does not hold, or −1, also for padding rows. `pos` is
    `[...]`, or `[axes, ...]` with an axis map; axes that it does not use are not looked at."""
    if table is None:
        return torch.full_like(pos if axis_map is None or pos.dim() == 1 else pos[0], -1)
    max_position = table.shape[0]
    if axis_map is None or pos.dim() == 1:
        return torch.where(pos >= max_position, pos, -1)
    used = axis_map.long().clamp(0, len(pos) - 1)
    bad = torch.full_like(pos[0], -1)
    for axis in reversed(range(len(pos))):
        p = pos[axis]
        wrong = (used == axis).any() & ((p < 0) | (p >= max_position))
        bad = torch.where(wrong, torch.where(p < 0, _PAST_ANY, p), bad)
    return torch.where(pos[0] < 0, -1, bad)


def angles(table: Tensor, pos: Tensor, axis_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """cos and sin `[..., R/2]` of positions `[...]`, or of `[axes, ...]` with each pair's taken from its axis.
    Positions outside the table stand for its nearest row."""
    pos = pos.clamp(0, table.shape[0] - 1)
    cos, sin = table.chunk(2, dim=-1)
    if axis_map is None or pos.dim() == 1:
        return cos[pos], sin[pos]
    own = pos[axis_map.long().clamp(0, len(pos) - 1)].movedim(0, -1)
    pair = torch.arange(cos.shape[1], device=pos.device)
    return cos[own, pair], sin[own, pair]


def pages_first(cache: Tensor, kv_layout: str) -> Tensor:
    """A view `[pages, page_size, Hkv, D]` of a cache in any layout; a flat `[slots, Hkv, D]` cache has pages of one slot."""
    if cache.dim() == 3:
        return cache.unsqueeze(1)
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)


def _from_slots(slot_mapping: Tensor, pos: Tensor, num_pages: int, page_size: int):
    """(page, offset, fault kind, value) of each token; tokens past the end of `slot_mapping` have slot −1."""
    slot = pos.new_full(pos.shape, -1)
    slot[: slot_mapping.shape[0]] = slot_mapping
    page = torch.where(slot >= 0, slot // page_size, -1)
    too_far = (pos >= 0) & (slot >= num_pages * page_size)
    return page, slot % page_size, torch.where(too_far, SLOT, 0), slot


def _from_table(block_table: Tensor, request: Tensor, pos: Tensor, p: Tensor, num_pages: int, page_size: int):
    """(page, offset, fault kind, value) of each token, through its request's row of the block table."""
    width = block_table.shape[1]
    column = torch.where((pos >= 0) & (p >= 0), p // page_size, -1)
    page = torch.full_like(column, -1)
    ok = (column >= 0) & (column < width)
    page[ok] = block_table[request[ok], column[ok]].long()
    kind = torch.where(column >= width, COLUMN, torch.where(page >= num_pages, PAGE_ID, 0))
    return page, p % page_size, kind, torch.where(column >= width, column, page)


def record_faults(faults: Tensor, kind: Tensor, value: Tensor) -> None:
    """Add the rows with a nonzero kind to `faults[0]`, and keep the lowest of them in `faults[1]`.

    The record of a row is row·2^35 + kind·2^32 + value, with the value capped at 2^32 − 1.
    """
    row = torch.arange(len(kind), device=kind.device)
    record = (row << 35) + (kind << 32) + value.clamp(max=2**32 - 1)
    record = torch.where(kind != 0, record, NO_RECORD)
    if len(kind):
        with _counting:
            faults[0] += (kind != 0).sum()
            faults[1] = torch.minimum(faults[1], record.min())
