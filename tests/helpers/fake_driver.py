"""Two CUDA drivers that fail when told to.

Most of what goes wrong in a launch goes wrong before the GPU sees it: an address of another call, a stream or device that is no
longer current, a stride in too few bits, a kernel compiled for memory that is better aligned. `FakeDriver` makes all of that
visible on a machine without a GPU. It takes the place of the one object that asks the machine for anything, `driver.machine`,
and gets the very bytes that are packed for `cuLaunchKernelEx`. It refuses what a GPU would refuse, a misaligned address or a grid
that does not fit, and runs the reference on the memory that the packed addresses name. So a test compares tensors, as on a GPU,
and everything from the look-up of a plan to the last packed byte has run. It says nothing about kernels.

`RealDriver` is the machine's own, for the same tests on a GPU.
"""

import ctypes
import itertools

import torch
from fake_kernels import Loaded, execute, is_aligned, loaded

from decode_rope.api import functions
from decode_rope.launch import compiled, driver, platform, rope

INVALID_VALUE, MISALIGNED_ADDRESS = 1, 716  # as in cuda.h
SCRATCH = 2  # trailing parameters of Triton's own, as on a GPU


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


BOOKS = (functions.DECODE_CALLS, functions.PREFILL_CALLS, rope.BOOK)


def with_nothing_loaded(monkeypatch) -> None:
    """No plan and no kernel of an earlier call is found, nor these by a later test."""
    monkeypatch.setattr(compiled, "_COMPILED", {})
    for book in BOOKS:
        monkeypatch.setattr(book, "_recent", [])
        monkeypatch.setattr(book, "_plans", {})


class FakeDriver:
    """Attributes:
    codes: error codes that the next launches return in turn, without doing anything.
    launches: (stream, device) of every launch that ran.
    arguments: the kernel's parameters by name, of every launch that ran.
    attributes: its launch attributes, id -> value.
    device, stream: what is current.
    refuse_to_load: an exception that loading a kernel raises, as a missing compiler would; or None.
    """

    def __init__(self):
        self.codes: list[int] = []
        self.launches: list[tuple[int, int | None]] = []
        self.arguments: list[dict[str, int]] = []
        self.attributes: list[dict[int, int]] = []
        self.device: int | None = None  # the index of torch.device("cpu")
        self.stream = 0x51
        self.refuse_to_load: BaseException | None = None
        self._loaded: dict[int, Loaded] = {}
        self._handles = itertools.count(0x1000)  # never the same one to two threads

    def install(self, monkeypatch) -> "FakeDriver":
        """CPU tensors go through plans and this driver, with plans and kernels of their own."""
        with_nothing_loaded(monkeypatch)
        load = self.load
        monkeypatch.setattr(compiled.Compiled, "_load", lambda self, dtypes: load(self, dtypes))
        monkeypatch.setattr(platform, "runs_reference", lambda device: False)
        monkeypatch.setattr(driver.machine, "cu_launch", self.launch)
        monkeypatch.setattr(driver.machine, "stream", lambda device: self.stream)
        monkeypatch.setattr(driver.machine, "device", lambda: self.device)
        monkeypatch.setattr(driver, "cuda_version", lambda: 13000)
        monkeypatch.setattr(driver, "error_string", lambda code: f"stand-in error {code}")
        monkeypatch.setattr(torch.cuda, "device", type("device", (_OnDevice,), {"driver": self}))
        return self

    def fail_next(self, code: int, times: int = 1) -> None:
        """Let the next launches do nothing and return `code`."""
        self.codes = [code] * times

    def load(self, kernel: compiled.Compiled, dtypes: dict[str, torch.dtype]) -> None:
        """In place of `Compiled._load`."""
        if self.refuse_to_load is not None:
            raise self.refuse_to_load
        handle = next(self._handles)
        self._loaded[handle] = loaded(kernel, dtypes)
        kernel.function, kernel.shared, kernel.num_scratch, kernel.direct = handle, 0, SCRATCH, True

    def launch(self, config_ref, function, pointers, extra) -> int:
        """In place of `cuLaunchKernelEx`; returns an error code, 0 for success."""
        if self.codes:
            return self.codes.pop(0)
        config = ctypes.cast(config_ref, ctypes.POINTER(Config))[0]
        found = self._loaded[function.value]
        values = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
        names = found.parameters
        if len(values) != len(names) + SCRATCH or any(values[len(names) :]) or extra is not None:
            return INVALID_VALUE
        arguments = dict(zip(names, values, strict=False))
        arguments |= {name: ctypes.c_int32(arguments[name]).value for name in found.narrow}
        programs = found.kernel.programs(found.facts, arguments)
        if list(config.grid) != [programs, 1, 1] or list(config.block) != [32 * found.num_warps, 1, 1]:
            return INVALID_VALUE
        if not is_aligned(found, arguments):
            return MISALIGNED_ADDRESS
        self.launches.append((config.stream, self.device))
        self.arguments.append(arguments)
        self.attributes.append({a.id: a.value for a in config.attributes[: config.num_attributes]})
        execute(found, arguments)
        return 0


class _OnDevice:
    """In place of `torch.cuda.device`."""

    driver: FakeDriver

    def __init__(self, index: int | None):
        self.index = index

    def __enter__(self):
        self.before, self.driver.device = self.driver.device, self.index

    def __exit__(self, *error):
        self.driver.device = self.before


class RealDriver:
    """The CUDA driver; `fail_next` and `refuse_to_load` as in `FakeDriver`."""

    def __init__(self):
        self.codes: list[int] = []
        self.refuse_to_load: BaseException | None = None

    def install(self, monkeypatch) -> "RealDriver":
        real, load = driver.machine.cu_launch, compiled.Compiled._load

        def launch(*packed):
            return self.codes.pop(0) if self.codes else real(*packed)

        def load_unless_refused(kernel, dtypes):
            if self.refuse_to_load is not None:
                raise self.refuse_to_load
            load(kernel, dtypes)

        with_nothing_loaded(monkeypatch)
        monkeypatch.setattr(compiled.Compiled, "_load", load_unless_refused)
        monkeypatch.setattr(driver.machine, "cu_launch", launch)
        return self

    fail_next = FakeDriver.fail_next
