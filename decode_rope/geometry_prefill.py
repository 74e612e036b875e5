"""How many tokens and heads one program of the prefill and plain kernels takes: one small function of the
sizes.

Results never depend on it; only time does. It does not depend on the number of tokens either, so one kernel
serves them all.
"""

from typing import NamedTuple

from .geometry import power_of_two

_WARPS = 4
_THREADS = 32 * _WARPS
# What a loop over heads keeps in flight per thread (H200: in two pieces 64 bytes beat 32 by 0-3 % in place, and lose 2 % with an
# output; of whole rows 32 beat 64 by 0-0.5 %).
_BYTES_PER_THREAD, _FEWER_BYTES_PER_THREAD = 64, 32
_MOST_HEADS, _MOST_HEADS_APART = 8, 4


class Tiles(NamedTuple):
    """A program takes `tokens` tokens of `heads · loop` heads, `heads` of them side by side. All are powers of
    two, tokens >= 2."""

    tokens: int
    heads: int
    loop: int

    def groups(self, num_heads: int) -> int:
        return -(-num_heads // (self.heads * self.loop))


class PrefillGeometry(NamedTuple):
    """`pdl`: programmatic dependent launch where the caller leaves it open."""

    q: Tiles
    kv: Tiles
    num_warps: int = _WARPS
    pdl: bool = True

    def programs(self, num_tokens: int, num_q_heads: int, num_kv_heads: int, writes_cache: bool) -> int:
        """Programs of a launch: Q tiles, K tiles and as many V tiles for every stretch of tokens that holds
        whole tiles of each. `num_q_heads` is 0 where Q stays as it is."""
        stretch = max(self.q.tokens, self.kv.tokens)
        q_tiles = stretch // self.q.tokens * self.q.groups(num_q_heads)
        k_tiles = stretch // self.kv.tokens * self.kv.groups(num_kv_heads)
        return -(-num_tokens // stretch) * (q_tiles + k_tiles * (2 if writes_cache else 1))


def check_geometry(geometry) -> None:
    """Raise a TypeError or ValueError for a geometry no kernel can be built with."""
    if not isinstance(geometry, PrefillGeometry):
        raise TypeError(f"geometry: expected a decode_rope.geometry_prefill.PrefillGeometry, got {type(geometry).__name__}")
    if any(n < 1 or n & (n - 1) for n in (*geometry.q, *geometry.kv, geometry.num_warps)):
        raise ValueError(f"geometry: expected powers of two, got {geometry}")
    if geometry.q.tokens < 2 or geometry.kv.tokens < 2:
        raise ValueError(f"geometry: expected tiles of at least two tokens, got {geometry}")


def takes_whole_rows(rotary_dim: int, itemsize: int, align: int) -> bool:
    """Whether a prefill that only appends, with no outputs of its own and no sequences to look up, takes the rotated part of a row
    in one piece, its halves exchanged between the threads of a warp, in small tiles. `align`: bytes an access may have.

    1.5 % (32/8/128) to 3 % (8/1/128) faster than pieces of both halves in one thread (H200, 131,072 tokens); 20 % slower with
    outputs, 8 to 14 % with sequences. The halves of longer rows, or of rows in narrower accesses or shorter than one, would meet in
    shared memory.
    """
    return rotary_dim == power_of_two(rotary_dim) and 8 <= rotary_dim <= 256 and itemsize == 2 and align == 16


def prefill_geometry(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    itemsize: int,
    aligned: bool = True,
    whole: bool = False,
) -> PrefillGeometry:
    """The launch of a prefill. `num_kv_heads` is 0 when only Q rotates, `rotary_dim` 0 when nothing does; `whole`:
    the kernel takes rows in one piece."""
    row = (head_dim, rotary_dim, itemsize, aligned, whole)
    q = plain_tiles(num_q_heads, *row)
    kv = plain_tiles(num_kv_heads, *row)._replace(loop=1) if num_kv_heads else q
    return PrefillGeometry(q, kv)


def plain_tiles(
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    itemsize: int,
    aligned: bool = True,
    whole: bool = False,
    own_output: bool = False,
    apart: bool = False,
) -> Tiles:
    """The tiles of one tensor: a 16-byte access a thread in each half of the rotated part, or in the `whole` of it, and heads side
    by side, since they are contiguous in memory and share their angles; fewer of them where they lie `apart`, further than tokens
    (H200, `[B, H, S, D]`: 4 tokens of 4 heads beat 2 of 8 by 6 %). Unaligned, a quarter of that: every element is an access of its
    own with a 64-bit address, and a whole tile of them spills."""
    width = power_of_two(head_dim)
    piece = power_of_two(rotary_dim or head_dim) // (1 if whole else 2) or 1
    elements = 16 // itemsize * _THREADS if aligned else _THREADS * 4 // itemsize
    rows = max(2, min(elements // piece, 4 * elements // width, 256))
    heads = min(num_heads & -num_heads, _MOST_HEADS_APART if apart else _MOST_HEADS, rows // 2)
    loop = 1
    moved = power_of_two(rotary_dim) if whole else width  # whole rows are of a Q in place, or not repeated
    most = _FEWER_BYTES_PER_THREAD if whole or own_output else _BYTES_PER_THREAD
    while aligned and 2 * loop * rows * moved * itemsize // _THREADS <= most and num_heads % (2 * loop * heads) == 0:
        loop *= 2
    return Tiles(rows // heads, heads, loop)
