"""Compiled kernels: one for each set of compile-time facts, loaded once for each device and kept for ever.

A kernel is compiled for dtypes, head counts and flags. It is never compiled for a batch size, a stride or an address, but for which
of its integers need more than 31 bits. So the key of a compiled kernel is entirely ours. `driver.launch` launches it directly.
`kernel[grid]` launches it under the interpreter, on AMD, for Triton versions that nobody has tried, for kernels whose parameters
are not what we gave, while a profiler's launch hooks are attached, and with DECODE_ROPE_LAUNCH=jit in the environment.
"""

import torch

from ..append.faults import fault_buffer
from . import driver
from .platform import DIRECT, INTERPRETED

# Never emptied: a captured graph holds the raw function, and Triton >= 3.8 unloads a module when its last reference goes.
_COMPILED: dict[tuple, "Compiled"] = {}


class Compiled:
    """One compiled kernel on one device.

    Attributes:
        facts: the kernel's compile-time parameters by name, among them pointers that are None.
        parameters: the names of its other parameters, in its own order.
        wide: those of its integers that have 64 bits because a value needs them.
        options: Triton's compile options.
        function, shared, num_scratch: the CUfunction, bytes of shared memory, and Triton's own parameters after ours.
        direct: whether `driver.launch` may launch it.
    """

    __slots__ = (
        "binary", "device", "direct", "facts", "function", "kernel", "num_scratch", "options", "parameters", "shared", "wide",
    )  # fmt: skip

    def __init__(self, kernel, device: torch.device, dtypes: dict, facts: dict, wide: frozenset, num_warps: int):
        self.kernel, self.device, self.facts, self.wide = kernel, device, facts, wide
        self.parameters = tuple([name for name in kernel.arg_names if name not in facts])
        # fp fusion would contract x1·c − x2·s and change bits between Triton releases.
        self.options = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}
        if facts.get("PDL"):
            self.options["launch_pdl"] = True  # HIP knows no such option, not even as False
        self.binary = self.function = self.shared = self.num_scratch = None
        self.direct = False
        if not INTERPRETED:
            self._load(dtypes)

    def _load(self, dtypes: dict) -> None:
        # Triton gives integers the bits that their values need.
        given = {name: dtypes.get(name, 2**32 if name in self.wide else 1) for name in self.parameters}
        with torch.cuda.device(self.device):
            self.binary = self.kernel.warmup(*self._in_order(given), **self.options, grid=(1,))
            _ = self.binary.run  # reading it loads the module
        self.function, self.shared = self.binary.function, self.binary.metadata.shared
        if DIRECT and driver.available():
            self.num_scratch = driver.scratch_parameters(self.binary.asm["ptx"], len(given))
            self.direct = self.num_scratch is not None and self.binary.metadata.global_scratch_size == 0

    def _in_order(self, values: dict) -> list:
        """All of the kernel's arguments in its own order, for Triton; `values` are those of `parameters`."""
        return [self.facts[name] if name in self.facts else values[name] for name in self.kernel.arg_names]

    def launch_jit(self, grid: int, values: dict) -> None:
        """Launch through `kernel[grid]`, on the current stream of the current device. `values`: parameters by name, tensors for
        pointers."""
        self.kernel[(grid,)](*self._in_order(values), **self.options)

    def pack(self, grid: int, stream: int, values: dict, carveout: int) -> tuple:
        """The launch in the driver's form. `values`: parameters by name, addresses for pointers."""
        # Triton's scratch pointers come last and are null, because these kernels use none.
        parameters = (*[values[name] for name in self.parameters], *[0] * self.num_scratch)
        return driver.pack(self.function, self.options, self.shared, grid, stream, parameters, carveout)


def compiled(kernel, device: torch.device, dtypes: dict, facts: dict, wide: frozenset, num_warps: int) -> Compiled:
    """The compiled `kernel` for a configuration; compiled and loaded if this is its first use.

    Args:
        dtypes: those of the tensors that its pointer parameters get, by parameter.
        facts, wide: as in `Compiled`.
    Raises:
        RuntimeError: the first use is inside a CUDA graph capture, which a module load could break.
    """
    key = (kernel.__name__, device, *dtypes.items(), *facts.items(), wide, num_warps)
    found = _COMPILED.get(key)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "decode_rope: this configuration is used for the first time inside a CUDA graph capture, where its kernel "
                "cannot be loaded; call DecodeRope.warmup(max_tokens) or make the same call once before capturing"
            )
        fault_buffer(device)
        # Two threads may both come here; setdefault lets one of their kernels stay, without a lock that a fork could strand.
        found = _COMPILED.setdefault(key, Compiled(kernel, device, dtypes, facts, wide, num_warps))
    return found


def num_compiled() -> int:
    """How many kernels this process has compiled or loaded."""
    return len(_COMPILED)
