"""What every kernel that carries out an append is told of it."""

from typing import Any

from ..append.arguments import Append
from ..append.faults import fault_buffer
from ..append.layout import append_steps, cache_view, index_shape, lowest_bit

UNBOUNDED = 2**31 - 1  # as a number of positions, where nothing looks at it
_WIDEST = 16  # bytes of one access


class Alignment:
    """How many bytes rows, caches and the table are aligned to: as many as their sizes and strides allow, or one element."""

    def __init__(self, call: Append, aligned: bool):
        self._sizes = [x.shape[2] for x in (call.q, call.v) if x is not None]
        self._steps = append_steps(call)
        self.rows, self.caches = self._most(call.q), self._most(call.k_cache if call.writes_cache else call.q)
        self.table = lowest_bit(4 * _rotary_dim(call) | _WIDEST)
        self.holds = aligned and self._strides_fit(call)
        if not self.holds:
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
        "ALIGN": alignment.rows,
        "ALIGN_CACHE": alignment.caches,
        "ALIGN_TABLE": alignment.table,
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


def num_kv_heads(call: Append) -> int:
    """Heads of k; 0 where only q rotates."""
    return 0 if call.k is None else call.k.shape[1]


def _rotary_dim(call: Append) -> int:
    return 0 if call.cos_sin_cache is None else call.cos_sin_cache.shape[1]


def reference_arguments(call: Append) -> dict[str, Any]:
    """What the reference is given for a call."""
    launch_only = ("metadata_ready", "geometry")
    arguments = {name: value for name, value in zip(Append._fields, call, strict=True) if name not in launch_only}
    return {**arguments, "faults": fault_buffer(call.q.device)}
