"""Tensors that end, or begin, where the process has no memory: touching the byte beyond kills it. For CPU lanes."""

import ctypes
import faulthandler
import mmap
import os
import signal
from collections.abc import Callable

import torch
from cases import Case

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PAGE = mmap.PAGESIZE


def at_the_edge(data: torch.Tensor, end: bool) -> torch.Tensor:
    """A copy of `data` with an unreadable page right after its last byte, or right before its first one. Never freed."""
    inside = -(-max(data.nbytes, 1) // _PAGE) * _PAGE
    start = _libc.mmap(None, inside + 2 * _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for wall in (start, start + _PAGE + inside):
        assert _libc.mprotect(wall, _PAGE, 0) == 0
    address = start + _PAGE + (inside - data.nbytes if end else 0)
    memory = (ctypes.c_ubyte * max(data.nbytes, 1)).from_address(address)
    copy = torch.frombuffer(memory, dtype=torch.uint8)[: data.nbytes]
    copy.copy_(data.contiguous().flatten().view(torch.uint8))
    return copy


def walled(case: Case, end: bool) -> Case:
    """The same call, of `case`'s own class, with every tensor contiguous and at the edge of memory."""
    storages, views = {}, {}
    for name, view in case.views.items():
        views[name] = view
        if view is not None:
            storages[name] = at_the_edge(case[name], end)
            views[name] = view._replace(storage=name, stride=case[name].contiguous().stride(), offset=0)
    return type(case)(storages, views, case.options, case.spec)


def signal_of(work: Callable[[], object]) -> int:
    """Run `work` in a forked process: 0 if it returned, the signal's number if it was killed. Its exception is raised here."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            work()
        except BaseException as error:
            os.write(write_end, repr(error).encode()[:4000])
        os._exit(0)
    os.close(write_end)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read_end) as pipe:
        failure = pipe.read()
    assert not failure, failure
    return os.WTERMSIG(status)


SEGMENTATION_FAULT = int(signal.SIGSEGV)
