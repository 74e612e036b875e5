"""What the compiler makes of a norm, seen without a GPU: no memory but registers, no fused product, no parameter without need."""

import re

import pytest
from compile_only import GFX942, SM80, SM100, accesses, pdl_events, resources
from lanes import INTERPRETED
from norm_targets import ABSENT, AFTER, BEFORE, NORMED, decode, prefill

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

NORMS = {
    "before": BEFORE,
    "rounded, offset": BEFORE | dict(ROUNDED=True, WEIGHT_OFFSET=1.0),
    "v too": BEFORE | dict(V_NORM=True),
    "partial": BEFORE | dict(R=64),
    "GPT-J": AFTER | dict(NEOX=False),
    "NoPE": BEFORE | dict(R=0),
    "D 80": BEFORE | dict(D=80, DV=80, R=80),
    "D 512": AFTER | dict(D=512, DV=512, R=512),
}


def assert_lean(kernel, registers: int) -> None:
    """Nothing is spilled, no product and sum are fused, and rows are summed inside warps."""
    used, ptx = resources(kernel, 90), kernel.asm["ptx"]
    assert used["spilled"] == used["stack"] == 0 and used["registers"] <= registers, used
    assert not re.search(r"\bfma\.", ptx)
    assert kernel.metadata.shared == 0 and "bar.sync" not in ptx and ".shared" not in ptx


@pytest.mark.parametrize("name", NORMS)
def test_a_decode_step_sums_in_registers(name):
    kernel = decode(**NORMS[name], **NORMED)
    assert_lean(kernel, 80)
    if name not in ("GPT-J", "D 80", "partial", "NoPE"):
        assert set(accesses(kernel, "st")) == {128}
    assert "shfl" in kernel.asm["ptx"]


def test_llamas_heads_take_no_more_than_72_registers():
    for num_warps, norm in ((1, BEFORE), (4, AFTER)):
        assert_lean(decode(num_warps=num_warps, **norm, **NORMED), 72)


def test_values_longer_than_a_warp_meet_in_a_few_bytes_of_shared_memory():
    """A row of 512 bf16 elements, 8 a thread, takes two warps; rows of q and k lie in two pieces and take one."""
    kernel = decode(**BEFORE | dict(D=512, DV=512, R=512, V_NORM=True), **NORMED)
    assert 0 < kernel.metadata.shared <= 64 and resources(kernel, 90)["spilled"] == 0


def test_a_prefill_sums_in_registers():
    """Whole rows normalised before the rotation change their layout in between, through 2 KiB of shared memory."""
    assert_lean(prefill(**AFTER, **NORMED), 96)
    assert_lean(prefill(**BEFORE, **NORMED, WHOLE=False), 96)
    before = prefill(**BEFORE, **NORMED)
    assert before.metadata.shared <= 2048 and resources(before, 90)["spilled"] == 0
    assert not re.search(r"\bfma\.", before.asm["ptx"])


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes(dtype):
    assert_lean(decode(dtype=dtype, weights="fp32", **BEFORE, **NORMED), 96)


@pytest.mark.parametrize("target", [SM80, SM100], ids=["sm_80", "sm_100"])
def test_other_nvidia_targets(target):
    kernel = decode(target=target, **BEFORE, **NORMED)
    assert resources(kernel, target[1])["spilled"] == 0 and not re.search(r"\bfma\.", kernel.asm["ptx"])


def test_amd_target():
    assembly = decode(target=GFX942, **BEFORE, **NORMED).asm["amdgcn"]
    assert re.search(r"\.vgpr_spill_count:\s+0", assembly) and re.search(r"\.sgpr_spill_count:\s+0", assembly)


@pytest.mark.parametrize("make", [decode, prefill], ids=["decode", "prefill"])
def test_a_launch_has_no_parameter_of_what_it_does_not_use(make):
    plain = parameters(make(**ABSENT))
    assert not [name for name in plain if "weight" in name or "scale" in name]
    weights = parameters(make(**BEFORE, **NORMED))
    assert len(weights) == len(plain) + 2
    scaled = parameters(make(q_weight_ptr=None, k_weight_ptr=None))
    assert len(scaled) == len(plain) + 1


def parameters(kernel) -> list[str]:
    ptx = kernel.asm["ptx"]
    entry = ptx[ptx.index(".entry") :]
    return re.findall(r"\.param \.\S+ (?:\.\S+ )*(\w+)", entry[: entry.index("{")])


def test_axes_cost_a_decode_step_two_parameters_and_others_none():
    with_axes = decode(**ABSENT, AXES=3)
    assert len(parameters(with_axes)) == len(parameters(decode(**ABSENT))) + 2
    used = resources(with_axes, 90)
    assert used["spilled"] == used["stack"] == 0


def test_division_and_root_are_rounded_to_nearest():
    """Their approximations differ between GPUs."""
    ptx = decode(**BEFORE, **NORMED).asm["ptx"]
    assert re.search(r"div\.rn\.f32", ptx) and re.search(r"sqrt\.rn\.f32", ptx)
    assert not re.search(r"approx|div\.full", ptx)


def test_without_a_norm_nothing_is_summed():
    ptx = decode(**ABSENT).asm["ptx"]
    assert not re.search(r"shfl|sqrt|div\.", ptx)


def test_F7_weights_are_read_after_the_wait_unless_metadata_is_ready():
    late = pdl_events(decode(**BEFORE, **NORMED, PDL=1).asm["ptx"])
    assert late[:2] == ["launch_dependents", "wait"] and "wait" not in late[2:]
    events = pdl_events(decode(**BEFORE, **NORMED, PDL=1, PREFETCH=True).asm["ptx"])
    assert events.count("wait") == 3 and not {"st", "atom", "red"} & set(events[: events.index("wait")])


def test_nothing_is_loaded_for_the_norm_after_the_rows():
    """Weights are asked for before anything waits for memory: in the PTX no load follows a shuffle of the sum."""
    for tile in decode(**BEFORE, **NORMED).asm["ptx"].split("shfl.sync")[1:]:
        assert not re.search(r"ld\.global", tile.split("\n$L__BB")[0])
