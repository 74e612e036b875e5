"""Kernels compiled for a GPU that need not be there, and what to ask of them."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

SM80, SM90, SM100 = (("cuda", arch, 32) for arch in (80, 90, 100))
GFX942 = ("hip", "gfx942", 64)


def pointers(kernel) -> list[str]:
    """The names of a kernel's pointer parameters."""
    return [name for name in kernel.arg_names if name.endswith("_ptr")]


def integers(kernel) -> list[str]:
    """The names of its integer parameters."""
    return [name for name in kernel.arg_names if not name.endswith("_ptr") and name not in facts(kernel)]


def facts(kernel) -> list[str]:
    """The names of its compile-time parameters."""
    return [name for name, kind in kernel.fn.__annotations__.items() if kind is tl.constexpr]


def compile_kernel(kernel, types: dict[str, str], static: dict, target, options: dict):
    """`kernel` for `target`, with run-time arguments of these types and `static` for its compile-time ones."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in static.items()},
        attrs={},
    )
    return triton.compile(source, target=GPUTarget(*target), options=options)


def resources(kernel, arch: int) -> dict[str, int]:
    """What ptxas says: registers, bytes spilled, bytes of stack."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        name = f"sm_{arch}{'a' if arch >= 90 else ''}"
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    words = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores", "stack": r"(\d+) bytes stack frame"}
    return {name: int(re.search(pattern, said)[1]) for name, pattern in words.items()}


def accesses(kernel, kind: str) -> list[int]:
    """Bits of every global `ld` or `st` in the PTX."""
    found = re.findall(rf"{kind}\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfu](\d+)", kernel.asm["ptx"])
    return [int(bits) * int(count or 1) for count, bits in found]


def sass_events(kernel) -> list[list[str]]:
    """Loads, stores and exits of every tile of a kernel in SASS, in order; a load `to keep` is one with an eviction policy."""
    names = {"LDG": "load", "STG": "store", "EXI": "leave"}
    tiles = [[]]
    for predicate, word in re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(@\S+ )?\s*((?:LDG|STG|EXIT)\S*)", sass(kernel), re.M):
        tiles[-1].append(names[word[:3]] + " to keep" * (".EL" in word))
        if word == "EXIT" and not predicate:
            tiles.append([])
    return [tile for tile in tiles if "store" in tile]


def sass(kernel) -> str:
    """A listing of what `ptxas` made, by the disassembler that Triton brings along."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [Path(nvidia.__file__).parent / "bin" / "nvdisasm", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pdl_events(ptx: str) -> list[str]:
    """PDL instructions and accesses to global memory, in order."""
    return re.findall(r"(?<=griddepcontrol\.)\w+|(?:ld|st|atom|red)(?=\.global)", ptx)
