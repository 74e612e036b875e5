"""What the kernels do, made of the reference: on the memory that the packed arguments of a launch name, with the programs and
the alignment that the launch must have. One object a kernel; `fake_driver.py` launches them.

`facts` are a kernel's compile-time parameters by name, `a` its other ones: addresses of pointers, and integers.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from decode_rope import reference

Facts = dict[str, Any]
Rows = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


class Kernel(NamedTuple):
    """programs: of a launch. rows: (shape, strides) of each tensor of rows that the kernel steps along, last dimension left out.
    run: on memory, given `at(name, shape, strides)`."""

    programs: Callable[[Facts, dict[str, int]], int]
    rows: Callable[[Facts, dict[str, int]], Rows]
    run: Callable[[Facts, dict[str, int], Callable], None]


class Loaded(NamedTuple):
    """What a function handle stands for. `dtypes`: of the pointers, by parameter."""

    kernel: Kernel
    parameters: tuple[str, ...]
    narrow: tuple[str, ...]  # integers of which the kernel reads 32 bits
    facts: Facts
    dtypes: dict[str, torch.dtype]
    num_warps: int


def loaded(compiled, dtypes: dict[str, torch.dtype]) -> Loaded:
    """What a kernel of the package is once it is compiled and loaded."""
    annotations = compiled.kernel.fn.__annotations__
    integers = [name for name in compiled.parameters if not name.endswith("_ptr")]
    narrow = tuple(name for name in integers if annotations.get(name) is not tl.int64 and name not in compiled.wide)
    kernel = KERNELS[compiled.kernel.__name__]
    return Loaded(kernel, compiled.parameters, narrow, compiled.facts, dtypes, compiled.options["num_warps"])


def is_aligned(loaded: Loaded, a: dict[str, int]) -> bool:
    """Whether addresses and strides are as aligned as the kernel was compiled for."""
    facts = loaded.facts
    for name, (shape, strides) in loaded.kernel.rows(facts, a).items():
        steps = [s for n, s in zip(shape, strides, strict=True) if n > 1]
        size = loaded.dtypes[f"{name}_ptr"].itemsize
        align = facts["ALIGN_CACHE" if name in ("k_cache", "v_cache") else "ALIGN"]
        if any(step % align for step in (a[f"{name}_ptr"], *[s * size for s in steps])):
            return False
    return not facts["R"] or not (a["cos_sin_ptr"] % facts["ALIGN_TABLE"] or facts["R"] * 4 % facts["ALIGN_TABLE"])


def execute(loaded: Loaded, a: dict[str, int]) -> None:
    def at(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        return tensor_at(a[f"{name}_ptr"], loaded.dtypes[f"{name}_ptr"], shape, strides)

    loaded.kernel.run(loaded.facts, a, at)


def tensor_at(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The memory at an address, as a tensor; nothing is copied."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_ubyte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


# Decode and prefill: the same tensors.


def _append_rows(facts: Facts, a: dict[str, int]) -> Rows:
    tokens, pages = a["num_tokens"], (a["num_pages"], facts["PAGE"], facts["HKV"])
    found = {
        "q": ((tokens, facts["HQ"]), (a["stride_q_t"], a["stride_q_h"])),
        "k": ((tokens, facts["HKV"]), (a["stride_k_t"], a["stride_k_h"])),
        "v": ((tokens, facts["HKV"]), (a["stride_v_t"], a["stride_v_h"])),
        "q_out": ((tokens, facts["HQ"]), (a["stride_qo_t"], a["stride_qo_h"])),
        "k_out": ((tokens, facts["HKV"]), (a["stride_ko_t"], a["stride_ko_h"])),
        "k_cache": (pages, (a["stride_kc_p"], a["stride_kc_t"], a["stride_kc_h"])),
        "v_cache": (pages, (a["stride_vc_p"], a["stride_vc_t"], a["stride_vc_h"])),
    }
    absent = [name for name in found if "k" in name or "v" in name] if facts["HKV"] == 0 else []
    absent += [] if facts.get("CACHE", True) else ["v", "k_cache", "v_cache"]
    absent += [name for name, given in (("q_out", facts["Q_OUT"]), ("k_out", facts["K_OUT"])) if not given]
    return {name: rows for name, rows in found.items() if name not in absent}


def _append(function: Callable, facts: Facts, a: dict[str, int], at: Callable, tokens_per_request: int, **options) -> None:
    """Call a function of the reference with what both kernels are given; `options` is what only one of them is."""
    tokens, length = a["num_tokens"], a["index_len"]
    x = {
        name: at(name, (*shape, facts["DV"] if name in ("v", "v_cache") else facts["D"]), (*strides, 1))
        for name, (shape, strides) in _append_rows(facts, a).items()
    }
    if "k_cache" in x and facts["PAGED"]:
        cu_seqlens = options.get("cu_seqlens_q")
        requests = -(-tokens // tokens_per_request) if cu_seqlens is None else len(cu_seqlens) - 1
        options["block_table"] = at("index", (requests, length), (a["stride_index"], 1))
    elif "k_cache" in x:
        options["slot_mapping"] = at("index", (length,), (1,))
    if facts["OWN_CACHE_POSITIONS"]:
        options["cache_positions"] = at("cache_positions", (tokens,), (1,))
    table = at("cos_sin", (a["max_position"], facts["R"]), (facts["R"], 1)) if facts["R"] else None
    options = {"positions": at("positions", (tokens,), (1,))} | options
    function(
        x["q"], x.get("k"), x.get("v"), x.get("k_cache"), x.get("v_cache"), table, **options,
        tokens_per_request=tokens_per_request, is_neox=facts["NEOX"], q_out=x.get("q_out"), k_out=x.get("k_out"),
        faults=at("faults", (2,), (1,)),
    )  # fmt: skip


def _decode_programs(facts: Facts, a: dict[str, int]) -> int:
    tokens = a["num_tokens"]
    programs = -(-tokens // facts["BTQ"]) * -(-facts["HQ"] // facts["BHQ"])
    return programs + 2 * -(-tokens // facts["BTK"]) * -(-facts["HKV"] // facts["BHK"])


def _decode(facts: Facts, a: dict[str, int], at: Callable) -> None:
    _append(reference.rope_append_decode, facts, a, at, facts["TOKENS_PER_REQUEST"])


def _prefill_programs(facts: Facts, a: dict[str, int]) -> int:
    stretch = max(facts["BTQ"], facts["BTK"])
    each = stretch // facts["BTQ"] * -(-facts["HQ"] // (facts["BHQ"] * facts["LOOPQ"]))
    if not (facts["R"] or facts["Q_OUT"]) and facts["HKV"]:
        each = 0  # Q stays as it is
    kv = stretch // facts["BTK"] * -(-facts["HKV"] // (facts["BHK"] * facts["LOOPK"]))
    return -(-a["num_tokens"] // stretch) * (each + kv * (2 if facts["CACHE"] else 1))


def _prefill(facts: Facts, a: dict[str, int], at: Callable) -> None:
    options = {}
    if facts["RAGGED"]:
        options["cu_seqlens_q"] = at("cu_seqlens", (a["num_requests"] + 1,), (1,))
    if facts["AXES"]:
        options["positions"] = at("positions", (facts["AXES"], a["num_tokens"]), (a["stride_axis"], 1))
        options["axis_map"] = at("axis_map", (facts["R"] // 2,), (1,))
    _append(reference.rope_append_prefill, facts, a, at, a["tokens_per_request"], **options)


# The rotation alone.


def _rope_programs(facts: Facts, a: dict[str, int]) -> int:
    return -(-a["num_tokens"] // facts["BT"]) * -(-facts["H"] // (facts["BH"] * facts["LOOP"]))


def _rope_rows(facts: Facts, a: dict[str, int]) -> Rows:
    shape = (a["num_tokens"] // a["seq_len"], a["seq_len"], facts["H"])
    return {name: (shape, tuple(a[f"stride_{name}_{step}"] for step in "bsh")) for name in ("x", "out")}


def _rope(facts: Facts, a: dict[str, int], at: Callable) -> None:
    x, out = (at(name, (*shape, facts["D"]), (*strides, 1)) for name, (shape, strides) in _rope_rows(facts, a).items())
    batch, seq_len = x.shape[:2]
    positions = axis_map = None
    if facts["AXES"]:
        positions = at("positions", (facts["AXES"], batch, seq_len), (a["stride_axis"], a["stride_positions_b"], 1))
        axis_map = at("axis_map", (facts["R"] // 2,), (1,))
    elif facts["POSITIONS"]:
        positions = at("positions", (batch, seq_len), (a["stride_positions_b"], 1))
    reference.apply_rope(
        x, at("cos_sin", (a["max_position"], facts["R"]), (facts["R"], 1)), positions, is_neox=facts["NEOX"], axis_map=axis_map,
        inverse=facts["INVERSE"], out=out, faults=at("faults", (2,), (1,)) if facts["REPORT"] else None,
    )  # fmt: skip


KERNELS = {
    "rope_append_decode_kernel": Kernel(_decode_programs, _append_rows, _decode),
    "rope_append_prefill_kernel": Kernel(_prefill_programs, _append_rows, _prefill),
    "apply_rope_kernel": Kernel(_rope_programs, _rope_rows, _rope),
}
