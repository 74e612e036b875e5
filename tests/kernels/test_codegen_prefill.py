"""What the compiler makes of the kernels for long sequences, seen without a GPU: 16-byte accesses, registers, no calls."""

import re

import pytest
from compile_only import GFX942, SM80, SM100, accesses, pdl_events, resources
from lanes import INTERPRETED
from targets import prefill, rope

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

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
ROPE = {
    "Llama": {},
    "one head": dict(H=1),
    "heads of 64": dict(H=64, D=64, R=64),
    "GPT-J pairs": dict(NEOX=False),
    "partial, own output": dict(R=64, OUT=True),
    "D 96": dict(D=96, R=96),
    "backwards, no positions": dict(INVERSE=True, POSITIONS=False, REPORT=False),
    "three axes": dict(AXES=3),
}


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
    assert_streams(prefill(**SHAPES[name]), name)


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("whole rows")])
def test_whole_rows_meet_through_shuffles(name):
    """One access a thread and row, none in two pieces; few enough registers for three quarters of all warps."""
    kernel = prefill(**SHAPES[name])
    # Two groups of Q heads, K and V; of half rotated rows K has tails and V tiles of twice the width.
    rows = 6 if "partial" in name else 4
    assert accesses(kernel, "st") == [128] * rows
    assert accesses(kernel, "ld").count(128) == rows + 2 * 2  # those, and cos and sin for Q and for K
    assert ("shfl.sync" in kernel.asm["ptx"]) == ("GPT-J" not in name) and kernel.metadata.shared == 0
    assert resources(kernel, 90)["registers"] <= 48
    assert not re.search(r"cvt\.rn\.bf16\.f32", kernel.asm["ptx"])


@pytest.mark.parametrize("name", ROPE)
def test_apply_rope_streams(name):
    assert_streams(rope(**ROPE[name]), name)


@pytest.mark.parametrize("changes", [{}, dict(D=48, R=32), dict(D=96, R=96), dict(NEOX=False)], ids=str)
@pytest.mark.parametrize("make", [prefill, rope])
def test_unaligned_memory_is_read_element_by_element_and_spills_nothing(make, changes):
    kernel = make(**changes, ALIGN=2, ALIGN_TABLE=4)
    assert set(accesses(kernel, "st")) == {16} and 16 in accesses(kernel, "ld")
    assert resources(kernel, 90)["spilled"] == 0


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", ["Llama", "slots, outputs", "live", "NoPE"])
def test_F7_pdl_triggers_first_and_waits_before_anything_is_read(name, arch):
    events = pdl_events(prefill(target=("cuda", arch, 32), **SHAPES[name] | {"PDL": True}).asm["ptx"])
    assert events[:2] == ["launch_dependents", "wait"]
    assert not {"launch_dependents", "wait"} & set(events[2:]) and events.count("ld") > 2
    assert not {"launch_dependents", "wait"} & set(pdl_events(prefill(**SHAPES[name]).asm["ptx"]))


@pytest.mark.parametrize("make", [prefill, rope])
def test_conversions_are_packed(make):
    """Two values in one instruction: a select between rotated and other rows after rounding would split them."""
    assert not re.search(r"cvt\.rn\.bf16\.f32", make().asm["ptx"])


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes_move_16_bytes_too(dtype):
    for kernel, stores in ((prefill(dtype), 8), (rope(dtype), 4)):
        assert accesses(kernel, "st") == [128] * stores
        assert 16 not in accesses(kernel, "ld") and "fma.rn" not in kernel.asm["ptx"]


@pytest.mark.parametrize("target", [SM80, SM100, GFX942], ids=str)
@pytest.mark.parametrize("make", [prefill, rope])
def test_other_gpus_compile(make, target):
    assert make(target=target).asm
