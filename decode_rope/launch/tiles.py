"""How many tokens and heads of one tensor a program of the prefill and rotation kernels takes."""

from typing import NamedTuple

_THREADS = 128  # of the kernels that use these tiles
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


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def tiles_of(
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
