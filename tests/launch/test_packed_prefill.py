"""As `test_packed_launches.py`, of prefills and of the rotation alone: what a direct launch is given is right, whatever call it
follows. The driver is a stand-in, see `fake_driver.py`.
"""

import pytest
import torch
import triton
from cases import Case, Spec, assert_same_storages, bits, build, check
from lanes import INTERPRETED
from ragged import BLOCK_TABLE, CU_SEQLENS, POSITIONS, RAGGED, SLOTS, STILL, ragged
from random_cases import CPU_SIZES, random_spec
from ways import prefill_of, reset, with_one_of, with_other_flags, works

from decode_rope import apply_rope, reference, rope_append_prefill
from decode_rope.api.functions import PREFILL_CALLS
from decode_rope.launch import book, compiled, plan
from decode_rope.launch.rope import BOOK

pytestmark = pytest.mark.skipif(INTERPRETED, reason="launches do not go to the driver")


def works_from(start: Case, times: int = 3) -> None:
    case = start.clone()
    works(prefill_of(case), case, start, times)


@pytest.mark.parametrize("seed", range(5000, 5040))
def test_repeated_prefills_of_random_calls(seed, fake_driver):
    start = build(random_spec(seed, CPU_SIZES), "cpu")
    works_from(start)
    assert len(fake_driver.launches) == (3 if len(start.spec.positions) else 0)


@pytest.mark.parametrize("cu_seqlens", [CU_SEQLENS, [0, 1, 4, 18, 18], [3, 3, 3, 9, 20], [0, 20, 20, 20, 20]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ragged_batches_leave_the_bytes_of_the_reference(dtype, cu_seqlens, fake_driver):
    start = ragged("cpu", RAGGED.but(q_out=True, k_out="k"), cu_seqlens, dtype)
    works_from(start)


@pytest.mark.parametrize(
    "changes, whole",
    [
        ({}, True),
        (dict(is_neox=False), True),
        (dict(head_dim=256), True),
        (dict(head_dim=512), False),  # rows of more than a warp
        (dict(v_head_dim=60), False),  # accesses of 8 bytes
        (dict(rotary_dim=32), True),
        (dict(rotary_dim=48), False),
        (dict(head_dim=48), False),
        (dict(dtype=torch.float32), False),
        (dict(shift=1), False),
        (dict(q_out=True), False),
        (dict(k_out="own"), False),
    ],
    ids=str,
)
def test_rows_in_one_piece_where_that_is_faster(changes, whole, fake_driver):
    start = build(Spec(POSITIONS, slots=SLOTS).but(**changes), "cpu")
    works_from(start, times=1)
    assert [kernel.facts["WHOLE"] for kernel in compiled._COMPILED.values()][-1] == whole


def test_rows_of_sequences_are_taken_in_pieces(fake_driver):
    start = ragged("cpu")
    works_from(start, times=1)
    assert not any(kernel.facts["WHOLE"] for kernel in compiled._COMPILED.values())


@pytest.mark.parametrize("changes", STILL, ids=str)
def test_rotation_of_nothing(changes, fake_driver):
    start = build(Spec(POSITIONS, slots=SLOTS, rotary_dim=0).but(**changes), "cpu")
    works_from(start)


def test_several_axes_of_any_stride(fake_driver):
    axis_map = (torch.arange(32) % 3).to(torch.int8)
    positions = torch.randint(0, 64, (3, 2 * len(POSITIONS)))[:, ::2].contiguous().repeat(1, 2)[:, : len(POSITIONS)]
    for rows in (positions.contiguous(), positions, torch.zeros(4, 100, dtype=torch.int64)[1:, 7 : 7 + len(POSITIONS)]):
        start = build(Spec(POSITIONS, slots=list(range(len(POSITIONS)))), "cpu")
        given = {"positions": rows, "axis_map": axis_map}
        case, want = start.clone(), start.clone()
        reference.rope_append_prefill(**want.arguments() | given)
        for _ in range(3):
            reset(case, start)
            rope_append_prefill(**case.arguments() | given)
            assert_same_storages(case, want)


def test_F3_memory_of_any_alignment_in_any_order_gets_a_kernel_that_fits(fake_driver):
    changes = [{}, dict(shift=1), dict(table_shift=1), dict(shift=8), dict(shift=3, table_shift=2), dict(activations="padded")]
    changes += [dict(cache="NHD padded"), dict(cache="HND beside"), {}]
    for spec in (RAGGED, RAGGED.but(head_dim=24, v_head_dim=20), RAGGED.but(q_out=True, k_out="own"), RAGGED.but(rotary_dim=6)):
        cases = [ragged("cpu", spec.but(**change)) for change in changes]
        for start in (*cases, *cases[::-1]):
            check(start, rope_append_prefill)


@pytest.mark.parametrize("one", ["q", "k", "v", "k_cache", "v_cache", "q_out", "k_out", "cos_sin_cache"])
def test_F3_one_unaligned_tensor_among_aligned_ones_gets_a_kernel_that_fits(one, fake_driver):
    spec = RAGGED.but(q_out=True, k_out="own")
    aligned, shifted = ragged("cpu", spec), ragged("cpu", spec.but(shift=1, table_shift=1))
    mixed = with_one_of(aligned, shifted, one)
    for start in (aligned, mixed, aligned, mixed):
        check(start, rope_append_prefill)


@pytest.mark.parametrize("changes", [dict(), dict(q_out=True, k_out="own"), dict(activations="packed", k_out="k")], ids=str)
def test_every_tensor_may_move_alone(changes, fake_driver):
    """A launch packed for some memory is not taken for memory that differs in one tensor."""
    start = ragged("cpu", RAGGED.but(**changes))
    case = start.clone()
    works(prefill_of(case), case, start)
    for storage in start.storages:
        moved = case.clone()
        moved.storages |= {other: memory for other, memory in case.storages.items() if other != storage}
        works(prefill_of(moved), moved, start)
        works(prefill_of(case), case, start, times=1)
    moved = case.clone()
    moved.storages = case.storages
    moved.options["cu_seqlens_q"] = torch.tensor([0, 1, 4, 18, 18], dtype=torch.int32)
    works(prefill_of(moved), moved, ragged("cpu", RAGGED.but(**changes), [0, 1, 4, 18, 18]))


INTERLEAVED = {
    "q, k and v of one tensor": (dict(activations="packed"), "k", 16, "q: expected memory of its own, got memory shared with k"),
    "K beside V": (dict(cache="NHD beside"), "v_cache", 32, "_cache: expected memory of its own, got memory shared with"),
}


@pytest.mark.parametrize(("changes", "one", "elements", "message"), INTERLEAVED.values(), ids=INTERLEAVED)
def test_memory_that_interleaves_well_says_nothing_of_other_memory(changes, one, elements, message, fake_driver):
    """The same views, then one of them moved by less than a head."""
    start = ragged("cpu", RAGGED.but(**changes))
    case = start.clone()
    works(prefill_of(case), case, start)
    moved = case.clone()
    view = moved.views[one]
    moved.views[one] = view._replace(offset=view.offset - elements)
    before = moved.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            rope_append_prefill(**moved.arguments())
        assert_same_storages(moved, before)
    works(prefill_of(case), case, start, times=1)


def test_a_packed_prefill_is_found_again(fake_driver, monkeypatch):
    start = ragged("cpu")
    case = start.clone()
    works(prefill_of(case), case, start, times=1)
    monkeypatch.setattr(plan.Plan, "_launch", None)  # what a launch that is not found would go through
    works(prefill_of(case), case, start)


def test_a_packed_rotation_is_found_again(fake_driver, monkeypatch):
    x, table, positions = torch.randn(5, 3, 64), torch.randn(8, 64), torch.tensor([3, -1, 7, 0, 9])
    out = torch.empty_like(x)
    want = reference.apply_rope(x, table, positions)
    apply_rope(x, table, positions, out=out)
    monkeypatch.setattr(plan.Plan, "_launch", None)  # what a launch that is not found would go through
    out.fill_(7)
    assert torch.equal(apply_rope(x, table, positions, out=out), want) and len(fake_driver.launches) == 2


@pytest.mark.parametrize("moves", ["x", "table", "positions", "out", "axis_map"])
def test_every_tensor_of_a_rotation_may_move_alone(moves, fake_driver):
    given = dict(x=torch.randn(5, 3, 64), table=torch.randn(8, 64), out=torch.empty(5, 3, 64))
    given |= dict(positions=torch.randint(0, 8, (2, 5)), axis_map=torch.randint(0, 2, (32,), dtype=torch.int8))
    for _ in range(3):
        x, table, out, positions, axis_map = given.values()
        want = reference.apply_rope(x, table, positions, axis_map=axis_map)
        assert torch.equal(apply_rope(x, table, positions, axis_map=axis_map, out=out), want)
        given[moves] = given[moves].flip(0)


def test_F5_a_launch_goes_to_the_stream_that_is_current(fake_driver):
    start = ragged("cpu")
    case = start.clone()
    x, table = torch.randn(2, 3, 64), torch.randn(8, 64)
    for fake_driver.stream in (7, 7, 9, 7, 9, 0, 0):
        works(prefill_of(case), case, start, times=1)
        apply_rope(x, table)
    assert [stream or 0 for stream, _ in fake_driver.launches] == [s for s in (7, 7, 9, 7, 9, 0, 0) for _ in range(2)]


def test_F4_a_launch_makes_the_device_of_its_tensors_current(fake_driver):
    start = ragged("cpu")
    case = start.clone()
    x, table = torch.randn(2, 3, 64), torch.randn(8, 64)
    for fake_driver.device in (None, 1, 1, None, 1):
        current = fake_driver.device
        works(prefill_of(case), case, start, times=1)
        apply_rope(x, table)
        assert fake_driver.device == current
    assert {device for _, device in fake_driver.launches} == {None} and len(fake_driver.launches) == 10


def test_a_profiler_s_launch_hook_sees_every_launch(fake_driver, monkeypatch):
    start = ragged("cpu")
    case = start.clone()
    works(prefill_of(case), case, start)
    seen = []
    monkeypatch.setattr(compiled.Compiled, "launch_jit", lambda self, grid, values: seen.append(grid))
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        for _ in range(2):
            rope_append_prefill(**case.arguments())
    finally:
        hook.remove(print)
    assert len(seen) == 2 and len(fake_driver.launches) == 3
    works(prefill_of(case), case, start)


def test_full_books_are_begun_anew(fake_driver, monkeypatch):
    monkeypatch.setattr(plan, "_MAX_KEPT", 2)
    monkeypatch.setattr(book, "_MAX_PLANS", 2)
    cases = [ragged("cpu", RAGGED.but(seed=seed, num_pages=7 + seed % 4)) for seed in range(8)]
    table = torch.randn(8, 64)
    for _ in range(2):
        for start in cases:
            works_from(start, times=2)
        for tokens in range(1, 6):
            x = torch.randn(tokens, 3, 64)
            assert torch.equal(apply_rope(x, table), reference.apply_rope(x, table))
    for plans in (PREFILL_CALLS._plans.values(), BOOK._plans.values()):
        assert len(plans) <= 2 and all(len(found._kept) <= 2 and len(found._known) <= 2 for found in plans)


def test_flags_of_one_call_say_nothing_about_the_next(fake_driver):
    """The same tensors, another pairing, another layout or another way through the block table."""
    start = build(Spec([1, 3, -1, 6], [[1, 2], [3, 4], [5, 6], [0, 7]], heads=(4, 4), head_dim=8), "cpu")
    for one in with_other_flags(start):
        check(one, rope_append_prefill)
        check(one, rope_append_prefill)


def test_the_rows_of_the_table_are_those_of_this_call(fake_driver):
    start = ragged("cpu", RAGGED.but(block_table=BLOCK_TABLE[::-1]))
    works_from(start)
    again = ragged("cpu")
    works_from(again)


SHAPES = {"[T, H, D]": (6, 3, 64), "[B, S, H, D]": (2, 6, 3, 64), "[B, H, S, D]": (2, 3, 6, 64)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(12))
def test_rotations_of_any_memory_after_any_other(seed, shape, fake_driver):
    """Strides, alignment, positions, direction and outputs change from call to call; shapes stay."""
    generator = torch.Generator().manual_seed(seed)

    def any_of(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    def placed() -> torch.Tensor:
        """A tensor of the shape somewhere in a larger one."""
        sizes = [n + any_of(0, 0, 1, 8) for n in SHAPES[shape]]
        memory = torch.randn(any_of(0, 1, 8) + torch.Size(sizes).numel(), generator=generator).to(torch.bfloat16)
        whole = memory[memory.numel() - torch.Size(sizes).numel() :].view(sizes)
        return whole[tuple(slice(size - n, None) for size, n in zip(sizes, SHAPES[shape], strict=True))]

    layout = "HND" if shape == "[B, H, S, D]" else "NHD"
    memory = torch.randn(33 * 64, generator=generator)
    for _ in range(25):
        table = memory[any_of(0, 1, 4) :][: 32 * 64].view(32, 64)[:, : any_of(64, 64, 32)].contiguous()
        flat = torch.randint(-1, 34, (6,), generator=generator)
        positions = any_of(None, flat, flat.expand(1, 6), torch.randint(-1, 34, (2, 6), generator=generator))
        if shape == "[T, H, D]":
            positions = any_of(None, flat)
        options = dict(layout=layout, is_neox=any_of(True, False), inverse=any_of(True, False))
        x = placed()
        want = reference.apply_rope(x, table, positions, **options)
        out = any_of(None, x, placed())
        for _ in range(2):
            before = x.clone()
            got = apply_rope(x, table, positions, out=out, **options)
            assert torch.equal(bits(got), bits(want)) and (out is None or got is out)
            x.copy_(before)
    assert len(fake_driver.launches) == 50
