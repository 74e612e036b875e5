"""Rows that must not be written: which slots change, what Q becomes, what is a fault, and that nothing else is touched."""

import ctypes

import pytest
import torch
from cases import Case, Spec, bits, build, check, no_faults, prepared, run, run_reference
from guarded_memory import SEGMENTATION_FAULT, signal_of, walled
from lanes import ON_GPU

import decode_rope
from decode_rope import reference
from decode_rope.append.faults import fault_buffer
from decode_rope.launch.decode import Geometry

pytestmark = pytest.mark.kernel
HUGE = (2**31, 2**32 + 3, 2**40, 2**62, 2**63 - 1)
BUILDS = [dict(), dict(cache="HND", shift=1, is_neox=False), dict(rotary_dim=32, k_out="own", q_out=True), dict(rotary_dim=0)]


def slots(*values: int, **changes) -> Spec:
    """One token per slot, all at position 7, in 8 pages of 4."""
    return Spec([7] * len(values), slots=list(values), **({"index_dtype": torch.int64} | changes))


def changed_slots(got: Case, before: Case) -> set[int]:
    """The flat slots in which any bit of K or of V differs, given that both kinds of slot change together."""
    changed = []
    for name in ("k_cache", "v_cache"):
        pages = [reference.pages_first(case[name], case.options["kv_layout"]) for case in (got, before)]
        new, old = (bits(p).flatten(0, 1) for p in pages)
        changed.append(set((new != old).flatten(1).any(1).nonzero().flatten().tolist()))
    assert changed[0] == changed[1]
    return changed[0]


def expect(spec: Spec, device, written: set[int], faults: int = 0) -> Case:
    """Byte for byte as the reference, in every build, with one token or several in a tile; these slots change and no other."""
    for changes in BUILDS:
        case = build(spec.but(**changes), device)
        assert changed_slots(check(case), case) == written, changes
    case = build(spec, device)
    got = check(case, prepared(case, geometry=Geometry(4, 2, 4, 1, 4, False)))
    assert changed_slots(got, case) == written
    assert got.faults[0] == faults
    return got


def rotated(case: Case, row: int) -> bool:
    """Whether q of a row differs from what it was, as it does for any position but 0."""
    return not torch.equal(bits(case["q"][row]), bits(build(case.spec, case.device)["q"][row]))


def test_A1_negative_slot_does_not_hit_the_last_page(device):
    expect(slots(5, -1, 7), device, {5, 7})
    # To a floor division −1 … −3 are on the last page, to a truncating one on the first.
    for page_size in (4, 3, 1):
        expect(slots(-1, -2, -3, -4, -5, 2, -32, -(2**31) - 1, -(2**32), -(2**63), page_size=page_size), device, {2})
    expect(slots(-(2**31), -1, 3, index_dtype=torch.int32), device, {3})


def test_A2_A3_rows_past_a_short_slot_mapping_write_nothing(device):
    got = expect(Spec([7] * 8, slots=[3, 1, 4, 15, 9]), device, {3, 1, 4, 15, 9})
    assert all(rotated(got, row) for row in range(8))
    expect(Spec([7] * 3, slots=[]), device, set())


def test_A4_request_without_pages_writes_nothing(device):
    expect(Spec([5, 0, 6], [[1, 2], [-1, -1], [3, 4]]), device, {9, 18})


@pytest.mark.parametrize("index", [dict(slots=[9, -1]), dict(block_table=[[2], [-1]])], ids=["slots", "table"])
def test_A5_skipped_rows_still_give_rotated_q_and_k(index, device):
    case = build(Spec([1, 3], q_out=True, k_out="own", **index), device)
    for name in ("q_out", "k_out"):
        case[name].fill_(float("nan"))
    got = check(case)
    cos, sin = case["cos_sin_cache"][3].chunk(2)
    for name in ("q", "k"):
        assert torch.equal(bits(got[f"{name}_out"][1]), bits(reference.rotate(case[name][1], cos, sin)))


def test_A6_skipped_rows_are_rotated_in_place_too(device):
    got = expect(slots(-1, 3), device, {3})
    assert rotated(got, 0)


def test_A7_stale_entries_of_the_block_table_are_no_pages(device):
    expect(Spec([4], [[2, -1]]), device, set())
    expect(Spec([4, 4], [[2, 8], [8, 7]]), device, {28}, faults=1)  # 8 pages: the last is 7
    bad = [-2, -(2**31), -(2**62), -(2**63), *HUGE]
    table = [[0, entry] for entry in (1, *bad)]
    expect(Spec([4] * 10, [[0, 1], *table[1:]], index_dtype=torch.int64), device, {4}, faults=len(HUGE))


def test_A9_position_minus_one_is_padding(device):
    spec = Spec([-1, 3, -1], [[0], [1], [-1]])
    got = expect(spec, device, {7})
    assert not rotated(got, 0) and rotated(got, 1) and not rotated(got, 2)
    expect(Spec([-(2**63), -(2**31) - 1, 1, -7, -(2**31)], slots=[1, 2, 3, 40, 4]), device, {3})


def test_A9_padding_passes_through_to_the_outputs(device):
    case = build(Spec([-1, 3], slots=[5, 6], q_out=True, k_out="own", rotary_dim=32), device)
    got = check(case)
    for name in ("q", "k"):
        assert torch.equal(bits(got[f"{name}_out"][0]), bits(case[name][0]))


def test_A10_positions_past_the_table_are_faults(device):
    for changes in BUILDS[:2]:
        case = build(Spec([64, 63, -1, 2**31 - 1], slots=[1, 2, 3, -1], positions_dtype=torch.int32).but(**changes), device)
        got = check(case)
        assert changed_slots(got, case) == {2} and got.faults[0] == 2
        assert [rotated(got, row) for row in range(4)] == [False, True, False, False]
    case = build(Spec([*HUGE, 3], slots=[1, 2, 3, 4, 5, 6]), device)
    got = check(case)
    assert changed_slots(got, case) == {6} and not any(rotated(got, row) for row in range(5))


def test_A10_without_a_table_any_position_is_good(device):
    case = build(Spec([2**40, 2**63 - 1, 5], slots=[1, 2, 3], rotary_dim=0), device)
    assert changed_slots(check(case), case) == {1, 2, 3}


def test_A11_slots_past_the_cache_are_faults(device):
    expect(slots(32, 31), device, {31}, faults=1)
    expect(slots(*HUGE, 0), device, {0}, faults=5)
    expect(slots(32, 31, cache="flat"), device, {31}, faults=1)


def test_columns_past_the_block_table_are_faults(device):
    spec = Spec([8, 7, 63], [[0, 1], [2, 3], [4, 5]])  # two pages of 4 each
    expect(spec, device, {15}, faults=2)
    expect(Spec([3] * 6, [[0, 1], *[[2, 3]] * 5], cache_positions=[7, *HUGE]), device, {7}, faults=5)
    case = build(spec, device)
    case.views["block_table"] = case.views["block_table"]._replace(shape=(3, 0))
    assert changed_slots(check(case), case) == set()


@pytest.mark.parametrize("spec", [slots(0, -1, 3), Spec([0, -1, 4], [[0, 1], [0, 1], [0, -1]])], ids=["slots", "table"])
def test_a_cache_without_pages_takes_nothing(spec, device):
    case = build(spec, device)
    for name in ("k_cache", "v_cache"):
        case.views[name] = case.views[name]._replace(shape=(0, *case.views[name].shape[1:]))
    got = check(case)
    assert torch.equal(got.storages["k_cache"], case.storages["k_cache"]) and rotated(got, 2)
    assert got.faults[0] == (2 if spec.slots else 1)


def test_cache_positions_place_and_positions_rotate(device):
    spec = Spec([9, 9, 9, -1, 64], [[0, 1], [2, 3], [4, 5], [6, 7], [6, 7]], cache_positions=[0, 5, -1, 2, 2])
    case = build(spec, device)
    got = check(case)
    assert changed_slots(got, case) == {0, 13} and got.faults[0] == 1
    assert rotated(got, 2) and not rotated(got, 3) and not rotated(got, 4)
    for page_size in (3, 1):  # −1 is before the table, and to a truncating division in its first column
        case = build(Spec([9] * 4, [[0], [1], [2], [3]], cache_positions=[0, -1, -2, -(2**63)], page_size=page_size), device)
        assert changed_slots(check(case), case) == {0}


def test_A14_two_tokens_with_one_slot_leave_one_of_them(device, on_gpu):
    rows = [3, 3, 5] + [3] * (29 if on_gpu else 1)
    spec = Spec([7] * len(rows), slots=rows, heads=(4, 3))
    case = build(spec, device)
    cos, sin = case["cos_sin_cache"][7].chunk(2)
    k = reference.rotate(case["k"], cos, sin)
    for _ in range(50 if on_gpu else 1):
        got = case.clone()
        assert run(got).faults[0] == 0
        assert changed_slots(got, case) == {3, 5}
        writers = torch.tensor([row for row, slot in enumerate(rows) if slot == 3], device=device)
        for cache, x in (("k_cache", k), ("v_cache", case["v"])):
            held = bits(got[cache][0, 3])
            for head in range(3):
                assert (held[head] == bits(x[writers, head])).all(-1).any(), (cache, head)


FAULTS = {
    "position": (Spec([1, 64, 70], slots=[1, 2, 3]), (2, 1, reference.POSITION, 64)),
    "position, Q only": (Spec([1, -1, 70], heads=(4, 0)), (1, 2, reference.POSITION, 70)),
    "no position is too far without a table": (Spec([1, 2**63 - 1], slots=[1, 2], rotary_dim=0), (0, None, None, None)),
    "nor if only Q is there": (Spec([1, 2**63 - 1], heads=(4, 0), rotary_dim=0), (0, None, None, None)),
    "column": (Spec([4, 8], [[1, 1]] * 2), (1, 1, reference.COLUMN, 2)),
    "page": (Spec([0, 0], [[8], [9]]), (2, 0, reference.PAGE_ID, 8)),
    "slot": (slots(-1, 40, 33), (2, 1, reference.SLOT, 40)),
    "huge slot": (slots(2, 2**45 + 9), (1, 1, reference.SLOT, 2**32 - 1)),
    "position before page": (Spec([64, 3], [[9], [1]], cache_positions=[0, 0]), (1, 0, reference.POSITION, 64)),
    "padding hides a bad slot": (Spec([-1, 3], slots=[99, 4]), (0, None, None, None)),
    "padding hides a bad page": (Spec([-1, 3], [[99], [1]], cache_positions=[0, 0]), (0, None, None, None)),
    "in several tiles": (Spec([5] * 9, slots=[-1] * 6 + [50, 51, 52], heads=(2, 2)), (3, 6, reference.SLOT, 50)),
    "many heads count once": (Spec([64], [[1]], heads=(71, 40)), (1, 0, reference.POSITION, 64)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_counted_once_a_row_and_the_lowest_is_kept(name, device):
    spec, (count, row, kind, value) = FAULTS[name]
    case = build(spec, device)
    record = reference.NO_RECORD if row is None else (row << 35) + (kind << 32) + value
    assert run_reference(case.clone()).faults == [count, record]
    assert run(case.clone()).faults == [count, record]
    for geometry in (Geometry(4, 2, 4, 1, 4, False), Geometry(1, 32, 2, 2, 4, False)):
        assert run(case.clone(), prepared(case, geometry=geometry)).faults == [count, record]


def test_faults_add_up_until_they_are_checked(device):
    fault_buffer(device).copy_(no_faults("cpu"))
    first, second = build(slots(1, 40), device), build(slots(50, -1, 60), device)
    for case in (first, second, first):
        decode_rope.rope_append_decode(**case.arguments())
    with pytest.raises(IndexError, match=r"4 faulty row\(s\).*row 0: slot 50 is past the capacity of the cache"):
        decode_rope.check_faults()
    decode_rope.check_faults()
    decode_rope.rope_append_decode(**build(slots(1, 2), device).arguments())
    decode_rope.check_faults()


EDGES = {
    "short slots": Spec([3] * 8, slots=[3, 1, 4, 15, 9], heads=(3, 1)),
    "table": Spec([63, 31, -1, 3, 3, 64], [[7] * 16] * 5 + [[9] * 16], heads=(5, 3), rotary_dim=24),
    "requests of 3": Spec([11, 10, 9, 8, 7, 12], [[0, 1, 2], [3, 4, 5]], tokens_per_request=3, heads=(3, 1), is_neox=False),
    "garbage": Spec([3, 2**62, -(2**63), 63, 5], [[2**62], [-(2**62)], [7], [8], [-1]], index_dtype=torch.int64,
                    cache_positions=[3, 2**63 - 1, 0, 4, -(2**63)], heads=(3, 1)),
    "garbage slots": Spec([3] * 5 + [64], slots=[2**62, -(2**63), 31, 32, -1, 0], index_dtype=torch.int64, heads=(1, 1)),
    "odd sizes": Spec([63, 62, 61], slots=[31, 30, 29], head_dim=72, v_head_dim=40, rotary_dim=40, heads=(7, 5)),
    "all of 80 rotate": Spec([63, 62], slots=[31, 30], head_dim=80, v_head_dim=72, heads=(3, 1)),
    "all of 80 in GPT-J pairs": Spec([63, 62], slots=[31, 30], head_dim=80, v_head_dim=72, heads=(3, 1), is_neox=False),
    "outputs": Spec([63, -1, 64], slots=[31, 30, 32], q_out=True, k_out="own", rotary_dim=20, head_dim=100),
    "Q only": Spec([63, -1, 64, 2**62], heads=(5, 0)),
}  # fmt: skip


@pytest.mark.skipif(ON_GPU, reason="a GPU has no pages to protect from here")
@pytest.mark.parametrize("end", [True, False], ids=["end", "start"])
@pytest.mark.parametrize("name", EDGES)
def test_no_byte_outside_the_tensors_is_touched(name, end, device):
    """Every tensor ends (or begins) at the edge of the process's memory."""
    case = build(EDGES[name], device)
    got, want = walled(case, end), case.clone()
    run_reference(want)

    def work():
        run(got)
        for argument, view in case.views.items():
            assert view is None or torch.equal(bits_of(got[argument]), bits_of(want[argument])), argument
        for tokens in (4, 2):
            tiles = walled(case, end)
            run(tiles, prepared(tiles, geometry=Geometry(tokens, 2, tokens, 1, 4, False)))
            assert torch.equal(bits(tiles.returned), bits(want.returned))

    assert signal_of(work) == 0


def bits_of(x):
    return bits(x) if x.dtype.is_floating_point else x


@pytest.mark.skipif(ON_GPU, reason="a GPU has no pages to protect from here")
def test_the_edge_of_memory_is_noticed(device):
    case = build(EDGES["short slots"], device)
    spoilt = walled(case, end=True)
    view = spoilt.views["slot_mapping"]
    end = spoilt["slot_mapping"].data_ptr() + 5 * view.dtype.itemsize
    assert signal_of(lambda: ctypes.string_at(end - 1, 1)) == 0
    assert signal_of(lambda: ctypes.string_at(end, 1)) == SEGMENTATION_FAULT
