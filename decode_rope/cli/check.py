"""`python -m decode_rope check`: the decode kernel against the reference on this machine, whole caches bit for bit."""

import argparse
import os
import subprocess
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..api.functions import rope_append_decode
from ..append.faults import fault_buffer
from ..launch.platform import INTERPRETED


class Case(NamedTuple):
    """One configuration. `rotary_dim` 0 is NoPE; `layout` names a view of a storage."""

    name: str
    heads: tuple[int, int]
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    dtype: torch.dtype = torch.bfloat16
    is_neox: bool = True
    paged: bool = True
    layout: str = "NHD"
    page_size: int = 16


CASES = (
    Case("Llama-3-8B", (32, 8), 128, 128, 128),
    Case("one rank of Llama-3-70B, slots", (8, 1), 128, 128, 128, paged=False),
    Case("gpt-oss, HND, 64-wide heads", (64, 8), 64, 64, 64, layout="HND"),
    Case("SmolLM2, fp32", (9, 3), 64, 64, 64, torch.float32),
    Case("GLM-4, GPT-J pairs, half rotary", (32, 2), 128, 128, 64, is_neox=False),
    Case("Open-LLaMA-3B, 100-wide heads", (4, 4), 100, 100, 100, torch.float16, layout="pair"),
    Case("StableLM, R/2 = 10", (4, 4), 80, 80, 20, torch.float16, paged=False),
    Case("MiMo-V2, V narrower than K", (8, 1), 192, 128, 64, page_size=544),
    Case("no rotation", (4, 2), 128, 128, 0),
    Case("flat slots", (14, 2), 64, 64, 64, paged=False, layout="flat", page_size=1),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=None, help="tokens in each case (default: 33 on a GPU, 5 interpreted)")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available() and not INTERPRETED:
        print("no GPU here: running the kernels through Triton's interpreter", flush=True)
        tokens = [] if args.tokens is None else ["--tokens", str(args.tokens)]
        env = os.environ | {"TRITON_INTERPRET": "1"}
        return subprocess.run([sys.executable, "-m", "decode_rope", "check", *tokens], env=env, check=False).returncode
    device = torch.device("cpu" if INTERPRETED else "cuda")
    num_tokens = args.tokens or (33 if device.type == "cuda" else 5)
    start, wrong = time.perf_counter(), 0
    for seed, case in enumerate(CASES):
        differences = compare(case, num_tokens, device, seed)
        wrong += bool(differences)
        print(
            f"{'differs' if differences else 'equal':<8} {case.name}{': ' + ', '.join(differences) if differences else ''}",
            flush=True,
        )
    print(f"{len(CASES) - wrong} of {len(CASES)} cases equal, bit for bit, in {time.perf_counter() - start:.1f} s")
    return 1 if wrong else 0


def compare(case: Case, num_tokens: int, device: torch.device, seed: int) -> list[str]:
    """What of q, the caches and the fault count differs between kernel and reference; some rows are padding or out of range."""
    inputs = make(case, num_tokens, device, seed)
    shared = {"kv_layout": "HND" if case.layout == "HND" else "NHD", "is_neox": case.is_neox}
    results = []
    for function in (rope_append_decode, reference.rope_append_decode):
        faults = fault_buffer(torch.device(device.type, torch.cuda.current_device()) if device.type == "cuda" else device)
        before = faults.clone()
        copies = {name: inputs[name].clone() for name in ("q", "storage")}
        k_cache, v_cache = views(case, copies["storage"])
        extra = {"faults": faults} if function is not rope_append_decode else {}
        function(
            copies["q"], inputs["k"], inputs["v"], k_cache, v_cache, inputs["table"], inputs["positions"],
            **inputs["index"], **shared, **extra,
        )  # fmt: skip
        results.append((copies["q"], copies["storage"], faults - before, faults[:1] - before[:1]))
        faults.copy_(before)
    (q, storage, _, count), (q_ref, storage_ref, _, count_ref) = results
    checks = {"q": bits_equal(q, q_ref), "caches": bits_equal(storage, storage_ref), "faults": torch.equal(count, count_ref)}
    return [name for name, same in checks.items() if not same]


def make(case: Case, num_tokens: int, device: torch.device, seed: int) -> dict:
    """Random inputs of a case, with a padding row, a page of nobody and a position past the table among them."""
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = case.heads
    max_position = 8 * case.page_size
    num_pages = 2 * num_tokens if case.layout != "flat" else 16 * num_tokens

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(case.dtype).to(device)

    angles = torch.rand(max_position, max(case.rotary_dim, 2) // 2, generator=generator) * 6.3
    table = torch.cat([angles.cos(), angles.sin()], -1).to(device) if case.rotary_dim else None
    positions = torch.randint(0, min(max_position, 2 * case.page_size), (num_tokens,), generator=generator)
    positions[0], positions[-1] = -1, max_position
    if case.paged:
        pages = torch.randperm(num_pages, generator=generator)[: 2 * num_tokens].view(num_tokens, 2).to(torch.int32)
        pages[num_tokens // 2] = -1
        index = {"block_table": pages.to(device)}
    else:
        slots = torch.randperm(num_pages * case.page_size, generator=generator)[:num_tokens]
        slots[num_tokens // 2] = -1
        index = {"slot_mapping": slots.to(device)}
    v_width = case.v_head_dim
    return {
        "q": normal(num_tokens, num_q_heads, case.head_dim),
        "k": normal(num_tokens, num_kv_heads, case.head_dim),
        "v": normal(num_tokens, num_kv_heads, v_width),
        "storage": normal(num_pages * case.page_size * num_kv_heads * (case.head_dim + v_width)),
        "table": table,
        "positions": positions.to(device),
        "index": index,
    }


def views(case: Case, storage: Tensor) -> tuple[Tensor, Tensor]:
    """The K and V caches of a case, as views of one storage."""
    num_kv_heads, d, dv, page = case.heads[1], case.head_dim, case.v_head_dim, case.page_size
    if case.layout == "pair":  # K beside V in the last dimension
        both = storage.view(-1, page, num_kv_heads, d + dv)
        return both[..., :d], both[..., d:]
    split = storage.numel() * d // (d + dv)
    shape = {"NHD": (page, num_kv_heads), "HND": (num_kv_heads, page), "flat": (num_kv_heads,)}[case.layout]
    return storage[:split].view(-1, *shape, d), storage[split:].view(-1, *shape, dv)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
