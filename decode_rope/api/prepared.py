"""`DecodeRope`: a decode step's launches with the static facts checked once, compiled ahead, and bound to buffers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..append.arguments import INDEX, ROW, SCALE, Append, of_table, resolved, scale_fields
from ..append.codes import CODES, cache_dtype
from ..append.layout import cache_view
from ..append.norm import WEIGHTS, QKNorm, by_public_name, norm_fields
from ..append.rules import check_integer, check_table
from ..compile import append as operators
from ..launch.book import Book
from ..launch.decode import DECODE, Geometry, check_geometry, decode_geometry
from ..launch.platform import check_pdl
from .bound import ADDRESSING, Bound, Prepared, check_addressing, check_dtypes, check_kept, device_of
from .tuning import candidates_for, fastest

_NONE = (None,) * 7


class DecodeRope(Prepared):
    """`rope_append_decode` for one attention shape: what cannot change is said here, once, and everything it may launch can be
    compiled before a CUDA graph is captured.

    Args:
        cos_sin_cache: fp32 `[max_position, R]`, a `RopeTable`, or None (NoPE), as for `rope_append_decode`; on `device`.
        num_q_heads, num_kv_heads, head_dim: heads of q, of k and v (0: rotate q only), and elements of a head of q and k.
        v_head_dim: elements of a head of v; head_dim if None.
        page_size: tokens a page; 1 for flat `[slots, Hkv, D]` caches.
        kv_layout, is_neox, tokens_per_request, enable_pdl: as for `rope_append_decode`.
        axes: rows of positions in models of several axes, whose calls give positions `[axes, T]`; 0: `[T]`.
        axis_map: int8 `[R/2]`, the axis of each pair, on `device`; None: that of the `RopeTable`.
        norm: a `QKNorm`, whose weights are kept; None: no norm.
        dtype: of q, k and v, and of the caches unless `kv_dtype` is another one.
        kv_dtype: float8_e4m3fn, float8_e5m2 or int8 for quantised caches, which calls may also give as uint8. None: dtype.
        dynamic_scales: whether `k_scale` and `v_scale` are written, one for each token and head, instead of read.
        device: a CUDA device, or "cpu" for the reference; None: the current CUDA device.
        addressing: "block_table" or "slot_mapping", whichever calls will give.
        positions_dtype, index_dtype: torch.int32 or torch.int64; index_dtype None: int32 for a block table, int64 for slots.
        q_out, k_out, cache_positions, q_token_scale: whether calls will give these. `q_out` may be torch.float8_e4m3fn instead of
            True: then it has that dtype, and calls may give `q_scale`.
        metadata_ready: promise that no kernel still in flight writes positions, the block table or slots, cache_positions,
            q_token_scale or the rotary table when a launch begins, so they may be read before the PDL wait (0.15-0.3 µs on an
            H200). True of memory written by a copy before the graph started, or by any kernel launched without the PDL attribute
            with another such kernel between it and this launch; false of a chain of early-triggering PDL kernels from their writer
            to this launch.
        geometry: a `Geometry` in place of the measured choice; changes time, never results.
    Raises:
        TypeError, ValueError: a fact is at fault; it is named.
    """

    spec = DECODE

    def __init__(
        self,
        cos_sin_cache,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        kv_layout: str = "NHD",
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        dynamic_scales: bool = False,
        v_head_dim: int | None = None,
        is_neox: bool = True,
        axis_map: Tensor | None = None,
        axes: int = 0,
        norm: QKNorm | None = None,
        tokens_per_request: int = 1,
        device: torch.device | str | None = None,
        addressing: str = "block_table",
        positions_dtype: torch.dtype = torch.int64,
        index_dtype: torch.dtype | None = None,
        q_out: bool | torch.dtype = False,
        k_out: bool = False,
        cache_positions: bool = False,
        q_token_scale: bool = False,
        enable_pdl: bool | None = None,
        metadata_ready: bool = False,
        geometry: Geometry | None = None,
    ):
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_addressing(addressing)
        index_dtype = index_dtype or (torch.int32 if addressing == "block_table" else torch.int64)
        sizes = {"num_q_heads": num_q_heads, "head_dim": head_dim, "v_head_dim": v_head_dim, "page_size": page_size}
        for name, number, least in [*((name, n, 1) for name, n in sizes.items()), ("num_kv_heads", num_kv_heads, 0)]:
            check_integer(name, number, least)
        dtypes = {"dtype": dtype, "kv_dtype": kv_dtype or dtype, "positions_dtype": positions_dtype, "index_dtype": index_dtype}
        check_dtypes(dtypes)
        if num_kv_heads == 0 and (k_out or cache_positions):
            raise ValueError("k_out, cache_positions: expected False with num_kv_heads=0, which has no k and no cache")
        if geometry is not None:
            check_geometry(geometry)
        self.device = device_of(device)
        self.cos_sin, is_neox, axis_map = of_table(cos_sin_cache, is_neox, axis_map)
        check_integer("axes", axes, 0)
        if axes and axis_map is None:
            raise ValueError(f"axis_map: expected one with axes={axes}, int8, the axis of each pair, got None")
        self.heads = (num_q_heads, num_kv_heads, head_dim, v_head_dim)
        self.page_size, self.dtype = page_size, dtype
        self.kv_dtype, self.dynamic_scales = dtype if kv_dtype is None else kv_dtype, dynamic_scales
        self._paged = addressing == "block_table"
        self.addressing, self.positions_dtype, self.index_dtype = addressing, positions_dtype, index_dtype
        self.optional = {"cache_positions": cache_positions, "q_out": q_out, "k_out": k_out, "q_token_scale": q_token_scale}
        self.axes = axes
        self._fixed = {
            **norm_fields(norm), "axis_map": axis_map if axes else None,
            "tokens_per_request": tokens_per_request, "is_neox": is_neox, "kv_layout": kv_layout, "enable_pdl": enable_pdl,
            "kv_dtype": kv_dtype, "metadata_ready": metadata_ready, "geometry": geometry,
        }  # fmt: skip
        self.tuned: dict[int, Geometry] = {}
        # Tensors that every call has, in the order of the record.
        self._held = tuple([x for name in Append.ROLES if isinstance(x := self._fixed.get(name), Tensor)])
        self._calls = Book(DECODE, self._check)
        if self.cos_sin is not None:
            check_table(self.cos_sin, head_dim)
        held = {name: self._fixed.get(name) for name in ("axis_map", *WEIGHTS)} | {"cos_sin_cache": self.cos_sin}
        check_kept(by_public_name(held), self.device)
        self._check_facts()
        check_pdl(enable_pdl, self.device)

    def tune(
        self,
        step: Callable[[], object],
        num_tokens: int,
        *,
        together_with: Sequence["DecodeRope"] = (),
        candidates: Sequence[Geometry] | None = None,
    ) -> Geometry:
        """Choose the geometry of calls of `num_tokens` tokens by timing your own step with each of some candidates.

        Results never depend on it. Where attention is launched early (PDL), its programs land beside ours, and a step can take
        up to 5 % more or less time. The choice is kept in `tuned`, by number of tokens, and may be saved and assigned again;
        launches bound before keep the geometry that they have.

        Args:
            step: runs a whole step on the current stream, with this op called or bound anew in it. It is run and captured in a
                CUDA graph once for each candidate, so it must be fit for that; its outputs are written again and again.
            num_tokens: of the step.
            together_with: the ops of other layers in the same step, which get the same geometry.
            candidates: geometries to try; the first one is kept unless another saves 0.3 % or more. None: a dozen around the
                measured choice.
        Returns:
            The geometry chosen.
        Raises:
            ValueError: the op is not on a CUDA device.
        """
        check_integer("num_tokens", num_tokens, 1)
        if self.device.type != "cuda":
            raise ValueError(f"device: expected an op on a CUDA device, whose launches can be timed, got {self.device}")
        ops = (self, *together_with)

        def choose(geometry: Geometry) -> None:
            for op in ops:
                op.tuned[num_tokens] = geometry
                op._calls.clear()

        tried = candidates_for(num_tokens, *self.heads[:3]) if candidates is None else list(candidates)
        for geometry in tried:
            check_geometry(geometry)
        chosen = fastest(choose, step, tried)
        choose(chosen)
        return chosen

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        k_cache: Tensor | None,
        v_cache: Tensor | None,
        positions: Tensor,
        *,
        block_table: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        cache_positions: Tensor | None = None,
        q_out: Tensor | None = None,
        k_out: Tensor | None = None,
        q_token_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        q_scale: Tensor | None = None,
    ) -> Tensor:
        """Launch for these tensors; the arguments, effects and result are those of `rope_append_decode`.

        Shapes, strides, dtypes, devices, alignment and shared memory are looked at in every call.

        Raises:
            TypeError, ValueError: an argument is at fault, or is not what this op was built for; nothing has been written.
            RuntimeError: a CUDA graph is being captured and `warmup` did not cover this number of tokens.
        """
        compiling = is_compiling()
        flags = given = None
        unusual = (q_out, k_out, cache_positions, q_token_scale, k_scale, v_scale, q_scale)
        if not compiling and k is not None and unusual == _NONE:
            # The usual call, whose identity costs less to tell.
            index, other = (block_table, slot_mapping) if self._paged else (slot_mapping, block_table)
            cos_sin = self.cos_sin
            if other is None and cos_sin is not None:
                given, flags = (q, k, v, k_cache, v_cache, cos_sin, positions, index, *self._held), ()
                plan = self._calls.find(flags, given)
                if plan is not None and plan.again(given):
                    return q
        call = self._call(
            q, k, v, k_cache, v_cache, positions, block_table=block_table, slot_mapping=slot_mapping,
            cache_positions=cache_positions, q_out=q_out, k_out=k_out, q_token_scale=q_token_scale,
            k_scale=k_scale, v_scale=v_scale, q_scale=q_scale,
        )  # fmt: skip
        if compiling:
            self._check_built_for(call)
            operators.append("rope_append_decode", call)
        elif given is None:
            self._calls.run(resolved(call))
        else:
            self._calls.run_keyed(call, flags, given)
        return q if q_out is None else q_out

    def bind(self, q, k, v, k_cache, v_cache, positions, **optional) -> Bound:
        """Freeze all buffers: the result launches on them, with no argument, as often as it is called.

        Takes the arguments of a call. What the tensors hold is read at each launch; where they are is not, so keep writing into the
        same ones. Raises as a call does; nothing is launched.
        """
        return self._bound(resolved(self._call(q, k, v, k_cache, v_cache, positions, **optional)))

    def _geometry_of(self, num_tokens: int) -> Geometry:
        fixed = self.tuned.get(num_tokens) or self._fixed["geometry"]
        return fixed or decode_geometry(num_tokens, *self.heads[:3])

    def _appends(self, call: Append) -> bool:
        return call.k is not None

    def _call(self, q, k, v, k_cache, v_cache, positions, k_scale=None, v_scale=None, **optional) -> Append:
        scales = scale_fields(k_scale, v_scale)
        fixed = self._fixed
        if self.tuned and q.shape[0] in self.tuned:
            fixed = fixed | {"geometry": self.tuned[q.shape[0]]}
        return Append(q, k, v, k_cache, v_cache, self.cos_sin, positions, **scales, **optional, **fixed)

    def _example(self, num_tokens: int, device: torch.device) -> Append:
        """A call such as this op will be given, with tensors of the right shapes and no meaning."""
        num_q_heads, num_kv_heads, head_dim, v_head_dim = self.heads

        def make(*shape, dtype=self.dtype):
            return torch.empty(shape, dtype=dtype, device=device)

        q, k, v, k_cache, v_cache, optional = make(num_tokens, num_q_heads, head_dim), None, None, None, None, {}
        if num_kv_heads:
            k, v = make(num_tokens, num_kv_heads, head_dim), make(num_tokens, num_kv_heads, v_head_dim)
            page = (num_kv_heads, self.page_size) if self._fixed["kv_layout"] == "HND" else (self.page_size, num_kv_heads)
            k_cache, v_cache = (make(1, *page, size, dtype=self.kv_dtype) for size in (head_dim, v_head_dim))
            if self.kv_dtype in CODES:
                shape = (1, self.page_size, num_kv_heads) if self.dynamic_scales else (1,)
                optional |= {name: make(*shape, dtype=torch.float32).fill_(1) for name in ("k_scale", "v_scale")}
            shape = (num_tokens, 1) if self.addressing == "block_table" else (num_tokens,)
            optional[self.addressing] = make(*shape, dtype=self.index_dtype)
        if self.optional["q_out"]:
            coded = isinstance(self.optional["q_out"], torch.dtype)
            optional["q_out"] = make(*q.shape, dtype=self.optional["q_out"] if coded else self.dtype)
            if coded:
                optional["q_scale"] = make(1, dtype=torch.float32).fill_(1)
        if self.optional["k_out"]:
            optional["k_out"] = make(*k.shape)
        if self.optional["cache_positions"]:
            optional["cache_positions"] = make(num_tokens, dtype=self.positions_dtype)
        if self.optional["q_token_scale"]:
            optional["q_token_scale"] = make(num_tokens, dtype=torch.float32)
        positions = make(*((self.axes, num_tokens) if self.axes else (num_tokens,)), dtype=self.positions_dtype)
        return self._call(q, k, v, k_cache, v_cache, positions, **optional)

    def _check_built_for(self, call: Append) -> None:
        """Is it what this op was built, and compiled, for?"""
        self._check_addressing_of(call)
        wanted = self._example(call.q.shape[0], torch.device("meta"))
        for name, role in Append.ROLES.items():
            if role.kind not in (ROW, INDEX, SCALE) or name in (*ADDRESSING, "axis_map"):
                continue
            got, want = getattr(call, name), getattr(wanted, name)
            if (got is None) != (want is None):
                state = "given" if got is None else "left out"
                name = name.removesuffix("_out") if role.kind == SCALE else name
                raise ValueError(f"{name}: expected it {state}, as this op was built; build another DecodeRope for these calls")
            if name.endswith(("_scale", "_scale_out")) and name != "q_token_scale":
                continue  # one for all heads and one for each are the same to the kernel
            if got is not None and (got.dtype != want.dtype or got.shape != want.shape):
                raise ValueError(
                    f"{name}: expected {want.dtype} of shape {tuple(want.shape)}, as this op was built, "
                    f"got {got.dtype} of {tuple(got.shape)}"
                )
        index = getattr(call, self.addressing)
        if index is not None and index.dtype != self.index_dtype:
            raise TypeError(f"{self.addressing}: expected {self.index_dtype}, as this op was built, got {index.dtype}")
        for name in ("k_cache", "v_cache") if call.k is not None else ():
            if cache_dtype(call, getattr(call, name)) != self.kv_dtype:
                raise TypeError(f"{name}: expected {self.kv_dtype}, as this op was built, got {getattr(call, name).dtype}")
        if call.k is not None and cache_view(call.k_cache, call.kv_layout).page_size != self.page_size:
            raise ValueError(
                f"k_cache: expected pages of {self.page_size} tokens, as this op was built, got shape {tuple(call.k_cache.shape)}"
            )
        if call.q.device != self.device:
            raise ValueError(f"q: expected device {self.device}, as this op was built, got {call.q.device}")
