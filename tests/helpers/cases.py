"""Calls with known surroundings: every tensor lies inside a larger storage of random bytes, so that a stray write shows when
whole storages are compared, and a stray read brings in a number that makes the result wrong.

`Spec` says what a call is like, `build` makes it, `check` runs it against the reference on an identical copy.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

import decode_rope
from decode_rope import reference
from decode_rope.append.faults import fault_buffer

GUARD = 64  # elements before and after every tensor: a multiple of 16 bytes in every dtype
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# What a `DecodeRope` is built with, so that its calls do not take it.
KNOWN = ("tokens_per_request", "is_neox", "kv_layout", "cos_sin_cache", "enable_pdl")
_INTEGER_OF = {2: torch.int16, 4: torch.int32}


class View(NamedTuple):
    """Where a tensor lies in which storage; `offset` and `stride` in elements."""

    storage: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Case:
    """A call. Two arguments with one `View` are one tensor (`k_out` is `k`)."""

    storages: dict[str, Tensor]  # uint8
    views: dict[str, View | None]
    options: dict[str, object]
    spec: "Spec"
    faults: list[int] | None = None  # [count, lowest record] that a run left
    _tensors: dict[View, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        view = self.views[name]
        if view not in self._tensors:
            typed = self.storages[view.storage].view(view.dtype)
            self._tensors[view] = typed.as_strided(view.shape, view.stride, view.offset)
        return self._tensors[view]

    def arguments(self) -> dict[str, object]:
        tensors = {name: None if view is None else self[name] for name, view in self.views.items()}
        return {**tensors, **self.options}

    def clone(self) -> "Case":
        """The same call on storages of its own."""
        return Case({name: s.clone() for name, s in self.storages.items()}, dict(self.views), dict(self.options), self.spec)

    @property
    def device(self) -> torch.device:
        return next(iter(self.storages.values())).device

    @property
    def returned(self) -> Tensor:
        return self["q" if self.views.get("q_out") is None else "q_out"]


@dataclass
class Spec:
    """What a call is like: `positions` and one of `block_table`, `slots` written out, a plain default for everything else."""

    positions: list[int]
    block_table: list[list[int]] | None = None
    slots: list[int] | None = None
    cache_positions: list[int] | None = None
    heads: tuple[int, int] = (4, 2)  # 0 KV heads: k and v are None
    head_dim: int = 64
    v_head_dim: int | None = None  # head_dim
    rotary_dim: int | None = None  # head_dim; 0: NoPE
    dtype: torch.dtype = torch.bfloat16
    positions_dtype: torch.dtype = torch.int64
    index_dtype: torch.dtype = torch.int32
    page_size: int = 4
    num_pages: int = 8
    max_position: int = 64
    tokens_per_request: int = 1
    is_neox: bool = True
    cache: str = "NHD"
    activations: str = "separate"
    shift: int = 0  # elements by which q, k, v, outputs and caches miss their alignment
    table_shift: int = 0  # the same of the rotary table
    q_out: bool = False
    k_out: str | None = None  # "own" or "k"
    v_is_k: bool = False
    seed: int = 0
    options: dict[str, object] = field(default_factory=dict)

    def but(self, **changes) -> "Spec":
        return dataclasses.replace(self, **changes)

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _nhd(p, s, h, d, dv):
    return _meta(p, s, h, d), _meta(p, s, h, dv)


def _hnd(p, s, h, d, dv):
    return _meta(p, h, s, d), _meta(p, h, s, dv)


def _flat(p, s, h, d, dv):
    return _meta(p * s, h, d), _meta(p * s, h, dv)


def _halves(kv: Tensor, d: int, dv: int):
    k, v = kv
    return k[..., :d], v[..., :dv]


# name -> (k_cache, v_cache) as views of meta tensors; two views of one base become two views of one storage.
CACHES = {
    "NHD": _nhd,
    "HND": _hnd,
    "flat": _flat,
    "NHD [2, ...]": lambda p, s, h, d, dv: _halves(_meta(2, p, s, h, max(d, dv)).unbind(0), d, dv),
    "HND [2, ...]": lambda p, s, h, d, dv: _halves(_meta(2, p, h, s, max(d, dv)).unbind(0), d, dv),
    "NHD [pages, 2, ...]": lambda p, s, h, d, dv: _halves(_meta(p, 2, s, h, max(d, dv)).unbind(1), d, dv),
    "HND [pages, 2, ...]": lambda p, s, h, d, dv: _halves(_meta(p, 2, h, s, max(d, dv)).unbind(1), d, dv),
    "NHD beside": lambda p, s, h, d, dv: _meta(p, s, h, d + dv).split([d, dv], -1),
    "HND beside": lambda p, s, h, d, dv: _meta(p, h, s, d + dv).split([d, dv], -1),
    "flat beside": lambda p, s, h, d, dv: _meta(p * s, h, d + dv).split([d, dv], -1),
    "NHD padded": lambda p, s, h, d, dv: (_meta(p, s + 1, h, d + 8)[:, :s, :, :d], _meta(p, s, h + 1, dv + 3)[:, :, :h, :dv]),
    "HND padded": lambda p, s, h, d, dv: (_meta(p, h, s, d + 3)[..., :d], _meta(p + 1, h, s + 1, dv + 8)[1:, :, 1:, :dv]),
    "K NHD, V HND": lambda p, s, h, d, dv: (_meta(p, s, h, d), _meta(p, h, s, dv).transpose(1, 2)),
    "one of three layers": lambda p, s, h, d, dv: _halves(_meta(p, 3, 2, s, h, max(d, dv))[:, 1].unbind(1), d, dv),
}


def kv_layout(cache: str) -> str:
    return "HND" if cache.startswith("HND") else "NHD"


def _heads(rows: Tensor, start: int, heads: int, d: int) -> Tensor:
    return rows[:, start : start + heads * d].unflatten(1, (heads, d))


def _packed(t, hq, hkv, d, dv):
    rows = _meta(t, hq * d + hkv * (d + dv))
    return _heads(rows, 0, hq, d), _heads(rows, hq * d, hkv, d), _heads(rows, (hq + hkv) * d, hkv, dv)


# name -> (q, k, v)
ACTIVATIONS = {
    "separate": lambda t, hq, hkv, d, dv: (_meta(t, hq, d), _meta(t, hkv, d), _meta(t, hkv, dv)),
    "packed": _packed,
    "padded": lambda t, hq, hkv, d, dv: (
        _meta(t, hq + 1, d + 8)[:, :hq, :d], _meta(t, hkv, d + 5)[..., :d], _meta(t, hkv + 2, dv)[:, 1 : 1 + hkv]
    ),
    "gated": lambda t, hq, hkv, d, dv: (_meta(t, hq, 2 * d)[..., :d], _meta(t, hkv, d), _meta(t, hkv, dv)),
    "heads first": lambda t, hq, hkv, d, dv: (
        _meta(hq, t, d).transpose(0, 1), _meta(hkv, t, d).transpose(0, 1), _meta(hkv, t, dv).transpose(0, 1)
    ),
    "kv side by side": lambda t, hq, hkv, d, dv: (_meta(t, hq, d), *_meta(t, hkv, d + dv).split([d, dv], -1)),
    "one head expanded": lambda t, hq, hkv, d, dv: (
        _meta(t, hq, d), _meta(t, 1, d).expand(t, hkv, d), _meta(t, 1, dv).expand(t, hkv, dv)
    ),
}  # fmt: skip


class _Builder:
    """Lays views of meta tensors out in storages, each base with a guard around it."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.storages: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        self.bases: list[Tensor] = []  # keeps the ids in `names` from being reused

    def place(self, name: str, meta: Tensor, dtype: torch.dtype, shift: int = 0) -> View:
        base = meta if meta._base is None else meta._base
        if id(base) not in self.names:
            self.names[id(base)] = name
            self.bases.append(base)
            size = (base.numel() + 2 * GUARD + shift) * dtype.itemsize
            size += -size % 8  # so that any dtype can view it
            self.storages[name] = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=self.generator)
        return View(
            self.names[id(base)], dtype, tuple(meta.shape), meta.stride(), meta.storage_offset() + GUARD + shift
        )  # fmt: skip

    def integers(self, name: str, values: list, dtype: torch.dtype, decoys: list[int], pad: int = 0) -> View:
        """A view that holds `values`, in a storage whose other entries are `decoys`: valid, so that reading one does harm."""
        held = torch.tensor(values, dtype=dtype)
        shape = held.shape if held.dim() == 1 else (held.shape[0] + 1, held.shape[1] + pad)
        base = _meta(*shape)
        view = self.place(name, base if held.dim() == 1 else base[: held.shape[0], : held.shape[1]], dtype)
        entries = self.storages[name].view(dtype)
        picks = torch.randint(0, len(decoys), entries.shape, generator=self.generator)
        entries.copy_(torch.tensor(decoys, dtype=dtype)[picks])
        entries.as_strided(view.shape, view.stride, view.offset).copy_(held)
        return view


def moved(x, device, memories: dict[int, Tensor] | None = None):
    """A tensor in memory of `device` laid out alike, which `Tensor.to` does not promise; anything else as it is.

    `memories` holds what was moved before, by its old address: tensors that shared memory share it again.
    """
    if not isinstance(x, Tensor) or x.is_meta:
        return x
    memories, storage = {} if memories is None else memories, x.untyped_storage()
    if storage.data_ptr() not in memories:
        memories[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage).to(device)
    there = memories[storage.data_ptr()].view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
    return there.requires_grad_(x.requires_grad) if x.is_floating_point() else there


def finite(shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Ordinary numbers, tiny and large ones, both zeros: nothing that makes a NaN when rotated."""
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-8, 8, shape, generator=generator).float())
    tiny = torch.finfo(dtype).smallest_normal
    special = torch.tensor([0.0, -0.0, tiny, -tiny, 1.0, -1.0, torch.finfo(dtype).max / 4, 1 + torch.finfo(dtype).eps])
    pick = torch.randint(0, 12 * len(special), shape, generator=generator)
    return torch.where(pick < len(special), special[pick % len(special)], x).to(dtype)


def _fill_rows(x: Tensor, rows: list[int], rotary_dim: int, generator: torch.Generator) -> None:
    for head in range(x.shape[1]):
        x[rows, head, :rotary_dim] = finite((len(rows), rotary_dim), x.dtype, generator)


def build(spec: Spec, device) -> Case:
    """The call that `spec` describes, made on the CPU from its seed and moved to `device`."""
    builder = _Builder(spec.seed)
    num_tokens, (hq, hkv), d, dv = len(spec.positions), spec.heads, spec.head_dim, spec.value_dim
    views: dict[str, View | None] = dict.fromkeys(("k", "v", "k_cache", "v_cache", "cos_sin_cache"))
    q, k, v = ACTIVATIONS[spec.activations](num_tokens, hq, max(hkv, 1), d, dv)
    views["q"] = builder.place("q", q, spec.dtype, spec.shift)
    views["positions"] = builder.integers("positions", spec.positions, spec.positions_dtype, [0, 1, 2])
    if hkv:
        views["k"] = builder.place("k", k, spec.dtype, spec.shift)
        views["v"] = views["k"] if spec.v_is_k else builder.place("v", v, spec.dtype, spec.shift)
        caches = CACHES[spec.cache](spec.num_pages, spec.page_size, hkv, d, dv)
        for name, meta in zip(("k_cache", "v_cache"), caches, strict=True):
            views[name] = builder.place(name, meta, spec.dtype, spec.shift)
        views.update(_index_views(builder, spec))
        if spec.k_out:
            own = _meta(num_tokens, hkv, d + 8)[..., :d]
            views["k_out"] = views["k"] if spec.k_out == "k" else builder.place("k_out", own, spec.dtype, spec.shift)
    if spec.q_out:
        views["q_out"] = builder.place("q_out", _meta(num_tokens, hq + 1, d)[:, :hq], spec.dtype, spec.shift)
    if spec.rotated:
        table = _meta(spec.max_position, spec.rotated)
        views["cos_sin_cache"] = builder.place("cos_sin_cache", table, torch.float32, spec.table_shift)
    options = {
        "tokens_per_request": spec.tokens_per_request,
        "is_neox": spec.is_neox,
        "kv_layout": kv_layout(spec.cache),
        **spec.options,
    }
    case = Case(builder.storages, views, options, spec)
    _fill(case, builder.generator)
    return Case({name: s.to(device) for name, s in case.storages.items()}, views, options, spec)


def _index_views(builder: _Builder, spec: Spec) -> dict[str, View]:
    found = {}
    if spec.block_table is not None:
        decoys = list(range(spec.num_pages))
        found["block_table"] = builder.integers("block_table", spec.block_table, spec.index_dtype, decoys, pad=3)
    if spec.slots is not None:
        decoys = list(range(spec.num_pages * spec.page_size))
        found["slot_mapping"] = builder.integers("slot_mapping", spec.slots, spec.index_dtype, decoys)
    if spec.cache_positions is not None:
        found["cache_positions"] = builder.integers("cache_positions", spec.cache_positions, spec.positions_dtype, [0, 1, 2])
    return found


def _fill(case: Case, generator: torch.Generator) -> None:
    """Numbers where arithmetic happens, NaN in the unused rows of the table; everything else keeps its random bits."""
    spec = case.spec
    if not spec.rotated:
        return
    rows = [row for row, p in enumerate(spec.positions) if 0 <= p < spec.max_position]
    _fill_rows(case["q"], rows, spec.rotated, generator)
    if spec.heads[1]:
        _fill_rows(case["k"], rows, spec.rotated, generator)
    used = sorted({spec.positions[row] for row in rows})
    angle = torch.rand(len(used), spec.rotated // 2, generator=generator) * 6.3
    table = case["cos_sin_cache"]
    table.fill_(float("nan"))
    table[used] = torch.cat([angle.cos(), angle.sin()], dim=1)


def no_faults(device) -> Tensor:
    return torch.tensor([0, reference.NO_RECORD], device=device)


def run_reference(case: Case) -> Case:
    """Run the reference of prefill, of which that of decode is a part, in place."""
    faults = no_faults(case.device)
    assert reference.rope_append_prefill(**case.arguments(), faults=faults) is case.returned
    case.faults = faults.tolist()
    return case


def run(case: Case, function=decode_rope.rope_append_decode) -> Case:
    """Run `function` in place."""
    buffer = fault_buffer(case.device)
    buffer.copy_(no_faults("cpu"))
    assert function(**case.arguments()) is case.returned
    case.faults = buffer.tolist()
    return case


def prepared(case: Case, **options):
    """The case's `DecodeRope` as a function of a case's arguments."""
    return without_known(prepare(case, **options))


def assert_same_storages(got: Case, want: Case) -> None:
    """Every byte of every storage, guards and gaps included."""
    for name, expected in want.storages.items():
        differs = (got.storages[name] != expected).nonzero().flatten()
        if len(differs):
            places = {arg: v for arg, v in want.views.items() if v is not None and v.storage == name}
            first = differs[:6].tolist()
            raise AssertionError(f"{name}: {len(differs)} bytes differ, first at {first}; holds {places}\n{want.spec}")


def check(case: Case, function=decode_rope.rope_append_decode) -> Case:
    """`function` and the reference, on copies of `case`, leave the same bytes and faults. Returns the copy of `function`."""
    want = run_reference(case.clone())
    got = run(case.clone(), function)
    assert_same_storages(got, want)
    assert got.faults == want.faults, f"got {_shown(got.faults)}, expected {_shown(want.faults)}"
    return got


def _shown(faults: list[int]) -> str:
    count, record = faults
    return f"{count} faults, lowest (row {record >> 35}, kind {record >> 32 & 7}, value {record & 0xFFFFFFFF})"


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a tensor, so that −0 is not 0 and one NaN is not another."""
    return x.contiguous().view(_INTEGER_OF[x.element_size()])


def prepare(case: Case, **options) -> decode_rope.DecodeRope:
    """The `DecodeRope` for a case."""
    spec = case.spec
    flat = spec.cache.startswith("flat")
    facts = dict(
        num_q_heads=spec.heads[0],
        num_kv_heads=spec.heads[1],
        head_dim=spec.head_dim,
        v_head_dim=spec.value_dim,
        page_size=1 if flat else spec.page_size,
        kv_layout=kv_layout(spec.cache),
        dtype=spec.dtype,
        is_neox=spec.is_neox,
        tokens_per_request=spec.tokens_per_request,
        device=case.device,
        addressing="block_table" if spec.slots is None else "slot_mapping",
        positions_dtype=spec.positions_dtype,
        index_dtype=spec.index_dtype,
        q_out=spec.q_out,
        k_out=spec.k_out is not None,
        cache_positions=spec.cache_positions is not None,
    )
    return decode_rope.DecodeRope(case["cos_sin_cache"] if spec.rotated else None, **(facts | options))


def without_known(function):
    """A method of a `DecodeRope` as a function of a case's arguments."""
    return lambda **arguments: function(**{name: x for name, x in arguments.items() if name not in KNOWN})


def call_arguments(case: Case) -> dict[str, Tensor | None]:
    """The arguments of a `DecodeRope` call: without those it was built with."""
    return {name: x for name, x in case.arguments().items() if name not in KNOWN}
