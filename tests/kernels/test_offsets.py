"""B1: offsets past 32 bits, in every dimension a kernel steps along. Memory is reserved, and hardly any of it is touched."""

import pytest
import torch
from cases import bits
from far import FAR, WRAP, D, expected, reserve, small_call

import decode_rope

pytestmark = pytest.mark.kernel
RESULTS = ("q", "k", "q_out", "k_out", "k_cache", "v_cache")
STRETCHED = {
    "q": ("tokens", "heads"),
    "k": ("tokens", "heads"),
    "v": ("tokens", "heads"),
    "q_out": ("tokens", "heads"),
    "k_out": ("tokens", "heads"),
    "k_cache": ("pages", "offsets", "heads"),
    "v_cache": ("pages", "offsets", "heads"),
}


@pytest.mark.parametrize(("name", "dim"), [(name, dim) for name, dims in STRETCHED.items() for dim in range(len(dims))])
@pytest.mark.parametrize(("n", "step"), [(2, FAR), (5, 2**30 + WRAP)], ids=["one step", "steps of 31 bits"])
def test_B1_steps_past_32_bits_arrive(n, step, name, dim, device):
    """One dimension goes to more than 2^32 elements; where 32 bits would wrap to, nothing may be used or changed."""
    call = small_call(device, n)
    for out in ("q_out", "k_out"):
        if name == out:
            call[out] = torch.zeros_like(call[out[0]])
    want = expected(call)
    strides = list(call[name].stride())
    strides[dim] = step
    memory = reserve((n - 1) * step + WRAP, device)
    near = memory[: (n + 1) * WRAP]
    near.fill_(7.0)
    view = memory.as_strided(call[name].shape, strides)
    view.copy_(call[name])
    before = near.clone()
    decode_rope.rope_append_decode(**call | {name: view})
    for result in RESULTS:
        if result in want:
            assert torch.equal(bits(view if result == name else call[result]), bits(want[result])), result
    assert torch.equal(near[WRAP:], before[WRAP:])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("index", ["block_table", "slot_mapping"])
def test_B1_int32_pages_and_slots_reach_the_end_of_a_large_cache(name, index, device):
    call = small_call(device)
    want = expected(call)
    page = 2 * 2 * D
    pages = FAR // page + 1
    cache = reserve(pages * page, device).view(pages, 2, 2, D)
    wrapped = pages - 1 - 2**32 // page
    cache[wrapped] = 7.0
    cache[0], cache[-1] = call[name][0], call[name][1]
    other = "v_cache" if name == "k_cache" else "k_cache"
    call[other] = reserve(pages * page, device).view(pages, 2, 2, D)
    call["block_table"] = torch.tensor([[0, 0], [0, pages - 1]], dtype=torch.int32, device=device)
    if index == "slot_mapping":
        del call["block_table"]
        call["slot_mapping"] = torch.tensor([0, 2 * pages - 1], dtype=torch.int32, device=device)
    decode_rope.rope_append_decode(**call | {name: cache})
    assert torch.equal(bits(cache[[0, -1]]), bits(want[name]))
    assert bool((cache[wrapped] == 7.0).all())


@pytest.mark.parametrize("index", ["block_table", "slot_mapping"])
@pytest.mark.parametrize("function", [decode_rope.rope_append_decode, decode_rope.rope_append_prefill])
def test_B1_sizes_of_32_bits_are_neither_negative_nor_cut(function, index, device):
    """More than 2^31 slots, and a table of as many columns: sizes between 2^31 and 2^32 are neither negative nor cut."""
    slots = 2**31 + 5
    x = torch.tensor([[[3.0]], [[5.0]], [[7.0]]], dtype=torch.float16, device=device)
    k_cache, v_cache = (reserve(slots, device).view(slots, 1, 1) for _ in range(2))
    call = {"positions": torch.tensor([0, slots - 1, slots], device=device), "cos_sin_cache": None}
    if index == "slot_mapping":
        call["slot_mapping"] = torch.tensor([2**30, slots - 1, slots], device=device)
    else:
        table = reserve(slots, device, torch.int32).view(1, slots)
        table[0, 0], table[0, -1] = 2**30, slots - 1 - 2**31
        call |= {"block_table": table, "tokens_per_request": 3}
    places = (2**30, slots - 1 if index == "slot_mapping" else slots - 1 - 2**31)
    for cache in (k_cache, v_cache):
        cache[0] = cache[slots - 1 - 2**31] = cache[slots - 1] = cache[2**30] = 1.0
    function(x.clone(), x, 2 * x, k_cache, v_cache, **call)
    assert [k_cache[place].item() for place in places] == [3.0, 5.0] and k_cache[0] == 1.0
    assert [v_cache[place].item() for place in places] == [6.0, 10.0] and v_cache[0] == 1.0
    with pytest.raises(IndexError, match="row 2"):
        decode_rope.check_faults()


def test_B1_rows_of_the_block_table_may_lie_far_apart(device):
    call = small_call(device)
    want = expected(call)
    far = 2**31 + WRAP
    table = reserve(far + WRAP, device, torch.int32).as_strided((2, 2), (far, 1))
    table.copy_(call["block_table"])
    decode_rope.rope_append_decode(**call | {"block_table": table})
    assert all(torch.equal(call[name], want[name]) for name in ("q", "k_cache", "v_cache"))


def test_B1_rows_of_the_rotary_table_may_lie_far_apart(device):
    call = small_call(device)
    want = expected(call)
    far_row = 2**31 // D + 5
    table = reserve((far_row + 1) * D, device, torch.float32).view(far_row + 1, D)
    table[0], table[far_row] = call["cos_sin_cache"][0], call["cos_sin_cache"][3]
    call |= {"positions": torch.tensor([0, far_row], device=device), "cache_positions": call["positions"]}
    decode_rope.rope_append_decode(**call | {"cos_sin_cache": table})
    assert all(torch.equal(call[name], want[name]) for name in ("q", "k_cache", "v_cache"))
