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
    rotary_dim = 2 * cos.shape[-1]
    if is_neox:
        first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    else:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
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
    faults: Tensor | None = None,
) -> Tensor:
    """`decode_rope.rope_append_decode`, same arguments and effects; `enable_pdl` is accepted and means nothing here.

    `faults` is an int64 `[2]` tensor: element 0 counts faulty rows, element 1 keeps the lowest one (see `record_faults`).
    """
    is_neox = getattr(cos_sin_cache, "is_neox", is_neox)
    table = getattr(cos_sin_cache, "cos_sin_cache", cos_sin_cache)
    pos = positions.long()
    max_position = None if table is None else table.shape[0]
    past_table = torch.zeros_like(pos, dtype=torch.bool) if table is None else pos >= max_position
    turns = (pos >= 0) & ~past_table
    kind = torch.where(past_table, POSITION, 0)
    value = pos
    q_new, k_new, v_new = q, k, v
    if table is not None:
        cos, sin = table[pos.clamp(0, max_position - 1)].unsqueeze(1).chunk(2, dim=-1)
        keep = turns[:, None, None]
        q_new = torch.where(keep, rotate(q, cos, sin, is_neox), q)
        k_new = None if k is None else torch.where(keep, rotate(k, cos, sin, is_neox), k)
    if k is not None:
        k_pages, v_pages = pages_first(k_cache, kv_layout), pages_first(v_cache, kv_layout)
        num_pages, page_size = k_pages.shape[:2]
        if slot_mapping is not None:
            page, offset, bad, what = _from_slots(slot_mapping, pos, num_pages, page_size)
        else:
            p = pos if cache_positions is None else cache_positions.long()
            page, offset, bad, what = _from_table(block_table, pos, p, tokens_per_request, num_pages, page_size)
        value = torch.where(kind == 0, what, value)
        kind = torch.where(kind == 0, bad, kind)
        v_new = v.clone()  # v may alias the memory k_out rewrites
        write = turns & (page >= 0) & (page < num_pages)
        k_pages[page[write], offset[write]] = k_new[write]
        v_pages[page[write], offset[write]] = v_new[write]
        if k_out is not None:
            k_out.copy_(k_new)
    if faults is not None:
        record_faults(faults, kind, value)
    out = q if q_out is None else q_out
    if q_new is not out:
        out.copy_(q_new)
    return out


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


def _from_table(block_table: Tensor, pos: Tensor, p: Tensor, per_request: int, num_pages: int, page_size: int):
    """(page, offset, fault kind, value) of each token, through the block table."""
    width = block_table.shape[1]
    column = torch.where((pos >= 0) & (p >= 0), p // page_size, -1)
    page = torch.full_like(column, -1)
    ok = (column >= 0) & (column < width)
    request = torch.arange(len(pos), device=pos.device) // per_request
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
