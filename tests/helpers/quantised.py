"""Appends to quantised caches with known surroundings: every tensor lies in a storage with other bytes around it."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import decode_rope
from decode_rope import reference

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FUNCTIONS = ("rope_append_decode", "rope_append_prefill")
GUARD = 64  # bytes before and after every tensor


def surrounded(shape, dtype: torch.dtype, generator: torch.Generator, pad: int = 0) -> Tensor:
    """A tensor of random bytes whose last dimension is `pad` elements longer in memory, inside a larger storage."""
    strides, size = [1], shape[-1] + pad
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * (size if len(strides) == 1 else n))
    elements = (strides[0] * shape[0] if len(shape) > 1 else size) + 2 * GUARD // dtype.itemsize
    storage = torch.randint(0, 256, (elements * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    return storage.as_strided(tuple(shape), tuple(strides), GUARD // dtype.itemsize)


def storage_of(x: Tensor) -> Tensor:
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def moved(x: Any, device) -> Any:
    """A copy of a tensor, its whole storage with it; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    return storage_of(x).clone().to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def hard_numbers(shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers at and beside ties, subnormal codes, the limits, past them, NaN, infinities, both zeros and rows of zeros."""
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-10, 8, shape, generator=generator).float())
    kind = torch.randint(0, 40, shape, generator=generator)
    ties = torch.randint(-40, 40, shape, generator=generator) * 0.5
    ties = ties * torch.exp2(torch.randint(-9, 5, shape, generator=generator).float())
    for number, value in ((0, float("nan")), (1, float("inf")), (2, -float("inf")), (3, 1e-7), (4, 448.0), (5, -464.0), (6, -0.0)):
        x = torch.where(kind == number, torch.tensor(value), x)
    x = torch.where(kind >= 28, ties, x)
    zero_rows = torch.rand((*shape[:-1], 1), generator=generator) < 0.1
    return torch.where(zero_rows, torch.zeros(()), x).to(dtype)


@dataclass
class Call:
    """tensors: written or read, by argument; options: everything else."""

    tensors: dict[str, Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, function, device, **more) -> dict[str, Tensor]:
        """The whole storages after a call on copies, as bytes, by argument."""
        given = {name: moved(x, device) for name, x in self.tensors.items()}
        options = {name: moved(x, device) for name, x in self.options.items()}
        function(**given, **options, **more)
        return {name: storage_of(x).view(torch.uint8).cpu() for name, x in given.items() if x is not None}


def quantised_call(
    seed: int,
    kv_dtype: torch.dtype,
    *,
    scale: str = "one",
    layout: str = "NHD",
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 5,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    rotary_dim: int = 16,
    as_bytes: bool = False,
    inline: bool = False,
    q_out: torch.dtype | None = None,
) -> Call:
    """`scale`: "none", "0-dim", "one", "heads" or "tokens", which is found and written. `inline`: scales of tokens lie in the rows
    of the caches, four bytes behind the codes, as vLLM keeps them."""
    generator = torch.Generator().manual_seed(seed)
    (hq, hkv), d, pages, page = heads, head_dim, 12, 4
    shape = {"NHD": (pages, page, hkv), "HND": (pages, hkv, page), "flat": (pages * page, hkv)}[layout]
    tensors: dict[str, Tensor | None] = {
        name: hard_numbers((tokens, n, d), dtype, generator) for name, n in (("q", hq), ("k", hkv), ("v", hkv))
    }
    options: dict[str, Any] = {"kv_layout": "HND" if layout == "HND" else "NHD", "kv_dtype": kv_dtype if as_bytes else None}
    for row in "kv":
        cache = surrounded((*shape, d), torch.uint8, generator, pad=4 if inline else 0)
        tensors[f"{row}_cache"] = cache if as_bytes else cache.view(kv_dtype)
        if scale == "tokens":
            out = surrounded(shape, torch.float32, generator)
            if inline:
                floats = storage_of(cache).view(torch.float32)
                steps = [step // 4 for step in cache.stride()[:-1]]
                out = floats.as_strided(shape, steps, (cache.storage_offset() + d) // 4)
            tensors[f"{row}_scale"] = out.transpose(1, 2) if layout == "HND" else out
        elif scale != "none":
            sizes = {"0-dim": (), "one": (1,), "heads": (hkv,)}[scale]
            options[f"{row}_scale"] = torch.rand(sizes, generator=generator) * 0.1 + 0.01
    angle = torch.rand(32, rotary_dim // 2, generator=generator) * 6.3
    angle[:4] = 0  # rows that keep their ties
    options["cos_sin_cache"] = torch.cat([angle.cos(), angle.sin()], dim=1)
    options["positions"] = torch.tensor(random.Random(seed).choices(range(-1, 34), k=tokens))
    options["slot_mapping"] = torch.randperm(pages * page + 4, generator=generator)[:tokens] - 2
    if q_out is not None:
        tensors["q_out"] = surrounded((tokens, hq, d), torch.uint8, generator).view(q_out)
        options["q_scale"] = torch.rand(1, generator=generator) + 0.02
    return Call(tensors, options)


def assert_same(call: Call, function: str, device) -> None:
    """The kernel and the reference leave the same bytes in every storage, but for the payload of a NaN in a row of numbers."""
    got = call.run(getattr(decode_rope, function), device)
    want = call.run(getattr(reference, function), device)
    for name, expected in want.items():
        differs = got[name] != expected
        if name in ("q", "k_out") and differs.any():
            a, b = (x.view(call.tensors[name].dtype) for x in (got[name], expected))
            differs = (a != b) & ~(a.isnan() & b.isnan())
        assert not differs.any(), f"{name}: {int(differs.sum())} differ, first at {differs.nonzero()[:4].flatten().tolist()}"
