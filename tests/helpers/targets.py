"""The package's kernels, compiled for a GPU that need not be there: with the usual facts of a shape, or other ones."""

from functools import cache

import torch
from compile_only import SM90, compile_kernel, integers, pointers

from decode_rope.kernels.decode import rope_append_decode_kernel
from decode_rope.kernels.prefill import rope_append_prefill_kernel
from decode_rope.kernels.rope import apply_rope_kernel
from decode_rope.launch.compiled import Compiled
from decode_rope.launch.prefill import prefill_geometry, takes_whole_rows
from decode_rope.launch.tiles import tiles_of

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Of options that an append may have: off. Parameters of None are none at all.
OFF = dict(
    AXES=0, NORM=0, V_NORM=False, EPS=0.0, WEIGHT_OFFSET=0.0, ROUNDED=False, Q_CODE=0, K_CODE=0, V_CODE=0, K_DYNAMIC=False,
    V_DYNAMIC=False, NATIVE_CAST=False, ALIGN_WEIGHT=None, q_weight_ptr=None, k_weight_ptr=None, q_token_scale_ptr=None,
    k_scale_ptr=None, v_scale_ptr=None, q_scale_ptr=None,
    **{f"stride_{row}_{step}": None for row in ("ks", "vs") for step in "pth"},
)  # fmt: skip
TYPES = {"faults_ptr": "*i64", "cos_sin_ptr": "*fp32", "cu_seqlens_ptr": "*i32", "axis_map_ptr": "*i8"}
LLAMA = dict(
    HQ=32, HKV=8, D=128, DV=128, R=128, NEOX=True, PAGED=True, PAGE=16, TOKENS_PER_REQUEST=1, OWN_CACHE_POSITIONS=False,
    Q_OUT=False, K_OUT=False, ALIGN=16, ALIGN_CACHE=16, ALIGN_TABLE=16, BTQ=1, BHQ=16, BTK=2, BHK=8, PDL=0, PREFETCH=False,
    FENCE=True, axis_map_ptr=None, stride_axis=None, **OFF,
)  # fmt: skip


class Unloaded(Compiled):
    """A kernel as the package makes it, but for the GPU."""

    __slots__ = ()

    def _load(self, dtypes: dict) -> None:
        pass


def options_of(kernel, facts: dict, num_warps: int) -> dict:
    """The options with which the package compiles a kernel."""
    return Unloaded(kernel, torch.device("cuda:0"), {}, facts, frozenset(), num_warps).options


def types_of(kernel, dtype: str, index: str, positions: str, wide: frozenset[str]) -> dict[str, str]:
    """The types of a kernel's parameters; integers have 32 bits unless they are named in `wide`."""
    found = dict.fromkeys(pointers(kernel), f"*{dtype}") | {name: "i64" if name in wide else "i32" for name in integers(kernel)}
    found |= {"positions_ptr": f"*{positions}", "cache_positions_ptr": f"*{positions}", "index_ptr": f"*{index}"} | TYPES
    return {name: kind for name, kind in found.items() if name in kernel.arg_names}


@cache
def decode(target=SM90, dtype="bf16", positions="i64", index="i32", wide=frozenset(), **changes):
    """The decode kernel for Llama-3-8B in bf16, or with other facts."""
    facts = LLAMA | {"FENCE": target[0] == "cuda"} | changes
    kernel = rope_append_decode_kernel
    types = {name: kind for name, kind in types_of(kernel, dtype, index, positions, wide).items() if name not in facts}
    return compile_kernel(kernel, types, facts, target, options_of(kernel, facts, 4))


@cache
def prefill(dtype="bf16", target=SM90, **changes):
    """The prefill kernel as the package compiles it, with the tiles that it chooses."""
    shape = dict(HQ=32, HKV=8, D=128, R=128, NEOX=True, AXES=0, CACHE=True, PAGED=True, PAGE=16, RAGGED=True, PDL=False)
    shape = OFF | shape | dict(OWN_CACHE_POSITIONS=False, Q_OUT=False, K_OUT=False, ALIGN=16, ALIGN_TABLE=16) | changes
    shape.setdefault("ALIGN_CACHE", shape["ALIGN"])
    sizes = (shape["HQ"], shape["HKV"], shape["D"], shape["R"], SIZES[dtype])
    aligned, busy = shape["ALIGN"] > SIZES[dtype], shape["RAGGED"] or shape["Q_OUT"] or shape["K_OUT"]
    shape |= dict(WHOLE=aligned and not busy and takes_whole_rows(*sizes[3:], shape["ALIGN"]))
    q, kv, num_warps, _ = prefill_geometry(*sizes, aligned, shape["WHOLE"])
    shape |= dict(DV=shape["D"], BTQ=q.tokens, BHQ=q.heads, LOOPQ=q.loop, BTK=kv.tokens, BHK=kv.heads, LOOPK=kv.loop)
    kernel = rope_append_prefill_kernel
    types = types_of(kernel, dtype, "i32", "i64", frozenset(integers(kernel)))
    types = {name: kind for name, kind in types.items() if name not in shape}
    return compile_kernel(kernel, types, shape, target, options_of(kernel, shape, num_warps))


@cache
def rope(dtype="bf16", target=SM90, **changes):
    """The kernel of `apply_rope` likewise."""
    shape = dict(H=32, D=128, R=128, NEOX=True, AXES=0, POSITIONS=True, OUT=False, INVERSE=False, REPORT=True)
    shape |= dict(ALIGN=16, ALIGN_TABLE=16) | changes
    tokens, heads, loop = tiles_of(shape["H"], shape["D"], shape["R"], SIZES[dtype], aligned=shape["ALIGN"] == 16)
    shape |= dict(BT=tokens, BH=heads, LOOP=loop)
    kernel = apply_rope_kernel
    types = types_of(kernel, dtype, "i32", "i64", frozenset(integers(kernel)))
    return compile_kernel(kernel, types, shape, target, options_of(kernel, shape, 4))
