"""Who imports whom: the reference is plain PyTorch, kernels know no PyTorch, and the package needs torch and triton alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import decode_rope

ROOT = Path(decode_rope.__file__).parent
FILES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
STANDARD = sys.stdlib_module_names
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


def own(name: str) -> set[str]:
    return {module for module in imports(name) if module.startswith(".")}


@pytest.mark.parametrize("name", ["reference", "scaling"])
def test_reference_and_scaling_know_nobody(name):
    assert imports(name) - STANDARD == {"torch"}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("kernels/")])
def test_kernels_import_triton_and_each_other(name):
    assert "torch" not in imports(name)
    assert imports(name) - STANDARD - {"triton"} <= {f".kernels.{Path(other).name}" for other in FILES if "kernels/" in other}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("kernels/")])
def test_kernels_call_nothing_that_another_package_may_replace(name):
    """SGLang 0.5.23 puts a plain function in the place of `triton.next_power_of_2`; then no kernel that calls it compiles."""
    nodes = list(ast.walk(ast.parse(FILES[name].read_text())))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "triton"}
    assert used <= {"jit", "constexpr_function"}
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    assert modules <= {"triton.language.extra.cuda"}


def test_rotation_is_below_the_other_kernels():
    assert not own("kernels/rotation")


def test_checks_and_layout_and_geometry_launch_nothing():
    assert own("layout") == set() and own("geometry") == set()
    assert own("checks") <= {".layout", ".axes"}
    assert own("faults") == {".reference"}
    assert not {"triton", ".plan", ".variants", ".kernels.decode"} & (imports("checks") | imports("layout") | imports("faults"))


def test_nobody_imports_the_public_functions():
    """`api` and `prepared` are at the top: below them nothing knows them."""
    for name in ("plan", "dispatch", "variants", "checks", "layout", "faults", "geometry", "reference"):
        assert not {".api", ".prepared"} & imports(name), name
    assert ".prepared" not in imports("api") or ".api" not in imports("prepared")


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


def test_tests_and_benchmarks_do_not_import_each_other():
    for path in Path(__file__).parent.glob("*.py"):
        if not path.name.startswith(("test_bench", "bench_")):  # of the benchmark
            tree = ast.parse(path.read_text())
            names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
            names |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
            assert "bench" not in names, path.name


def test_importing_touches_no_gpu_and_no_optional_package():
    code = (
        "import sys, decode_rope, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'transformers', 'gguf', 'flashinfer', 'matplotlib'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
