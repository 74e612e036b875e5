"""The latent kernel's launch: what it is told, and how its work is divided, for decode steps and prefills alike.

Results never depend on the geometry; only time does.
"""

from typing import NamedTuple

import torch

from .. import reference
from ..append.arguments import MLAAppend, absent_parameters
from ..append.faults import fault_buffer
from ..append.layout import index_shape, lowest_bit, mla_steps
from ..append.mla import check_mla
from ..append.norm import LatentNorm
from ..kernels.mla import rope_append_mla_kernel
from .append import UNBOUNDED, Alignment
from .decode import check_fields, shape_of, tile_of
from .platform import INTERPRETED, check_pdl, pdl_mode
from .spec import Spec, Values
from .tiles import power_of_two


class MLAGeometry(NamedTuple):
    """A Q tile is `tokens_q · heads_q` rows, at least two; another program takes the latents and keys of `tokens` tokens. `pdl` and
    `carveout` are those of the decode kernel's `Geometry`."""

    tokens_q: int
    heads_q: int
    tokens: int
    num_warps: int
    pdl: int
    carveout: int = -1

    def programs(self, num_tokens: int, num_heads: int) -> int:
        """Programs of a launch. `num_heads` is 0 where Q stays as it is."""
        return -(-num_tokens // self.tokens_q) * -(-num_heads // self.heads_q) + -(-num_tokens // self.tokens)


def check_geometry(geometry) -> None:
    """Raise a TypeError or ValueError for a geometry no kernel can be built with."""
    check_fields(geometry, MLAGeometry)
    if geometry.tokens_q * geometry.heads_q < 2:
        raise ValueError(f"geometry: expected Q tiles of at least two rows, got {geometry}; set heads_q to 2")


def mla_geometry(num_tokens: int, num_heads: int, rope_dim: int, latent_dim: int) -> MLAGeometry:
    """The launch of `num_tokens` tokens.

    The decode kernel's rule, which was measured, for the elements that this one moves: up to 100,000, one warp and one token a
    program; beyond, four warps, with as many Q rows as give each thread one 16-byte access to each of their halves (up to 350,000
    elements: an 8-byte one). A warp takes a latent of 512 elements, in two 16-byte accesses a thread.
    """
    elements = num_tokens * (num_heads * rope_dim + latent_dim + rope_dim)
    warps, rows, carveout = shape_of(elements, num_heads, rope_dim)
    tokens = max(1, 512 * warps // power_of_two(max(latent_dim, rope_dim))) if warps > 1 else 1
    return MLAGeometry(*tile_of(num_heads, rows, warps > 1), tokens, warps, 1, carveout)


def _values(call: MLAAppend, device: torch.device, aligned: bool) -> Values:
    (num_tokens, num_heads, rope_dim), latent_dim = call.q_pe.shape, call.kv_c.shape[-1]
    geometry = call.geometry or mla_geometry(num_tokens, num_heads, rope_dim, latent_dim)
    pdl = pdl_mode(device, geometry.pdl, call.enable_pdl)
    steps = mla_steps(call)
    alignment = Alignment(call, steps, aligned)
    index_len, stride_index = index_shape(call)
    integers = {
        "num_tokens": num_tokens,
        "max_position": UNBOUNDED if call.cos_sin_cache is None else call.cos_sin_cache.shape[0],
        "index_len": index_len,
        "stride_index": stride_index,
        "num_pages": call.cache.shape[0],
        **{name: step.stride for name, step in steps.items()},
    }
    if call.cu_seqlens_q is not None:
        integers["num_requests"] = call.cu_seqlens_q.shape[0] - 1
    facts = {
        "H": num_heads,
        "L": latent_dim,
        "R": rope_dim,
        "NEOX_IN": not call.interleaved_in,
        "NEOX_OUT": not call.interleaved_out,
        "PAGED": call.slot_mapping is None,
        "PAGE": call.cache.shape[1],
        "TOKENS_PER_REQUEST": call.tokens_per_request,
        "Q_OUT": call.q_out is not None,
        "EPS": call.eps,
        "ALIGN": alignment.rows,
        "ALIGN_CACHE": lowest_bit(alignment.caches | latent_dim * call.cache.element_size()),  # where the key begins in a slot
        "ALIGN_TABLE": None if call.cos_sin_cache is None else alignment.table,
        "ALIGN_WEIGHT": alignment.weights,
        "BTQ": geometry.tokens_q,
        "BHQ": geometry.heads_q,
        "BT": geometry.tokens,
        "PDL": pdl,
        "PREFETCH": pdl > 0 and call.metadata_ready,
        "FENCE": not INTERPRETED and torch.version.hip is None,
        **absent_parameters(call),
        **{name: None for name in ("stride_rc_p", "stride_rc_t", "num_requests") if name not in integers},
    }
    moves_q = call.cos_sin_cache is not None or call.q_out is not None
    return Values(facts, integers, geometry.programs(num_tokens, num_heads * moves_q), geometry.num_warps, geometry.carveout)


def _check(call: MLAAppend) -> None:
    check_mla(call)
    check_pdl(call.enable_pdl, call.q_pe.device)
    if call.geometry is not None:
        check_geometry(call.geometry)


def _reference(call: MLAAppend) -> None:
    taken_apart = ("cache", "rope_cache", "kv_weight", "eps", "metadata_ready", "geometry")
    arguments = {name: value for name, value in zip(MLAAppend._fields, call, strict=True) if name not in taken_apart}
    cache = call.cache if call.rope_cache is None else (call.cache, call.rope_cache)
    norm = None if call.eps is None else LatentNorm(call.kv_weight, call.eps)
    reference.rope_append_mla_prefill(**arguments, cache=cache, kv_norm=norm, faults=fault_buffer(call.q_pe.device))


MLA = Spec(rope_append_mla_kernel, MLAAppend, _values, _check, _reference)
