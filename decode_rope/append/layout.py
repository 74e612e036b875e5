"""KV-cache layouts as strides: NHD, HND and flat caches, and any view of them, seen as [page, offset, head, element]."""

from typing import NamedTuple

from torch import Tensor

from .arguments import CACHE, ROW, Append, MLAAppend

KV_LAYOUTS = ("NHD", "HND")


class CacheView(NamedTuple):
    """A cache as the kernels address it: sizes, and strides in elements."""

    num_pages: int
    page_size: int
    num_heads: int
    head_dim: int
    stride_page: int
    stride_offset: int
    stride_head: int


def cache_view(cache: Tensor, kv_layout: str) -> CacheView:
    """See a 4-D NHD `[pages, page_size, Hkv, D]` or HND `[pages, Hkv, page_size, D]` cache, or a flat `[slots, Hkv, D]` one."""
    shape, stride = cache.shape, cache.stride()
    if len(shape) == 3:
        return CacheView(shape[0], 1, shape[1], shape[2], stride[0], 0, stride[1])
    offset, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    return CacheView(shape[0], shape[offset], shape[head], shape[3], stride[0], stride[offset], stride[head])


class Step(NamedTuple):
    """What a kernel steps along: a stride in elements, how many steps there are, the size of an element in bytes, the kind of
    tensor."""

    stride: int
    size: int
    itemsize: int
    kind: int


def append_steps(call: Append) -> dict[str, Step]:
    """Every dimension that a kernel steps along, by the name of the stride: tokens and heads of rows, pages, offsets and heads of
    caches. Zeros for a cache that is not written; a row that is None has the steps of its stand-in."""
    found = {}
    for name, role in call.ROLES.items():
        x = getattr(call, name)
        if role.kind == ROW:
            x = getattr(call, role.stand_in) if x is None else x
            letters, strides, sizes = "th", x.stride(), x.shape
        elif role.kind == CACHE and call.writes_cache:
            view = cache_view(x, call.kv_layout)
            letters, strides = "pth", (view.stride_page, view.stride_offset, view.stride_head)
            sizes = (view.num_pages, view.page_size, view.num_heads)
        elif role.kind == CACHE:
            letters, strides, sizes, x = "pth", (0, 0, 0), (0, 0, 0), call.q
        else:
            continue
        for i, letter in enumerate(letters):
            found[f"stride_{role.short}_{letter}"] = Step(strides[i], sizes[i], x.element_size(), role.kind)
    return found


def mla_steps(call: MLAAppend) -> dict[str, Step]:
    """`append_steps` of a latent append: tokens of all rows, heads of q, pages of caches and offsets in them."""
    q, out, k, kv = call.q_pe, call.q_pe if call.q_out is None else call.q_out, call.k_pe, call.kv_c
    rows = {"q_t": (q, 0), "q_h": (q, 1), "qo_t": (out, 0), "qo_h": (out, 1), "k_t": (k, 0), "kv_t": (kv, 0)}
    caches = {"c_p": (call.cache, 0), "c_t": (call.cache, 1)}
    if call.rope_cache is not None:
        caches |= {"rc_p": (call.rope_cache, 0), "rc_t": (call.rope_cache, 1)}
    return {
        f"stride_{name}": Step(x.stride(dim), x.shape[dim], x.element_size(), kind)
        for kind, found in ((ROW, rows), (CACHE, caches))
        for name, (x, dim) in found.items()
    }


def scale_steps(call: Append) -> dict[str, int]:
    """The strides of the scales of caches, in elements, by name: 0 where all pages, tokens or heads share one."""
    found = {}
    for row, short in (("k", "ks"), ("v", "vs")):
        out, scale = getattr(call, f"{row}_scale_out"), getattr(call, f"{row}_scale")
        if out is not None:
            strides = (out.stride(0), 0, out.stride(1)) if out.dim() == 2 else out.stride()
        elif scale is not None:
            strides = (0, 0, scale.stride(0) if scale.numel() > 1 else 0)
        else:
            continue
        found |= {f"stride_{short}_{letter}": stride for letter, stride in zip("pth", strides, strict=True)}
    return found


def index_shape(call: Append | MLAAppend) -> tuple[int, int]:
    """(number of columns, row stride) of a block table; (number of slots, 0) of a slot mapping; zeros without either."""
    if call.slot_mapping is not None:
        return call.slot_mapping.shape[0], 0
    return (0, 0) if call.block_table is None else (call.block_table.shape[1], call.block_table.stride(0))


def lowest_bit(n: int) -> int:
    """The largest power of two that divides `n`."""
    return n & -n


def span(x: Tensor) -> tuple[int, int]:
    """First byte of a view and the byte after its last one; equal for an empty view."""
    start = x.data_ptr()
    if x.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


def overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of a view share memory (an expanded dimension, or rows that run into each other)."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two views can touch the same byte. Exact for disjoint ranges, for dense views, and for views of equal strides (slices
    of one packed tensor); other interleaved views are taken to share only if they start at the same byte."""
    a_start, a_end = span(a)
    b_start, b_end = span(b)
    if a_start >= b_end or b_start >= a_end or a_start == b_start:
        return a_start == b_start and a_end > a_start and b_end > b_start
    size = a.element_size()
    delta, odd = divmod(b_start - a_start, size)
    if a.dtype == b.dtype and a.stride() == b.stride() and not odd:
        dims = [(s, n, m) for s, n, m in zip(a.stride(), a.shape, b.shape, strict=True) if s > 0 and max(n, m) > 1]
        return _meet(delta, sorted(dims, reverse=True))
    a_dense, b_dense = (x.numel() * x.element_size() == end - start for x, start, end in ((a, a_start, a_end), (b, b_start, b_end)))
    # A view's first and last bytes are its own, whatever lies between.
    a_holds_an_end = a_start <= b_start < a_end or a_start < b_end <= a_end
    b_holds_an_end = b_start <= a_start < b_end or b_start < a_end <= b_end
    return (a_dense and (a_holds_an_end or b_dense)) or (b_dense and b_holds_an_end) or bool(odd)


def _meet(delta: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether `delta` is a sum of index differences times strides. Inner dimensions reach less than one outer stride, so only
    the two nearest multiples of each stride can be part of it."""
    if not dims:
        return delta == 0
    (stride, n, m), *inner = dims
    nearest = delta // stride, delta // stride + 1
    return any(1 - m <= c <= n - 1 and _meet(delta - c * stride, inner) for c in nearest)
