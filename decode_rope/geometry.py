"""How many heads and tokens one program takes, how many warps it has, and whether PDL pays: one small function of the sizes.

Results never depend on it; only time does.
"""

from typing import NamedTuple


class Geometry(NamedTuple):
    """A tile is `tokens · heads` rows; Q tiles and K/V tiles are shaped apart. Rows of one tile must be at least two."""

    tokens_q: int
    heads_q: int
    tokens_kv: int
    heads_kv: int
    num_warps: int
    pdl: bool

    def programs(self, num_tokens: int, num_q_heads: int, num_kv_heads: int) -> int:
        """Programs of a launch: the Q tiles, then as many K tiles as V tiles."""
        q_tiles = -(-num_tokens // self.tokens_q) * -(-num_q_heads // self.heads_q)
        kv_tiles = -(-num_tokens // self.tokens_kv) * -(-num_kv_heads // self.heads_kv)
        return q_tiles + 2 * kv_tiles


def check_geometry(geometry) -> None:
    """Raise a TypeError or ValueError for a geometry no kernel can be built with."""
    if not isinstance(geometry, Geometry):
        raise TypeError(f"geometry: expected a decode_rope.geometry.Geometry, got {type(geometry).__name__}")
    if any(n < 1 or n & (n - 1) for n in geometry[:5]):
        raise ValueError(f"geometry: expected powers of two, got {geometry}")
    for tokens, heads in (geometry[:2], geometry[2:4]):
        if tokens * heads < 2:
            raise ValueError(f"geometry: expected tiles of at least two rows, got {geometry}; set the heads to 2")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def decode_geometry(num_tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> Geometry:
    """The launch of a decode step. `num_kv_heads` is 0 when only Q rotates."""
    warps = 4
    # 8 elements a thread in each half of a head: one 16-byte access of bf16.
    rows = max(2, 8 * 32 * warps // power_of_two(head_dim // 2))
    many = num_tokens > 64
    tokens_q, heads_q = _tile(num_q_heads, rows, many)
    tokens_kv, heads_kv = _tile(max(num_kv_heads, 1), rows, many)
    return Geometry(tokens_q, heads_q, tokens_kv, heads_kv, warps, pdl=num_tokens <= 256)


def _tile(num_heads: int, rows: int, many_tokens: bool) -> tuple[int, int]:
    """(tokens, heads): all heads that fit, and several tokens only where there are many, so that few tokens stay scalar."""
    heads = min(power_of_two(num_heads), rows)
    tokens = rows // heads if many_tokens else 1
    return (tokens, heads) if tokens * heads >= 2 and (tokens > 1 or heads > 1) else (1, 2)
