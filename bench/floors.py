"""What a launch costs before it does anything, and what moving its bytes costs without anything to look up."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_WARPS = 4
_WORDS = 4 * 32 * _WARPS  # of a program: 16 bytes a thread


@triton.jit
def empty_kernel(ptr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def copy_kernel(source_ptr, target_ptr, count, WORDS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(target_ptr + place, tl.load(source_ptr + place, mask=place < count), mask=place < count)


@triton.jit
def bench_marker_kernel(ptr):
    """Separates one provider's kernels from the next one's in a profile."""
    tl.store(ptr, 1)


def empty_launch(grid: tuple[int, ...], num_warps: int, *, pdl: bool) -> Callable[[], None]:
    """An empty kernel of our grid."""
    scratch = torch.zeros(16, dtype=torch.int32, device="cuda")
    options = {"launch_pdl": True} if pdl else {}

    def launch() -> None:
        empty_kernel[grid](scratch, PDL=pdl, num_warps=num_warps, **options)

    return launch


def words_of(moved: int) -> int:
    """Words of four bytes to copy so that `moved` bytes are read or written: a multiple of 16, or Triton would not know that
    accesses of 16 bytes fit."""
    return -(-moved // 128) * 16


def copy_launch(moved: int) -> Callable[[], None]:
    """A kernel with PDL that reads and writes `moved` bytes in all, from one buffer of its own to another."""
    words = words_of(moved)
    source, target = (torch.zeros(words, dtype=torch.int32, device="cuda") for _ in range(2))

    def launch() -> None:
        copy_kernel[(-(-words // _WORDS),)](source, target, words, _WORDS, True, num_warps=_WARPS, launch_pdl=True)

    return launch


def marker() -> None:
    bench_marker_kernel[(1,)](torch.empty(1, dtype=torch.int32, device="cuda"))  # zeros would be a kernel too
