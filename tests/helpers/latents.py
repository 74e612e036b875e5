"""Latent appends with known surroundings, as `cases.py` makes them of other appends: every tensor lies inside a larger storage
of random bytes. `LatentSpec` says what a call is like, `build` makes it, `check` runs it against the reference on a copy."""

import dataclasses
from dataclasses import dataclass, field

import torch
from cases import Case, View, _Builder, _meta, assert_same_storages, finite, no_faults
from torch import Tensor

import decode_rope
from decode_rope import LatentNorm, reference
from decode_rope.append.faults import fault_buffer

EPS = 1e-6
# What a `DecodeMLA` is built with, so that its calls do not take it.
KNOWN = ("tokens_per_request", "cos_sin_cache", "kv_norm", "interleaved_in", "interleaved_out", "enable_pdl")


@dataclass
class LatentSpec:
    """What a call is like: `positions` and one of `block_table`, `slots` written out, a plain default for everything else."""

    positions: list[int]
    block_table: list[list[int]] | None = None
    slots: list[int] | None = None
    cache_positions: list[int] | None = None
    cu_seqlens: list[int] | None = None
    heads: int = 3
    rope_dim: int = 16
    latent_dim: int = 32
    nope: bool = False
    dtype: torch.dtype = torch.bfloat16
    norm: torch.dtype | None = None  # the dtype of its weight
    positions_dtype: torch.dtype = torch.int64
    index_dtype: torch.dtype = torch.int32
    page_size: int = 4
    num_pages: int = 8
    max_position: int = 64
    tokens_per_request: int = 1
    interleaved_in: bool = True
    interleaved_out: bool = True
    cache: str = "pages"
    rows: str = "slices"
    shift: int = 0  # elements by which rows, outputs and caches miss their alignment
    q_out: bool = False
    seed: int = 0
    options: dict[str, object] = field(default_factory=dict)

    def but(self, **changes) -> "LatentSpec":
        return dataclasses.replace(self, **changes)

    @property
    def capacity(self) -> tuple[int, int]:
        """Pages, and tokens a page."""
        return (self.num_pages * self.page_size, 1) if self.cache == "slots" else (self.num_pages, self.page_size)


# name -> one cache or a pair, as views of meta tensors, for p pages of s tokens
CACHES = {
    "pages": lambda p, s, n, r: _meta(p, s, n + r),
    "slots": lambda p, s, n, r: _meta(p, 1, n + r),
    "4-D": lambda p, s, n, r: _meta(p, s, 1, n + r),
    "padded": lambda p, s, n, r: _meta(p + 1, s + 1, n + r + 8)[1:, :s, : n + r],
    "one of three layers": lambda p, s, n, r: _meta(p, 3, s, n + r)[:, 1],
    "pair": lambda p, s, n, r: (_meta(p, s, n), _meta(p, s, r)),
    "pair, 4-D and strided": lambda p, s, n, r: (_meta(p, s, 1, n), _meta(p, s + 1, r + 5)[:, 1:, :r]),
    "pair in one tensor": lambda p, s, n, r: _meta(p, s, n + r).split([n, r], -1),
}
# name -> (q_pe, k_pe, kv_c); "slices" is what DeepSeek's projections leave
ROWS = {
    "slices": lambda t, h, n, r: (_meta(t, h, 8 + r)[..., 8:], *reversed(_meta(t, n + r).split([n, r], -1))),
    "separate": lambda t, h, n, r: (_meta(t, h, r), _meta(t, r), _meta(t, n)),
    "3-D": lambda t, h, n, r: (_meta(t, h, r), _meta(t, 1, r), _meta(t, 1, n)),
    "one tensor": lambda t, h, n, r: (
        (x := _meta(t, (h + 1) * r + n + 3))[:, : h * r].unflatten(1, (h, r)), x[:, h * r + n : (h + 1) * r + n],
        x[:, h * r : h * r + n],
    ),
    "heads first": lambda t, h, n, r: (_meta(h, t, r).transpose(0, 1), _meta(t, r), _meta(1, t, n).transpose(0, 1)),
}  # fmt: skip


class LatentCase(Case):
    """A call; `cache` and `rope_cache` are its pair of caches, `weight` is its norm's."""

    def arguments(self) -> dict[str, object]:
        found = {name: None if view is None else self[name] for name, view in self.views.items()} | self.options
        rope_cache, weight = found.pop("rope_cache", None), found.pop("weight", None)
        if rope_cache is not None:
            found["cache"] = (found["cache"], rope_cache)
        return found | ({} if weight is None else {"kv_norm": LatentNorm(weight, EPS)})

    def clone(self) -> "LatentCase":
        return LatentCase({name: s.clone() for name, s in self.storages.items()}, dict(self.views), dict(self.options), self.spec)

    @property
    def returned(self) -> Tensor:
        return self["q_pe" if self.views.get("q_out") is None else "q_out"]

    @property
    def caches(self) -> list[Tensor]:
        return [self[name] for name in ("cache", "rope_cache") if name in self.views]


def build(spec: LatentSpec, device) -> LatentCase:
    """The call that `spec` describes, made on the CPU from its seed and moved to `device`."""
    builder = _Builder(spec.seed)
    num_tokens, n, r = len(spec.positions), spec.latent_dim, spec.rope_dim
    views: dict[str, View | None] = {"cos_sin_cache": None}
    for name, meta in zip(("q_pe", "k_pe", "kv_c"), ROWS[spec.rows](num_tokens, spec.heads, n, r), strict=True):
        views[name] = builder.place(name, meta, spec.dtype, spec.shift)
    caches = CACHES[spec.cache](*spec.capacity, n, r)
    for name, meta in zip(("cache", "rope_cache"), caches if isinstance(caches, tuple | list) else (caches,), strict=False):
        views[name] = builder.place(name, meta, spec.dtype, spec.shift)
    views["positions"] = builder.integers("positions", spec.positions, spec.positions_dtype, [0, 1, 2])
    pages, page_size = spec.capacity
    if spec.block_table is not None:
        views["block_table"] = builder.integers("block_table", spec.block_table, spec.index_dtype, list(range(pages)), pad=3)
    if spec.slots is not None:
        views["slot_mapping"] = builder.integers("slot_mapping", spec.slots, spec.index_dtype, list(range(pages * page_size)))
    if spec.cache_positions is not None:
        views["cache_positions"] = builder.integers("cache_positions", spec.cache_positions, spec.positions_dtype, [0, 1, 2])
    if spec.cu_seqlens is not None:
        views["cu_seqlens_q"] = builder.integers("cu_seqlens_q", spec.cu_seqlens, torch.int32, [0, 1, 2])
    if spec.q_out:
        views["q_out"] = builder.place("q_out", _meta(num_tokens, spec.heads + 1, r)[:, : spec.heads], spec.dtype, spec.shift)
    if spec.norm is not None:
        views["weight"] = builder.place("weight", _meta(n), spec.norm)
    if not spec.nope:
        views["cos_sin_cache"] = builder.place("cos_sin_cache", _meta(spec.max_position, r), torch.float32)
    options = {
        "tokens_per_request": spec.tokens_per_request,
        "interleaved_in": spec.interleaved_in,
        "interleaved_out": spec.interleaved_out,
        **spec.options,
    }
    case = LatentCase(builder.storages, views, options, spec)
    _fill(case, builder.generator)
    return LatentCase({name: s.to(device) for name, s in case.storages.items()}, views, options, spec)


def _fill(case: LatentCase, generator: torch.Generator) -> None:
    """Numbers where arithmetic happens, NaN in the unused rows of the table; everything else keeps its random bits."""
    spec = case.spec
    rows = [row for row, p in enumerate(spec.positions) if p >= 0]
    if spec.norm is not None:
        x = case["kv_c"].view(len(spec.positions), spec.latent_dim) if case["kv_c"].is_contiguous() else case["kv_c"].flatten(1)
        assert x.data_ptr() == case["kv_c"].data_ptr()
        x[rows] = finite((len(rows), spec.latent_dim), spec.dtype, generator)
        case["weight"].copy_(finite((spec.latent_dim,), spec.norm, generator).clamp(-4, 4))
    if spec.nope:
        return
    rows = [row for row in rows if spec.positions[row] < spec.max_position]
    for name in ("q_pe", "k_pe"):
        x = case[name]
        x[rows] = finite((len(rows), *x.shape[1:]), spec.dtype, generator)
    used = sorted({spec.positions[row] for row in rows})
    angle = torch.rand(len(used), spec.rope_dim // 2, generator=generator) * 6.3
    table = case["cos_sin_cache"]
    table.fill_(float("nan"))
    table[used] = torch.cat([angle.cos(), angle.sin()], dim=1)


def function_of(case: Case, module=decode_rope):
    """The public function that a case is a call of."""
    return module.rope_append_mla_decode if case.spec.cu_seqlens is None else module.rope_append_mla_prefill


def run_reference(case: LatentCase) -> LatentCase:
    """Run the reference in place."""
    faults = no_faults(case.device)
    assert function_of(case, reference)(**case.arguments(), faults=faults) is case.returned
    case.faults = faults.tolist()
    return case


def run(case: LatentCase, function=None) -> LatentCase:
    """Run `function` in place."""
    buffer = fault_buffer(case.device)
    buffer.copy_(no_faults("cpu"))
    assert (function or function_of(case))(**case.arguments()) is case.returned
    case.faults = buffer.tolist()
    return case


def slots_of(spec: LatentSpec) -> list[int]:
    """The slots that the tokens of a call write."""
    pages, page_size = spec.capacity
    bounds = spec.cu_seqlens or range(0, len(spec.positions) + spec.tokens_per_request, spec.tokens_per_request)
    slots = []
    for token, pos in enumerate(spec.positions):
        outside = spec.cu_seqlens is not None and not bounds[0] <= token < bounds[-1]
        if pos < 0 or outside or (pos >= spec.max_position and not spec.nope):
            continue
        if spec.slots is not None:
            slot = spec.slots[token] if token < len(spec.slots) else -1
        else:
            row = spec.block_table[max(sum(bound <= token for bound in bounds) - 1, 0)]
            at = pos if spec.cache_positions is None else spec.cache_positions[token]
            column = at // page_size
            page = row[column] if at >= 0 and column < len(row) else -1
            slot = page * page_size + at % page_size if 0 <= page < pages else -1
        if 0 <= slot < pages * page_size:
            slots.append(slot)
    return slots


def check(case: LatentCase, function=None) -> LatentCase:
    """`function` and the reference, on copies of `case`, leave the same bytes and faults. Returns the copy of `function`.

    Only for calls whose tokens have slots of their own: of two tokens with one slot, a GPU keeps either.
    """
    slots = slots_of(case.spec)
    assert len(set(slots)) == len(slots), f"tokens share slots: {sorted(slots)}"
    want = run_reference(case.clone())
    got = run(case.clone(), function)
    assert_same_storages(got, want)
    assert got.faults == want.faults
    return got


def prepare(case: LatentCase, **options) -> decode_rope.DecodeMLA:
    """The `DecodeMLA` for a case."""
    spec = case.spec
    facts = dict(
        num_heads=spec.heads, rope_dim=spec.rope_dim, latent_dim=spec.latent_dim, page_size=spec.capacity[1], dtype=spec.dtype,
        two_caches=len(case.caches) == 2, kv_norm=case.arguments().get("kv_norm"), interleaved_in=spec.interleaved_in,
        interleaved_out=spec.interleaved_out, tokens_per_request=spec.tokens_per_request, device=case.device,
        addressing="block_table" if spec.slots is None else "slot_mapping", positions_dtype=spec.positions_dtype,
        index_dtype=spec.index_dtype, q_out=spec.q_out, cache_positions=spec.cache_positions is not None,
    )  # fmt: skip
    return decode_rope.DecodeMLA(case["cos_sin_cache"] if not spec.nope else None, **(facts | options))


def without_known(function):
    """A method of a `DecodeMLA` as a function of a case's arguments."""
    return lambda **arguments: function(**{name: x for name, x in arguments.items() if name not in KNOWN})
