"""Launch geometry: every choice covers every row once and can be compiled."""

import pytest

from decode_rope.kernels import rotation
from decode_rope.launch.decode import Geometry, check_geometry, decode_geometry
from decode_rope.launch.tiles import power_of_two

HEADS = [(32, 8, 128), (8, 1, 128), (64, 8, 64), (71, 1, 64), (1, 1, 2), (5, 1, 100), (9, 3, 64), (128, 8, 512), (7, 0, 128)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_choice_can_be_compiled(heads):
    for num_tokens in (1, 2, 7, 64, 65, 512, 5000):
        geometry = decode_geometry(num_tokens, *heads)
        check_geometry(geometry)
        assert geometry.tokens_q * geometry.heads_q * heads[2] // 2 <= 32 * 32 * geometry.num_warps or geometry.heads_q == 2


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_server_needs_few_kernels(heads):
    assert len({decode_geometry(num_tokens, *heads)[:6] for num_tokens in range(1, 2049)}) <= 3


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_launch_of_several_warps_fills_them(heads):
    """Few heads share a program with other tokens, of Q as of K and V, so that each thread has a whole access in each half of a
    head: 8 or 16 bytes of bf16. A launch of one warp takes one token a tile, whose index loads are scalar."""
    num_q_heads, num_kv_heads, head_dim = heads
    for num_tokens in (*range(1, 600, 7), 1024, 4096):
        geometry = decode_geometry(num_tokens, *heads)
        rows = [geometry.tokens_q * geometry.heads_q, geometry.tokens_kv * geometry.heads_kv]
        threads = 32 * geometry.num_warps
        if geometry.num_warps == 1:
            assert geometry.tokens_q == geometry.tokens_kv == 1
        elif power_of_two(head_dim // 2) < 4 * threads:
            assert rows[0] == rows[1] and rows[0] * power_of_two(head_dim // 2) in (4 * threads, 8 * threads)
        for tile, heads_of_tile, heads_there in zip(rows, geometry[1:4:2], (num_q_heads, max(num_kv_heads, 1)), strict=True):
            assert heads_of_tile == max(min(power_of_two(heads_there), tile), 2 // (tile // heads_of_tile))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_more_tokens_take_no_fewer_warps_and_no_more_shared_memory(heads):
    """What a launch asks for its neighbours, it asks while it is small; then it keeps the driver's split."""
    found = [decode_geometry(num_tokens, *heads) for num_tokens in (*range(1, 2049), 10**6)]
    warps, carveouts = [geometry.num_warps for geometry in found], [geometry.carveout for geometry in found]
    assert warps == sorted(warps) and carveouts == sorted(carveouts, reverse=True)
    assert carveouts[-1] == -1 and set(carveouts) <= {-1, 100}
    assert warps[-1] > 1


def test_both_powers_of_two_are_one():
    """The kernels know no other file, and no other file knows the kernels'."""
    assert [rotation.power_of_two(n) for n in range(600)] == [power_of_two(n) for n in range(600)]


def test_programs_count_the_tiles():
    geometry = Geometry(tokens_q=2, heads_q=8, tokens_kv=4, heads_kv=2, num_warps=4, pdl=False)
    assert geometry.programs(5, 20, 3) == 3 * 3 + 2 * (2 * 2)
    assert geometry.programs(5, 20, 0) == 9
