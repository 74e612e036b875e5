"""Launch geometry: every choice covers every row once and can be compiled."""

import pytest

from decode_rope.geometry import Geometry, check_geometry, decode_geometry, power_of_two
from decode_rope.kernels import rotation

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


def test_few_kv_heads_share_a_program_with_other_tokens_once_there_are_many():
    for heads, few, many in (((8, 1, 128), (1, 2), (8, 1)), ((9, 3, 64), (1, 4), (4, 4)), ((2, 2, 64), (1, 2), (8, 2))):
        for num_tokens, want in ((1, few), (78, few), (265, many)):
            assert decode_geometry(num_tokens, *heads)[2:4] == want


def test_warps_and_accesses_by_size():
    """(tokens, warps, elements an access) of Llama-3-8B: 100,000 and 350,000 elements are the borders."""
    for tokens, warps, elements in ((1, 1, 8), (16, 1, 8), (17, 4, 4), (56, 4, 4), (57, 4, 8), (1024, 4, 8)):
        geometry = decode_geometry(tokens, 32, 8, 128)
        assert geometry.num_warps == warps
        assert geometry.tokens_q * geometry.heads_q * 64 == elements * 32 * warps


def test_both_powers_of_two_are_one():
    """The kernels know no other file, and no other file knows the kernels'."""
    assert [rotation.power_of_two(n) for n in range(600)] == [power_of_two(n) for n in range(600)]


def test_programs_count_the_tiles():
    geometry = Geometry(tokens_q=2, heads_q=8, tokens_kv=4, heads_kv=2, num_warps=4, pdl=False)
    assert geometry.programs(5, 20, 3) == 3 * 3 + 2 * (2 * 2)
    assert geometry.programs(5, 20, 0) == 9


def test_shared_memory_is_left_alone_where_that_was_better():
    """In whole steps of H200; wide Q and large launches keep the driver's split."""
    for heads, tokens, carveout in (
        ((16, 8, 128), 64, 100),
        ((16, 8, 128), 128, -1),
        ((32, 8, 64), 8, 100),
        ((32, 8, 128), 1, -1),
    ):
        assert decode_geometry(tokens, *heads).carveout == carveout
