"""What differs from kernel to kernel, as the plans see it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..append.arguments import Record


class Values(NamedTuple):
    """A launch but for its memory.

    facts: the kernel's compile-time parameters by name.
    integers: its integer parameters by name; those of 2^31 and more are given in 64 bits.
    carveout: as in `Geometry`.
    """

    facts: dict[str, Any]
    integers: dict[str, int]
    grid: int
    num_warps: int
    carveout: int = -1


class Spec(NamedTuple):
    """One kernel.

    record: what its calls are.
    values: (checked call, device, aligned) -> Values. `aligned` of False assumes no alignment beyond that of one element. Only
        shapes, strides and dtypes of the call's tensors are looked at, so they may be on the meta device.
    check: raises for a call that breaks a rule.
    reference: runs a call in PyTorch.
    """

    kernel: Any
    record: type[Record]
    values: Callable[[Any, torch.device, bool], Values]
    check: Callable[[Record], None]
    reference: Callable[[Record], None]
