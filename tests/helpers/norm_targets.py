"""The decode and prefill kernels with a norm, compiled for a GPU that need not be there."""

from functools import cache

import torch
from compile_only import SM90, compile_kernel, facts, pointers

from decode_rope.kernels.decode import rope_append_decode_kernel
from decode_rope.kernels.prefill import rope_append_prefill_kernel
from decode_rope.launch.compiled import Compiled
from decode_rope.launch.prefill import prefill_geometry
from decode_rope.launch.tiles import power_of_two

NONE = dict(NORM=0, V_NORM=False, EPS=0.0, WEIGHT_OFFSET=0.0, ROUNDED=False, ALIGN_WEIGHT=None)
ABSENT = dict(q_weight_ptr=None, k_weight_ptr=None, q_token_scale_ptr=None)
BEFORE = dict(NORM=1, V_NORM=False, EPS=1e-6, WEIGHT_OFFSET=0.0, ROUNDED=False, ALIGN_WEIGHT=16)
AFTER = BEFORE | dict(NORM=2)
NORMED = dict(q_token_scale_ptr=None)  # of ABSENT, what a norm with weights leaves
LLAMA = dict(
    HQ=32, HKV=8, D=128, DV=128, R=128, NEOX=True, PAGED=True, PAGE=16, OWN_CACHE_POSITIONS=False, Q_OUT=False, K_OUT=False,
    ALIGN=16, ALIGN_CACHE=16, ALIGN_TABLE=16,
)  # fmt: skip
TYPES = {
    "faults_ptr": "*i64", "cos_sin_ptr": "*fp32", "cu_seqlens_ptr": "*i32", "axis_map_ptr": "*i8", "q_token_scale_ptr": "*fp32",
    "positions_ptr": "*i64", "cache_positions_ptr": "*i64", "index_ptr": "*i32",
}  # fmt: skip


class Unloaded(Compiled):
    """A kernel as the package makes it, but for the GPU."""

    __slots__ = ()

    def _load(self, dtypes: dict) -> None:
        pass


def _compiled(kernel, known: dict, num_warps: int, dtype: str, weights: str, target, integer: str):
    """`known`: facts, and None for the pointers that are not there."""
    names = [name for name in kernel.arg_names if name not in known and name not in facts(kernel)]
    types = {name: f"*{dtype}" if name in pointers(kernel) else integer for name in names}
    types |= {name: kind for name, kind in TYPES.items() if name in names}
    types |= {name: f"*{weights}" for name in ("q_weight_ptr", "k_weight_ptr") if name in names}
    options = Unloaded(kernel, torch.device("cuda:0"), {}, known, frozenset(), num_warps).options
    return compile_kernel(kernel, types, known, target, options)


@cache
def decode(num_warps: int = 4, dtype: str = "bf16", weights: str = "bf16", target=SM90, **changes):
    """The decode kernel of Llama-3-8B's heads in bf16, or with other facts; pointers that are None are not there."""
    known = LLAMA | NONE | dict(AXES=0, TOKENS_PER_REQUEST=1, PDL=0, PREFETCH=False, FENCE=target[0] == "cuda") | changes
    if not known["AXES"]:
        known |= dict(axis_map_ptr=None, stride_axis=None)
    rows = max(2, 256 * num_warps // power_of_two(known["D"] // 2))
    known = dict(BTQ=1, BHQ=rows, BTK=max(1, rows // 8), BHK=min(8, rows)) | known
    return _compiled(rope_append_decode_kernel, known, num_warps, dtype, weights, target, "i32")


@cache
def prefill(dtype: str = "bf16", weights: str = "bf16", target=SM90, **changes):
    """The prefill kernel likewise, with the tiles that it chooses."""
    known = LLAMA | NONE | dict(AXES=0, CACHE=True, RAGGED=False, WHOLE=dtype != "fp32", PDL=False) | changes
    size = 4 if dtype == "fp32" else 2
    q, kv, num_warps, _ = prefill_geometry(known["HQ"], known["HKV"], known["D"], known["R"], size, True, known["WHOLE"])
    known |= dict(BTQ=q.tokens, BHQ=q.heads, LOOPQ=q.loop, BTK=kv.tokens, BHK=kv.heads, LOOPK=kv.loop)
    return _compiled(rope_append_prefill_kernel, known, num_warps, dtype, weights, target, "i64")
