"""The reference of latent appends against formulas written out token by token in float64."""

import cmath
import math

import pytest
import torch

from decode_rope import LatentNorm, reference
from decode_rope.append.faults import fault_buffer

T, H, R, L = 4, 2, 8, 12


def a_call(norm: bool):
    generator = torch.Generator().manual_seed(1)
    q, k, kv = (torch.randn(shape, generator=generator) for shape in ((T, H, R), (T, R), (T, L)))
    angle = torch.rand(32, R // 2, generator=generator) * 6
    kv_norm = LatentNorm(torch.rand(L, generator=generator), 1e-3) if norm else None
    return q, k, kv, angle, kv_norm


def pairs_of(row: list[float], interleaved: bool) -> list[complex]:
    half = len(row) // 2
    return [complex(row[2 * i], row[2 * i + 1]) if interleaved else complex(row[i], row[half + i]) for i in range(half)]


def row_of(pairs: list[complex], interleaved: bool) -> list[float]:
    if interleaved:
        return [x for pair in pairs for x in (pair.real, pair.imag)]
    return [pair.real for pair in pairs] + [pair.imag for pair in pairs]


def turned(row: torch.Tensor, angles: torch.Tensor, read: bool, written: bool) -> torch.Tensor:
    pairs = pairs_of(row.tolist(), read)
    return torch.tensor(row_of([pair * cmath.exp(1j * a) for pair, a in zip(pairs, angles.tolist(), strict=True)], written))


def normed(row: torch.Tensor, kv_norm: LatentNorm | None) -> torch.Tensor:
    if kv_norm is None:
        return row
    root = math.sqrt(sum(x * x for x in row.tolist()) / len(row) + kv_norm.eps)
    return torch.tensor([x / root * w for x, w in zip(row.tolist(), kv_norm.weight.tolist(), strict=True)])


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("written", [False, True], ids=["halves out", "interleaved out"])
@pytest.mark.parametrize("read", [False, True], ids=["halves in", "interleaved in"])
@pytest.mark.parametrize("pair", [False, True], ids=["one cache", "two caches"])
def test_the_reference_does_what_the_formulas_say(read, written, norm, pair):
    q, k, kv, angle, kv_norm = a_call(norm)
    table = torch.cat([angle.cos(), angle.sin()], 1)
    positions, block_table = torch.tensor([5, 0, 11, -1]), torch.tensor([[3, 1, 2], [4, 0, 0], [7, 6, 5], [1, 1, 1]])
    cache = torch.zeros(8, 4, L + R)
    given = (torch.zeros(8, 4, L), torch.zeros(8, 4, R)) if pair else cache
    out = torch.zeros_like(q)
    faults = fault_buffer(torch.device("cpu")).clone()
    reference.rope_append_mla_decode(
        q, k, kv, given, table, positions, block_table=block_table, kv_norm=kv_norm, q_out=out, interleaved_in=read,
        interleaved_out=written, faults=faults,
    )  # fmt: skip
    cache = torch.cat(given, -1) if pair else cache
    for token, (page, offset) in enumerate([(1, 1), (4, 0), (5, 3)]):
        angles = angle[positions[token]]
        wanted = torch.cat([normed(kv[token], kv_norm), turned(k[token], angles, read, written)])
        torch.testing.assert_close(cache[page, offset], wanted, atol=2e-6, rtol=2e-6)
        for head in range(H):
            torch.testing.assert_close(out[token, head], turned(q[token, head], angles, read, written), atol=2e-6, rtol=2e-6)
        cache[page, offset] = 0
    assert not cache.any() and torch.equal(out[3], q[3])
    assert faults[0] == 0
