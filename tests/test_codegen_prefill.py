"""What the compiler makes of the kernels for long sequences, seen without a GPU: 16-byte accesses, registers, no calls."""

import re
from functools import cache

import pytest
from compile_only import GFX942, SM80, SM90, SM100, accesses, compile_kernel, pdl_events, resources
from conftest import INTERPRETED

from decode_rope import plan_prefill, rotate
from decode_rope.geometry_prefill import plain_tiles, prefill_geometry, takes_whole_rows
from decode_rope.kernels import plain as plain_kernels
from decode_rope.kernels import prefill as prefill_kernels

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
TYPES = {"faults_ptr": "*i64", "cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "cache_positions_ptr": "*i64"}
TYPES |= {"index_ptr": "*i32", "cu_seqlens_ptr": "*i32", "axis_map_ptr": "*i8"}
SHAPES = {
    "Llama": {},
    "one KV head": dict(HQ=8, HKV=1),
    "heads of 64": dict(HQ=64, D=64, R=64),
    "GPT-J pairs": dict(NEOX=False),
    "partial": dict(R=64),
    "D 96": dict(D=96, R=96),
    "D 80, pages of 544": dict(D=80, R=80, PAGE=544),
    "slots, outputs": dict(PAGED=False, RAGGED=False, Q_OUT=True, K_OUT=True),
    "requests of one length": dict(RAGGED=False),
    "live": dict(CACHE=False, K_OUT=True),
    "NoPE": dict(R=0),
    "three axes": dict(AXES=3),
    "whole rows": dict(RAGGED=False, PAGED=False),
    "whole rows, one KV head": dict(RAGGED=False, HQ=8, HKV=1),
    "whole rows of 64": dict(RAGGED=False, HQ=64, D=64, R=64),
    "whole rows, GPT-J pairs": dict(RAGGED=False, NEOX=False),
    "whole rows, partial": dict(RAGGED=False, R=64),
    "whole rows of 256": dict(RAGGED=False, HQ=8, HKV=4, D=256, R=256),
}
PLAIN = {
    "Llama": {},
    "one head": dict(H=1),
    "heads of 64": dict(H=64, D=64, R=64),
    "GPT-J pairs": dict(NEOX=False),
    "partial, own output": dict(R=64, OUT=True),
    "D 96": dict(D=96, R=96),
    "backwards, no positions": dict(INVERSE=True, POSITIONS=False, REPORT=False),
    "three axes": dict(AXES=3),
}


def types_of(kernels, dtype: str) -> dict[str, str]:
    return dict.fromkeys(kernels.POINTERS, f"*{dtype}") | dict.fromkeys(kernels.INTEGERS, "i64") | TYPES


def options(num_warps: int) -> dict:
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}


@cache
def compiled(dtype="bf16", target=SM90, **changes):
    """The prefill kernel as the package compiles it, with the tiles that it chooses."""
    shape = dict(HQ=32, HKV=8, D=128, R=128, NEOX=True, AXES=0, CACHE=True, PAGED=True, PAGE=16, RAGGED=True, PDL=False, SOFT=False)
    shape |= dict(OWN_CACHE_POSITIONS=False, Q_OUT=False, K_OUT=False, ALIGN=16, ALIGN_TABLE=16) | changes
    sizes = (shape["HQ"], shape["HKV"], shape["D"], shape["R"], SIZES[dtype])
    aligned, busy = shape["ALIGN"] > SIZES[dtype], shape["RAGGED"] or shape["Q_OUT"] or shape["K_OUT"]
    shape |= dict(WHOLE=aligned and not busy and takes_whole_rows(*sizes[3:], shape["ALIGN"]))
    q, kv, num_warps, _ = prefill_geometry(*sizes, aligned, shape["WHOLE"])
    shape |= dict(DV=shape["D"], BTQ=q.tokens, BHQ=q.heads, LOOPQ=q.loop, BTK=kv.tokens, BHK=kv.heads, LOOPK=kv.loop)
    static = {name: shape[name] for name in plan_prefill.Static._fields}
    return compile_kernel(prefill_kernels.prefill_kernel, types_of(prefill_kernels, dtype), static, target, options(num_warps))


@cache
def plain(dtype="bf16", target=SM90, **changes):
    """The kernel of `apply_rope` likewise."""
    shape = dict(H=32, D=128, R=128, NEOX=True, AXES=0, POSITIONS=True, OUT=False, INVERSE=False, REPORT=True)
    shape |= dict(ALIGN=16, ALIGN_TABLE=16, SOFT=False) | changes
    tokens, heads, loop = plain_tiles(shape["H"], shape["D"], shape["R"], SIZES[dtype], aligned=shape["ALIGN"] == 16)
    shape |= dict(BT=tokens, BH=heads, LOOP=loop)
    static = {name: shape[name] for name in rotate.Static._fields}
    return compile_kernel(plain_kernels.plain_kernel, types_of(plain_kernels, dtype), static, target, options(4))


def assert_streams(kernel, name: str) -> None:
    """16-byte accesses, no fused multiply-add, nothing spilled, no call, and for most shapes room for half of all warps."""
    ptx = kernel.asm["ptx"]
    assert set(accesses(kernel, "st")) == {128}
    assert 128 in accesses(kernel, "ld") and 16 not in accesses(kernel, "ld")
    assert "fma.rn" not in ptx and not re.search(r"\b(div|rem)\.[su]64", ptx)
    used = resources(kernel, 90)
    assert used["spilled"] == 0 and used["registers"] <= (128 if name == "three axes" else 96)
    assert kernel.metadata.shared == 0 or name == "three axes"


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_streams(name):
    assert_streams(compiled(**SHAPES[name]), name)


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("whole rows")])
def test_whole_rows_meet_through_shuffles(name):
    """One access a thread and row, none in two pieces; few enough registers for three quarters of all warps."""
    kernel = compiled(**SHAPES[name])
    # Two groups of Q heads, K and V; of half rotated rows K has tails and V tiles of twice the width.
    rows = 6 if "partial" in name else 4
    assert accesses(kernel, "st") == [128] * rows
    assert accesses(kernel, "ld").count(128) == rows + 2 * 2  # those, and cos and sin for Q and for K
    assert ("shfl.sync" in kernel.asm["ptx"]) == ("GPT-J" not in name) and kernel.metadata.shared == 0
    assert resources(kernel, 90)["registers"] <= 48
    assert not re.search(r"cvt\.rn\.bf16\.f32", kernel.asm["ptx"])


@pytest.mark.parametrize("name", PLAIN)
def test_apply_rope_streams(name):
    assert_streams(plain(**PLAIN[name]), name)


@pytest.mark.parametrize("changes", [{}, dict(D=48, R=32), dict(D=96, R=96), dict(NEOX=False)], ids=str)
@pytest.mark.parametrize("make", [compiled, plain])
def test_unaligned_memory_is_read_element_by_element_and_spills_nothing(make, changes):
    kernel = make(**changes, ALIGN=2, ALIGN_TABLE=4)
    assert set(accesses(kernel, "st")) == {16} and 16 in accesses(kernel, "ld")
    assert resources(kernel, 90)["spilled"] == 0


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", ["Llama", "slots, outputs", "live", "NoPE"])
def test_F7_pdl_triggers_first_and_waits_before_anything_is_read(name, arch):
    events = pdl_events(compiled(target=("cuda", arch, 32), **SHAPES[name] | {"PDL": True}).asm["ptx"])
    assert events[:2] == ["launch_dependents", "wait"]
    assert not {"launch_dependents", "wait"} & set(events[2:]) and events.count("ld") > 2
    assert not {"launch_dependents", "wait"} & set(pdl_events(compiled(**SHAPES[name]).asm["ptx"]))


@pytest.mark.parametrize("make", [compiled, plain])
def test_conversions_are_packed(make):
    """Two values in one instruction: a select between rotated and other rows after rounding would split them."""
    assert not re.search(r"cvt\.rn\.bf16\.f32", make().asm["ptx"])


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes_move_16_bytes_too(dtype):
    for kernel, stores in ((compiled(dtype), 8), (plain(dtype), 4)):
        assert accesses(kernel, "st") == [128] * stores
        assert 16 not in accesses(kernel, "ld") and "fma.rn" not in kernel.asm["ptx"]


@pytest.mark.parametrize("target", [SM80, SM100, GFX942], ids=str)
@pytest.mark.parametrize("make", [compiled, plain])
def test_other_gpus_compile(make, target):
    assert make(target=target).asm
