"""What a mutant is, where its tests run, and which tests are meant to notice a fault in a file."""

from typing import NamedTuple

INTERPRET, PLAIN, GPU = "interpret", "plain", "gpu"


class Fault(NamedTuple):
    """`old`, which occurs once in a file, becomes `new`."""

    old: str
    new: str
    breaks: str
    lane: str = INTERPRET
    tests: tuple[str, ...] = ()  # pytest arguments; () is DEFAULT_TESTS of the file and lane
    fast: bool = False  # one of those tried at every commit


class Mutant(NamedTuple):
    """The package with one fault; `file` is below decode_rope/, `tests` are never empty."""

    file: str
    old: str
    new: str
    breaks: str
    lane: str
    tests: tuple[str, ...]
    fast: bool = False


class Lane(NamedTuple):
    environment: dict[str, str]
    arguments: tuple[str, ...] = ()  # to pytest


_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LANES = {
    INTERPRET: Lane(_NO_GPU | {"TRITON_INTERPRET": "1"}, ("-m", "(kernel or anywhere) and not gpu")),
    PLAIN: Lane(_NO_GPU | {"TRITON_INTERPRET": "0"}),
    GPU: Lane({"TRITON_INTERPRET": "0"}),
}
ROWS, LAYOUTS, DECODE = "tests/kernels/test_rows.py", "tests/append/test_layouts.py", "tests/kernels/test_decode.py"
ROTARY, ERRORS, PREPARED = "tests/kernels/test_rotary.py", "tests/append/test_errors.py", "tests/api/test_prepared.py"
PREFILL, PREFILL_ROWS = "tests/kernels/test_prefill.py", "tests/kernels/test_prefill_rows.py"
APPLY, AXES = "tests/kernels/test_apply_rope.py", "tests/kernels/test_multi_axis.py"
CODEGEN, REFERENCE = "tests/kernels/test_codegen.py", "tests/test_reference.py"
FAILURES, PACKED = "tests/launch/test_failures.py", "tests/launch/test_packed_launches.py"
PACKED_PREFILL = "tests/launch/test_packed_prefill.py"
WALLS = f"{ROWS}::test_no_byte_outside_the_tensors_is_touched"
OLD_CALLS = f"{ERRORS}::test_bad_argument_after_good_calls"
_TABLES = ("tests/tables/test_tables.py", "tests/tables/test_scaling.py")

DEFAULT_TESTS = {
    ("kernels/rotation.py", INTERPRET): (ROTARY, ROWS, DECODE),
    ("kernels/rotation.py", PLAIN): (CODEGEN,),
    ("kernels/decode.py", INTERPRET): (ROTARY, LAYOUTS, ROWS),
    ("kernels/decode.py", PLAIN): (CODEGEN,),
    ("kernels/prefill.py", INTERPRET): (PREFILL, PREFILL_ROWS),
    ("kernels/plain.py", INTERPRET): (APPLY, AXES),
    ("plan.py", INTERPRET): (ROWS, LAYOUTS, OLD_CALLS),
    ("plan.py", PLAIN): (PACKED, FAILURES),
    ("launch.py", INTERPRET): (ROWS, LAYOUTS, OLD_CALLS),
    ("plan_prefill.py", INTERPRET): (PREFILL,),
    ("plan_prefill.py", PLAIN): (PACKED_PREFILL,),
    ("rotate.py", INTERPRET): (APPLY,),
    ("rotate.py", PLAIN): (PACKED_PREFILL,),
    ("rope.py", INTERPRET): (APPLY,),
    ("dispatch.py", PLAIN): (PACKED, FAILURES),
    ("dispatch.py", INTERPRET): (DECODE,),
    ("driver.py", PLAIN): ("tests/launch/test_driver.py", FAILURES, PACKED),
    ("variants.py", PLAIN): (PACKED, FAILURES, "tests/launch/test_threads.py"),
    ("variants.py", GPU): ("tests/launch/test_graphs.py", "tests/launch/test_pdl.py", DECODE),
    ("prepared.py", INTERPRET): (PREPARED,),
    ("prepared.py", PLAIN): (PACKED, FAILURES, PREPARED),
    ("ops.py", PLAIN): ("tests/compile/test_ops.py",),
    ("operators.py", PLAIN): ("tests/compile/test_ops.py", "tests/compile/test_compile.py"),
    ("ops_prefill.py", PLAIN): ("tests/compile/test_ops_prefill.py",),
    ("rope.py", PLAIN): ("tests/compile/test_ops_rope.py",),
    ("ops_rope.py", PLAIN): ("tests/compile/test_ops_rope.py",),
    ("faults.py", INTERPRET): (ROWS,),
    ("faults.py", PLAIN): ("tests/launch/test_threads.py",),
    ("checks.py", PLAIN): (ERRORS,),
    ("checks_prefill.py", PLAIN): (PREFILL, APPLY),
    ("layout.py", PLAIN): (LAYOUTS, ERRORS),
    ("reference.py", PLAIN): (REFERENCE,),
    ("reference.py", INTERPRET): (PREFILL, APPLY, AXES),
    ("cache.py", PLAIN): ("tests/test_cache.py",),
    ("tables.py", PLAIN): _TABLES,
    ("scaling.py", PLAIN): _TABLES[::-1],
    ("axes.py", PLAIN): _TABLES,
    ("registry.py", INTERPRET): ("tests/test_rope.py",),
}


def mutants(faults: dict[str, list[Fault]]) -> list[Mutant]:
    return [
        Mutant(file, *fault)._replace(tests=fault.tests or DEFAULT_TESTS[file, fault.lane])
        for file, found in faults.items()
        for fault in found
    ]
