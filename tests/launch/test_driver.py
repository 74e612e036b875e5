"""The launch arguments packed for the driver, read back through the layouts of cuda.h."""

import ctypes

import pytest
from fake_driver import Config

from decode_rope.launch import driver

PTX = """
.visible .entry decode_kernel(
    .param .u64 .ptr .global .align 1 decode_kernel_param_0,
    .param .u64 decode_kernel_param_1,
    .param .u64 .ptr .global .align 1 decode_kernel_param_2
)
"""


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("carveout, version", [(-1, 13000), (0, 13000), (100, 12050), (100, 12040)])
def test_packed_launch_reads_back(pdl, carveout, version, monkeypatch):
    monkeypatch.setattr(driver, "cuda_version", lambda: version)
    options = {"num_warps": 4} | ({"launch_pdl": True} if pdl else {})
    parameters = (0x7F0000000010, 5, -7, 2**62, 0, 0)
    config_ref, function, pointers, extra = driver.pack(0x1234, options, 96, 33, 0xABCD, parameters, carveout)
    config = ctypes.cast(config_ref, ctypes.POINTER(Config))[0]
    assert list(config.grid) == [33, 1, 1] and list(config.block) == [128, 1, 1]
    assert (config.shared, config.stream, function.value, extra) == (96, 0xABCD, 0x1234, None)
    values = [ctypes.cast(p, ctypes.POINTER(ctypes.c_int64))[0] for p in pointers]
    assert values == [*parameters]
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION and, since CUDA 12.5, ..._PREFERRED_SHARED_MEMORY_CARVEOUT
    want = ([(6, 1)] if pdl else []) + ([(14, carveout)] if carveout >= 0 and version >= 12050 else [])
    assert [(a.id, a.value) for a in config.attributes[: config.num_attributes]] == want
    assert bool(config.attributes) == bool(want)


@pytest.mark.parametrize("given, scratch", [(1, 2), (3, 0), (4, None)])
def test_scratch_parameters_are_what_follows_ours(given, scratch):
    assert driver.scratch_parameters(PTX, given) == scratch


def test_a_kernel_with_a_narrow_parameter_is_not_launched_directly():
    assert driver.scratch_parameters(PTX.replace(".param .u64 decode", ".param .u16 decode"), 1) is None
    assert driver.scratch_parameters("", 0) is None
