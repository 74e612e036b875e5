"""What prepared ops have in common: their rules, warming up, and launches bound to buffers."""

import torch
from torch import Tensor

from ..append.arguments import Append, MLAAppend, given_tensors
from ..launch import driver, platform
from ..launch.driver import machine
from ..launch.plan import Plan, addresses_of
from ..launch.platform import INTERPRETED
from ..launch.spec import Spec

ADDRESSING = ("block_table", "slot_mapping")


class Prepared:
    """A kernel's calls with the static facts said once.

    A subclass has a `spec`, and sets `device`, `addressing` and `_fixed`, the fields that all its calls have. Its `_example` is a
    call such as it will be given, with tensors of the right shapes and no meaning; `_geometry_of` a number of tokens is what is
    launched; `_appends` says whether a call needs a block table or slots; `_check_built_for` raises for a call
    that the op was not built for.
    """

    spec: Spec

    def warmup(self, max_tokens: int):
        """Compile and load every kernel that calls of up to `max_tokens` tokens may launch; nothing is launched or written.

        After it, any such call, bound or not, may be captured in a CUDA graph; only steps and sizes of 2^31 and more need another
        kernel. Returns self.
        """
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"max_tokens: expected an int of at least 1, got {max_tokens!r}")
        if platform.runs_reference(self.device):
            return self
        done = set()
        for num_tokens in range(1, max_tokens + 1):
            geometry = self._geometry_of(num_tokens)
            if geometry not in done:
                done.add(geometry)
                call = self._example(num_tokens, torch.device("meta"))
                Plan(self.spec, call, self.device)
                Plan(self.spec, call, self.device, aligned=False)
        return self

    def _bound(self, call: Append | MLAAppend) -> "Bound":
        self._check(call)
        if platform.runs_reference(self.device) or call[0].shape[0] == 0:
            return Bound(self.spec, call, None)
        return Bound(self.spec, call, Plan(self.spec, call, self.device))

    def _check_facts(self) -> None:
        """The rules for everything but where tensors are, on an example that costs no memory of the device."""
        example = self._example(1, torch.device("cpu"))
        given = given_tensors(example).items()
        elsewhere = {
            name: torch.empty_like(x, device="cpu") for name, x in given if isinstance(x, Tensor) and x.device.type != "cpu"
        }
        self.spec.check(example._replace(**(elsewhere | {"cos_sin_cache": None})))

    def _check(self, call: Append | MLAAppend) -> None:
        """The rules for any call, then those of this op."""
        self._check_addressing_of(call)
        self.spec.check(call)
        self._check_built_for(call)

    def _check_addressing_of(self, call: Append | MLAAppend) -> None:
        wanted, unwanted = ADDRESSING if self.addressing == "block_table" else ADDRESSING[::-1]
        if getattr(call, unwanted) is not None or (getattr(call, wanted) is None and self._appends(call)):
            raise ValueError(f"{wanted}: expected it, and no {unwanted}, as this op was built; see `addressing`")


class Bound:
    """One launch with every buffer frozen: calling it takes no argument and returns rotated q.

    Attributes:
        plan: the plan it launches; None for the reference and for no tokens.
        addresses: what the plan is launched on, by kernel parameter.
    """

    __slots__ = ("_call", "_device", "_output", "_packed", "_spec", "addresses", "plan")

    def __init__(self, spec: Spec, call: Append | MLAAppend, plan: Plan | None):
        self._spec, self._call = spec, call
        self._output = call[0] if call.q_out is None else call.q_out  # q comes first
        self._packed = {}
        self.addresses = addresses_of(call)
        self.plan = plan and plan.fitting(call, self.addresses)
        self._device = plan and plan.device

    def __call__(self) -> Tensor:
        device = self._device
        if self._packed and machine.device() == device and not machine.hooks:
            packed = self._packed.get(machine.stream(device))
            if packed is not None:
                if machine.cu_launch(*packed):
                    driver.launch(packed)
                return self._output
        return self._first_on_stream()

    def _first_on_stream(self) -> Tensor:
        """Any launch but a repeated one: the first on a stream, one through `kernel[grid]`, or the reference."""
        plan = self.plan
        if plan is None:
            if self._call[0].shape[0] > 0:
                self._spec.reference(self._call)
        elif INTERPRETED or not plan.compiled.direct or machine.hooks:
            plan.launch(self._call, self.addresses)
        else:
            with torch.cuda.device(self._device):
                stream = machine.stream(self._device)
                self._packed[stream] = plan.pack(self.addresses, stream)
                driver.launch(self._packed[stream])
        return self._output


def check_addressing(addressing) -> None:
    if not isinstance(addressing, str) or addressing not in ADDRESSING:
        raise ValueError(f'addressing: expected "block_table" or "slot_mapping", got {addressing!r}')


def check_dtypes(dtypes: dict) -> None:
    for name, choice in dtypes.items():
        if not isinstance(choice, torch.dtype):
            raise TypeError(f"{name}: expected a torch.dtype, got {choice!r}")


def check_kept(tensors: dict, device: torch.device) -> None:
    """The rule for tensors that every call of an op has: they are on its device."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.device != device:
            raise ValueError(f"{name}: expected device {device}, got {x.device}; use .to(device)")


def device_of(device) -> torch.device:
    """`device` with its index; None is the current CUDA device."""
    if device is None and not torch.cuda.is_available():
        raise ValueError('device: expected "cpu" or a CUDA device, because this process has no current CUDA device, got None')
    if device is not None and not isinstance(device, str | torch.device | int):
        raise TypeError(f"device: expected a torch.device, a string or None, got {type(device).__name__}")
    try:
        device = torch.device("cuda" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"device: expected a CUDA device or cpu, got {device!r}: {error}") from None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
