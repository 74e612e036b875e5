"""Compiled kernels: one for each static configuration, loaded once for each device and kept for ever.

A kernel is compiled for dtypes, head counts and flags, and never for a batch size, a stride or an address, but for which of them
need more than 31 bits, so the key of a variant is entirely ours. `driver.launch` launches a variant directly; `kernel[grid]` does
it under the interpreter, on AMD, for Triton versions nobody has tried, for kernels whose parameters are not what we gave, while a
profiler's launch hooks are attached, and with DECODE_ROPE_LAUNCH=jit in the environment.
"""

import os
from typing import NamedTuple

import torch
import triton

from . import driver
from .faults import fault_buffer

# Triton decides this when a kernel is defined, by TRITON_INTERPRET in the environment.
INTERPRETED = bool(triton.knobs.runtime.interpret)
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_TRIED_VERSIONS = ((3, 6), (3, 9))
# Never emptied: a captured graph holds the raw function, and Triton >= 3.8 unloads a module when its last reference goes.
_VARIANTS: dict[tuple, "Variant"] = {}


class Variant:
    """One compiled kernel on one device. `static` is a NamedTuple of the kernel's constexpr parameters, in its own order, and
    `names` are those of its other parameters, pointers (whose dtypes are given) first, in the order of its callers.

    Attributes:
        run, metadata: Triton's launch call and its packed argument, None under the interpreter.
        function, shared, num_scratch: the CUfunction, bytes of shared memory, and Triton's own parameters after ours.
        direct: whether `driver.launch` may launch it.
    """

    __slots__ = (
        "compiled",
        "device",
        "direct",
        "function",
        "kernel",
        "metadata",
        "num_scratch",
        "options",
        "order",
        "run",
        "shared",
        "static",
    )

    def __init__(self, kernel, names: tuple[str, ...], device: torch.device, dtypes: tuple, static: NamedTuple, num_warps: int):
        self.kernel, self.device, self.static = kernel, device, static
        self.order = tuple(names.index(name) for name in kernel.arg_names[: len(names)])
        # fp fusion would contract x1·c − x2·s and change bits between Triton releases.
        self.options = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}
        if getattr(static, "PDL", False):
            self.options["launch_pdl"] = True  # HIP knows no such option, not even as False
        self.compiled = self.run = self.metadata = self.function = self.shared = self.num_scratch = None
        self.direct = False
        if not INTERPRETED:
            self._load(dtypes)

    def _load(self, dtypes: tuple) -> None:
        wide = getattr(self.static, "WIDE", 0)
        # Triton gives integers the bits that their values need.
        given = (*dtypes, *[2**32 if wide >> i & 1 else 1 for i in range(len(self.order) - len(dtypes))])
        with torch.cuda.device(self.device):
            self.compiled = self.kernel.warmup(*self.in_order(given), **self.static._asdict(), **self.options, grid=(1,))
            self.run = self.compiled.run  # reading it loads the module
        self.function, self.metadata = self.compiled.function, self.compiled.packed_metadata
        self.shared = self.compiled.metadata.shared
        if DIRECT and driver.available():
            self.num_scratch = driver.scratch_parameters(self.compiled.asm["ptx"], len(given))
            self.direct = self.num_scratch is not None and self.compiled.metadata.global_scratch_size == 0

    def in_order(self, given: tuple) -> tuple:
        """What is given for `names`, in the kernel's own order."""
        return tuple([given[i] for i in self.order])

    def launch_jit(self, grid: int, tensors, integers) -> None:
        """Launch through `kernel[grid]`, on the current stream of the current device."""
        self.kernel[(grid,)](*self.in_order((*tensors, *integers)), **self.static._asdict(), **self.options)


def variant(
    kernel, names: tuple[str, ...], device: torch.device, dtypes: tuple, static: NamedTuple, num_warps: int
) -> Variant:  # fmt: skip
    """The compiled `kernel` for a configuration, whose pointers have `dtypes`; compiled and loaded if this is its first use.

    Raises:
        RuntimeError: the first use is inside a CUDA graph capture, which a module load could break.
    """
    key = (kernel.__name__, device, dtypes, static, num_warps)
    found = _VARIANTS.get(key)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "decode_rope: this configuration is used for the first time inside a CUDA graph capture, where its kernel "
                "cannot be loaded; call DecodeRope.warmup(max_tokens) or make the same call once before capturing"
            )
        fault_buffer(device)
        # Two threads may both come here; setdefault lets one of their kernels stay, without a lock that a fork could strand.
        found = _VARIANTS.setdefault(key, Variant(kernel, names, device, dtypes, static, num_warps))
    return found


def num_variants() -> int:
    """How many kernels this process has compiled or loaded."""
    return len(_VARIANTS)


def pdl_supported(device: torch.device) -> bool:
    """Programmatic dependent launch needs an NVIDIA GPU of compute capability 9.0; DECODE_ROPE_PDL=0 turns it off."""
    if os.environ.get("DECODE_ROPE_PDL", "1") == "0" or INTERPRETED or device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def pdl_mode(device: torch.device, chosen: int, asked: bool | None) -> int:
    """How a launch uses PDL, as `Geometry.pdl` numbers it: as its geometry chose, unless the caller asked for it or against."""
    if not pdl_supported(device) or asked is False:
        return 0
    return int(chosen or bool(asked))


DIRECT = (
    not INTERPRETED
    and not torch.version.hip
    and _TRIED_VERSIONS[0] <= _VERSION <= _TRIED_VERSIONS[1]
    and os.environ.get("DECODE_ROPE_LAUNCH", "direct") != "jit"
)
