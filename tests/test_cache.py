"""`PagedKVCache`: pages have one owner, none gets lost, and a refused call changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from decode_rope.cache import CacheFull, PagedKVCache

LAYOUTS = ("NHD", "HND")


def make_cache(**changes) -> PagedKVCache:
    sizes = dict(num_layers=2, num_pages=8, page_size=3, num_kv_heads=2, head_dim=4, v_head_dim=6)
    sizes |= dict(max_requests=3, max_pages_per_request=4, dtype=torch.float32, device="cpu")
    return PagedKVCache(**(sizes | changes))


def state(cache: PagedKVCache) -> dict:
    """All that a refused call must leave alone, and what the next calls would hand out."""
    return {
        "table": cache.block_table.tolist(),
        "address": cache.block_table.data_ptr(),
        "k": cache.k_storage.clone(),
        "v": cache.v_storage.clone(),
        "requests": {r: (cache.length(r), cache.pages(r)) for r in cache.requests},
        "free pages": list(cache._free_pages),
        "free requests": list(cache._free_requests),
    }


def assert_same_state(before: dict, after: dict) -> None:
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, after[key]), key
        else:
            assert value == after[key], key


def expect_refused(cache: PagedKVCache, error, match: str | None, call) -> None:
    before = state(cache)
    with pytest.raises(error, match=match):
        call()
    assert_same_state(before, state(cache))


class Pages(RuleBasedStateMachine):
    """A plain dict of lengths is the model; the cache must agree with it after any sequence of calls."""

    @initialize(
        num_pages=st.integers(1, 12),
        page_size=st.integers(1, 5),
        max_requests=st.integers(1, 4),
        width=st.integers(1, 6),
    )
    def build(self, num_pages, page_size, max_requests, width):
        self.cache = make_cache(num_pages=num_pages, page_size=page_size, max_requests=max_requests, max_pages_per_request=width)
        self.address = self.cache.block_table.data_ptr()
        self.model: dict[int, int] = {}

    def pages_needed(self, lengths) -> int:
        return sum(-(-n // self.cache.page_size) for n in lengths)

    def fits(self, model: dict[int, int]) -> bool:
        widest = max(model.values(), default=0)
        return widest <= self.cache.max_tokens_per_request and (self.pages_needed(model.values()) <= self.cache.num_pages)

    def attempt(self, call, after: dict[int, int], allowed: bool):
        """`call` must work exactly if `allowed`, and a refused one must leave no trace."""
        if allowed:
            result = call()
            self.model = after
            return result
        expect_refused(self.cache, (CacheFull, ValueError), None, call)
        return None

    @rule(num_tokens=st.integers(0, 20))
    def allocate(self, num_tokens):
        free_ids = set(range(self.cache.max_requests)) - set(self.model)
        allowed = bool(free_ids) and self.fits(self.model | {-1: num_tokens})
        request = self.attempt(lambda: self.cache.allocate(num_tokens), self.model, allowed)
        if allowed:
            assert request in free_ids
            self.model = self.model | {request: num_tokens}

    @rule(data=st.data(), n=st.integers(0, 9))
    def append(self, data, n):
        request = data.draw(st.integers(0, self.cache.max_requests - 1))
        start = self.model.get(request, 0)
        after = self.model | {request: start + n}
        allowed = request in self.model and self.fits(after)
        got = self.attempt(lambda: self.cache.append(request, n), after, allowed)
        assert got is None or got == range(start, start + n)

    @rule(data=st.data())
    def append_many(self, data):
        requests = data.draw(st.permutations(sorted(self.model)))
        counts = [data.draw(st.integers(0, 5)) for _ in requests]
        after = self.model | {r: self.model[r] + n for r, n in zip(requests, counts, strict=True)}
        starts = dict(self.model)
        got = self.attempt(lambda: self.cache.append_many(requests, counts), after, self.fits(after))
        wanted = [range(starts[r], starts[r] + n) for r, n in zip(requests, counts, strict=True)]
        assert got is None or got == wanted

    @rule(data=st.data())
    def free(self, data):
        request = data.draw(st.integers(0, self.cache.max_requests - 1))
        after = {r: n for r, n in self.model.items() if r != request}
        self.attempt(lambda: self.cache.free(request), after, request in self.model)

    @invariant()
    def agrees_with_the_model(self):
        cache = self.cache
        assert cache.requests == tuple(sorted(self.model))
        assert {r: cache.length(r) for r in cache.requests} == self.model
        assert cache.num_free_pages == cache.num_pages - self.pages_needed(self.model.values())
        assert cache.block_table.data_ptr() == self.address

    @invariant()
    def every_page_has_one_owner(self):
        owned = [page for request in self.cache.requests for page in self.cache.pages(request)]
        assert sorted(owned + self.cache._free_pages) == list(range(self.cache.num_pages))

    @invariant()
    def table_shows_the_pages_and_nothing_else(self):
        width = self.cache.max_pages_per_request
        for row, entries in enumerate(self.cache.block_table.tolist()):
            pages = list(self.cache.pages(row)) if row in self.model else []
            assert len(pages) == self.pages_needed([self.model.get(row, 0)])
            assert entries == pages + [-1] * (width - len(pages))


Pages.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPages = Pages.TestCase


def test_out_of_pages_changes_nothing():
    cache = make_cache(num_pages=5)
    first = cache.allocate(9)
    second = cache.allocate(5)
    assert cache.num_free_pages == 0
    expect_refused(cache, CacheFull, "1 pages needed and 0 of 5 free", lambda: cache.append(second, 2))
    expect_refused(cache, CacheFull, "1 pages needed", lambda: cache.allocate(1))
    assert cache.append(second) == range(5, 6)  # the last slot of its last page needs no new one
    cache.free(first)
    expect_refused(cache, CacheFull, "4 pages needed and 3 of 5 free", lambda: cache.allocate(12))
    assert cache.append(second, 6) == range(6, 12)


def test_a_batch_grows_whole_or_not_at_all():
    cache = make_cache(num_pages=3)
    requests = [cache.allocate(3), cache.allocate(3)]
    expect_refused(cache, CacheFull, "2 pages needed and 1", lambda: cache.append_many(requests))
    assert cache.append_many(requests, [1, 0]) == [range(3, 4), range(3, 3)]


def test_out_of_requests_changes_nothing():
    cache = make_cache()
    for _ in range(3):
        cache.allocate()
    expect_refused(cache, CacheFull, "all 3 requests are in use", cache.allocate)


def test_more_tokens_than_a_row_holds_changes_nothing():
    cache = make_cache()
    expect_refused(cache, ValueError, "4 pages of 3", lambda: cache.allocate(13))
    request = cache.allocate(12)
    other = cache.allocate(1)
    expect_refused(cache, ValueError, "from 12 to 13", lambda: cache.append(request))
    expect_refused(cache, ValueError, "from 12 to 13", lambda: cache.append_many([other, request]))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda c: c.free(1), ValueError, "request: 1 is not allocated"),
        (lambda c: c.free(7), ValueError, "below max_requests=3, got 7"),
        (lambda c: c.free(-1), ValueError, "got -1"),
        (lambda c: c.free("0"), TypeError, "request: expected an int"),
        (lambda c: c.append(2), ValueError, "request: 2 is not allocated"),
        (lambda c: c.append(0, -1), ValueError, "n: expected at least 0, got -1"),
        (lambda c: c.append(0, 1.5), TypeError, "n"),
        (lambda c: c.append_many([0, 0]), ValueError, "requests: expected distinct ids"),
        (lambda c: c.append_many([0], [1, 2]), ValueError, "one number for each of 1"),
        (lambda c: c.allocate(-1), ValueError, "num_tokens"),
        (lambda c: c.allocate(1.0), TypeError, "num_tokens: expected an int"),
        (lambda c: c.length(1), ValueError, "request: 1"),
        (lambda c: c.pages(1), ValueError, "request: 1"),
        (lambda c: c.gather(0, 1), ValueError, "request: 1"),
        (lambda c: c.slot_mapping([0], 6), ValueError, "has 5 tokens, got n=6"),
    ],
)
def test_bad_arguments_change_nothing(call, error, match):
    cache = make_cache()
    assert cache.allocate(5) == 0
    expect_refused(cache, error, match, lambda: call(cache))


def test_double_free_is_refused():
    cache = make_cache()
    request = cache.allocate(5)
    cache.free(request)
    expect_refused(cache, ValueError, "freed already", lambda: cache.free(request))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_pages": 0},
        {"page_size": -1},
        {"max_requests": 0},
        {"kv_layout": "NDH"},
        {"max_pages_per_request": 0},
    ],
)
def test_bad_sizes_are_refused(changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=name):
        make_cache(**changes)
    with pytest.raises(TypeError, match="head_dim: expected an int"):
        make_cache(head_dim=64.0)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_layers_are_views_of_one_storage(kv_layout):
    cache = make_cache(kv_layout=kv_layout)
    shapes = {"NHD": ((8, 3, 2, 4), (8, 3, 2, 6)), "HND": ((8, 2, 3, 4), (8, 2, 3, 6))}[kv_layout]
    for layer in range(2):
        k, v = cache.layer(layer)
        assert (tuple(k.shape), tuple(v.shape)) == shapes
        assert k.is_contiguous() and v.is_contiguous()
        k.fill_(layer + 1)
        v.fill_(-layer - 1)
        assert cache.layer(layer)[0] is k
    assert cache.k_storage[0].eq(1).all() and cache.k_storage[1].eq(2).all()
    assert cache.v_storage[0].eq(-1).all() and cache.v_storage[1].eq(-2).all()


@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_slot_mapping_and_gather_address_the_same_tokens(kv_layout):
    """Writes through the flat slots come back from `gather` in token order, and touch nothing else."""
    cache = make_cache(kv_layout=kv_layout)
    a, b = cache.allocate(), cache.allocate()
    wanted: dict[int, list] = {a: [], b: []}
    generator = torch.Generator().manual_seed(0)
    for counts in ([4, 1], [1, 1], [0, 5], [2, 1]):  # pages of both requests interleave
        cache.append_many([a, b], counts)
        slots = cache.slot_mapping([a, b], counts)
        assert slots.dtype == torch.int64 and slots.shape == (sum(counts),)
        k = torch.randn(len(slots), 2, 4, generator=generator)
        v = torch.randn(len(slots), 2, 6, generator=generator)
        for row, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, cache.page_size)
            for values, pages in zip((k, v), cache.layer(1), strict=True):
                target = pages[page, offset] if kv_layout == "NHD" else pages[page, :, offset]
                target.copy_(values[row])
        for request, part in zip((a, b), zip(k.split(counts), v.split(counts), strict=True), strict=True):
            wanted[request].append(part)
    assert max(cache.pages(a)) > min(cache.pages(b)) and max(cache.pages(b)) > min(cache.pages(a))
    for request in (a, b):
        for got, parts in zip(cache.gather(1, request), zip(*wanted[request], strict=True), strict=True):
            assert got.is_contiguous()
            assert torch.equal(got, torch.cat(parts))
    written = cache.length(a) + cache.length(b)
    assert cache.k_storage[1].count_nonzero() == written * 2 * 4
    assert cache.k_storage[0].count_nonzero() == 0 and cache.v_storage[0].count_nonzero() == 0


def test_empty_requests_have_no_slots_and_no_tokens():
    cache = make_cache()
    request = cache.allocate()
    assert cache.pages(request) == () and cache.length(request) == 0
    assert cache.slot_mapping([request], 0).shape == (0,)
    k, v = cache.gather(0, request)
    assert k.shape == (0, 2, 4) and v.shape == (0, 2, 6)
    cache.free(request)


def test_quantised_storage_gathers_its_codes():
    cache = make_cache(dtype=torch.float8_e4m3fn)
    request = cache.allocate(4)
    k, _ = cache.gather(1, request)
    assert k.dtype == torch.float8_e4m3fn and k.shape == (4, 2, 4)


def test_a_cache_built_in_inference_mode_can_be_updated_outside_of_it():
    with torch.inference_mode():
        cache = make_cache()
        request = cache.allocate(1)
    cache.append(request, 5)
    with torch.inference_mode():
        cache.free(request)
    assert cache.block_table.eq(-1).all()


@pytest.mark.gpu
def test_updates_neither_synchronise_nor_move_the_table():
    cache = make_cache(device="cuda")
    address = cache.block_table.data_ptr()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        a, b = cache.allocate(4), cache.allocate(4)
        cache.append_many([a, b], 3)
        cache.slot_mapping([a, b], 3)
        cache.free(a)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.block_table.data_ptr() == address
    assert cache.block_table[a].eq(-1).all()
    assert cache.block_table[b].tolist() == [*cache.pages(b), -1]


@pytest.mark.gpu
def test_a_change_cannot_overtake_the_one_before_it():
    """Many changes are queued behind slow work; each kernel must see the table of its own moment."""
    cache = make_cache(num_pages=64, page_size=1, max_requests=1, max_pages_per_request=64, device="cuda")
    seen = torch.empty(64, 64, dtype=torch.int32, device="cuda")
    wanted = []
    torch.cuda._sleep(50_000_000)
    for turn in range(64):
        request = cache.allocate(turn % 5 + 1)
        seen[turn].copy_(cache.block_table[0])
        wanted.append([*cache.pages(request)] + [-1] * (63 - turn % 5))
        cache.free(request)
    assert seen.tolist() == wanted


@pytest.mark.gpu
def test_changes_inside_a_capture_are_refused():
    cache = make_cache(device="cuda")
    request = cache.allocate(1)
    graph = torch.cuda.CUDAGraph()
    row = torch.empty_like(cache.block_table[0])
    with torch.cuda.graph(graph):
        row.copy_(cache.block_table[request])
        with pytest.raises(RuntimeError, match="inside a CUDA graph capture"):
            cache.append(request, 5)
    assert cache.length(request) == 1
    cache.append(request, 5)
    graph.replay()
    assert row.tolist() == [*cache.pages(request), -1, -1]
