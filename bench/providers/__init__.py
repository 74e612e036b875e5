"""Who is measured. One file a peer; each imports its package when it is first asked, never earlier."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, Protocol

from torch import Tensor

from bench.buffers import Case, Layer, Meta
from bench.workloads import UsageError


class Unavailable(Exception):
    """A provider cannot run here; the message is the reason that is printed."""


class Provider(Protocol):
    """One way to rotate Q and K and to append K and V to a paged cache.

    group: `ours`, `peer`, or `other-bytes` for a peer that moves different bytes and enters no ratio.
    exact: the result must be bit-identical to decode_rope.reference; otherwise within one unit in the last place.
    slow: takes seconds to prepare a case, so it runs at a few batch sizes only unless asked for by name.
    cpu: also runs on CPU tensors.
    modules: what it imports, the newest name first; one of them is enough.
    """

    name: str
    group: Literal["ours", "peer", "other-bytes"]
    exact: bool
    slow: bool
    cpu: bool
    modules: tuple[str, ...]

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        """A call that rotates and appends `layer` and returns the rotated Q, [T, Hq, D] or [T, Hq * D].

        Raises:
            Unavailable: the package is missing, or the case is outside what it supports.
        """
        ...


# name -> (module, argument of its `make`)
REGISTRY: dict[str, tuple[str, str]] = {
    "ours": ("ours", "default"),
    "ours-plain": ("ours", "plain"),
    "ours-pdl": ("ours", "pdl"),
    "ours-late": ("ours", "late"),
    "ours-last": ("ours", "last"),
    "ours-meta-last": ("ours", "meta-last"),
    "ours-meta": ("ours", "meta"),
    "ours-tuned": ("ours", "tuned"),
    "ours-function": ("ours", "function"),
    "ours-prefill": ("ours", "prefill"),
    "reference": ("ours", "reference"),
    "eager": ("eager", ""),
    "compile": ("compile", ""),
    "flashinfer": ("flashinfer", ""),
    "flashinfer-fp8": ("flashinfer_fp8", ""),
    "sglang": ("sglang", ""),
    "tokenspeed": ("tokenspeed", ""),
    "aiter": ("aiter", ""),
    "liger": ("liger", ""),
}
PEERS = (
    "eager",
    "compile",
    "flashinfer",
    "sglang",
    "tokenspeed",
    "aiter",
    "liger",
    "flashinfer-fp8",
)
SLOW_BATCHES = (1, 512)
TILED = "ours@"  # and a geometry: its numbers between slashes


def load(name: str) -> Provider:
    if name.startswith(TILED):
        return importlib.import_module("bench.providers.ours").of_tiles(name, name.removeprefix(TILED))
    if name not in REGISTRY:
        raise UsageError(f"--peers: expected some of {', '.join(REGISTRY)}; got {name!r}")
    module, argument = REGISTRY[name]
    return importlib.import_module(f"bench.providers.{module}").make(name, argument)


def choose(ours: tuple[str, ...], asked: list[str] | None) -> list[Provider]:
    """The given variants of ours, then every peer, or the peers `asked` for (`none`: no peer)."""
    peers = list(PEERS) if asked is None else [name for name in asked if name != "none"]
    return [load(name) for name in dict.fromkeys((*ours, *peers))]


class Absent(str):
    """Why a module cannot be imported: it is not there, which in another release of its package it may be."""


@functools.cache
def _import(package: str) -> ModuleType | str:
    """The module, or why it cannot be imported; a broken install is tried once, not once a case."""
    try:
        return importlib.import_module(package)
    except Exception as error:  # a broken install raises anything
        absent = isinstance(error, ModuleNotFoundError) and f"{package}.".startswith(f"{error.name}.")
        return (Absent if absent else str)(f"import {package}: {type(error).__name__}: {first_line(error)}")


def missing(modules: tuple[str, ...]) -> str | None:
    """Why none of `modules` can be imported, or None when one can: of the last one, or rather of one that is there."""
    found = [_import(module) for module in modules]
    if any(not isinstance(module, str) for module in found):
        return None
    return next((reason for reason in found if not isinstance(reason, Absent)), found[-1])


def need(modules: str | tuple[str, ...], name: str) -> Any:
    """`name` from the first of `modules` that can be imported and has it; Unavailable with the reason otherwise."""
    modules = (modules,) if isinstance(modules, str) else modules
    for module in map(_import, modules):
        if not isinstance(module, str) and hasattr(module, name):
            return getattr(module, name)
    raise Unavailable(missing(modules) or f"{modules[0]} has no {name}")


def first_line(error: BaseException, limit: int = 160) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:limit] if lines else ""
