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
TABLES, SCALING = "tests/tables/test_tables.py", "tests/tables/test_scaling.py"

DEFAULT_TESTS = {
    ("api/functions.py", PLAIN): ("tests/compile/test_ops_rope.py",),
    ("append/checks.py", PLAIN): (PREFILL, APPLY, ERRORS),
    ("append/faults.py", PLAIN): ("tests/launch/test_threads.py",),
    ("append/layout.py", PLAIN): (LAYOUTS, ERRORS),
    ("append/rules.py", PLAIN): (ERRORS,),
    ("cache.py", PLAIN): ("tests/test_cache.py",),
    ("compile/append.py", PLAIN): ("tests/compile/test_ops.py", "tests/compile/test_ops_prefill.py"),
    ("compile/operators.py", PLAIN): ("tests/compile/test_ops.py", "tests/compile/test_compile.py"),
    ("compile/rope.py", PLAIN): ("tests/compile/test_ops_rope.py",),
    ("kernels/heads.py", INTERPRET): (APPLY, AXES),
    ("kernels/prefill.py", INTERPRET): (PREFILL, PREFILL_ROWS),
    ("kernels/rope.py", INTERPRET): (APPLY, AXES),
    ("kernels/rotation.py", PLAIN): (CODEGEN,),
    ("launch/append.py", PLAIN): (PACKED_PREFILL,),
    ("launch/compiled.py", GPU): ("tests/launch/test_graphs.py", "tests/launch/test_pdl.py", DECODE),
    ("launch/driver.py", PLAIN): ("tests/launch/test_driver.py", FAILURES, PACKED),
    ("launch/prefill.py", INTERPRET): (PREFILL,),
    ("launch/rope.py", PLAIN): (PACKED_PREFILL,),
    ("reference.py", INTERPRET): (PREFILL, APPLY, AXES),
    ("reference.py", PLAIN): (REFERENCE,),
    ("tables/axes.py", PLAIN): (TABLES, SCALING),
    ("tables/scaling.py", PLAIN): (SCALING, TABLES),
    ("tables/table.py", PLAIN): (TABLES, SCALING),
}


def mutants(faults: dict[str, list[Fault]]) -> list[Mutant]:
    return [
        Mutant(file, *fault)._replace(tests=fault.tests or DEFAULT_TESTS[file, fault.lane])
        for file, found in faults.items()
        for fault in found
    ]
