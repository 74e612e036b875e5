"""What every kernel that carries out an append is told of it."""

from typing import Any

from ..append.arguments import Append, absent_parameters
from ..append.faults import fault_buffer
from ..append.layout import append_steps, cache_view, index_shape, lowest_bit
from ..append.norm import QKNorm

UNBOUNDED = 2**31 - 1  # as a number of positions, where nothing looks at it
_WIDEST = 16  # bytes of one access


class Alignment:
    """How many bytes rows, caches and the table are aligned to: as many as their sizes and strides allow, or one element."""

    def __init__(self, call: Append, aligned: bool):
        self._sizes = [x.shape[2] for x in (call.q, call.v) if x is not None]
        self._steps = append_steps(call)
        self.rows, self.caches = self._most(call.q), self._most(call.k_cache if call.writes_cache else call.q)
        self.table = lowest_bit(4 * _rotary_dim(call) | _WIDEST)
        itemsizes = [w.element_size() for w in (call.q_weight, call.k_weight) if w is not None]
        self.weights = min((lowest_bit(call.q.shape[2] * size | _WIDEST) for size in itemsizes), default=None)
        self.holds = aligned and self._strides_fit(call)
        if not self.holds:
            self.weights = min(itemsizes, default=None)
            self.rows = call.q.element_size()
            self.caches = call.k_cache.element_size() if call.writes_cache else self.rows
            self.table = 4

    def _most(self, x) -> int:
        bits = _WIDEST
        for size in self._sizes:
            bits |= size * x.element_size()
        return lowest_bit(bits)

    def _strides_fit(self, call: Append) -> bool:
        row, cache = call.q.element_size(), call.k_cache.element_size() if call.writes_cache else 1
        for name, (stride, size) in self._steps.items():
            item, align = (cache, self.caches) if name.startswith(("stride_kc", "stride_vc")) else (row, self.rows)
            if size > 1 and stride * item % align:
                return False
        return True


def append_facts(call: Append, alignment: Alignment) -> dict[str, Any]:
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
        **{name: stride for name, (stride, _) in append_steps(call).items()},
    }


def num_axes(call: Append) -> int:
    """Rows of positions; 0 where they have one dimension."""
    return call.positions.shape[0] if call.positions.dim() == 2 else 0


def num_kv_heads(call: Append) -> int:
    """Heads of k; 0 where only q rotates."""
    return 0 if call.k is None else call.k.shape[1]


def _rotary_dim(call: Append) -> int:
    return 0 if call.cos_sin_cache is None else call.cos_sin_cache.shape[1]


def reference_arguments(call: Append) -> dict[str, Any]:
    """What the reference is given for a call."""
    others = ("q_weight", "k_weight", "norm", "metadata_ready", "geometry")
    arguments = {name: value for name, value in zip(Append._fields, call, strict=True) if name not in others}
    norm = None
    if call.norm is not None:
        eps, offset, after, v_norm, rounded = call.norm
        norm = QKNorm(call.q_weight, call.k_weight, eps, offset, "after" if after else "before", v_norm, rounded)
    return {**arguments, "norm": norm, "faults": fault_buffer(call.q.device)}
