"""The prefill kernel's launch: what it is told, and how its work is divided.

Results never depend on the geometry; only time does. The geometry does not depend on the number of tokens, so one kernel serves any
number.
"""

from typing import NamedTuple

import torch

from .. import reference
from ..append.arguments import Append
from ..append.checks import check_append
from ..append.layout import append_steps
from ..kernels.prefill import rope_append_prefill_kernel
from .append import Alignment, append_facts, append_integers, num_kv_heads, reference_arguments
from .platform import check_pdl, pdl_mode
from .spec import Spec, Values
from .tiles import Tiles, power_of_two, tiles_of

_WARPS = 4


class PrefillGeometry(NamedTuple):
    """`pdl`: programmatic dependent launch where the caller leaves it open."""

    q: Tiles
    kv: Tiles
    num_warps: int = _WARPS
    pdl: bool = True

    def programs(self, num_tokens: int, num_q_heads: int, num_kv_heads: int, writes_cache: bool) -> int:
        """Programs of a launch: Q tiles, K tiles and as many V tiles for every stretch of tokens that holds
        whole tiles of each. `num_q_heads` is 0 where Q stays as it is."""
        stretch = max(self.q.tokens, self.kv.tokens)
        q_tiles = stretch // self.q.tokens * self.q.groups(num_q_heads)
        k_tiles = stretch // self.kv.tokens * self.kv.groups(num_kv_heads)
        return -(-num_tokens // stretch) * (q_tiles + k_tiles * (2 if writes_cache else 1))


def check_geometry(geometry) -> None:
    """Raise a TypeError or ValueError for a geometry no kernel can be built with."""
    if not isinstance(geometry, PrefillGeometry):
        raise TypeError(f"geometry: expected a decode_rope.launch.prefill.PrefillGeometry, got {type(geometry).__name__}")
    if any(n < 1 or n & (n - 1) for n in (*geometry.q, *geometry.kv, geometry.num_warps)):
        raise ValueError(f"geometry: expected powers of two, got {geometry}")
    if geometry.q.tokens < 2 or geometry.kv.tokens < 2:
        raise ValueError(f"geometry: expected tiles of at least two tokens, got {geometry}")


def takes_whole_rows(rotary_dim: int, itemsize: int, align: int) -> bool:
    """Whether a prefill that only appends, with no outputs of its own and no sequences to look up, takes the rotated part of a row
    in one piece, its halves exchanged between the threads of a warp, in small tiles. `align`: bytes an access may have.

    1.5 % (32/8/128) to 3 % (8/1/128) faster than pieces of both halves in one thread (H200, 131,072 tokens); 20 % slower with
    outputs, 8 to 14 % with sequences. The halves of longer rows, or of rows in narrower accesses or shorter than one, would meet in
    shared memory.
    """
    return rotary_dim == power_of_two(rotary_dim) and 8 <= rotary_dim <= 256 and itemsize == 2 and align == 16


def prefill_geometry(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    itemsize: int,
    aligned: bool = True,
    whole: bool = False,
) -> PrefillGeometry:
    """The launch of a prefill. `num_kv_heads` is 0 when only Q rotates, `rotary_dim` 0 when nothing does; `whole`:
    the kernel takes rows in one piece."""
    row = (head_dim, rotary_dim, itemsize, aligned, whole)
    q = tiles_of(num_q_heads, *row)
    kv = tiles_of(num_kv_heads, *row)._replace(loop=1) if num_kv_heads else q
    return PrefillGeometry(q, kv)


def _values(call: Append, device: torch.device, aligned: bool) -> Values:
    (num_tokens, num_q_heads, head_dim), itemsize = call.q.shape, call.q.element_size()
    alignment = Alignment(call, append_steps(call), aligned)
    facts = append_facts(call, alignment, device)
    only_appends = call.q_out is None and call.k_out is None and call.cu_seqlens_q is None
    whole = alignment.holds and only_appends and takes_whole_rows(facts["R"], itemsize, alignment.rows)
    sizes = (num_q_heads, num_kv_heads(call), head_dim, facts["R"], itemsize)
    geometry = call.geometry or prefill_geometry(*sizes, alignment.holds, whole)
    facts |= {
        "CACHE": call.writes_cache,
        "RAGGED": call.cu_seqlens_q is not None,
        "BTQ": geometry.q.tokens,
        "BHQ": geometry.q.heads,
        "LOOPQ": geometry.q.loop,
        "BTK": geometry.kv.tokens,
        "BHK": geometry.kv.heads,
        "LOOPK": geometry.kv.loop,
        "WHOLE": whole,
        "PDL": pdl_mode(device, geometry.pdl, call.enable_pdl) > 0,
    }
    integers = {
        **append_integers(call),
        "tokens_per_request": call.tokens_per_request,
        "num_requests": 0 if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1,
        "stride_axis": call.positions.stride(0) if facts["AXES"] else 0,
    }
    changes_q = facts["R"] or facts["NORM"] or call.q_token_scale is not None
    moved_q_heads = num_q_heads if changes_q or facts["Q_OUT"] or not num_kv_heads(call) else 0
    grid = geometry.programs(num_tokens, moved_q_heads, num_kv_heads(call), facts["CACHE"])
    return Values(facts, integers, grid, geometry.num_warps)


def _check(call: Append) -> None:
    check_append(call, prefill=True)
    check_pdl(call.enable_pdl, call.q.device)
    if call.geometry is not None:
        check_geometry(call.geometry)


def _reference(call: Append) -> None:
    reference.rope_append_prefill(**reference_arguments(call))


PREFILL = Spec(rope_append_prefill_kernel, Append, _values, _check, _reference)
