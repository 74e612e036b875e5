"""What every kernel that carries out an append is told of it."""

from typing import Any

import torch

from ..append.arguments import CACHE, ROW, SCALE, WEIGHT, Append, MLAAppend, absent_parameters, given_tensors
from ..append.codes import cache_dtype, code_of
from ..append.faults import fault_buffer
from ..append.layout import Step, append_steps, cache_view, index_shape, lowest_bit, scale_steps
from ..append.norm import QKNorm
from .platform import casts_float8

UNBOUNDED = 2**31 - 1  # as a number of positions, where nothing looks at it
_WIDEST, _SCALE = 16, 4  # bytes of one access, and of a scale


class Alignment:
    """How many bytes rows, caches, the table and weights are aligned to: as many as their sizes allow, or one element.

    Attributes:
        holds: whether all is aligned as well as sizes allow. If not, nothing is taken to be aligned, so that two kernels, which a
            warm-up compiles, serve all memory.
    """

    def __init__(self, call: Append | MLAAppend, steps: dict[str, Step], aligned: bool):
        given = given_tensors(call)
        rows, caches, weights = ([x for name, x in given.items() if call.ROLES[name].kind == kind] for kind in (ROW, CACHE, WEIGHT))
        steps = [step for step in steps.values() if step.size > 1]
        self.rows = _common([x.shape[-1] * x.element_size() for x in rows])
        self.caches = _common([x.shape[-1] * x.element_size() for x in caches or rows])
        if any(call.ROLES[name].kind == SCALE for name in given):
            self.caches = min(self.caches, _SCALE)  # scales may lie in the rows, between codes
        align = {ROW: self.rows, CACHE: self.caches}
        self.holds = aligned and not any(s.stride * s.itemsize % align[s.kind] for s in steps)
        if self.holds:
            self.table = _common([4 * _rotary_dim(call)])
            self.weights = _common([x.shape[-1] * x.element_size() for x in weights]) if weights else None
        else:
            self.rows = min(x.element_size() for x in rows)
            self.caches = min([x.element_size() for x in caches], default=self.rows)
            self.table = 4
            self.weights = min([x.element_size() for x in weights], default=None)


def _common(distances: list[int]) -> int:
    """The alignment in bytes, at most that of the widest access, that all distances keep."""
    bits = _WIDEST
    for distance in distances:
        bits |= distance
    return lowest_bit(bits)


def append_facts(call: Append, alignment: Alignment, device: torch.device) -> dict[str, Any]:
    """The compile-time parameters that the kernels share; the kernels say what each means."""
    head_dim = call.q.shape[2]
    return {
        "HQ": call.q.shape[1],
        "HKV": num_kv_heads(call),
        "D": head_dim,
        "DV": head_dim if call.v is None else call.v.shape[2],
        "R": _rotary_dim(call),
        "NEOX": call.is_neox,
        "PAGED": call.slot_mapping is None,
        "PAGE": cache_view(call.k_cache, call.kv_layout).page_size if call.writes_cache else 1,
        "OWN_CACHE_POSITIONS": call.cache_positions is not None,
        "Q_OUT": call.q_out is not None,
        "K_OUT": call.k_out is not None,
        "AXES": num_axes(call),
        **norm_facts(call),
        **_code_facts(call, device),
        **absent_parameters(call),
        "ALIGN": alignment.rows,
        "ALIGN_CACHE": alignment.caches,
        "ALIGN_TABLE": alignment.table,
        "ALIGN_WEIGHT": alignment.weights,
    }


def norm_facts(call: Append) -> dict[str, Any]:
    norm = call.norm
    if norm is None:
        return {"NORM": 0, "V_NORM": False, "EPS": 0.0, "WEIGHT_OFFSET": 0.0, "ROUNDED": False}
    return {
        "NORM": 2 if norm.after else 1,
        "V_NORM": norm.v_norm,
        "EPS": norm.eps,
        "WEIGHT_OFFSET": norm.weight_offset,
        "ROUNDED": norm.rounded,
    }


def append_integers(call: Append) -> dict[str, int]:
    """The integer parameters that the kernels share. Strides are in elements."""
    index_len, stride_index = index_shape(call)
    return {
        "index_len": index_len,
        "stride_index": stride_index,
        "num_tokens": call.q.shape[0],
        "max_position": UNBOUNDED if call.cos_sin_cache is None else call.cos_sin_cache.shape[0],
        "num_pages": cache_view(call.k_cache, call.kv_layout).num_pages if call.writes_cache else 0,
        **{name: step.stride for name, step in append_steps(call).items()},
        **scale_steps(call),
    }


def _code_facts(call: Append, device: torch.device) -> dict[str, Any]:
    """What is quantised, and how."""
    codes = {
        "Q_CODE": 0 if call.q_out is None else code_of(call.q_out.dtype),
        "K_CODE": code_of(cache_dtype(call, call.k_cache)) if call.writes_cache else 0,
        "V_CODE": code_of(cache_dtype(call, call.v_cache)) if call.writes_cache else 0,
    }
    dynamic = {"K_DYNAMIC": call.k_scale_out is not None, "V_DYNAMIC": call.v_scale_out is not None}
    steps = scale_steps(call)
    names = [f"stride_{short}_{letter}" for short in ("ks", "vs") for letter in "pth"]
    absent = {name: None for name in names if name not in steps}
    return {**codes, **dynamic, "NATIVE_CAST": any(codes.values()) and casts_float8(device), **absent}


def num_axes(call: Append) -> int:
    """Rows of positions; 0 where they have one dimension."""
    return call.positions.shape[0] if call.positions.dim() == 2 else 0


def num_kv_heads(call: Append) -> int:
    """Heads of k; 0 where only q rotates."""
    return 0 if call.k is None else call.k.shape[1]


def _rotary_dim(call: Append | MLAAppend) -> int:
    return 0 if call.cos_sin_cache is None else call.cos_sin_cache.shape[1]


def reference_arguments(call: Append) -> dict[str, Any]:
    """What the reference is given for a call."""
    others = ("q_weight", "k_weight", "norm", "k_scale_out", "v_scale_out", "metadata_ready", "geometry")
    arguments = {name: value for name, value in zip(Append._fields, call, strict=True) if name not in others}
    norm = None
    if call.norm is not None:
        eps, offset, after, v_norm, rounded = call.norm
        norm = QKNorm(call.q_weight, call.k_weight, eps, offset, "after" if after else "before", v_norm, rounded)
    for name in ("k_scale", "v_scale"):
        out = getattr(call, f"{name}_out")
        arguments[name] = arguments[name] if out is None else out
    return {**arguments, "norm": norm, "faults": fault_buffer(call.q.device)}
