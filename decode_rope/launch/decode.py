"""The decode kernel's launch: what it is told, and how its work is divided.

Results never depend on the geometry; only time does.
"""

from typing import NamedTuple

import torch

from .. import reference
from ..append.arguments import Append
from ..append.checks import check_append
from ..append.layout import append_steps
from ..kernels.decode import rope_append_decode_kernel
from .append import Alignment, append_facts, append_integers, num_kv_heads, reference_arguments
from .platform import INTERPRETED, check_pdl, pdl_mode
from .spec import Spec, Values
from .tiles import power_of_two

_VERY_FEW_ELEMENTS, _FEW_ELEMENTS = 100_000, 350_000  # of all rows together
_MANY_Q_COLUMNS = 4096


class Geometry(NamedTuple):
    """A tile is `tokens · heads` rows; Q tiles and K/V tiles are shaped apart. Rows of one tile must be at least two.

    `pdl`: programmatic dependent launch where the caller leaves it open, and when kernels behind this one may be scheduled: 0 off,
    1 at once, 2 when all before this launch has ended (with metadata ready, at once), 3 when this launch has.

    `carveout`: shared memory to keep while this launch runs, in percent of the most there can be; -1 for the driver's choice. The
    kernel needs none, but a multiprocessor must be idle to change the split between it and L1, so that a GEMM or attention kernel,
    which live on shared memory, cannot share one with a launch that prefers L1. Launches through `kernel[grid]`, which a profiler's
    hooks bring about, cannot ask for it.
    """

    tokens_q: int
    heads_q: int
    tokens_kv: int
    heads_kv: int
    num_warps: int
    pdl: int
    carveout: int = -1

    def programs(self, num_tokens: int, num_q_heads: int, num_kv_heads: int) -> int:
        """Programs of a launch: the Q tiles, then as many K tiles as V tiles."""
        q_tiles = -(-num_tokens // self.tokens_q) * -(-num_q_heads // self.heads_q)
        kv_tiles = -(-num_tokens // self.tokens_kv) * -(-num_kv_heads // self.heads_kv)
        return q_tiles + 2 * kv_tiles


def check_geometry(geometry) -> None:
    """Raise a TypeError or ValueError for a geometry no kernel can be built with."""
    check_fields(geometry, Geometry)
    for tokens, heads in (geometry[:2], geometry[2:4]):
        if tokens * heads < 2:
            raise ValueError(f"geometry: expected tiles of at least two rows, got {geometry}; set the heads to 2")


def check_fields(geometry, kind: type) -> None:
    """The rules for every field of a geometry of decode steps alone: `kind`'s, whose last two are pdl and the carveout."""
    if not isinstance(geometry, kind):
        raise TypeError(f"geometry: expected a {kind.__module__}.{kind.__name__}, got {type(geometry).__name__}")
    if not all(isinstance(n, int) for n in geometry):
        raise TypeError(f"geometry: expected integers, got {geometry}")
    if any(n < 1 or n & (n - 1) for n in geometry[:-2]):
        raise ValueError(f"geometry: expected powers of two, got {geometry}")
    if geometry.pdl not in (0, 1, 2, 3):
        raise ValueError(f"geometry: expected pdl of 0 to 3, got {geometry}")
    if not -1 <= geometry.carveout <= 100:
        raise ValueError(f"geometry: expected a carveout of -1 to 100 percent, got {geometry}")


def decode_geometry(num_tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> Geometry:
    """The launch of a decode step. `num_kv_heads` is 0 when only Q rotates.

    Measured on an H200 (Triton 3.6, bf16, 1-1024 tokens, 2026-11-30), back to back: from 390,000 elements on, tiles that fill four
    warps with one 16-byte access a thread are the best. From 100,000 to 330,000, 8-byte ones, with half the instructions, are
    2-17 % faster. Below, they would be 0-8 % faster too than tiles of one warp and one token with 16-byte accesses; but whole steps
    have it otherwise: with these, Llama-3-8B saved 7.5 % of a step with one request and a rank of Llama-3-70B 5.2 % with 8 and
    3.6 % with 64; with 8-byte ones 1.9, 0.9 and, of four warps, -6.2 %.

    Whole steps with FlashInfer's attention (bench/FACTS.md) choose the carveout: without it 32/8/64 and 16/8/128 at 8 tokens and
    8/1/128 at 64 lose 2 to 5 % of the step, with it 32/8/128 at one token loses 1 to 3 %.
    """
    elements = num_tokens * (num_q_heads + 2 * num_kv_heads) * head_dim
    warps, rows, carveout = shape_of(elements, num_q_heads, head_dim)
    tiles = (*tile_of(num_q_heads, rows, warps > 1), *tile_of(max(num_kv_heads, 1), rows, warps > 1))
    return Geometry(*tiles, warps, 1, carveout)


def shape_of(elements: int, num_q_heads: int, head_dim: int) -> tuple[int, int, int]:
    """(warps of a program, rows of its tile, carveout) of a launch that moves this many elements; `decode_geometry` says why."""
    warps = 1 if elements <= _VERY_FEW_ELEMENTS else 4
    access = 4 if _VERY_FEW_ELEMENTS < elements <= _FEW_ELEMENTS else 8  # elements a thread in each half of a head
    rows = max(2, access * 32 * warps // power_of_two(head_dim // 2))
    carveout = 100 if elements <= _FEW_ELEMENTS and num_q_heads * head_dim < _MANY_Q_COLUMNS else -1
    return warps, rows, carveout


def tile_of(num_heads: int, rows: int, several_tokens: bool) -> tuple[int, int]:
    """(tokens, heads): all heads that fit, then tokens to fill up; a tile of one token keeps its index loads scalar."""
    heads = min(power_of_two(num_heads), rows)
    tokens = rows // heads if several_tokens else 1
    return (tokens, heads) if tokens * heads >= 2 else (1, 2)


def _values(call: Append, device: torch.device, aligned: bool) -> Values:
    num_tokens, num_q_heads, head_dim = call.q.shape
    geometry = call.geometry or decode_geometry(num_tokens, num_q_heads, num_kv_heads(call), head_dim)
    pdl = pdl_mode(device, geometry.pdl, call.enable_pdl)
    facts = {
        **append_facts(call, Alignment(call, append_steps(call), aligned), device),
        "TOKENS_PER_REQUEST": call.tokens_per_request,
        "BTQ": geometry.tokens_q,
        "BHQ": geometry.heads_q,
        "BTK": geometry.tokens_kv,
        "BHK": geometry.heads_kv,
        "PDL": pdl,
        "PREFETCH": pdl > 0 and call.metadata_ready,
        "FENCE": not INTERPRETED and torch.version.hip is None,
    }
    integers = append_integers(call)
    if facts["AXES"]:
        integers["stride_axis"] = call.positions.stride(0)
    else:
        facts |= {"axis_map_ptr": None, "stride_axis": None}
    grid = geometry.programs(num_tokens, num_q_heads, num_kv_heads(call))
    return Values(facts, integers, grid, geometry.num_warps, geometry.carveout)


def _check(call: Append) -> None:
    check_append(call, prefill=False)
    check_pdl(call.enable_pdl, call.q.device)


def _reference(call: Append) -> None:
    arguments = reference_arguments(call)
    del arguments["cu_seqlens_q"]  # which a decode step does not have
    reference.rope_append_decode(**arguments)


DECODE = Spec(rope_append_decode_kernel, Append, _values, _check, _reference)
