"""An empty Triton kernel of the same grid: what a launch costs before it does anything."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def empty_kernel(ptr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def bench_marker_kernel(ptr):
    """Separates one provider's kernels from the next one's in a profile."""
    tl.store(ptr, 1)


def empty_launch(grid: tuple[int, ...], num_warps: int, *, pdl: bool) -> Callable[[], None]:
    scratch = torch.zeros(16, dtype=torch.int32, device="cuda")
    options = {"launch_pdl": True} if pdl else {}

    def launch() -> None:
        empty_kernel[grid](scratch, PDL=pdl, num_warps=num_warps, **options)

    return launch


def marker() -> None:
    bench_marker_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
