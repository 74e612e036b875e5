"""Every view of a cache, and of q, k and v: written where its own strides say, or refused; never a copy, never a neighbour."""

import pytest
import torch
from cases import ACTIVATIONS, CACHES, Spec, assert_same_storages, bits, build, check, run, run_reference
from lanes import ON_GPU

import decode_rope
from decode_rope import reference
from decode_rope.append import layout

kernel = pytest.mark.kernel
# Four tokens at page edges: first and last offset of a page, first and last page.
CORNERS = Spec([0, 3, 7, 8], [[0, 5, 5], [7, 5, 5], [5, 6, 5], [5, 5, 2]], heads=(3, 2))


@kernel
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("v_head_dim", [64, 40])
@pytest.mark.parametrize("cache", CACHES)
def test_B2_B4_any_view_of_k_and_v_caches_is_written_by_its_own_strides(cache, v_head_dim, shift, device):
    spec = CORNERS.but(cache=cache, v_head_dim=v_head_dim, shift=shift)
    if cache.startswith("flat"):
        spec = spec.but(block_table=None, slots=[0, 31, 26, 8])
    check(build(spec, device))


@kernel
@pytest.mark.parametrize("cache", CACHES)
def test_B2_views_hold_what_separate_caches_hold(cache, device):
    """Against two contiguous NHD caches rather than against the reference."""
    spec = CORNERS.but(block_table=None, slots=[0, 31, 26, 8], v_head_dim=40, index_dtype=torch.int64)
    plain, view = build(spec, device), build(spec.but(cache=cache), device)
    for name in ("q", "k", "v", "cos_sin_cache"):
        view[name].copy_(plain[name])
    for case in (plain, view):
        run(case)
    for name in ("k_cache", "v_cache"):
        pages = reference.pages_first(view[name], view.options["kv_layout"]).flatten(0, 1)
        assert torch.equal(bits(pages[spec.slots]), bits(plain[name].flatten(0, 1)[spec.slots])), name


@kernel
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("changes", [dict(), dict(shift=1, v_head_dim=40), dict(q_out=True, k_out="own", rotary_dim=32)], ids=str)
def test_B5_B6_any_view_of_q_k_and_v_is_read_and_turned_where_it_lies(activations, changes, device):
    """In place means in the caller's memory, also through a slice of a packed projection or a transpose."""
    check(build(CORNERS.but(activations=activations, **changes), device))


@kernel
def test_B5_heads_of_q_and_k_have_strides_of_their_own(device):
    case = build(CORNERS.but(activations="gated", heads=(4, 4)), device)
    assert case["q"].stride(1) == 128 and case["k"].stride(1) == 64
    check(case)


@kernel
@pytest.mark.parametrize("head_dim", [64, 80])
def test_B8_rows_off_a_16_byte_boundary_are_exact(head_dim, device):
    """By the address, by the row stride, by both; each shape once aligned before."""
    spec = CORNERS.but(head_dim=head_dim, heads=(2, 1))
    for shift in (0, 1, 3, 4):
        for activations in ("separate", "padded"):
            check(build(spec.but(shift=shift, activations=activations), device))


PAGE_SIZES = (1, 2, 3, 5, 8, 16, 17, 64, 256, 544, 1056) if ON_GPU else (1, 3, 16, 544, 1056)


@kernel
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("cache", ["NHD", "HND beside"])
def test_page_sizes(page_size, cache, device):
    middle = page_size // 2 if page_size != 2 else 0  # else it is where the fourth token goes
    edges = [0, page_size - 1, page_size, 2 * page_size - 1, middle]
    slots = [3 * page_size - 1, 0, page_size, 2 * page_size - 1]
    spec = Spec(edges, [[2, 1], [0, 2], [2, 0], [1, 1], [1, 0]], page_size=page_size, num_pages=3, heads=(2, 1), cache=cache)
    if page_size == 1:
        spec = spec.but(block_table=[[2, 1], [-1, 1], [0, 1], [1, 0], [-1, 0]])
    check(build(spec.but(max_position=2 * page_size + 1), device))
    check(build(spec.but(positions=[1] * 4, block_table=None, slots=sorted(set(slots)), index_dtype=torch.int64), device))


@kernel
def test_flat_caches_may_have_a_block_table_of_slots(device):
    check(build(Spec([2, 0, 1], [[5, 6, 7], [31, 0, 0], [0, 30, 1]], cache="flat"), device))


@kernel
def test_flat_and_paged_caches_of_one_token_mix(device):
    case = build(Spec([2, 1], slots=[5, 0], page_size=1, num_pages=8, v_head_dim=40), device)
    view = case.views["k_cache"]
    case.views["k_cache"] = view._replace(shape=(8, 2, 64), stride=(128, 64, 1))
    check(case)


@kernel
def test_requests_share_a_row_of_the_block_table(device):
    """Speculative tokens of one request, over a page edge."""
    table = [[1, 4], [6, 2]]
    for per_request, positions in ((3, [2, 3, 4, 5, 6, 7]), (2, [3, 4, 0, 1]), (4, [1, 2, 3, 4, 0])):
        check(build(Spec(positions, table, tokens_per_request=per_request), device))


REFUSED = {
    "q": lambda case: case["q"][..., ::2],
    "k": lambda case: case["k"][..., ::2],
    "v": lambda case: case["v"].transpose(1, 2).contiguous().transpose(1, 2),
    "k_cache": lambda case: case["k_cache"].transpose(2, 3).contiguous().transpose(2, 3),
    "v_cache": lambda case: case["v_cache"].transpose(1, 3).contiguous().transpose(1, 3),
    "q_out": lambda case: case["q_out"].transpose(1, 2).contiguous().transpose(1, 2),
    "k_out": lambda case: case["k_out"].transpose(1, 2).contiguous().transpose(1, 2),
    "block_table": lambda case: case["block_table"].t().contiguous().t(),
}


@pytest.mark.anywhere
@pytest.mark.parametrize("name", REFUSED)
def test_B7_last_dimension_must_be_contiguous(name, device):
    case = build(CORNERS.but(q_out=True, k_out="own"), device)
    before = case.clone()
    with pytest.raises(ValueError, match=rf"^{name}: expected a contiguous last dimension \(stride 1\), got strides"):
        decode_rope.rope_append_decode(**case.arguments() | {name: REFUSED[name](case)})
    assert_same_storages(case, before)


def test_the_reference_writes_through_views_too():
    case = build(CORNERS.but(activations="packed", cache="HND beside"), "cpu")
    rows = case.storages["q"].clone()
    run_reference(case)
    assert not torch.equal(rows, case.storages["q"])


def test_cache_view_of_each_layout():
    nhd = torch.empty(5, 4, 3, 8)
    assert layout.cache_view(nhd, "NHD") == (5, 4, 3, 8, 96, 24, 8)
    assert layout.cache_view(nhd, "HND") == (5, 3, 4, 8, 96, 8, 24)
    assert layout.cache_view(torch.empty(20, 3, 8), "HND") == (20, 1, 3, 8, 24, 0, 8)


def test_span_is_first_byte_to_last():
    x = torch.empty(100, dtype=torch.float32)
    start = x.data_ptr()
    assert layout.span(x[3:5]) == (start + 12, start + 20)
    assert layout.span(x[4:].as_strided((3, 2), (10, 2))) == (start + 16, start + 16 + 4 * 23)
    assert layout.span(x[:0])[0] == layout.span(x[:0])[1]


OVERLAPPING = {
    "expanded": (torch.empty(1, 4).expand(3, 4), True),
    "rows run into each other": (torch.empty(100).as_strided((3, 8), (7, 1)), True),
    "rows touch": (torch.empty(100).as_strided((3, 8), (8, 1)), False),
    "expanded, one row": (torch.empty(1, 4).expand(1, 4), False),
    "transposed": (torch.empty(3, 4).t(), False),
    "two heads on one row": (torch.empty(100).as_strided((4, 2, 8), (16, 4, 1)), True),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlaps_itself(name):
    x, overlaps = OVERLAPPING[name]
    assert layout.overlaps_itself(x) is overlaps


def _touches(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The bytes of two views of one storage, compared one by one."""
    places = [
        {x.storage_offset() + sum(i * s for i, s in zip(index, x.stride(), strict=True)) for index in _indices(x.shape)}
        for x in (a, b)
    ]
    return bool(places[0] & places[1])


def _indices(shape):
    return torch.cartesian_prod(*(torch.arange(n) for n in shape)).tolist()


def test_share_memory_is_exact_for_equal_strides_and_disjoint_ranges():
    memory = torch.empty(400)
    shapes = [(3, 2, 4), (2, 1, 4), (3, 3, 2), (1, 2, 4)]
    seen = set()
    for stride in ((24, 4, 1), (40, 8, 1), (12, 36, 1)):
        for offset in range(0, 80, 3):
            for first in shapes:
                a = memory.as_strided(first, stride, 30)
                if layout.overlaps_itself(a):
                    continue
                for second in shapes:
                    b = memory.as_strided(second, stride, offset)
                    if layout.overlaps_itself(b):
                        continue
                    seen.add(_touches(a, b))
                    assert layout.share_memory(a, b) is _touches(a, b), (stride, offset, first, second)
                    assert layout.share_memory(b, a) is _touches(a, b), (stride, offset, first, second)
    assert seen == {True, False}


def test_share_memory_of_other_strides_sees_one_start_and_ignores_other_storages():
    memory = torch.empty(100)
    assert layout.share_memory(memory[:64].view(8, 8), memory[:32].view(8, 4))
    assert not layout.share_memory(memory[:64].view(8, 8), torch.empty(64).view(8, 8))
    assert not layout.share_memory(memory[:64].view(8, 8), memory[64:96].view(8, 4))


def test_share_memory_of_contiguous_tensors_of_other_shapes():
    """Two plain slices of one buffer that overlap by half share memory, whatever their shapes."""
    memory = torch.empty(256)
    assert layout.share_memory(memory[:128].view(2, 8, 8), memory[64:128].view(2, 4, 8))
    assert layout.share_memory(memory[64:128].view(2, 4, 8), memory[:128].view(2, 8, 8))
