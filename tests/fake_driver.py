"""Two CUDA drivers that fail when told to.

`FakeDriver` is made of the reference: it takes the very arguments that are packed for `cuLaunchKernelEx`, and runs the reference
on the memory they name. So the path of a direct launch, from the look-up to the last packed byte, runs on a machine without a
GPU; and it refuses what a GPU would refuse, a misaligned address or a grid that does not fit. `RealDriver` is the machine's own.
"""

import ctypes
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from decode_rope import api, dispatch, driver, plan, prepared, reference, rotate, variants
from decode_rope.kernels.decode import INTEGERS, POINTERS

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


class Loaded(NamedTuple):
    """What a function handle stands for."""

    static: plan.Static
    dtypes: dict[str, torch.dtype]
    num_warps: int


class FakeDriver:
    """Attributes:
    codes: error codes that the next launches return in turn, without doing anything.
    launches: (stream, device) of every launch that ran.
    device, stream: what is current.
    refuse_to_load: an exception that loading a kernel raises, as a missing compiler would; or None.
    """

    def __init__(self):
        self.codes: list[int] = []
        self.launches: list[tuple[int, int | None]] = []
        self.device: int | None = None  # the index of torch.device("cpu")
        self.stream = 0x51
        self.refuse_to_load: BaseException | None = None
        self._loaded: dict[int, Loaded] = {}
        self._handles = itertools.count(0x1000)  # never the same one to two threads

    def install(self, monkeypatch) -> "FakeDriver":
        """CPU tensors go through plans and this driver, with plans and kernels of their own. It knows the decode kernel only."""
        monkeypatch.setattr(variants, "_VARIANTS", {})
        monkeypatch.setattr(api, "_PLANS", dispatch.decode_plans())
        load = self.load
        monkeypatch.setattr(variants.Variant, "_load", lambda self, dtypes: load(self, dtypes))
        for module in (dispatch, prepared, rotate):
            monkeypatch.setattr(module, "runs_reference", lambda device: False)
        for module in (plan, prepared):
            monkeypatch.setattr(module, "raw_stream", lambda device: self.stream)
            monkeypatch.setattr(module, "current_device", lambda: self.device)
            monkeypatch.setattr(module, "cu_launch", self.launch)
        monkeypatch.setattr(driver, "cu_launch_kernel_ex", lambda: self.launch)
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
        named = dict(zip(POINTERS, dtypes, strict=True))
        self._loaded[handle] = Loaded(variant.static, named, variant.options["num_warps"])
        variant.function, variant.shared, variant.num_scratch, variant.direct = handle, 0, SCRATCH, True

    def launch(self, config_ref, function, pointers, extra) -> int:
        """In place of `cuLaunchKernelEx`; returns an error code, 0 for success."""
        if self.codes:
            return self.codes.pop(0)
        config = ctypes.cast(config_ref, ctypes.POINTER(Config))[0]
        loaded = self._loaded[function.value]
        values = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
        names = (*POINTERS, *INTEGERS)
        if len(values) != len(names) + SCRATCH or any(values[len(names) :]) or extra is not None:
            return INVALID_VALUE
        arguments = dict(zip(names, values, strict=False))
        code = _refusal(loaded, arguments, config)
        if code == 0:
            self.launches.append((config.stream, self.device))
            run(loaded, arguments)
        return code


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


def _rows(arguments: dict[str, int], static: plan.Static) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """(shape, strides) of each tensor of rows that the kernel steps along, last dimension left out."""
    a, tokens = arguments, arguments["num_tokens"]
    pages = (a["num_pages"], static.PAGE, static.HKV)
    found = {
        "q": ((tokens, static.HQ), (a["stride_q_t"], a["stride_q_h"])),
        "k": ((tokens, static.HKV), (a["stride_k_t"], a["stride_k_h"])),
        "v": ((tokens, static.HKV), (a["stride_v_t"], a["stride_v_h"])),
        "q_out": ((tokens, static.HQ), (a["stride_qo_t"], a["stride_qo_h"])),
        "k_out": ((tokens, static.HKV), (a["stride_ko_t"], a["stride_ko_h"])),
        "k_cache": (pages, (a["stride_kc_p"], a["stride_kc_t"], a["stride_kc_h"])),
        "v_cache": (pages, (a["stride_vc_p"], a["stride_vc_t"], a["stride_vc_h"])),
    }
    absent = [name for name in found if "k" in name or "v" in name] if static.HKV == 0 else []
    absent += [name for name, given in (("q_out", static.Q_OUT), ("k_out", static.K_OUT)) if not given]
    return {name: rows for name, rows in found.items() if name not in absent}


def _refusal(loaded: Loaded, arguments: dict[str, int], config: Config) -> int:
    static, tokens = loaded.static, arguments["num_tokens"]
    programs = -(-tokens // static.BTQ) * -(-static.HQ // static.BHQ)
    programs += 2 * -(-tokens // static.BTK) * -(-static.HKV // static.BHK)
    if list(config.grid) != [programs, 1, 1] or list(config.block) != [32 * loaded.num_warps, 1, 1]:
        return INVALID_VALUE
    for name, (shape, strides) in _rows(arguments, static).items():
        steps = [s for n, s in zip(shape, strides, strict=True) if n > 1]
        size = loaded.dtypes[f"{name}_ptr"].itemsize
        if any(step % static.ALIGN for step in (arguments[f"{name}_ptr"], *[s * size for s in steps])):
            return MISALIGNED_ADDRESS
    if static.R and (arguments["cos_sin_ptr"] % static.ALIGN_TABLE or static.R * 4 % static.ALIGN_TABLE):
        return MISALIGNED_ADDRESS
    return 0


def run(loaded: Loaded, arguments: dict[str, int]) -> None:
    """The reference on the memory that a launch names."""
    static, dtypes, tokens = loaded.static, loaded.dtypes, arguments["num_tokens"]

    def at(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        return tensor_at(arguments[f"{name}_ptr"], dtypes[f"{name}_ptr"], shape, strides)

    x = {
        name: at(name, (*shape, static.DV if name in ("v", "v_cache") else static.D), (*strides, 1))
        for name, (shape, strides) in _rows(arguments, static).items()
    }
    table = at("cos_sin", (arguments["max_position"], static.R), (static.R, 1)) if static.R else None
    length, options = arguments["index_len"], {}
    if static.HKV and static.PAGED:
        requests = -(-tokens // static.TOKENS_PER_REQUEST)
        options["block_table"] = at("index", (requests, length), (arguments["stride_index"], 1))
    elif static.HKV:
        options["slot_mapping"] = at("index", (length,), (1,))
    if static.OWN_CACHE_POSITIONS:
        options["cache_positions"] = at("cache_positions", (tokens,), (1,))
    reference.rope_append_decode(
        x["q"], x.get("k"), x.get("v"), x.get("k_cache"), x.get("v_cache"), table, at("positions", (tokens,), (1,)),
        **options, tokens_per_request=static.TOKENS_PER_REQUEST, is_neox=static.NEOX,
        q_out=x.get("q_out"), k_out=x.get("k_out"), faults=at("faults", (2,), (1,)),
    )  # fmt: skip


def tensor_at(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The memory at an address, as a tensor; nothing is copied."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_ubyte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)
