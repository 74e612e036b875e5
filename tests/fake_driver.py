"""Two CUDA drivers that fail when told to.

`FakeDriver` takes the very arguments that are packed for `cuLaunchKernelEx`, and runs the reference on the memory they name. So
the path of a direct launch, from the look-up to the last packed byte, runs on a machine without a GPU; and it refuses what a GPU
would refuse, a misaligned address or a grid that does not fit. `RealDriver` is the machine's own.
"""

import ctypes
import itertools

import torch
from fake_kernels import KERNELS, Loaded, execute, is_aligned

from decode_rope import api, dispatch, dispatch_prefill, driver, launch, plan, prepared, rotate, variants

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
        monkeypatch.setattr(variants, "_VARIANTS", {})
        monkeypatch.setattr(api, "_PLANS", dispatch.decode_plans())
        monkeypatch.setattr(dispatch_prefill, "_PLANS", dispatch_prefill.prefill_plans())
        monkeypatch.setattr(rotate, "_PLANS", rotate.rotation_plans())
        load = self.load
        monkeypatch.setattr(variants.Variant, "_load", lambda self, dtypes: load(self, dtypes))
        for module in (dispatch, prepared):
            monkeypatch.setattr(module, "runs_reference", lambda device: False)
        for module in (launch, plan, prepared):
            monkeypatch.setattr(module, "raw_stream", lambda device: self.stream)
            monkeypatch.setattr(module, "current_device", lambda: self.device)
        for module in (plan, prepared):
            monkeypatch.setattr(module, "cu_launch", self.launch)
        monkeypatch.setattr(driver, "cu_launch_kernel_ex", lambda: self.launch)
        monkeypatch.setattr(driver, "cuda_version", lambda: 13000)
        monkeypatch.setattr(driver, "error_string", lambda code: f"stand-in error {code}")
        monkeypatch.setattr(torch.cuda, "device", type("device", (_OnDevice,), {"driver": self}))
        return self

    def fail_next(self, code: int, times: int = 1) -> None:
        """Let the next launches do nothing and return `code`."""
        self.codes = [code] * times

    def load(self, variant: variants.Variant, dtypes: tuple) -> None:
        """In place of `Variant._load`."""
        if self.refuse_to_load is not None:
            raise self.refuse_to_load
        handle = next(self._handles)
        kernel = KERNELS[variant.kernel.__name__]
        named = dict(zip(kernel.pointers, dtypes, strict=True))
        names = tuple(variant.kernel.arg_names[: len(kernel.pointers) + len(kernel.integers)])
        self._loaded[handle] = Loaded(kernel, names, variant.static, named, variant.options["num_warps"])
        variant.function, variant.shared, variant.num_scratch, variant.direct = handle, 0, SCRATCH, True

    def launch(self, config_ref, function, pointers, extra) -> int:
        """In place of `cuLaunchKernelEx`; returns an error code, 0 for success."""
        if self.codes:
            return self.codes.pop(0)
        config = ctypes.cast(config_ref, ctypes.POINTER(Config))[0]
        loaded = self._loaded[function.value]
        values = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
        names = loaded.names
        if len(values) != len(names) + SCRATCH or any(values[len(names) :]) or extra is not None:
            return INVALID_VALUE
        arguments = dict(zip(names, values, strict=False))
        wide = getattr(loaded.static, "WIDE", -1)
        narrow = [name for i, name in enumerate(loaded.kernel.integers) if not wide >> i & 1]
        arguments |= {name: ctypes.c_int32(arguments[name]).value for name in narrow}  # the kernel reads 32 bits of each
        programs = loaded.kernel.programs(loaded.static, arguments)
        if list(config.grid) != [programs, 1, 1] or list(config.block) != [32 * loaded.num_warps, 1, 1]:
            return INVALID_VALUE
        if not is_aligned(loaded, arguments):
            return MISALIGNED_ADDRESS
        self.launches.append((config.stream, self.device))
        self.arguments.append(arguments)
        self.attributes.append({a.id: a.value for a in config.attributes[: config.num_attributes]})
        execute(loaded, arguments)
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
        real, load = driver.cu_launch_kernel_ex(), variants.Variant._load

        def launch(*packed):
            return self.codes.pop(0) if self.codes else real(*packed)

        def load_unless_refused(variant, dtypes):
            if self.refuse_to_load is not None:
                raise self.refuse_to_load
            load(variant, dtypes)

        monkeypatch.setattr(variants, "_VARIANTS", {})
        monkeypatch.setattr(api, "_PLANS", dispatch.decode_plans())
        monkeypatch.setattr(variants.Variant, "_load", load_unless_refused)
        for module in (plan, prepared):
            monkeypatch.setattr(module, "cu_launch", launch)
        monkeypatch.setattr(driver, "cu_launch_kernel_ex", lambda: launch)
        return self

    fail_next = FakeDriver.fail_next
