"""What a server asks of `PagedKVCache` beyond pages: forks that share them, FlashInfer's indices, slots, one request's K and V."""

import random

import pytest
import torch

from decode_rope import CacheFull, PagedKVCache, RopeTable, rope_append_prefill


def make_cache(**changes):
    sizes = dict(num_layers=2, num_pages=12, page_size=3, num_kv_heads=2, head_dim=4, max_requests=5, device="cpu")
    return PagedKVCache(**(sizes | dict(dtype=torch.float32) | changes))


def write(cache, request, positions, value):
    """K = value + position and V = −K at `positions`, in every layer."""
    for index in range(cache.num_layers):
        k_cache, v_cache = cache.layer(index)
        for position in positions:
            page = cache.block_table[request, position // cache.page_size]
            offset = position % cache.page_size
            at = (page, offset) if cache.kv_layout == "NHD" else (page, slice(None), offset)
            k_cache[at] = value + position
            v_cache[at] = -value - position


def held(cache, request):
    """The first element of K of each token, and proof that V and all layers say the same."""
    rows = []
    for index in range(cache.num_layers):
        k, v = cache.gather(index, request)
        assert torch.equal(k[..., :1].expand_as(k), k) and torch.equal(v, -k)
        rows.append(k[:, 0, 0].tolist())
    assert rows == [rows[0]] * len(rows)
    return rows[0]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_fork_shares_pages_until_one_of_them_appends(kv_layout):
    cache = make_cache(kv_layout=kv_layout)
    parent = cache.allocate(5)
    write(cache, parent, range(5), 100)
    fork = cache.fork(parent)
    assert cache.pages(fork) == cache.pages(parent) and cache.num_free_pages == 10
    assert cache.block_table[fork].tolist() == cache.block_table[parent].tolist()
    write(cache, fork, cache.append(fork, 2), 200)  # copies the half-full page, and needs one more
    assert cache.num_free_pages == 8
    write(cache, parent, cache.append(parent), 300)  # owns its page again: no copy
    assert cache.num_free_pages == 8
    assert held(cache, parent) == [100, 101, 102, 103, 104, 305]
    assert held(cache, fork) == [100, 101, 102, 103, 104, 205, 206]
    assert cache.pages(fork)[0] == cache.pages(parent)[0] and cache.pages(fork)[1] != cache.pages(parent)[1]
    assert cache.block_table[fork, :3].tolist() == list(cache.pages(fork))
    cache.free(parent)
    assert held(cache, fork) == [100, 101, 102, 103, 104, 205, 206]  # the shared page is still its own
    cache.free(fork)
    assert cache.num_free_pages == cache.num_pages


def test_full_pages_are_never_copied():
    cache = make_cache()
    parent = cache.allocate(6)
    forks = [cache.fork(parent) for _ in range(3)]
    cache.append_many([parent, *forks], 1)
    assert cache.num_free_pages == 12 - 2 - 4
    assert {cache.pages(request)[:2] for request in forks} == {cache.pages(parent)[:2]}


def test_the_last_of_the_sharers_in_one_call_keeps_the_page():
    cache = make_cache()
    parent = cache.allocate(4)
    write(cache, parent, range(4), 100)
    forks = [cache.fork(parent), cache.fork(parent)]
    grown = cache.append_many([parent, *forks], 1)
    assert cache.num_free_pages == 12 - 2 - 2  # three sharers, two copies
    for value, request, positions in zip((1000, 2000, 3000), (parent, *forks), grown, strict=True):
        write(cache, request, positions, value)
    assert [held(cache, request)[-2:] for request in (parent, *forks)] == [[103, 1004], [103, 2004], [103, 3004]]


def test_a_copy_counts_among_the_pages_needed():
    cache = make_cache(num_pages=2)
    parent = cache.allocate(4)
    fork = cache.fork(parent)
    before = (cache.block_table.clone(), cache.pages(fork), cache.length(fork))
    with pytest.raises(CacheFull, match="1 pages needed and 0 of 2 free"):
        cache.append(fork)
    assert torch.equal(before[0], cache.block_table) and before[1:] == (cache.pages(fork), cache.length(fork))
    cache.append(fork, 0)  # nothing is written, so nothing is copied
    cache.free(parent)
    cache.append(fork)
    assert cache.pages(fork) == before[1]


def test_fork_refuses_what_allocate_refuses():
    cache = make_cache(max_requests=1)
    with pytest.raises(ValueError, match="request: 0 is not allocated"):
        cache.fork(0)
    parent = cache.allocate()
    with pytest.raises(CacheFull, match="all 1 requests are in use"):
        cache.fork(parent)


@pytest.mark.parametrize("seed", range(4))
def test_forks_appends_and_frees_in_any_order_keep_every_text(seed):
    rng = random.Random(seed)
    cache = make_cache(num_pages=20, page_size=rng.choice([1, 2, 5]), max_requests=6, max_pages_per_request=30)
    texts: dict[int, list[int]] = {}
    for step in range(400):
        try:
            action = rng.random()
            if action < 0.15:
                texts[cache.allocate()] = []
            elif action < 0.35 and texts:
                parent = rng.choice(list(texts))
                texts[cache.fork(parent)] = list(texts[parent])
            elif action < 0.5 and texts:
                request = rng.choice(list(texts))
                cache.free(request)
                del texts[request]
            elif texts:
                chosen = rng.sample(list(texts), rng.randint(1, len(texts)))
                counts = [rng.randint(0, 4) for _ in chosen]
                for request, positions in zip(chosen, cache.append_many(chosen, counts), strict=True):
                    value = 1000 * (step + 1) + 100 * request
                    write(cache, request, positions, value)
                    texts[request] += [value + position for position in positions]
        except CacheFull:
            pass
        assert cache.num_free_pages == 20 - len({page for request in texts for page in cache.pages(request)})
        for request, text in texts.items():
            assert cache.length(request) == len(text)
    assert any(texts.values())
    for request, text in texts.items():
        assert held(cache, request) == text
    for request in texts:
        cache.free(request)
    assert cache.num_free_pages == 20 and sorted(cache._free_pages) == list(range(20))


def test_page_indices_are_flashinfers():
    cache = make_cache()
    first, empty, second = cache.allocate(7), cache.allocate(), cache.allocate(3)
    indptr, indices, last_page_len = cache.page_indices([second, empty, first], pad_to=5)
    assert indptr.tolist() == [0, 1, 1, 4, 5, 6]
    assert indices.tolist() == [*cache.pages(second), *cache.pages(first), 0, 0]
    assert last_page_len.tolist() == [3, 0, 1, 1, 1]
    assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
    # FlashInfer's own formula for the length of a row.
    lengths = (indptr.diff() - 1).clamp(min=0) * cache.page_size + last_page_len
    assert lengths.tolist() == [3, 0, 7, 1, 1]
    with pytest.raises(ValueError, match="pad_to: expected at least a row for each of 2 requests, got 1"):
        cache.page_indices([first, second], pad_to=1)


def test_a_forks_slots_are_its_own():
    """Through `slot_mapping`, forks that continue one prompt write apart."""
    cache = make_cache(num_layers=1, head_dim=8)
    table = RopeTable.build(8, 64)
    parent = cache.allocate(4)
    fork = cache.fork(parent)
    requests = [parent, fork]
    grown = cache.append_many(requests, 2)
    positions = torch.tensor([position for row in grown for position in row])
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 4, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    slots = cache.slot_mapping(requests, 2)
    assert len(set(slots.tolist())) == 4
    rope_append_prefill(q, k, v, *cache.layer(0), table, positions, slot_mapping=slots)
    for request, rows in zip(requests, v.split(2), strict=True):
        assert torch.equal(cache.gather(0, request)[1][4:], rows)
