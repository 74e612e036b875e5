"""Jitted pieces shared by the kernels: which bytes a tile reads, how a pair rotates, where a token's slot is.

A tile is a set of rows, one row per (token, head); `row_ptr` is a `[ROWS, 1]` block of pointers to the first element of each
row. When a tile holds one token, `token`, `pos` and everything derived from them are scalars, so the loads stay scalar;
otherwise they are `[ROWS, 1]` blocks. Offsets are 64-bit; only numbers of tiles, tokens and heads are not, until they are
multiplied by a stride.
"""

import inspect

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Fault kinds, as `faults.py` and `reference.py` number them.
POSITION = tl.constexpr(1)
COLUMN = tl.constexpr(2)
PAGE_ID = tl.constexpr(3)
SLOT = tl.constexpr(4)
# Under the interpreter, rounding to bf16 is done in integers, because the interpreter truncates.
SOFT = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Triton's eviction policy of most loads; as a default, Triton 3.6 takes no plain string.
NORMAL = tl.constexpr("")
# Metadata is of all layers. To keep it in the L2 cache while a layer's weights go by is worth 0.1-0.4 us a launch (H200, behind a
# projection of 50 MB).
EVICT = tl.constexpr("evict_last")


def kernel(function):
    """`triton.jit` for a kernel whose run-time parameters are never specialised: Triton then compiles it for their types alone."""
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(do_not_specialize=[p.name for p in parameters if p.annotation is not tl.constexpr])(function)


@triton.constexpr_function
def power_of_two(n):
    """The smallest power of two that is at least `n`. Not Triton's, because SGLang 0.5.23 replaces that by a function that kernels
    cannot call."""
    return 1 << max(n - 1, 0).bit_length()


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def divide(x, DIVISOR: tl.constexpr):
    """(x // DIVISOR, x % DIVISOR) of an int64, as if it had no sign: a negative one gives a quotient past any number of pages or
    columns, which the checks keep below 2^63 // DIVISOR."""
    u = x.to(tl.uint64, bitcast=True)
    if DIVISOR & (DIVISOR - 1) == 0:
        SHIFT: tl.constexpr = log2(DIVISOR)
        return (u >> SHIFT).to(tl.int64, bitcast=True), (u & (DIVISOR - 1)).to(tl.int64, bitcast=True)
    else:
        return (u // DIVISOR).to(tl.int64, bitcast=True), (u % DIVISOR).to(tl.int64, bitcast=True)


@triton.jit
def natural(x):
    """An integer that is not negative, as int64. Two 32-bit ones that are both extended by zeros are multiplied by one instruction,
    and the compiler knows that of program numbers; strides and sizes have to be told."""
    if x.dtype == tl.int32:
        return x.to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        return x.to(tl.int64)


@triton.jit
def in_range(x, end):
    """0 <= x < end, in one comparison; `end` is not negative."""
    if x.dtype == tl.int32 and end.dtype == tl.int32:
        return x.to(tl.uint32, bitcast=True) < end.to(tl.uint32, bitcast=True)
    else:
        return x.to(tl.int64).to(tl.uint64) < natural(end).to(tl.uint64)


@triton.jit
def steps(i, stride):
    """`i` steps of `stride`, neither of them negative, in 64 bits."""
    return natural(i) * natural(stride)


@triton.jit
def begin(PDL: tl.constexpr, PREFETCH: tl.constexpr):
    """The start of a decode step's kernel, which lets dependent kernels be scheduled and waits for earlier ones."""
    # A dependent kernel waits for our completion before it reads, so it may be scheduled from here on: worth 0.2-0.4 us at
    # small grids (H200).
    if PDL:
        if PDL == 1 or (PDL == 2 and PREFETCH):
            gdc_launch_dependents()
        if not PREFETCH:
            gdc_wait()
            if PDL == 2:
                gdc_launch_dependents()


@triton.jit
def issue_loads(FENCE: tl.constexpr):
    """Have the loads above made before those below. `ptxas` would move a load to where its result is used, behind the wait for
    another one, and make two round trips to memory of one; a barrier of a warp holds it back and costs no instruction."""
    if FENCE:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def row_pointers(ptr, offset, ALIGN: tl.constexpr):
    """`ptr + offset`, known to be ALIGN-byte aligned. The compiler keeps this hint on a sum and drops it on an argument; Triton 3.6
    needs it along both dimensions to load 16 bytes at once."""
    return tl.multiple_of(ptr + offset, [ALIGN, ALIGN])


@triton.jit
def rows(tensor, token, head, ALIGN: tl.constexpr):
    """Pointers to the rows of a tensor, which is (pointer, stride of tokens, stride of heads)."""
    ptr, stride_t, stride_h = tensor
    return row_pointers(ptr, steps(token, stride_t) + steps(head, stride_h), ALIGN)


@triton.jit
def slots(cache, page, offset, head, ALIGN: tl.constexpr):
    """Pointers to the rows of a cache, which is (pointer, strides of pages, of offsets in them, of heads)."""
    ptr, stride_p, stride_t, stride_h = cache
    return row_pointers(ptr, steps(page, stride_p) + steps(offset, stride_t) + steps(head, stride_h), ALIGN)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """`x`, which is fp32 or of `dtype` already, to `dtype`: to nearest even."""
    if x.dtype == dtype:
        return x
    elif SOFT and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, quiet_nan).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def widen(x):
    """To fp32, exactly. Of bf16 by its bits: the interpreter misreads subnormals, and `ptxas` takes two instructions where every
    other element needs one."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def load_pairs(
    row_ptr, row_ok, R: tl.constexpr, NEOX: tl.constexpr, STREAM: tl.constexpr = False, WHOLE: tl.constexpr = False,
    EVICT: tl.constexpr = NORMAL,
):  # fmt: skip
    """The two members of every rotated pair, each `[ROWS, power_of_two(R/2)]`. STREAM, here and below: more bytes go by than a
    cache holds. WHOLE: take NeoX rows in one piece, whose halves then meet through shuffles; R is a power of two."""
    FIRST_OUT: tl.constexpr = "evict_first" if STREAM else EVICT
    HALF: tl.constexpr = R // 2
    P: tl.constexpr = power_of_two(HALF)
    if NEOX and WHOLE:
        d = tl.arange(0, R)[None, :]
        x = tl.load(row_ptr + d, mask=row_ok, other=0.0, eviction_policy=FIRST_OUT)
        return tl.split(tl.trans(tl.reshape(x, [x.shape[0], 2, P]), 0, 2, 1))
    elif NEOX:
        d = tl.arange(0, P)[None, :]
        ok = row_ok & (d < HALF)
        x1 = tl.load(row_ptr + d, mask=ok, other=0.0, eviction_policy=FIRST_OUT)
        x2 = tl.load(row_ptr + HALF + d, mask=ok, other=0.0, eviction_policy=FIRST_OUT)
        return x1, x2
    else:
        d = tl.arange(0, 2 * P)[None, :]
        x = tl.load(row_ptr + d, mask=row_ok & (d < R), other=0.0, eviction_policy=FIRST_OUT)
        return tl.split(tl.reshape(x, [x.shape[0], P, 2]))


@triton.jit
def store_pairs(
    row_ptr, row_ok, y1, y2, R: tl.constexpr, NEOX: tl.constexpr, STREAM: tl.constexpr = False, WHOLE: tl.constexpr = False
):  # fmt: skip
    """Pairs in fp32, or of the row's dtype already, to the places that `load_pairs` reads; rounded once."""
    y1 = round_to(y1, row_ptr.dtype.element_ty)
    y2 = round_to(y2, row_ptr.dtype.element_ty)
    MODIFIER: tl.constexpr = ".cs" if STREAM else ""
    HALF: tl.constexpr = R // 2
    P: tl.constexpr = power_of_two(HALF)
    if NEOX and WHOLE:
        d = tl.arange(0, R)[None, :]
        y = tl.reshape(tl.trans(tl.join(y1, y2), 0, 2, 1), [y1.shape[0], R])
        tl.store(row_ptr + d, y, mask=row_ok, cache_modifier=MODIFIER)
    elif NEOX:
        d = tl.arange(0, P)[None, :]
        ok = row_ok & (d < HALF)
        tl.store(row_ptr + d, y1, mask=ok, cache_modifier=MODIFIER)
        tl.store(row_ptr + HALF + d, y2, mask=ok, cache_modifier=MODIFIER)
    else:
        d = tl.arange(0, 2 * P)[None, :]
        y = tl.reshape(tl.join(y1, y2), [y1.shape[0], 2 * P])
        tl.store(row_ptr + d, y, mask=row_ok & (d < R), cache_modifier=MODIFIER)


@triton.jit
def load_span(
    row_ptr, row_ok, START: tl.constexpr, N: tl.constexpr, STREAM: tl.constexpr = False, EVICT: tl.constexpr = NORMAL
):  # fmt: skip
    """Elements START … START + N of every row, `[ROWS, power_of_two(N)]`, in their own dtype."""
    d = tl.arange(0, power_of_two(N))[None, :]
    FIRST_OUT: tl.constexpr = "evict_first" if STREAM else EVICT
    return tl.load(row_ptr + START + d, mask=row_ok & (d < N), other=0.0, eviction_policy=FIRST_OUT)


@triton.jit
def store_span(row_ptr, row_ok, x, START: tl.constexpr, N: tl.constexpr, STREAM: tl.constexpr = False):
    """Elements in fp32, or of the row's dtype already, to the places that `load_span` reads; rounded once."""
    x = round_to(x, row_ptr.dtype.element_ty)
    MODIFIER: tl.constexpr = ".cs" if STREAM else ""
    d = tl.arange(0, power_of_two(N))[None, :]
    tl.store(row_ptr + START + d, x, mask=row_ok & (d < N), cache_modifier=MODIFIER)


@triton.jit
def copy_span(src_row_ptr, dst_row_ptr, src_ok, dst_ok, START: tl.constexpr, N: tl.constexpr):
    store_span(dst_row_ptr, dst_ok, load_span(src_row_ptr, src_ok, START, N), START, N)


@triton.jit
def load_cos_sin(
    cos_sin_ptr, pos, max_position, head, R: tl.constexpr, ALIGN: tl.constexpr, BT: tl.constexpr, EVICT: tl.constexpr = NORMAL
):  # fmt: skip
    """cos and sin of `pos`, `[ROWS, power_of_two(R/2)]`; a position outside the table reads its first row. EVICT, here and below:
    the eviction policy of loads.

    The pointers span the full tile: a `[1, P]` load broadcast afterwards would go through shared memory and a barrier.
    """
    HALF: tl.constexpr = R // 2
    P: tl.constexpr = power_of_two(HALF)
    d = tl.arange(0, P)[None, :]
    row = tl.where(in_range(pos, max_position), pos, 0)
    if BT == 1:
        ptr = tl.multiple_of(cos_sin_ptr + row * R, ALIGN) + head * 0
    else:
        ptr = row_pointers(cos_sin_ptr, row * R, ALIGN)
    if P == HALF:
        return tl.load(ptr + d, eviction_policy=EVICT), tl.load(ptr + HALF + d, eviction_policy=EVICT)
    else:
        ok = (head >= 0) & (d < HALF)
        c = tl.load(ptr + d, mask=ok, other=0.0, eviction_policy=EVICT)
        return c, tl.load(ptr + HALF + d, mask=ok, other=0.0, eviction_policy=EVICT)


@triton.jit
def turns(pos, max_position, head):
    """Whether a row's token has a position in the table, `[ROWS, 1]`."""
    # Adding a block first keeps the compare a block: the interpreter cannot splat a scalar i1.
    return in_range(pos + head * 0, max_position)


@triton.jit
def rotate_pairs(x1, x2, c, s, dtype: tl.constexpr):
    """(x1·c − x2·s, x2·c + x1·s) in fp32, each rounded to `dtype` once."""
    a = widen(x1)
    b = widen(x2)
    return round_to(a * c - b * s, dtype), round_to(b * c + a * s, dtype)


@triton.jit
def tile_rows(
    block, group, num_tokens, H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, FULL: tl.constexpr = False
):  # fmt: skip
    """The tokens, heads and validity of a tile of BT tokens by BH heads (heads innermost). FULL: there is no group of fewer heads,
    which the compiler does not see by itself."""
    r = tl.arange(0, BT * BH)[:, None]
    head = natural(group * BH + r % BH)
    exists = head >= 0 if FULL else head < H
    if BT == 1:
        return natural(block), head, exists
    else:
        token = natural(block * BT + r // BH)
        return token, head, exists & (token < num_tokens)


@triton.jit
def load_index(ptr, token, count, EVICT: tl.constexpr = NORMAL):
    """`ptr[token]` as int64; tokens past `count` read nothing and give −1."""
    return tl.load(ptr + token, mask=token < count, other=-1, eviction_policy=EVICT).to(tl.int64)


@triton.jit
def load_per_token(ptr, token, num_tokens, BT: tl.constexpr, EVICT: tl.constexpr = NORMAL):
    """`ptr[token]` as int64 from a tensor of one element a token; −1 past the last token, where only tiles of several reach."""
    if BT == 1:
        return tl.load(ptr + token, eviction_policy=EVICT).to(tl.int64)
    else:
        return load_index(ptr, token, num_tokens, EVICT)


@triton.jit
def locate(
    token, pos, where, num_tokens, max_position,
    ROTARY: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, TOKENS_PER_REQUEST: tl.constexpr,
    OWN_CACHE_POSITIONS: tl.constexpr, BT: tl.constexpr, EVICT: tl.constexpr = NORMAL,
):  # fmt: skip
    """Where a token's K and V go: (page, offset in page, may be written, fault kind, offending value).

    `where` is (cache positions, block table or slots, its width or their number, row stride, number of pages). Reads nothing
    outside the index tensors whatever they hold; a fault kind of 0 is no fault.
    """
    cache_positions_ptr, index_ptr, index_len, stride_index, num_pages = where
    if PAGED:
        p = pos
        if OWN_CACHE_POSITIONS:
            p = load_per_token(cache_positions_ptr, token, num_tokens, BT, EVICT)
        column, offset = divide(p, PAGE)
        has_entry = in_range(column, index_len)
        if OWN_CACHE_POSITIONS:
            has_entry = has_entry & (pos >= 0)
        request, _of_request = divide(token, TOKENS_PER_REQUEST)
        entry = index_ptr + steps(request, stride_index) + column
        page = tl.load(entry, mask=has_entry, other=-1, eviction_policy=EVICT)
        wide = (pos >= 0) & (p >= 0) & (column >= index_len)
        kind = tl.where(wide, COLUMN, tl.where(page >= num_pages, PAGE_ID, 0))
        value = tl.where(wide, column, page)
    else:
        slot = load_index(index_ptr, token, index_len, EVICT)
        page, offset = divide(slot, PAGE)
        kind = tl.where((pos >= 0) & (slot >= 0) & (page >= num_pages), SLOT, 0)
        value = slot
    writes = in_range(page, num_pages)
    if not PAGED:
        writes = writes & (pos >= 0)
    if ROTARY:
        kind = tl.where(pos >= max_position, POSITION, kind)
        value = tl.where(pos >= max_position, pos, value)
        writes = writes & in_range(pos, max_position)
    return natural(page), offset, writes.to(tl.int32), kind, value


@triton.jit
def report_faults(faults_ptr, token, kind, value, group, head, BT: tl.constexpr):
    """Count each token whose `kind` is not 0 once and keep the lowest such row. Costs good rows one predicate.

    The record is one word, so it cannot mix two rows: row · 2^35 + kind · 2^32 + value, the value capped at 2^32 − 1.
    """
    record = (token << 35) + (kind.to(tl.int64) << 32) + tl.minimum(value, 0xFFFFFFFF)
    if BT == 1:
        if (kind != 0) & (group == 0):
            tl.atomic_add(faults_ptr, 1, sem="relaxed")
            tl.atomic_min(faults_ptr + 1, record, sem="relaxed")
    else:
        bad = (head == 0) & (kind != 0)
        tl.atomic_add(faults_ptr + token * 0, 1, mask=bad, sem="relaxed")
        tl.atomic_min(faults_ptr + 1 + token * 0, record, mask=bad, sem="relaxed")
