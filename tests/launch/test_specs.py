"""Every kernel is told exactly what its parameters are called, whatever the call."""

import pytest
import torch
from cases import build
from compile_only import facts, integers, pointers
from fake_kernels import KERNELS
from ragged import RAGGED, live, ragged
from random_cases import CPU_SIZES, random_spec
from ways import SPECS

from decode_rope.append.arguments import Append, Rotation, kernel_tensors, resolved
from decode_rope.launch.decode import DECODE
from decode_rope.launch.prefill import PREFILL
from decode_rope.launch.rope import ROPE
from decode_rope.launch.spec import Spec

CPU = torch.device("cpu")


def appends(axes: bool) -> list[Append]:
    """Calls of every kind that decode and prefill know; with `axes`, also those of prefill alone."""
    cases = [build(spec, "cpu") for spec in SPECS.values()]
    cases += [build(random_spec(seed, CPU_SIZES), "cpu") for seed in range(60)]
    found = [resolved(Append(**case.arguments())) for case in cases]
    found += [call._replace(metadata_ready=True, enable_pdl=True) for call in found[:5]]
    if axes:
        cases = [
            ragged("cpu"),
            ragged("cpu", RAGGED.but(q_out=True, k_out="own")),
            live("cpu", k_out="k"),
            live("cpu", [0, 20], k_out="k"),
        ]
        found += [resolved(Append(**case.arguments())) for case in cases]
        several = {"positions": torch.zeros(3, 20, dtype=torch.int64), "axis_map": torch.zeros(32, dtype=torch.int8)}
        found += [call._replace(**several) for call in found[-4:]]
    return found


def rotations() -> list[Rotation]:
    table, axis_map = torch.ones(64, 32), torch.zeros(16, dtype=torch.int8)
    found = []
    for layout, shape in (("NHD", (5, 3, 32)), ("NHD", (2, 5, 3, 32)), ("HND", (2, 3, 5, 32))):
        x = torch.ones(shape)
        batch = () if x.dim() == 3 else (2,)
        for positions in (None, torch.zeros(*batch, 5).long(), torch.zeros(3, *batch, 5).long()):
            for out in (None, torch.empty_like(x)):
                found.append(Rotation(x, out, table, positions, axis_map, layout=layout))
    return found


CALLS = {"decode": (DECODE, appends(axes=False)), "prefill": (PREFILL, appends(axes=True)), "rope": (ROPE, rotations())}
every_spec = pytest.mark.parametrize(("spec", "calls"), CALLS.values(), ids=CALLS)


@every_spec
def test_facts_and_integers_are_the_parameters_of_the_kernel(spec: Spec, calls: list):
    for call in calls:
        for aligned in (True, False):
            values = spec.values(call, CPU, aligned)
            absent = {name for name, fact in values.facts.items() if fact is None and name not in facts(spec.kernel)}
            assert set(values.facts) == set(facts(spec.kernel)) | absent, call
            assert set(values.integers) == set(integers(spec.kernel)) - absent, call
            assert all(type(n) is int and n >= 0 for n in values.integers.values()), call
            assert type(values.grid) is int and values.grid >= (call[0].numel() > 0), call


@every_spec
def test_every_pointer_gets_a_tensor(spec: Spec, calls: list):
    """But that of the fault record, which the plan gives. What another kernel alone takes may be there as well."""
    of_kernels = {name for other, _ in CALLS.values() for name in pointers(other.kernel)}
    for call in calls:
        given, told = kernel_tensors(call), spec.values(call, CPU, True).facts
        assert set(pointers(spec.kernel)) - {"faults_ptr"} - set(told) <= set(given) <= of_kernels
        assert all(isinstance(x, torch.Tensor) for x in given.values())


@every_spec
def test_facts_and_tensors_come_in_one_order(spec: Spec, calls: list):
    """Calls of one configuration find one compiled kernel."""
    assert len({tuple(spec.values(call, CPU, aligned).facts) for call in calls[:40] for aligned in (True, False)}) == 1
    assert len({tuple(kernel_tensors(call)) for call in calls[:40]}) == 1


@every_spec
def test_a_plan_of_meta_tensors_is_that_of_real_ones(spec: Spec, calls: list):
    """Only shapes, strides and dtypes are looked at, so that a warm-up needs no memory."""
    for call in calls:
        on_meta = [x.to("meta") if isinstance(x, torch.Tensor) and x.is_contiguous() else x for x in call]
        assert spec.values(call._make(on_meta), CPU, True) == spec.values(call, CPU, True)


def test_every_kernel_has_a_spec_and_a_stand_in():
    assert {spec.kernel.__name__ for spec, _ in CALLS.values()} == KERNELS.keys()
