"""The decode and prefill kernels with a norm, compiled for a GPU that need not be there."""

from functools import cache

from compile_only import SM90, compile_kernel, integers
from targets import LLAMA, OFF, SIZES, options_of, types_of

from decode_rope.kernels.decode import rope_append_decode_kernel
from decode_rope.kernels.prefill import rope_append_prefill_kernel
from decode_rope.launch.prefill import prefill_geometry
from decode_rope.launch.tiles import power_of_two

ABSENT = dict(q_weight_ptr=None, k_weight_ptr=None, q_token_scale_ptr=None)
BEFORE = dict(NORM=1, V_NORM=False, EPS=1e-6, WEIGHT_OFFSET=0.0, ROUNDED=False, ALIGN_WEIGHT=16)
AFTER = BEFORE | dict(NORM=2)
NORMED = dict(q_token_scale_ptr=None)  # of ABSENT, what a norm with weights leaves
_PRESENT = (*ABSENT, "axis_map_ptr", "stride_axis")  # parameters, unless a kernel is made without them


def _compiled(kernel, known: dict, num_warps: int, dtype: str, weights: str, target, wide: frozenset[str]):
    """`known`: facts, and None for the pointers that are not there."""
    types = types_of(kernel, dtype, "i32", "i64", wide) | {"q_token_scale_ptr": "*fp32"}
    types |= {name: f"*{weights}" for name in ("q_weight_ptr", "k_weight_ptr")}
    types = {name: kind for name, kind in types.items() if name not in known}
    return compile_kernel(kernel, types, known, target, options_of(kernel, known, num_warps))


def _usual(kernel) -> dict:
    """The facts of `targets.LLAMA` that a kernel has."""
    return {name: value for name, value in (LLAMA | OFF).items() if name in kernel.arg_names and name not in _PRESENT}


@cache
def decode(num_warps: int = 4, dtype: str = "bf16", weights: str = "bf16", target=SM90, **changes):
    """The decode kernel of Llama-3-8B's heads in bf16, or with other facts; pointers that are None are not there."""
    known = _usual(rope_append_decode_kernel) | dict(FENCE=target[0] == "cuda") | changes
    if not known["AXES"]:
        known |= dict(axis_map_ptr=None, stride_axis=None)
    rows = max(2, 256 * num_warps // power_of_two(known["D"] // 2))
    known |= dict(BTQ=1, BHQ=rows, BTK=max(1, rows // 8), BHK=min(8, rows))
    return _compiled(rope_append_decode_kernel, known, num_warps, dtype, weights, target, frozenset())


@cache
def prefill(dtype: str = "bf16", weights: str = "bf16", target=SM90, **changes):
    """The prefill kernel likewise, with the tiles that it chooses."""
    kernel = rope_append_prefill_kernel
    known = _usual(kernel) | dict(CACHE=True, RAGGED=False, WHOLE=dtype != "fp32", PDL=False) | changes
    q, kv, num_warps, _ = prefill_geometry(known["HQ"], known["HKV"], known["D"], known["R"], SIZES[dtype], True, known["WHOLE"])
    known |= dict(BTQ=q.tokens, BHQ=q.heads, LOOPQ=q.loop, BTK=kv.tokens, BHK=kv.heads, LOOPK=kv.loop)
    return _compiled(kernel, known, num_warps, dtype, weights, target, frozenset(integers(kernel)))
