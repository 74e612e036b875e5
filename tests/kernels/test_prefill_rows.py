"""Prefill rows that must not be written although their slot is good, and sequences that are not there."""

import pytest
import torch
from cases import Spec, bits, build, check, run
from guarded_memory import at_the_edge, signal_of, walled
from lanes import ON_GPU

from decode_rope import reference, rope_append_prefill

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("index", ["slots", "table"])
def test_positions_past_the_table_write_neither_k_nor_v(index, device):
    """The last position of the table, the first one past it, a huge one: each with a slot of its own."""
    spec = Spec([63, 64, 2**40, 5], slots=[4, 9, 14, 19])
    if index == "table":
        spec = Spec([63, 64, 2**40, 5], [[1], [2], [3], [4]], cache_positions=[0, 1, 2, 3])
    for changes in (dict(), dict(rotary_dim=32, k_out="own", q_out=True), dict(cache="HND", shift=1)):
        case = build(spec.but(**changes), device)
        got = check(case, rope_append_prefill)
        for name in ("k_cache", "v_cache"):
            pages, before = (reference.pages_first(x[name], case.options["kv_layout"]).flatten(0, 1) for x in (got, case))
            assert (bits(pages) != bits(before)).flatten(1).any(1).nonzero().flatten().tolist() == [4, 19], name
        assert got.faults[0] == 2


@pytest.mark.parametrize("only", [5, 0, -3, 2**31 - 1])
def test_one_entry_of_cu_seqlens_is_no_sequence_and_is_all_that_is_read(only, device):
    cu_seqlens = torch.tensor([only], dtype=torch.int32)
    case = build(Spec([0, 1, 2, 3], [[1, 2]], num_pages=4), device)

    def work():
        placed = case.clone() if ON_GPU else walled(case, end=True)
        entry = cu_seqlens.to(device) if ON_GPU else at_the_edge(cu_seqlens, end=True).view(torch.int32)
        got = run(placed, lambda **arguments: rope_append_prefill(**arguments, cu_seqlens_q=entry))
        for name in ("q", "k_cache", "v_cache"):
            assert torch.equal(bits(got[name]), bits(case[name])), name

    if ON_GPU:
        work()
    else:
        assert signal_of(work) == 0
