"""Laws that hold for any input, tried on inputs that Hypothesis looks for."""

import math

import pytest
import torch
from cases import ACTIVATIONS, CACHES, FLOATS, Spec, build, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import ON_GPU

from decode_rope import reference

quick = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
kernel_runs = settings(quick, max_examples=40 if ON_GPU else 15)
angles = st.floats(-10, 10)


@st.composite
def specs(draw):
    """Up to 6 tokens in 12 slots of a small cache: any positions, any index entries, any layout."""
    num_tokens = draw(st.integers(1, 6))
    page_size, num_pages, per_request, width = draw(st.sampled_from([(1, 12, 1, 8), (3, 4, 1, 3), (4, 3, 2, 2), (6, 2, 3, 4)]))
    cache = draw(st.sampled_from(sorted(CACHES)))
    if cache.startswith("flat"):
        page_size, num_pages = 1, 12
    anything = st.sampled_from([-(2**63), -(2**31), -7, -1, 12, 13, 2**31, 2**40, 2**63 - 1])
    positions = draw(st.lists(st.integers(0, 15) | anything, min_size=num_tokens, max_size=num_tokens))
    rotary_dim, head_dim = draw(st.sampled_from([(0, 8), (2, 7), (6, 6), (10, 12), (16, 16), (24, 32)]))
    spec = Spec(
        positions,
        heads=(draw(st.integers(1, 5)), draw(st.integers(1, 3))),
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([head_dim, 4, 9])),
        rotary_dim=rotary_dim,
        dtype=draw(st.sampled_from(FLOATS)),
        index_dtype=torch.int64,
        page_size=page_size,
        num_pages=num_pages,
        max_position=draw(st.sampled_from([16, 11])),
        is_neox=draw(st.booleans()),
        cache=cache,
        activations=draw(st.sampled_from(sorted(ACTIVATIONS))),
        shift=draw(st.integers(0, 2)),
        q_out=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )
    if draw(st.booleans()):
        slots = draw(st.permutations(range(12)))[: draw(st.integers(0, num_tokens))]
        return spec.but(slots=[draw(st.just(slot) | anything) for slot in slots])
    pages = st.integers(0, num_pages - 1) | anything
    rows = -(-num_tokens // per_request)
    table = draw(st.lists(st.lists(pages, min_size=width, max_size=width), min_size=rows, max_size=rows))
    return without_shared_slots(spec.but(block_table=table, tokens_per_request=per_request))


def without_shared_slots(spec: Spec) -> Spec:
    """Two tokens with one slot may leave either; make all but the first of them padding."""
    positions, taken = list(spec.positions), set()
    for token, p in enumerate(positions):
        row = spec.block_table[token // spec.tokens_per_request]
        if 0 <= p < len(row) * spec.page_size:
            slot = row[p // spec.page_size] * spec.page_size + p % spec.page_size
            if slot in taken:
                positions[token] = -1
            taken.add(slot)
    return spec.but(positions=positions)


@pytest.mark.kernel
@kernel_runs
@given(spec=specs())
def test_kernel_and_reference_leave_the_same_bytes(spec, device):
    check(build(spec, device))


def turn(x: torch.Tensor, angle: torch.Tensor, is_neox: bool) -> torch.Tensor:
    return reference.rotate(x, angle.cos(), angle.sin(), is_neox)


@quick
@given(st.lists(angles, min_size=3, max_size=3), st.lists(angles, min_size=3, max_size=3), st.booleans(), st.integers(0, 99))
def test_turning_twice_is_turning_by_the_sum(a, b, is_neox, seed):
    a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    x = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert torch.allclose(turn(turn(x, a, is_neox), b, is_neox), turn(x, a + b, is_neox), atol=1e-12)


@quick
@given(st.lists(angles, min_size=4, max_size=4), st.booleans(), st.integers(0, 99))
def test_turning_keeps_lengths_and_turning_back_undoes_it(angle, is_neox, seed):
    angle = torch.tensor(angle, dtype=torch.float64)
    x = torch.randn(10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = turn(x, angle, is_neox)
    assert math.isclose(float(y.norm()), float(x.norm()), rel_tol=1e-12)
    assert torch.allclose(turn(y, -angle, is_neox), x, atol=1e-12)
    assert torch.equal(turn(x, 0 * angle, is_neox), x)


@quick
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.booleans(), st.integers(0, 99))
def test_scores_depend_on_the_distance_alone(p, q, shift, is_neox, seed):
    frequency = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    x, y = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = [turn(x, (p + s) * frequency, is_neox) @ turn(y, (q + s) * frequency, is_neox) for s in (0, shift)]
    assert math.isclose(float(scores[0]), float(scores[1]), abs_tol=1e-9)


@quick
@given(st.integers(0, 99), st.integers(1, 8))
def test_the_two_pairings_are_one_rotation_of_reordered_elements(seed, half):
    generator = torch.Generator().manual_seed(seed)
    x, angle = torch.randn(2 * half + 3, generator=generator), torch.randn(half, generator=generator)
    order = torch.cat([torch.arange(0, 2 * half, 2), torch.arange(1, 2 * half, 2), torch.arange(2 * half, 2 * half + 3)])
    assert torch.equal(turn(x, angle, False)[order], turn(x[order], angle, True))
