"""Calls with a norm, several axes or a scale of q, and known surroundings: every tensor lies between guards of random bytes, so
that a stray write shows when whole storages are compared.

`NormSpec` says what a call is like, `build` makes it, `check` runs it against the reference on an identical copy.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from cases import bits
from torch import Tensor

import decode_rope
from decode_rope import QKNorm, reference
from decode_rope.append.arguments import Append, resolved
from decode_rope.append.faults import fault_buffer
from decode_rope.append.norm import norm_fields
from decode_rope.launch.book import Book
from decode_rope.launch.decode import DECODE
from decode_rope.launch.prefill import PREFILL

GUARD = 64  # elements around every tensor, a multiple of 16 bytes in every dtype
PAGE, ROWS = 4, 32  # tokens of a page, and rows of the rotary table
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FUNCTIONS = {"decode": decode_rope.rope_append_decode, "prefill": decode_rope.rope_append_prefill}
BOOKS = {"decode": Book(DECODE), "prefill": Book(PREFILL)}


@dataclass(frozen=True)
class NormSpec:
    """q_weight, k_weight: the dtype of a weight, or None for none. weights_shift, shift: elements by which weights, and all rows
    and caches, miss their alignment. positions: written out, or None for some in the first half of the table.
    k_out: None, "own" or "k". gated: a gate of D elements lies behind every head of q. scales: magnitudes of rows, in turn."""

    tokens: int = 3
    heads: tuple[int, int] = (4, 2)  # no KV heads: k is None
    head_dim: int = 64
    v_head_dim: int | None = None
    rotary_dim: int | None = None  # None: head_dim; 0: NoPE
    dtype: torch.dtype = BF16
    normed: bool = True
    q_weight: torch.dtype | None = FP32
    k_weight: torch.dtype | None = FP32
    eps: float = 1e-6
    weight_offset: float = 0.0
    order: str = "before"
    v_norm: bool = False
    rounded: bool = False
    scaled: bool = False
    axes: int = 0
    positions: tuple[int, ...] | None = None
    slots: bool = False
    tokens_per_request: int = 1
    is_neox: bool = True
    q_out: bool = False
    k_out: str | None = None
    v_is_k: bool = False
    gated: bool = False
    shift: int = 0
    weights_shift: int = 0
    scales: tuple[float, ...] = (1.0, 30.0, 0.01)
    seed: int = 0

    def but(self, **changes) -> "NormSpec":
        return dataclasses.replace(self, **changes)

    @property
    def requests(self) -> int:
        return -(-self.tokens // self.tokens_per_request)

    @property
    def pages(self) -> int:
        return max(8, self.requests)

    @property
    def rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


@dataclass
class NormCase:
    """A call: `views` are (storage, dtype, shape, stride, offset in elements) by argument, and by `q_weight` and `k_weight`."""

    spec: NormSpec
    storages: dict[str, Tensor]
    views: dict[str, tuple]
    faults: list[int] | None = None
    _made: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        storage, dtype, shape, stride, offset = self.views[name]
        key = "k" if self.views[name] is self.views.get("k") else name  # one tensor, where two arguments are
        if key not in self._made:
            self._made[key] = self.storages[storage].view(dtype).as_strided(shape, stride, offset)
        return self._made[key]

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self.views else None

    def clone(self) -> "NormCase":
        return NormCase(self.spec, {name: x.clone() for name, x in self.storages.items()}, self.views)

    def to(self, device) -> "NormCase":
        return NormCase(self.spec, {name: x.to(device) for name, x in self.storages.items()}, self.views)

    @property
    def norm(self) -> QKNorm | None:
        spec = self.spec
        if not spec.normed:
            return None
        weights = self.get("q_weight"), self.get("k_weight")
        return QKNorm(*weights, spec.eps, spec.weight_offset, spec.order, spec.v_norm, spec.rounded)

    def arguments(self) -> dict:
        names = ("k", "v", "k_cache", "v_cache", "cos_sin_cache", "positions")
        optional = ("block_table", "slot_mapping", "axis_map", "q_out", "k_out", "q_token_scale", "cache_positions")
        found = {"q": self["q"], **{name: self.get(name) for name in names}}
        found |= {name: self[name] for name in optional if name in self.views}
        found |= {"is_neox": self.spec.is_neox, "norm": self.norm, "tokens_per_request": self.spec.tokens_per_request}
        return found

    @property
    def written(self) -> list[str]:
        """The arguments that a call may write."""
        names = ("q" if "q_out" not in self.views else "q_out", "k_out", "k_cache", "v_cache")
        return [name for name in names if name in self.views]


def build(spec: NormSpec, device="cpu") -> NormCase:
    """The call that `spec` describes, made on the CPU from its seed and moved to `device`."""
    generator = torch.Generator().manual_seed(spec.seed)
    case = NormCase(spec, {}, {})
    tokens, (hq, hkv), d, dv = spec.tokens, spec.heads, spec.head_dim, spec.value_dim

    def place(name: str, dtype, shape, rows: tuple[int, ...] | None = None, shift: int = 0) -> Tensor:
        """A tensor of `shape` in a storage of its own; `rows` is the shape of what it is the first part of."""
        whole = torch.empty(rows or shape, device="meta")
        size = (whole.numel() + 2 * GUARD + shift) * dtype.itemsize
        case.storages[name] = torch.randint(0, 256, (size + -size % 8,), dtype=torch.uint8, generator=generator)
        case.views[name] = (name, dtype, tuple(shape), whole.stride(), GUARD + shift)
        return case[name]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    positions = _positions(spec, generator)
    given = place("positions", torch.int64, positions.shape)
    given.copy_(positions)
    first = positions if not spec.axes else positions[0]
    good = (first >= 0) & (first < ROWS)  # other rows keep their random bits
    scales = torch.tensor(spec.scales)[torch.arange(tokens) % len(spec.scales)][:, None, None]
    q = place("q", spec.dtype, (tokens, hq, d), (tokens, hq, d * (1 + spec.gated)), spec.shift)
    q[good] = (random(tokens, hq, d) * scales).to(spec.dtype)[good]
    if hkv:
        k = place("k", spec.dtype, (tokens, hkv, d), (tokens, hkv + 1, d), spec.shift)
        k[good] = (random(tokens, hkv, d) * scales).to(spec.dtype)[good]
        if spec.v_is_k:
            case.views["v"] = case.views["k"]
        else:
            v = place("v", spec.dtype, (tokens, hkv, dv), None, spec.shift)
            v[good] = (random(tokens, hkv, dv) * scales).to(spec.dtype)[good]
        place("k_cache", spec.dtype, (spec.pages, PAGE, hkv, d), None, spec.shift)
        place("v_cache", spec.dtype, (spec.pages, PAGE, hkv, dv), (spec.pages, PAGE, hkv + 1, dv), spec.shift)
        _place_index(spec, place, generator, first)
    if spec.rotated:
        angle = torch.rand(ROWS, spec.rotated // 2, generator=generator) * 6.3
        place("cos_sin_cache", FP32, (ROWS, spec.rotated)).copy_(torch.cat([angle.cos(), angle.sin()], dim=1))
    if spec.axes:
        axis_map = torch.randint(0, spec.axes, (spec.rotated // 2,), generator=generator)
        place("axis_map", torch.int8, axis_map.shape).copy_(axis_map)
    for name in ("q_weight", "k_weight"):
        dtype = getattr(spec, name)
        if spec.normed and dtype is not None:
            place(name, dtype, (d,), None, spec.weights_shift).copy_(random(d) + (spec.weight_offset == 0))
    if spec.scaled:
        place("q_token_scale", FP32, (tokens,)).copy_(torch.rand(tokens, generator=generator) * 2 + 0.1)
    if spec.q_out:
        place("q_out", spec.dtype, (tokens, hq, d), (tokens, hq + 1, d), spec.shift)
    if spec.k_out == "own":
        place("k_out", spec.dtype, (tokens, hkv, d), (tokens, hkv, d + 8), spec.shift)
    elif spec.k_out == "k":
        case.views["k_out"] = case.views["k"]
    return case.to(device)


def _positions(spec: NormSpec, generator) -> Tensor:
    if spec.positions is not None:
        rows = torch.tensor(spec.positions)
    else:
        rows = torch.randint(0, ROWS // 2, (spec.tokens,), generator=generator)
    others = [torch.randint(0, ROWS, (spec.tokens,), generator=generator) for _ in range(1, spec.axes)]
    return torch.stack([rows, *others]) if spec.axes else rows


def _place_index(spec: NormSpec, place: Callable, generator, first: Tensor) -> None:
    """A slot of its own for every token: through `slot_mapping`, or one column a request of `block_table`."""
    if spec.slots:
        slots = torch.randperm(spec.pages * PAGE, generator=generator)[: spec.tokens]
        place("slot_mapping", torch.int64, slots.shape).copy_(slots)
        return
    pages = torch.randperm(spec.pages, generator=generator)[: spec.requests, None]
    place("block_table", torch.int32, pages.shape, (spec.requests, 4)).copy_(pages)
    within = torch.arange(spec.tokens) % spec.tokens_per_request
    place("cache_positions", torch.int64, (spec.tokens,)).copy_(torch.where(first >= 0, within % PAGE, first))


def run(case: NormCase, function: Callable) -> NormCase:
    """Run `function` in place."""
    buffer = fault_buffer(case["q"].device)
    buffer.copy_(torch.tensor([0, reference.NO_RECORD]))
    function(**case.arguments())
    case.faults = buffer.tolist()
    return case


def run_reference(case: NormCase) -> NormCase:
    faults = torch.tensor([0, reference.NO_RECORD], device=case["q"].device)
    reference.rope_append_prefill(**case.arguments(), faults=faults)
    case.faults = faults.tolist()
    return case


def with_geometry(name: str, geometry) -> Callable:
    """`rope_append_<name>` with its work divided as `geometry` says."""

    def function(norm, **arguments):
        BOOKS[name].run(resolved(Append(**arguments, **norm_fields(norm), geometry=geometry)))

    return function


def assert_same(got: NormCase, want: NormCase) -> None:
    """Every byte of every storage is the same, guards and gaps included, and so are the faults."""
    for name, expected in want.storages.items():
        differs = (got.storages[name].cpu() != expected.cpu()).nonzero().flatten().tolist()
        assert not differs, f"{name}: {len(differs)} bytes differ, first at {differs[:6]}\n{want.spec}"
    assert got.faults == want.faults, want.spec


def check(case: NormCase, function: Callable) -> NormCase:
    """`function` and the reference leave the same bytes and faults. Returns the copy of `function`."""
    want, got = run_reference(case.clone()), run(case.clone(), function)
    assert_same(got, want)
    return got


def normed(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """The norm in float64, in one line."""
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * (weight.double() + offset)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(bits(x).cpu(), bits(y).cpu())
