"""Who imports whom: rooms know the rooms below them and no others, the reference is plain PyTorch, kernels know no PyTorch, and the
package needs torch and triton alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import decode_rope

ROOT = Path(decode_rope.__file__).parent
FILES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
TESTS = Path(__file__).parent
STANDARD = sys.stdlib_module_names
# The rooms of the house, and all that files of each import of the others. Files beside the rooms are rooms of their own.
ROOMS = {
    "reference": set(),
    "cache": set(),
    "tables": set(),
    "kernels": set(),
    "append": {"reference"},
    "launch": {"append", "kernels", "reference"},
    "compile": {"append", "launch"},
    "api": {"append", "compile", "launch"},
}
APPEND = {".append", *(f".append.{name}" for name in ("arguments", "checks", "codes", "faults", "layout", "norm", "rules"))}
# At the top of it: they may import anything, and nothing imports them.
ABOVE = {"__init__", "__main__", "cli", "examples", "hf"}
ALWAYS_THERE = STANDARD | {"torch", "triton", "decode_rope"}


def imports(name: str, at_import: bool = False) -> set[str]:
    """What a file imports: `torch`, `triton`, …, and the package's own as `.layout`; or only what it needs to be imported."""
    path, found = FILES[name], set()
    package = path.relative_to(ROOT).parent.parts
    tree = ast.parse(path.read_text())
    for node in _needed_to_import(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            if node.level == 0 and module[0] != "decode_rope":
                found.add(module[0])
                continue
            base = [*package[: len(package) - node.level + 1], *module] if node.level else module[1:]
            both = [".".join(["", *base]), *(".".join(["", *base, alias.name]) for alias in node.names)]
            found |= {own for own in both if own.strip(".").replace(".", "/") in FILES}
    return found


def _needed_to_import(node):
    for child in ast.iter_child_nodes(node):
        for_types_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not for_types_only and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _needed_to_import(child)


def room_of(name: str) -> str:
    """The room of a file, or of a module as `imports` names it."""
    return name.lstrip(".").replace(".", "/").split("/")[0]


def rooms_imported(room: str) -> set[str]:
    """The other rooms that files of a room import. (A package's own `__init__`, as in `.append`, counts as the room.)"""
    files = [name for name in FILES if room_of(name) == room]
    return {room_of(module) for name in files for module in imports(name) if module.startswith(".")} - {room}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_the_rooms_below_it_and_no_others(room):
    assert rooms_imported(room) == ROOMS[room]


def test_every_file_is_in_a_room():
    assert {room_of(name) for name in FILES} == ROOMS.keys() | ABOVE


def test_rooms_below_know_nothing_of_rooms_above():
    """`ROOMS` is in order: a room imports earlier ones alone."""
    order = list(ROOMS)
    for room, below in ROOMS.items():
        assert below <= set(order[: order.index(room)]), room


def test_the_top_of_the_package_shows_a_dozen_entries():
    # `examples` are read and copied, and hold nothing that the package is made of.
    shown = {path.name for path in ROOT.iterdir()} - {"__pycache__", "py.typed", "examples"}
    assert len(shown) <= 12, sorted(shown)


@pytest.mark.parametrize("name", [name for name in FILES if room_of(name) in ("reference", "cache", "tables")])
def test_reference_cache_and_tables_need_torch_alone(name):
    assert {module for module in imports(name, at_import=True) if not module.startswith(".")} - STANDARD <= {"torch"}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("kernels/")])
def test_kernels_import_triton_and_each_other(name):
    assert "torch" not in imports(name)
    assert imports(name) - STANDARD - {"triton"} <= {f".kernels.{Path(other).name}" for other in FILES if "kernels/" in other}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("kernels/")])
def test_kernels_call_nothing_that_another_package_may_replace(name):
    """SGLang 0.5.23 puts a plain function in the place of `triton.next_power_of_2`; then no kernel that calls it compiles."""
    nodes = list(ast.walk(ast.parse(FILES[name].read_text())))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "triton"}
    assert used <= {"jit", "constexpr_function", "knobs"}  # the last is read when a kernel is defined
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    assert modules <= {"triton.language.extra.cuda"}


def test_rotation_is_below_the_other_kernels():
    assert imports("kernels/rotation") - STANDARD == {"triton"}


def test_checks_and_layouts_launch_nothing():
    for name in FILES:
        if room_of(name) == "append":
            assert imports(name, at_import=True) - STANDARD <= {"torch", ".reference", *APPEND}, name
    assert {module for module in imports("append/faults") if module.startswith(".")} == {".reference"}


def test_the_driver_and_the_platform_know_nothing_of_calls():
    for name in ("launch/driver", "launch/platform", "launch/tiles"):
        assert imports(name) - STANDARD <= {"torch", "triton"}, name


def test_only_torch_and_triton_are_needed_to_import():
    for name in FILES:
        assert {m for m in imports(name, at_import=True) if not m.startswith(".")} <= ALWAYS_THERE, name


def test_no_import_cycle():
    graph = {"." + name.replace("/", "."): imports(name, at_import=True) for name in FILES}

    def reach(start: str, seen: set[str]) -> set[str]:
        for other in graph.get(start, ()):
            if other not in seen:
                seen.add(other)
                reach(other, seen)
        return seen

    for name in graph:
        assert name not in reach(name, set()), name


def names_imported(path: Path) -> set[str]:
    """The first names of all modules that a file imports, in any function too."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.split(".")[0] for name in found}


def test_tests_and_benchmarks_do_not_import_each_other():
    of_tests = {path.stem for path in TESTS.rglob("*.py")} | {"tests"}
    for path in TESTS.rglob("*.py"):
        if path.parent.name != "bench":  # the benchmark's own tests
            assert "bench" not in names_imported(path), path.name
    for path in (TESTS.parent / "bench").rglob("*.py"):
        assert not names_imported(path) & of_tests, path.name


def test_no_test_file_imports_another():
    """What two of them need is a helper."""
    for path in TESTS.rglob("*.py"):
        assert not {name for name in names_imported(path) if name.startswith("test_") or name == "conftest"}, path.name


def test_importing_touches_no_gpu_and_no_optional_package():
    code = (
        "import sys, decode_rope, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'transformers', 'gguf', 'flashinfer', 'matplotlib'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
