"""`DecodeRope`: a decode step's launches with the static facts checked once, compiled ahead, and bound to buffers."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import driver, ops
from .checks import check_table
from .dispatch import check_call, check_pdl, decode_plans, run_reference, runs_reference
from .geometry import Geometry, check_geometry, decode_geometry
from .launch import cu_launch, current_device, launch_hooks, raw_stream
from .layout import cache_view
from .plan import Call, Plan, append_plan
from .variants import INTERPRETED

_ADDRESSING = ("block_table", "slot_mapping")


class DecodeRope:
    """`rope_append_decode` for one attention shape: what cannot change is said here, once, and everything it may launch can be
    compiled before a CUDA graph is captured.

    Args:
        cos_sin_cache: fp32 `[max_position, R]`, a `RopeTable`, or None (NoPE), as for `rope_append_decode`; on `device`.
        num_q_heads, num_kv_heads, head_dim: heads of q, of k and v (0: rotate q only), and elements of a head of q and k.
        v_head_dim: elements of a head of v; head_dim if None.
        page_size: tokens a page; 1 for flat `[slots, Hkv, D]` caches.
        kv_layout, is_neox, tokens_per_request, enable_pdl: as for `rope_append_decode`.
        dtype: of q, k, v and the caches.
        device: a CUDA device, or "cpu" for the reference; None: the current CUDA device.
        addressing: "block_table" or "slot_mapping", whichever calls will give.
        positions_dtype, index_dtype: torch.int32 or torch.int64; index_dtype None: int32 for a block table, int64 for slots.
        q_out, k_out, cache_positions: whether calls will give these.
        metadata_ready: promise that no kernel still in flight writes positions, the block table or slots, cache_positions or the
            rotary table when a launch begins, so they may be read before the PDL wait (0.15-0.3 µs on an H200). True of memory
            written by a copy before the graph started, or by any kernel launched without the PDL attribute with another such
            kernel between it and this launch; false of a chain of early-triggering PDL kernels from their writer to this launch.
        geometry: a `Geometry` in place of the measured choice; changes time, never results.
    Raises:
        TypeError, ValueError: a fact is at fault; it is named.
    """

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
        v_head_dim: int | None = None,
        is_neox: bool = True,
        tokens_per_request: int = 1,
        device: torch.device | str | None = None,
        addressing: str = "block_table",
        positions_dtype: torch.dtype = torch.int64,
        index_dtype: torch.dtype | None = None,
        q_out: bool = False,
        k_out: bool = False,
        cache_positions: bool = False,
        enable_pdl: bool | None = None,
        metadata_ready: bool = False,
        geometry: Geometry | None = None,
    ):
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        index_dtype = index_dtype or (torch.int32 if addressing == "block_table" else torch.int64)
        _check_facts(
            addressing,
            {"num_q_heads": num_q_heads, "head_dim": head_dim, "v_head_dim": v_head_dim, "page_size": page_size},
            num_kv_heads,
            {"dtype": dtype, "positions_dtype": positions_dtype, "index_dtype": index_dtype},
        )
        if num_kv_heads == 0 and (k_out or cache_positions):
            raise ValueError("k_out, cache_positions: expected False with num_kv_heads=0, which has no k and no cache")
        if geometry is not None:
            check_geometry(geometry)
        self.device = _device(device)
        check_pdl(enable_pdl, self.device)
        self.is_neox = getattr(cos_sin_cache, "is_neox", is_neox)
        self.cos_sin = getattr(cos_sin_cache, "cos_sin_cache", cos_sin_cache)
        self.heads = (num_q_heads, num_kv_heads, head_dim, v_head_dim)
        self.page_size, self.kv_layout, self.dtype = page_size, kv_layout, dtype
        self.tokens_per_request, self.paged = tokens_per_request, addressing == "block_table"
        self.positions_dtype, self.index_dtype = positions_dtype, index_dtype
        self.outputs = (cache_positions, q_out, k_out)
        self.enable_pdl, self.metadata_ready, self.geometry = enable_pdl, metadata_ready, geometry
        self._plans = decode_plans()
        if self.cos_sin is not None:
            check_table(self.cos_sin, head_dim)
            if self.cos_sin.device != self.device:
                raise ValueError(f"cos_sin_cache: expected device {self.device}, got {self.cos_sin.device}; use .to(device)")
        _check_call(self._example(1, torch.device("cpu"))._replace(cos_sin=None))

    def warmup(self, max_tokens: int) -> "DecodeRope":
        """Compile and load every kernel that calls of up to `max_tokens` tokens may launch; nothing is launched or written.

        After it, any such call, bound or not, may be captured in a CUDA graph; only steps and sizes of 2^31 and more need another
        kernel. Returns self.
        """
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"max_tokens: expected an int of at least 1, got {max_tokens!r}")
        if runs_reference(self.device):
            return self
        done = set()
        for num_tokens in range(1, max_tokens + 1):
            geometry = self.geometry or decode_geometry(num_tokens, *self.heads[:3])
            if geometry not in done:
                done.add(geometry)
                call = self._example(num_tokens, torch.device("meta"))
                append_plan(call, self.device)
                append_plan(call, self.device, aligned=False)
        return self

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
    ) -> Tensor:
        """Launch for these tensors; the arguments, effects and result are those of `rope_append_decode`.

        Shapes, strides, dtypes, devices, alignment and shared memory are looked at in every call.

        Raises:
            TypeError, ValueError: an argument is at fault, or is not what this op was built for; nothing has been written.
            RuntimeError: a CUDA graph is being captured and `warmup` did not cover this number of tokens.
        """
        index, other = (block_table, slot_mapping) if self.paged else (slot_mapping, block_table)
        if k is None and isinstance(k_cache, Tensor | None) and isinstance(v_cache, Tensor | None):
            k_cache = v_cache = None
        if is_compiling():
            self._check_built_for(self._call(q, k, v, k_cache, v_cache, positions, index, other, cache_positions, q_out, k_out))
            return ops.rope_append_decode(
                q, k, v, k_cache, v_cache, self.cos_sin, positions, block_table=block_table, slot_mapping=slot_mapping,
                cache_positions=cache_positions, tokens_per_request=self.tokens_per_request, is_neox=self.is_neox,
                kv_layout=self.kv_layout, q_out=q_out, k_out=k_out, enable_pdl=self.enable_pdl,
                metadata_ready=self.metadata_ready, geometry=self.geometry,
            )  # fmt: skip
        if q_out is None and k_out is None and cache_positions is None and k is not None:
            given = (q, k, v, k_cache, v_cache, positions, index)
            pattern = True
        else:
            everything = (q, k, v, k_cache, v_cache, positions, index, cache_positions, q_out, k_out)
            given = tuple([x for x in everything if x is not None])
            pattern = tuple([x is None for x in everything])
        plan = self._plans.find(pattern, given) if other is None else None
        if plan is None or not plan.submit(
            q, k, v, k_cache, v_cache, self.cos_sin, positions, index, cache_positions, q_out, k_out
        ):
            call = self._call(q, k, v, k_cache, v_cache, positions, index, other, cache_positions, q_out, k_out)
            self._check(call)
            self._plans.run_checked(call, pattern, given)
        return q if q_out is None else q_out

    def bind(
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
    ) -> "Bound":
        """Freeze all buffers: the result launches on them, with no argument, as often as it is called.

        What the tensors hold is read at each launch; where they are is not, so keep writing into the same ones. Raises as a
        call does; nothing is launched.
        """
        index, other = (block_table, slot_mapping) if self.paged else (slot_mapping, block_table)
        if k is None and isinstance(k_cache, Tensor | None) and isinstance(v_cache, Tensor | None):
            k_cache = v_cache = None
        call = self._call(q, k, v, k_cache, v_cache, positions, index, other, cache_positions, q_out, k_out)
        self._check(call)
        if runs_reference(self.device) or q.shape[0] == 0:
            return Bound(call, None)
        return Bound(call, append_plan(call, self.device))

    def _call(self, q, k, v, k_cache, v_cache, positions, index, other, cache_positions, q_out, k_out) -> Call:
        if other is not None or (index is None and k is not None):
            wanted, unwanted = _ADDRESSING if self.paged else _ADDRESSING[::-1]
            raise ValueError(f"{wanted}: expected it, and no {unwanted}, as this op was built; see `addressing`")
        return Call(
            q, k, v, k_cache, v_cache, self.cos_sin, positions, index, self.paged, cache_positions, q_out, k_out,
            self.tokens_per_request, self.is_neox, self.kv_layout, self.enable_pdl, self.metadata_ready, self.geometry,
        )  # fmt: skip

    def _example(self, num_tokens: int, device: torch.device) -> Call:
        """A call such as this op will be given, with tensors of the right shapes and no meaning."""
        num_q_heads, num_kv_heads, head_dim, v_head_dim = self.heads
        has_cache_positions, has_q_out, has_k_out = self.outputs

        def make(*shape, dtype=self.dtype):
            return torch.empty(shape, dtype=dtype, device=device)

        q, k, v, k_cache, v_cache, index = make(num_tokens, num_q_heads, head_dim), None, None, None, None, None
        if num_kv_heads:
            k, v = make(num_tokens, num_kv_heads, head_dim), make(num_tokens, num_kv_heads, v_head_dim)
            page = (self.page_size, num_kv_heads) if self.kv_layout == "NHD" else (num_kv_heads, self.page_size)
            k_cache, v_cache = make(1, *page, head_dim), make(1, *page, v_head_dim)
            index = make(*(num_tokens, 1) if self.paged else (num_tokens,), dtype=self.index_dtype)
        positions = make(num_tokens, dtype=self.positions_dtype)
        return Call(
            q, k, v, k_cache, v_cache, self.cos_sin, positions, index, self.paged,
            make(num_tokens, dtype=self.positions_dtype) if has_cache_positions else None,
            torch.empty_like(q) if has_q_out else None, torch.empty_like(k) if has_k_out else None,
            self.tokens_per_request, self.is_neox, self.kv_layout, self.enable_pdl, self.metadata_ready, self.geometry,
        )  # fmt: skip

    def _check(self, call: Call) -> None:
        """The rules of any call, then those of this op."""
        _check_call(call)
        self._check_built_for(call)

    def _check_built_for(self, call: Call) -> None:
        """Is it what this op was built, and compiled, for?"""
        wanted = self._example(call.q.shape[0], torch.device("meta"))
        pairs = zip(Call._fields, call, wanted, strict=True)
        for name, got, want in pairs:
            if name in ("cos_sin", "k_cache", "v_cache", "index") or not (isinstance(want, Tensor) or isinstance(got, Tensor)):
                continue
            if (got is None) != (want is None):
                state = "given" if got is None else "left out"
                raise ValueError(f"{name}: expected it {state}, as this op was built; build another DecodeRope for these calls")
            if got.dtype != want.dtype or got.shape != want.shape:
                raise ValueError(
                    f"{name}: expected {want.dtype} of shape {tuple(want.shape)}, as this op was built, "
                    f"got {got.dtype} of {tuple(got.shape)}"
                )
        if call.index is not None and call.index.dtype != self.index_dtype:
            raise TypeError(
                f"{_ADDRESSING[not self.paged]}: expected {self.index_dtype}, as this op was built, got {call.index.dtype}"
            )
        if call.k is not None and cache_view(call.k_cache, self.kv_layout).page_size != self.page_size:
            raise ValueError(
                f"k_cache: expected pages of {self.page_size} tokens, as this op was built, got shape {tuple(call.k_cache.shape)}"
            )
        if call.q.device != self.device:
            raise ValueError(f"q: expected device {self.device}, as this op was built, got {call.q.device}")


class Bound:
    """One launch with every buffer frozen: calling it takes no argument and returns rotated q.

    Attributes:
        plan: the plan it launches; None for the reference and for no tokens.
        addresses: what the plan is launched on, in the kernel's order.
    """

    __slots__ = ("_call", "_device", "_output", "_packed", "addresses", "plan")

    def __init__(self, call: Call, plan: Plan | None):
        self._call = call
        self._output = call.q if call.q_out is None else call.q_out
        self._packed = {}
        self.addresses = call.addresses()
        self.plan = plan and plan.fitting(self.addresses, call)
        self._device = plan and plan.device

    def __call__(self) -> Tensor:
        device = self._device
        if self._packed and current_device() == device and not launch_hooks:
            packed = self._packed.get(raw_stream(device))
            if packed is not None:
                if cu_launch(*packed):
                    driver.launch(packed)
                return self._output
        return self._first_on_stream()

    def _first_on_stream(self) -> Tensor:
        """Any launch but a repeated one: the first on a stream, through `kernel[grid]`, or the reference."""
        plan = self.plan
        if plan is None:
            if self._call.q.shape[0] > 0:
                run_reference(self._call)
        elif INTERPRETED or not plan.variant.direct or launch_hooks:
            plan.launch(self._call.kernel_tensors(), self.addresses)
        else:
            with torch.cuda.device(self._device):
                stream = raw_stream(self._device)
                self._packed[stream] = plan.pack(self.addresses, stream)
                driver.launch(self._packed[stream])
        return self._output


def _check_call(call: Call) -> None:
    block_table, slot_mapping = (call.index, None) if call.paged else (None, call.index)
    check_call(call, block_table=block_table, slot_mapping=slot_mapping)


def _check_facts(addressing, sizes: dict, num_kv_heads, dtypes: dict) -> None:
    if addressing not in _ADDRESSING:
        raise ValueError(f'addressing: expected "block_table" or "slot_mapping", got {addressing!r}')
    for name, number, least in [*((name, n, 1) for name, n in sizes.items()), ("num_kv_heads", num_kv_heads, 0)]:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: expected an int, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"{name}: expected at least {least}, got {number}")
    for name, dtype in dtypes.items():
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name}: expected a torch.dtype, got {dtype!r}")


def _device(device) -> torch.device:
    """`device` with its index; None is the current CUDA device."""
    device = torch.device("cuda" if device is None else device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
