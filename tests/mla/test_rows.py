"""Rows that must not be written, faults, and reads and writes that stay inside the tensors."""

import pytest
import torch
from guarded_memory import SEGMENTATION_FAULT, signal_of, walled
from latents import LatentCase, LatentSpec, build, check, run, run_reference

import decode_rope
from decode_rope.reference import COLUMN, NO_RECORD, PAGE_ID, POSITION, SLOT

GOOD = LatentSpec([5, 0, 17], [[1, 2, 3, 4, 5], [6, 2, 4, 6, 7], [7, 6, 5, 4, 0]], norm=torch.bfloat16)
FLAT = GOOD.but(block_table=None, slots=[3, 9, 31])
BIG = 2**40
# name -> (call, tokens whose slots are written, tokens whose q is rotated, fault of a token: (token, kind, value))
ROWS = {
    "padding": (GOOD.but(positions=[5, -1, 17]), [0, 2], [0, 2], None),
    "a very negative position": (GOOD.but(positions=[5, -BIG, 17]), [0, 2], [0, 2], None),
    "all padding": (GOOD.but(positions=[-1, -1, -1]), [], [], None),
    "a page below 0": (GOOD.but(block_table=[[1, -1, 3, 4, 5], [6, 2, 4, 6, 7], [7, 6, 5, 4, 0]]), [1, 2], [0, 1, 2], None),
    "a slot below 0": (FLAT.but(slots=[3, -1, 31]), [0, 2], [0, 1, 2], None),
    "past the end of the slots": (FLAT.but(slots=[3, 9]), [0, 1], [0, 1, 2], None),
    "no slots": (FLAT.but(slots=[]), [], [0, 1, 2], None),
    "padding with a slot": (FLAT.but(positions=[5, -1, 17]), [0, 2], [0, 2], None),
    "a position past the table": (GOOD.but(positions=[5, 64, 17]), [0, 2], [0, 2], (1, POSITION, 64)),
    "a position past the table, in slots": (FLAT.but(positions=[5, 64, 17]), [0, 2], [0, 2], (1, POSITION, 64)),
    "a position far past the table": (GOOD.but(positions=[BIG, 0, 17]), [1, 2], [1, 2], (0, POSITION, 2**32 - 1)),
    "a column past the table": (GOOD.but(positions=[5, 0, 20]), [0, 1], [0, 1, 2], (2, COLUMN, 5)),
    "a page past the cache": (
        GOOD.but(block_table=[[1, 8, 3, 4, 5], [6, 2, 4, 6, 7], [7, 6, 5, 4, 0]]), [1, 2], [0, 1, 2], (0, PAGE_ID, 8)
    ),
    "a slot past the cache": (FLAT.but(slots=[3, 9, 32]), [0, 1], [0, 1, 2], (2, SLOT, 32)),
    "NoPE: positions have no end but the columns": (GOOD.but(nope=True, positions=[5, 0, 999]), [0, 1], [], (2, COLUMN, 249)),
    "NoPE: padding": (GOOD.but(nope=True, positions=[5, -1, 17]), [0, 2], [], None),
    "cache positions below 0": (GOOD.but(cache_positions=[5, -1, 17]), [0, 2], [0, 1, 2], None),
    "before and behind the sequences": (
        GOOD.but(positions=[5, 0, 3, 17, 2], cu_seqlens=[1, 2, 4]), [1, 2, 3], [1, 2, 3], None
    ),
    "no sequences": (GOOD.but(cu_seqlens=[0]), [], [], None),
    "empty sequences": (GOOD.but(cu_seqlens=[0, 0, 3, 3], positions=[5, 0, 17]), [0, 1, 2], [0, 1, 2], None),
}  # fmt: skip


def slot_of(case: LatentCase, token: int) -> tuple[int, int]:
    """(page, offset) of a token, worked out one token at a time."""
    spec = case.spec
    if spec.slots is not None:
        return divmod(spec.slots[token], spec.page_size)
    request = token // spec.tokens_per_request
    if spec.cu_seqlens is not None:
        bounds = spec.cu_seqlens
        request = next(r for r in range(len(bounds) - 1) if bounds[r] <= token < bounds[r + 1])
    p = (spec.cache_positions or spec.positions)[token]
    return spec.block_table[request][p // spec.page_size], p % spec.page_size


@pytest.mark.anywhere
@pytest.mark.parametrize("q_out", [False, True], ids=["in place", "q_out"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_must_not_be_written_are_not(name, q_out, device):
    spec, written, rotated, fault = ROWS[name]
    before = build(spec.but(q_out=q_out), device)
    after = run(before.clone())
    places = [slot_of(before, token) for token in written]
    for old, new in zip(before.caches, after.caches, strict=True):
        changed = (old.view(torch.int16) != new.view(torch.int16)).any(-1).nonzero().tolist()
        assert sorted(map(tuple, changed)) == sorted(places)
    for token in range(len(spec.positions)):
        same = torch.equal(after.returned[token].view(torch.int16), before["q_pe"][token].view(torch.int16))
        assert same == (token not in rotated)
    count, record = after.faults
    if fault is None:
        assert (count, record) == (0, NO_RECORD)
    else:
        row, kind, value = fault
        assert (count, record) == (1, (row << 35) + (kind << 32) + value)


@pytest.mark.kernel
@pytest.mark.parametrize("cache", ["pages", "pair"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_those_of_the_reference(name, cache, device):
    spec = ROWS[name][0].but(cache=cache)
    check(build(spec, device))
    check(build(spec.but(interleaved_out=False, q_out=True), device))


@pytest.mark.anywhere
def test_faults_are_raised_when_asked_for(device):
    case = build(GOOD.but(positions=[5, 64, 70]), device)
    run(case)
    with pytest.raises(IndexError, match=r"2 faulty row.*row 1: position 64 is past the end"):
        decode_rope.check_faults()
    decode_rope.check_faults()


@pytest.mark.kernel
def test_two_tokens_with_one_slot_leave_one_of_them(device):
    case = build(FLAT.but(slots=[9, 9, 9], latent_dim=64), device)
    got = run(case.clone())
    alone = [
        run_reference(build_with(case, [slot if i == token else -1 for i, slot in enumerate([9, 9, 9])])) for token in range(3)
    ]
    words = got["cache"][2, 1].view(torch.int64)
    candidates = torch.stack([one["cache"][2, 1].view(torch.int64) for one in alone])
    assert (candidates == words).any(0).all()


def build_with(case: LatentCase, slots: list[int]) -> LatentCase:
    other = case.clone()
    other["slot_mapping"].copy_(torch.tensor(slots))
    return other


@pytest.mark.kernel
@pytest.mark.skipif(torch.cuda.is_available(), reason="walls are for the memory of the CPU")
@pytest.mark.parametrize("end", [False, True], ids=["before", "behind"])
def test_no_byte_outside_the_tensors_is_touched(end, device):
    """Odd sizes, one row after another, index tensors of nonsense."""
    wild = [-BIG, -1, 0, 3, 7, 8, 63, 64, BIG]
    specs = [spec.but(latent_dim=6, rope_dim=10, q_out=True) for spec, *_ in ROWS.values() if spec.slots != []]
    specs += [
        GOOD.but(
            positions=wild, block_table=[wild[i:] + wild[:i] for i in range(9)], index_dtype=torch.int64, latent_dim=6, nope=nope
        )
        for nope in (False, True)
    ]
    specs += [FLAT.but(positions=wild, slots=wild[::-1], index_dtype=torch.int64, latent_dim=5)]
    specs += [GOOD.but(positions=[1] * 5, block_table=[[1, 2]] * 4, cu_seqlens=[0, 2, 2, 4, 5])]
    specs += [
        GOOD.but(positions=[1] * 5, block_table=[[1, 2]] * 4, cu_seqlens=bounds) for bounds in ([3, -9, 99, 1, 5], [9, 9, 0, 0, -5])
    ]

    def work():
        for spec in specs:
            run(walled(build(spec, device), end))

    assert signal_of(work) != SEGMENTATION_FAULT
