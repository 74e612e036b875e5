"""What the kernels do, made of the reference: on the memory that the packed arguments of a launch name, with the programs and
the alignment that the launch must have. One object a kernel; `fake_driver.py` launches them.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from decode_rope import reference
from decode_rope.kernels import decode, plain, prefill

Rows = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


class Loaded(NamedTuple):
    """What a function handle stands for."""

    kernel: "Kernel"
    names: tuple[str, ...]  # of its parameters, in its own order
    static: NamedTuple
    dtypes: dict[str, torch.dtype]
    num_warps: int


class Kernel(NamedTuple):
    """pointers, integers: names of the parameters. programs: of a launch. rows: (shape, strides) of each tensor of rows that the
    kernel steps along, last dimension left out. run: on memory, given `at(name, shape, strides)`."""

    pointers: tuple[str, ...]
    integers: tuple[str, ...]
    programs: Callable[[NamedTuple, dict[str, int]], int]
    rows: Callable[[NamedTuple, dict[str, int]], Rows]
    run: Callable[[NamedTuple, dict[str, int], Callable], None]


def is_aligned(loaded: Loaded, a: dict[str, int]) -> bool:
    """Whether addresses and strides are as aligned as the kernel was compiled for."""
    static = loaded.static
    for name, (shape, strides) in loaded.kernel.rows(static, a).items():
        steps = [s for n, s in zip(shape, strides, strict=True) if n > 1]
        size = loaded.dtypes[f"{name}_ptr"].itemsize
        if any(step % static.ALIGN for step in (a[f"{name}_ptr"], *[s * size for s in steps])):
            return False
    return not static.R or not (a["cos_sin_ptr"] % static.ALIGN_TABLE or static.R * 4 % static.ALIGN_TABLE)


def execute(loaded: Loaded, a: dict[str, int]) -> None:
    def at(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        return tensor_at(a[f"{name}_ptr"], loaded.dtypes[f"{name}_ptr"], shape, strides)

    loaded.kernel.run(loaded.static, a, at)


def tensor_at(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The memory at an address, as a tensor; nothing is copied."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_ubyte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


# Decode and prefill: the same tensors.


def _append_rows(static, a: dict[str, int]) -> Rows:
    tokens, pages = a["num_tokens"], (a["num_pages"], static.PAGE, static.HKV)
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
    absent += [] if getattr(static, "CACHE", True) else ["v", "k_cache", "v_cache"]
    absent += [name for name, given in (("q_out", static.Q_OUT), ("k_out", static.K_OUT)) if not given]
    return {name: rows for name, rows in found.items() if name not in absent}


def _append(function: Callable, static, a: dict[str, int], at: Callable, tokens_per_request: int, **options) -> None:
    """Call a function of the reference with what both kernels are given; `options` is what only one of them is."""
    tokens, length = a["num_tokens"], a["index_len"]
    x = {
        name: at(name, (*shape, static.DV if name in ("v", "v_cache") else static.D), (*strides, 1))
        for name, (shape, strides) in _append_rows(static, a).items()
    }
    if "k_cache" in x and static.PAGED:
        cu_seqlens = options.get("cu_seqlens_q")
        requests = -(-tokens // tokens_per_request) if cu_seqlens is None else len(cu_seqlens) - 1
        options["block_table"] = at("index", (requests, length), (a["stride_index"], 1))
    elif "k_cache" in x:
        options["slot_mapping"] = at("index", (length,), (1,))
    if static.OWN_CACHE_POSITIONS:
        options["cache_positions"] = at("cache_positions", (tokens,), (1,))
    table = at("cos_sin", (a["max_position"], static.R), (static.R, 1)) if static.R else None
    options = {"positions": at("positions", (tokens,), (1,))} | options
    function(
        x["q"], x.get("k"), x.get("v"), x.get("k_cache"), x.get("v_cache"), table, **options,
        tokens_per_request=tokens_per_request, is_neox=static.NEOX, q_out=x.get("q_out"), k_out=x.get("k_out"),
        faults=at("faults", (2,), (1,)),
    )  # fmt: skip


def _decode_programs(static, a: dict[str, int]) -> int:
    tokens = a["num_tokens"]
    programs = -(-tokens // static.BTQ) * -(-static.HQ // static.BHQ)
    return programs + 2 * -(-tokens // static.BTK) * -(-static.HKV // static.BHK)


def _decode(static, a: dict[str, int], at: Callable) -> None:
    _append(reference.rope_append_decode, static, a, at, static.TOKENS_PER_REQUEST)


def _prefill_programs(static, a: dict[str, int]) -> int:
    stretch = max(static.BTQ, static.BTK)
    each = stretch // static.BTQ * -(-static.HQ // (static.BHQ * static.LOOPQ))
    if not (static.R or static.Q_OUT) and static.HKV:
        each = 0  # Q stays as it is
    kv = stretch // static.BTK * -(-static.HKV // (static.BHK * static.LOOPK))
    return -(-a["num_tokens"] // stretch) * (each + kv * (2 if static.CACHE else 1))


def _prefill(static, a: dict[str, int], at: Callable) -> None:
    options = {}
    if static.RAGGED:
        options["cu_seqlens_q"] = at("cu_seqlens", (a["num_requests"] + 1,), (1,))
    if static.AXES:
        options["positions"] = at("positions", (static.AXES, a["num_tokens"]), (a["stride_axis"], 1))
        options["axis_map"] = at("axis_map", (static.R // 2,), (1,))
    _append(reference.rope_append_prefill, static, a, at, a["tokens_per_request"], **options)


# The rotation alone.


def _plain_programs(static, a: dict[str, int]) -> int:
    return -(-a["num_tokens"] // static.BT) * -(-static.H // (static.BH * static.LOOP))


def _plain_rows(static, a: dict[str, int]) -> Rows:
    shape = (a["num_tokens"] // a["seq_len"], a["seq_len"], static.H)
    return {name: (shape, tuple(a[f"stride_{name}_{step}"] for step in "bsh")) for name in ("x", "out")}


def _plain(static, a: dict[str, int], at: Callable) -> None:
    x, out = (at(name, (*shape, static.D), (*strides, 1)) for name, (shape, strides) in _plain_rows(static, a).items())
    batch, seq_len = x.shape[:2]
    positions = axis_map = None
    if static.AXES:
        positions = at("positions", (static.AXES, batch, seq_len), (a["stride_axis"], a["stride_positions_b"], 1))
        axis_map = at("axis_map", (static.R // 2,), (1,))
    elif static.POSITIONS:
        positions = at("positions", (batch, seq_len), (a["stride_positions_b"], 1))
    reference.apply_rope(
        x, at("cos_sin", (a["max_position"], static.R), (static.R, 1)), positions, is_neox=static.NEOX, axis_map=axis_map,
        inverse=static.INVERSE, out=out, faults=at("faults", (2,), (1,)) if static.REPORT else None,
    )  # fmt: skip


KERNELS = {
    "decode_kernel": Kernel(decode.POINTERS, decode.INTEGERS, _decode_programs, _append_rows, _decode),
    "prefill_kernel": Kernel(prefill.POINTERS, prefill.INTEGERS, _prefill_programs, _append_rows, _prefill),
    "plain_kernel": Kernel(plain.POINTERS, plain.INTEGERS, _plain_programs, _plain_rows, _plain),
}
