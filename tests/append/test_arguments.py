"""The records of calls: what each of their tensors is to a kernel."""

import pytest
import torch
from bad import GOOD, ONLY_Q
from cases import build
from compile_only import pointers

from decode_rope.append.arguments import (
    CACHE,
    INDEX,
    ROW,
    SCALE,
    TABLE,
    WEIGHT,
    Append,
    Rotation,
    absent_parameters,
    given_tensors,
    kernel_tensors,
    resolved,
)
from decode_rope.append.layout import append_steps, scale_steps
from decode_rope.kernels.decode import rope_append_decode_kernel
from decode_rope.kernels.prefill import rope_append_prefill_kernel
from decode_rope.kernels.rope import apply_rope_kernel

RECORDS = {Append: (rope_append_decode_kernel, rope_append_prefill_kernel), Rotation: (apply_rope_kernel,)}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_tensors_come_first_and_each_has_a_role(record):
    assert tuple(record.ROLES) == record._fields[: len(record.ROLES)]
    assert all("Tensor" in str(record.__annotations__[name]) for name in record.ROLES)
    assert not any("Tensor" in str(record.__annotations__[name]) for name in record._fields[len(record.ROLES) :])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_roles_name_the_pointers_of_the_kernels(record):
    of_kernels = {name for kernel in RECORDS[record] for name in pointers(kernel)}
    assert {role.parameter for role in record.ROLES.values()} | {"faults_ptr"} == of_kernels


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_stand_in_is_always_there(record):
    """A tensor that no call lacks, where a kernel has a parameter for the tensor in every call."""
    for name, role in record.ROLES.items():
        assert role.stand_in is None or "None" not in str(record.__annotations__[role.stand_in]), name
        assert role.kind in (ROW, CACHE, SCALE, TABLE, WEIGHT, INDEX)


def test_a_parameter_without_a_stand_in_is_none_where_its_tensor_is():
    call = resolved(Append(**build(GOOD, "cpu").arguments()))
    absent = absent_parameters(call)
    assert set(absent.values()) == {None}
    assert set(absent) == {role.parameter for role in Append.ROLES.values() if role.stand_in is None}
    written = call._replace(k_scale_out=torch.ones(1, 1, 1))
    assert set(absent) - set(absent_parameters(written)) == {"k_scale_ptr"}


def test_absent_tensors_are_stood_for_and_given_ones_are_not():
    call = resolved(Append(**build(ONLY_Q, "cpu").arguments()))
    assert set(given_tensors(call)) == {"q", "cos_sin_cache", "positions"}
    tensors = kernel_tensors(call)
    assert tensors["q_out_ptr"] is call.q and tensors["index_ptr"] is call.positions
    call = resolved(Append(**build(GOOD.but(block_table=None, slots=[1, 2, 3], k_out="own"), "cpu").arguments()))
    tensors = kernel_tensors(call)
    assert tensors["index_ptr"] is call.slot_mapping and tensors["k_out_ptr"] is call.k_out
    assert kernel_tensors(Rotation(call.q, None, call.cos_sin_cache))["out_ptr"] is call.q


def test_steps_are_named_as_the_kernels_name_them():
    call = resolved(Append(**build(GOOD, "cpu").arguments()))
    for kernel in RECORDS[Append]:
        strides = {name for name in kernel.arg_names if name.startswith("stride_")}
        scaled = call._replace(k_scale=torch.ones(1), v_scale=torch.ones(1))
        assert set(append_steps(call)) | set(scale_steps(scaled)) == strides - {"stride_index", "stride_axis"}
    assert append_steps(call)["stride_kc_t"] == (call.k_cache.stride(1), call.k_cache.shape[1], 2, CACHE)


def test_a_layer_without_k_writes_no_cache():
    """It may pass the cache of the layer whose keys it shares."""
    cache = torch.zeros(2, 4, 2, 16)
    call = resolved(Append(**build(ONLY_Q, "cpu").arguments())._replace(k_cache=cache, v_cache=cache))
    assert call.k_cache is None and call.v_cache is None and not call.writes_cache


def test_requests_are_rows_of_the_block_table():
    call = Append(**build(GOOD, "cpu").arguments())
    assert call.requests == 3 and call._replace(tokens_per_request=2).requests == 2
    assert call._replace(cu_seqlens_q=torch.tensor([0, 2, 3])).requests == 2
