"""The records that every kernel's path uses: the tensors and flags of an append, of one to a latent cache, and of a rotation alone.

Fields have the names of the public arguments. The tensors come first; `ROLES` says of each what it is to a kernel.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .norm import NormFacts

# Kinds of tensors. Rows may interleave with rows, and caches with caches and the scales that are written beside codes, as slices of
# one tensor do; the others are only read.
ROW, CACHE, SCALE, TABLE, WEIGHT, INDEX = range(6)
# The compile-time fact of a kernel that says how many bytes tensors of a kind are aligned to.
ALIGNED_BY = {ROW: "ALIGN", CACHE: "ALIGN_CACHE", TABLE: "ALIGN_TABLE", WEIGHT: "ALIGN_WEIGHT"}


class Role(NamedTuple):
    """What a tensor is to the kernels.

    parameter: the kernel parameter that takes its address.
    stand_in: the tensor that a kernel gets where this one is None. A kernel writes rotated q into the stand-in of `q_out`, which is
        how it works in place; a kernel compiled for the absence of any other tensor never uses its stand-in. None: the parameter is
        a compile-time None, so that a launch without the tensor is what it was before there was such a tensor.
    short: its name in the names of its strides, such as `stride_qo_t`.
    """

    kind: int
    parameter: str
    stand_in: str | None
    short: str = ""


_APPEND = {
    "q": Role(ROW, "q_ptr", "q", "q"),
    "k": Role(ROW, "k_ptr", "q", "k"),
    "v": Role(ROW, "v_ptr", "q", "v"),
    "k_cache": Role(CACHE, "k_cache_ptr", "q", "kc"),
    "v_cache": Role(CACHE, "v_cache_ptr", "q", "vc"),
    "cos_sin_cache": Role(TABLE, "cos_sin_ptr", "q"),
    "positions": Role(INDEX, "positions_ptr", "positions"),
    "block_table": Role(INDEX, "index_ptr", "positions"),
    "slot_mapping": Role(INDEX, "index_ptr", "positions"),
    "cache_positions": Role(INDEX, "cache_positions_ptr", "positions"),
    "cu_seqlens_q": Role(INDEX, "cu_seqlens_ptr", "positions"),
    "axis_map": Role(INDEX, "axis_map_ptr", "positions"),
    "q_out": Role(ROW, "q_out_ptr", "q", "qo"),
    "k_out": Role(ROW, "k_out_ptr", "q", "ko"),
    "q_weight": Role(WEIGHT, "q_weight_ptr", None),
    "k_weight": Role(WEIGHT, "k_weight_ptr", None),
    "q_token_scale": Role(INDEX, "q_token_scale_ptr", None),
    "k_scale": Role(INDEX, "k_scale_ptr", None),
    "v_scale": Role(INDEX, "v_scale_ptr", None),
    "q_scale": Role(INDEX, "q_scale_ptr", None),
    "k_scale_out": Role(SCALE, "k_scale_ptr", None, "ks"),
    "v_scale_out": Role(SCALE, "v_scale_ptr", None, "vs"),
}


class Append(NamedTuple):
    """One append: what is rotated, written, and where to. Shapes and meanings are those of `decode_rope.rope_append_prefill`.

    A decode step has no `cu_seqlens_q`. `cos_sin_cache` is the tensor, never a `RopeTable`; a `QKNorm` is taken apart into its
    weights and `norm`. A `k_scale` that is written is `k_scale_out`. `metadata_ready` and `geometry` are those of `DecodeRope`.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    k_cache: Tensor | None
    v_cache: Tensor | None
    cos_sin_cache: Tensor | None
    positions: Tensor
    block_table: Tensor | None = None
    slot_mapping: Tensor | None = None
    cache_positions: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    axis_map: Tensor | None = None
    q_out: Tensor | None = None
    k_out: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_token_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale_out: Tensor | None = None
    v_scale_out: Tensor | None = None
    tokens_per_request: int = 1
    is_neox: bool = True
    kv_layout: str = "NHD"
    enable_pdl: bool | None = None
    norm: NormFacts | None = None
    kv_dtype: torch.dtype | None = None
    metadata_ready: bool = False
    geometry: Any = None

    ROLES = _APPEND

    @property
    def writes_cache(self) -> bool:
        return self.k is not None and self.k_cache is not None

    @property
    def requests(self) -> int:
        """Rows of the block table that the tokens look into."""
        return _requests(self, self.q.shape[0])


_MLA = {
    "q_pe": Role(ROW, "q_ptr", None),
    "k_pe": Role(ROW, "k_ptr", None),
    "kv_c": Role(ROW, "kv_ptr", None),
    "cache": Role(CACHE, "cache_ptr", None),
    "rope_cache": Role(CACHE, "rope_cache_ptr", None),
    "cos_sin_cache": Role(TABLE, "cos_sin_ptr", None),
    "positions": Role(INDEX, "positions_ptr", None),
    "block_table": Role(INDEX, "index_ptr", None),
    "slot_mapping": Role(INDEX, "index_ptr", None),
    "cache_positions": Role(INDEX, "cache_positions_ptr", None),
    "cu_seqlens_q": Role(INDEX, "cu_seqlens_ptr", None),
    "q_out": Role(ROW, "q_out_ptr", "q_pe"),
    "kv_weight": Role(WEIGHT, "kv_weight_ptr", None),
}


class MLAAppend(NamedTuple):
    """One append of multi-head latent attention. Shapes and meanings are those of `decode_rope.rope_append_mla_prefill`.

    A pair of caches is `cache` and `rope_cache`. A `LatentNorm` is taken apart into `kv_weight` and `eps`, which is None without a
    norm. `metadata_ready` and `geometry` are those of `DecodeMLA`.
    """

    q_pe: Tensor
    k_pe: Tensor
    kv_c: Tensor
    cache: Tensor
    rope_cache: Tensor | None
    cos_sin_cache: Tensor | None
    positions: Tensor
    block_table: Tensor | None = None
    slot_mapping: Tensor | None = None
    cache_positions: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    q_out: Tensor | None = None
    kv_weight: Tensor | None = None
    tokens_per_request: int = 1
    interleaved_in: bool = True
    interleaved_out: bool = True
    enable_pdl: bool | None = None
    eps: float | None = None
    metadata_ready: bool = False
    geometry: Any = None

    ROLES = _MLA

    @property
    def requests(self) -> int:
        """Rows of the block table that the tokens look into."""
        return _requests(self, self.q_pe.shape[0])


_ROTATION = {
    "x": Role(ROW, "x_ptr", "x", "x"),
    "out": Role(ROW, "out_ptr", "x", "out"),
    "cos_sin_cache": Role(TABLE, "cos_sin_ptr", "x"),
    "positions": Role(INDEX, "positions_ptr", "x"),
    "axis_map": Role(INDEX, "axis_map_ptr", "x"),
}


class Rotation(NamedTuple):
    """One rotation without a cache. Shapes and meanings are those of `decode_rope.apply_rope`, but `out` of None rotates `x` in
    place. `report`: whether faulty rows are counted."""

    x: Tensor
    out: Tensor | None
    cos_sin_cache: Tensor
    positions: Tensor | None = None
    axis_map: Tensor | None = None
    is_neox: bool = True
    inverse: bool = False
    layout: str = "NHD"
    report: bool = True
    geometry: Any = None

    ROLES = _ROTATION


Record = Append | MLAAppend | Rotation


def _requests(call: Append | MLAAppend, num_tokens: int) -> int:
    if call.cu_seqlens_q is not None:
        return call.cu_seqlens_q.shape[0] - 1
    return -(-num_tokens // call.tokens_per_request)


def given_tensors(call: Record) -> dict[str, Tensor]:
    """The tensors of a call that are not None, by field."""
    return {name: x for name, x in zip(call.ROLES, call, strict=False) if x is not None}


def kernel_tensors(call: Record) -> dict[str, Tensor]:
    """What a kernel's pointer parameters get, by parameter, stand-ins included."""
    found: dict[str, Tensor] = {}
    for role, x in zip(call.ROLES.values(), call, strict=False):
        if x is not None:
            found[role.parameter] = x
        elif role.stand_in is not None:
            found.setdefault(role.parameter, getattr(call, role.stand_in))
    return found


def absent_parameters(call: Record) -> dict[str, None]:
    """The pointer parameters that a call's kernel does not have, as the compile-time None that they are."""
    given = kernel_tensors(call)
    return {role.parameter: None for role in call.ROLES.values() if role.parameter not in given}


def scale_fields(k_scale, v_scale) -> dict:
    """The fields of `Append` that `k_scale` and `v_scale` fill: a scale of two dimensions or more, one for each token and head of
    the cache, is written."""
    found = {}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        written = isinstance(scale, Tensor) and scale.dim() >= 2
        found[f"{name}_out" if written else name] = scale
    return found


def of_table(cos_sin_cache, is_neox: bool, axis_map: Tensor | None = None):
    """(tensor, is_neox, axis_map) of a rotary table: a `RopeTable` brings its own pairing, and its axis map where none is given."""
    if cos_sin_cache is None or isinstance(cos_sin_cache, Tensor):
        return cos_sin_cache, is_neox, axis_map
    axis_map = getattr(cos_sin_cache, "axis_map", None) if axis_map is None else axis_map
    is_neox = getattr(cos_sin_cache, "is_neox", is_neox)
    return getattr(cos_sin_cache, "cos_sin_cache", cos_sin_cache), is_neox, axis_map


def resolved(call: Append) -> Append:
    """The call with its table's tensor, pairing and axis map in place of a `RopeTable`. Where k is None it names no caches: a layer
    that shares another one's K and V may pass its cache, and nothing is written to it."""
    if call.cos_sin_cache is not None and not isinstance(call.cos_sin_cache, Tensor):
        table, is_neox, axis_map = of_table(call.cos_sin_cache, call.is_neox, call.axis_map)
        call = call._replace(cos_sin_cache=table, is_neox=is_neox, axis_map=axis_map)
    if call.k is None and isinstance(call.k_cache, Tensor | None) and isinstance(call.v_cache, Tensor | None):
        call = call._replace(k_cache=None, v_cache=None)
    return call


def mla_fields(cache, cos_sin_cache, interleaved_in, interleaved_out) -> tuple:
    """(cache, rope_cache, table, interleaved_in, interleaved_out) of a call: a pair of caches and a `RopeTable` taken apart, pairs
    written as they are read unless the call says otherwise."""
    rope_cache = None
    if isinstance(cache, tuple | list) and len(cache) == 2:
        cache, rope_cache = cache
    if cos_sin_cache is not None and not isinstance(cos_sin_cache, Tensor):
        interleaved_in = not getattr(cos_sin_cache, "is_neox", not interleaved_in)
        cos_sin_cache = getattr(cos_sin_cache, "cos_sin_cache", cos_sin_cache)
    return cache, rope_cache, cos_sin_cache, interleaved_in, interleaved_in if interleaved_out is None else interleaved_out
