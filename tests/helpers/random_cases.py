"""Seeded random calls: shapes, dtypes, layouts, addressing and every kind of row that must not be written, drawn together."""

import random
from dataclasses import dataclass

import torch
from cases import ACTIVATIONS, CACHES, FLOATS, Spec

HEADS = ((5, 1), (9, 3), (14, 2), (71, 1), (32, 8), (8, 1), (4, 4), (16, 16), (1, 1), (24, 0))
HEAD_DIMS = (64, 80, 96, 100, 128, 192, 256, 512)
ROTARY_DIMS = (0, 20, 24, 32, 64, 80, 96, 100, 128, 160, 256)
PAGE_SIZES = (1, 2, 3, 7, 16, 64, 128, 256, 544, 1056)


@dataclass
class Sizes:
    """What a lane can afford."""

    max_tokens: int
    cache_elements: int
    calls_per_shape: int  # a GPU compiles a kernel for each shape
    heads: tuple = HEADS


CPU_SIZES = Sizes(max_tokens=6, cache_elements=300_000, calls_per_shape=1, heads=(*HEADS[:-1], (6, 0)))
GPU_SIZES = Sizes(max_tokens=130, cache_elements=1_000_000, calls_per_shape=6)


def bad_integers(dtype: torch.dtype, first_bad: int) -> list[int]:
    """Numbers past the end of something that holds `first_bad`, up to the largest of the dtype."""
    huge = [2**31 - 1] if dtype == torch.int32 else [2**31, 2**32 + 1, 2**40, 2**62, 2**63 - 1]
    return [first_bad, first_bad + 1, *huge]


def negatives(dtype: torch.dtype) -> list[int]:
    return [-1, -1, -2, -7, -(2**31)] + ([] if dtype == torch.int32 else [-(2**31) - 1, -(2**62), -(2**63)])


def random_spec(seed: int, sizes: Sizes) -> Spec:
    """A call whose good rows go to slots of their own, and about a third of whose rows are not good."""
    rng = random.Random(-1 - seed // sizes.calls_per_shape)
    heads = rng.choice(sizes.heads)
    head_dim = rng.choice(HEAD_DIMS)
    rotary_dim = rng.choice([head_dim, *(r for r in ROTARY_DIMS if r <= head_dim)])
    cache, activations = rng.choice(list(CACHES)), rng.choice(list(ACTIVATIONS))
    v_is_k = rng.random() < 0.1 and activations != "packed"
    k_out = rng.choice([None, None, "own", "k"]) if heads[1] else None
    if k_out == "k" and (v_is_k or activations == "one head expanded"):
        k_out = "own"
    v_head_dim = head_dim if v_is_k else rng.choice([head_dim, head_dim, 40, 64, 96, 128, 512])
    slot_elements = max(heads[1], 1) * (head_dim + v_head_dim)
    slots = max(sizes.max_tokens + 2, min(2200, sizes.cache_elements // slot_elements))
    page_size = rng.choice([p for p in PAGE_SIZES if 2 * p <= slots])
    num_pages = max(2, slots // page_size)
    spec = Spec(
        positions=[],
        heads=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        rotary_dim=rotary_dim,
        dtype=rng.choice(FLOATS),
        positions_dtype=rng.choice([torch.int32, torch.int64]),
        index_dtype=rng.choice([torch.int32, torch.int64]),
        page_size=page_size,
        num_pages=num_pages,
        tokens_per_request=rng.choice([1, 1, 1, 2, 3, 4]),
        is_neox=rng.random() < 0.6,
        cache=cache,
        activations=activations,
        q_out=rng.random() < 0.3,
        k_out=k_out,
        v_is_k=v_is_k,
        seed=seed,
    )
    draw = rng.choice([_with_slots, _with_table])
    rng = random.Random(seed)
    spec = spec.but(shift=rng.choice([0, 0, 0, 1, 2, 4, 8]), table_shift=rng.choice([0, 0, 0, 1, 2]))
    num_tokens = rng.choice([1, 2, 3, rng.randint(1, sizes.max_tokens), sizes.max_tokens])
    if cache.startswith("flat"):
        page_size, num_pages = 1, num_pages * page_size
    num_tokens = min(num_tokens, page_size * num_pages)
    targets = rng.sample(range(page_size * num_pages), num_tokens)
    if heads[1] == 0:
        return _positions_only(spec, rng, num_tokens)
    return draw(spec, rng, targets, page_size, num_pages)


def _spoil(rng: random.Random, good: int, bad: list[int], rate: float = 0.12) -> int:
    return rng.choice(bad) if rng.random() < rate else good


def _positions_only(spec: Spec, rng: random.Random, num_tokens: int) -> Spec:
    bad = negatives(spec.positions_dtype) + bad_integers(spec.positions_dtype, spec.max_position)
    return spec.but(positions=[_spoil(rng, rng.randrange(spec.max_position), bad, 0.3) for _ in range(num_tokens)])


def _with_slots(spec: Spec, rng: random.Random, targets: list[int], page_size: int, num_pages: int) -> Spec:
    capacity = page_size * num_pages
    bad_slots = [*negatives(spec.index_dtype), 1 - page_size or -1, *bad_integers(spec.index_dtype, capacity)]
    slots = [_spoil(rng, slot, bad_slots, 0.25) for slot in targets]
    spec = spec.but(slots=slots[: len(slots) - rng.choice([0, 0, 0, 1, 2])] if len(slots) > 2 else slots)
    bad = negatives(spec.positions_dtype) + bad_integers(spec.positions_dtype, spec.max_position)
    return spec.but(positions=[_spoil(rng, rng.randrange(spec.max_position), bad) for _ in targets])


def _with_table(spec: Spec, rng: random.Random, targets: list[int], page_size: int, num_pages: int) -> Spec:
    """Token t gets a column of its own in its request's row, so that any target slot can be reached."""
    per_request = spec.tokens_per_request
    requests = -(-len(targets) // per_request)
    width = per_request + rng.randint(0, 3)
    garbage = [*range(num_pages), *negatives(spec.index_dtype), *bad_integers(spec.index_dtype, num_pages)]
    table = [[rng.choice(garbage) for _ in range(width)] for _ in range(requests)]
    columns = [rng.sample(range(width), per_request) for _ in range(requests)]
    bad_pages = [*negatives(spec.index_dtype), *bad_integers(spec.index_dtype, num_pages)]
    places = []
    for token, slot in enumerate(targets):
        request, column = token // per_request, columns[token // per_request][token % per_request]
        table[request][column] = _spoil(rng, slot // page_size, bad_pages, 0.15)
        places.append(column * page_size + slot % page_size)
    too_wide = [width * page_size, *bad_integers(spec.positions_dtype, (width + 1) * page_size)]
    bad = negatives(spec.positions_dtype) + too_wide
    spec = spec.but(block_table=table, max_position=max(64, width * page_size + rng.randint(0, 2 * page_size)))
    places = [_spoil(rng, p, bad, 0.2) for p in places]
    if rng.random() < 0.3:
        bad_positions = negatives(spec.positions_dtype) + bad_integers(spec.positions_dtype, spec.max_position)
        positions = [_spoil(rng, rng.randrange(spec.max_position), bad_positions) for _ in places]
        return spec.but(positions=positions, cache_positions=places)
    return spec.but(positions=places)
