"""Latent appends leave what the reference leaves, byte for byte, whatever is asked of them and however their work is divided."""

import pytest
import torch
from latents import CACHES, ROWS, LatentSpec, build, check, prepare, run, without_known

from decode_rope import rope_append_mla_decode
from decode_rope.api.mla import CALLS
from decode_rope.launch import mla
from decode_rope.launch.mla import MLAGeometry

pytestmark = pytest.mark.kernel
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = LatentSpec([5, 0, 17, 9, 3], [[1, 2, 3, 4, 5], [0, 2, 4, 6, 7], [7, 6, 5, 4, 3], [2, 3, 6, 5, 4], [4, 3, 2, 1, 0]])
NORM = PLAIN.but(norm=torch.bfloat16)
RAGGED = PLAIN.but(
    positions=[2, 3, 0, 1, 2, 3, 4, 9], block_table=[[1, 5, 6], [2, 4, 6], [7, 0, 3], [3, 0, 1]], cu_seqlens=[0, 2, 2, 7, 8]
)
SLOTS = PLAIN.but(block_table=None, slots=[3, 9, 31, 16, 8])
SPECS = {
    "plain": PLAIN,
    "one token": PLAIN.but(positions=[6], block_table=[[3, 1]]),
    "one head": PLAIN.but(heads=1),
    "NeoX": PLAIN.but(interleaved_in=False, interleaved_out=False),
    "interleaved in, halves out": PLAIN.but(interleaved_out=False),
    "halves in, interleaved out": PLAIN.but(interleaved_in=False),
    "interleaved in, halves out, q_out": PLAIN.but(interleaved_out=False, q_out=True),
    "NoPE": PLAIN.but(nope=True),
    "NoPE, q_out": PLAIN.but(nope=True, q_out=True),
    "NoPE, halves out": PLAIN.but(nope=True, interleaved_out=False),
    "q_out": PLAIN.but(q_out=True),
    "norm": NORM,
    "norm, fp32 weight": PLAIN.but(norm=torch.float32),
    "norm, fp16": PLAIN.but(norm=torch.float16, dtype=torch.float16),
    "norm, fp32": PLAIN.but(norm=torch.float32, dtype=torch.float32),
    "norm, NoPE": NORM.but(nope=True),
    "norm, latents of 24": NORM.but(latent_dim=24),
    "norm, latents of 1": NORM.but(latent_dim=1),
    "sizes of 6 and 10": NORM.but(latent_dim=6, rope_dim=10),
    "keys wider than latents": NORM.but(latent_dim=8, rope_dim=64),
    "pairs of 2": PLAIN.but(rope_dim=2),
    "two tokens a request": PLAIN.but(positions=[3, 4, 7, 8], block_table=[[1, 2, 3], [4, 5, 6]], tokens_per_request=2),
    "cache_positions": PLAIN.but(cache_positions=[1, 2, 15, 0, 7]),
    "slots": SLOTS,
    "slots, 64 bits": SLOTS.but(index_dtype=torch.int64, positions_dtype=torch.int32),
    "pages of 3": PLAIN.but(page_size=3, num_pages=12, positions=[5, 0, 14, 9, 3]),
    "unaligned": NORM.but(shift=1),
    "unaligned, halves out, q_out": PLAIN.but(shift=3, interleaved_out=False, q_out=True),
    "ragged": RAGGED,
    "ragged, norm, q_out": RAGGED.but(norm=torch.bfloat16, q_out=True),
    "ragged, halves out": RAGGED.but(interleaved_out=False),
    "ragged, cache_positions": RAGGED.but(cache_positions=[0, 1, 4, 5, 6, 7, 8, 11]),
    "ragged, slots": RAGGED.but(block_table=None, slots=[3, 9, 31, 16, 8, 4, 5, 6]),
    "three sequences": RAGGED.but(cu_seqlens=[0, 1, 5, 8], block_table=[[1, 5, 6], [2, 4, 6], [7, 0, 3]]),
    "five sequences": RAGGED.but(
        cu_seqlens=[0, 1, 3, 5, 7, 8], block_table=[[1, 5, 6], [2, 4, 1], [7, 0, 3], [3, 5, 2], [6, 4, 0]]
    ),
    "one sequence": RAGGED.but(positions=[2, 3, 0, 1, 4, 5, 6, 9], cu_seqlens=[0, 8], block_table=[[2, 4, 6]]),
    **{f"rows: {name}": NORM.but(rows=name) for name in ROWS},
    **{f"cache: {name}": NORM.but(cache=name) for name in CACHES if name != "slots"},
    "cache: slots": SLOTS.but(cache="slots", norm=torch.bfloat16),
    "cache: slots through a block table": NORM.but(cache="slots", positions=[1, 0, 4, 3, 0]),
    **{f"{dtype}": PLAIN.but(dtype=dtype) for dtype in FLOATS},
}
TILES = {
    "four warps": MLAGeometry(2, 2, 4, 4, 0),
    "more rows than there are": MLAGeometry(8, 4, 8, 1, 0),
    "one token of a part of the heads": MLAGeometry(1, 2, 2, 1, 0),
    "tokens apart from heads": MLAGeometry(4, 1, 1, 1, 0),
}


@pytest.fixture(autouse=True)
def no_plans():
    CALLS.clear()
    yield
    CALLS.clear()


@pytest.mark.parametrize("name", SPECS)
def test_an_option_leaves_what_the_reference_leaves(name, device):
    check(build(SPECS[name], device))


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", ["plain", "interleaved in, halves out", "norm", "NoPE, q_out", "ragged, norm, q_out", "slots"])
def test_results_do_not_depend_on_the_geometry(name, tiles, device, monkeypatch):
    monkeypatch.setattr(mla, "mla_geometry", lambda *_: TILES[tiles])
    check(build(SPECS[name], device))


@pytest.mark.parametrize("name", ["plain", "norm", "cache: pair", "NoPE", "slots", "q_out", "unaligned", "two tokens a request"])
def test_a_prepared_op_leaves_the_same(name, device):
    case = build(SPECS[name], device)
    op = prepare(case)
    check(case, without_known(op))
    check(case, without_known(lambda **arguments: op.bind(**arguments)()))


def test_calls_of_one_configuration_and_other_memory(device):
    """The second call finds the plan of the first one; the third finds its packed launch, where there is a driver."""
    for seed in (0, 1, 0):
        check(build(NORM.but(seed=seed), device))


def test_latents_of_deepseek_do_not_depend_on_the_batch(device):
    """A token's slot has the same bits whatever its batch: with 1 and 3 tokens a warp takes one, with 70 four warps take four."""
    sizes = (1, 3, 70) if device.type == "cuda" else (1, 3)
    tokens = list(range(max(sizes)))
    spec = LatentSpec(
        tokens, [[i] for i in tokens], heads=16, rope_dim=64, latent_dim=512, num_pages=len(tokens), page_size=128,
        max_position=128, norm=torch.bfloat16,
    )  # fmt: skip
    whole = build(spec, device)
    outcomes = []
    for size in sizes:
        case = whole.clone()
        arguments = case.arguments()
        cut = {name: arguments[name][:size] for name in ("q_pe", "k_pe", "kv_c", "positions", "block_table")}
        rope_append_mla_decode(**(arguments | cut))
        outcomes.append((case["cache"][0, 0].view(torch.int16), case["q_pe"][0].view(torch.int16)))
    assert all(torch.equal(a, b) for outcome in outcomes for a, b in zip(outcome, outcomes[0], strict=True))


def test_no_tokens(device):
    case = build(PLAIN.but(positions=[], block_table=[[1]], q_out=True), device)
    assert run(case.clone()).returned.shape == (0, 3, 16)
    check(case)
