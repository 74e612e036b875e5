"""`rope_append_mla_decode`, `rope_append_mla_prefill`, and `DecodeMLA`, which is the first of them prepared."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..append.arguments import INDEX, ROW, MLAAppend, mla_fields
from ..append.mla import check_mla_table
from ..append.norm import LatentNorm, latent_norm_fields
from ..append.rules import check_bool, check_integer
from ..compile import mla as operators
from ..launch.book import Book
from ..launch.mla import MLA, MLAGeometry, mla_geometry
from ..launch.platform import check_pdl
from .bound import ADDRESSING, Bound, Prepared, check_addressing, check_dtypes, check_kept, device_of

CALLS = Book(MLA)


def rope_append_mla_decode(
    q_pe: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    cache: Tensor | tuple[Tensor, Tensor],
    cos_sin_cache,
    positions: Tensor,
    *,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    cache_positions: Tensor | None = None,
    tokens_per_request: int = 1,
    kv_norm: LatentNorm | None = None,
    q_out: Tensor | None = None,
    interleaved_in: bool = True,
    interleaved_out: bool | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Rotate `q_pe` in place, and write each token's latent and rotated key, `[kv_c ‖ k_pe]`, into a paged latent cache, in one
    kernel launch. For the decode step of a model with multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).

    Safe in CUDA graphs: positions, block table and slots are read from memory at every replay. A configuration's first call
    compiles its kernel, so make it, or `DecodeMLA.warmup`, before a capture. On CPU tensors `decode_rope.reference` runs instead.
    Rows that must not be written, faults, and two tokens with one slot are as in `rope_append_decode`.

    Args:
        q_pe: `[T, H, R]` fp16, bf16 or fp32: the rotary part of every query head, such as `q[..., 128:]`; last dimension
            contiguous, other strides free. All R elements rotate, in place unless `q_out` is given.
        k_pe: `[T, R]` or `[T, 1, R]`, dtype of q_pe: the rotary key that all heads share. Not modified.
        kv_c: `[T, L]` or `[T, 1, L]`, dtype of q_pe: latents. Not modified. May be a slice of one tensor with k_pe.
        cache: `[pages, page_size, L + R]` or `[pages, page_size, 1, L + R]`, latent first (a pool of slots, `[slots, 1, L + R]`,
            has pages of one token); or a pair of caches, for latents (L) and for keys (R). Dtype of kv_c, any strides with the
            last dimension contiguous. The addressed slots are written.
        cos_sin_cache: fp32 `[max_position, R]`, cosines then sines, contiguous; or a `RopeTable`, whose own pairing then holds for
            what is read; or None: nothing rotates (NoPE), latents and keys are written as they are.
        positions: `[T]` int32 or int64, in tokens. Row of the table, and by default the place in the sequence.
        block_table, slot_mapping, cache_positions, tokens_per_request, enable_pdl: as in `rope_append_decode`; exactly one of
            block_table and slot_mapping.
        kv_norm: a `LatentNorm`: latents are normalised before they are written. None: they are written as they are.
        q_out: output for rotated q, shape and dtype of q_pe.
        interleaved_in: pairs are read as (2i, 2i + 1) (GPT-J, all published DeepSeek weights), else as (i, i + R/2) (NeoX).
        interleaved_out: the same of how they are written, to `q_pe` or `q_out` and to the cache. None: as they are read. True in,
            False out is what transformers' DeepSeek-V3 does; scores are the same, but the caches differ.
    Returns:
        q_pe, or `q_out` if given.
    Raises:
        TypeError, ValueError: an argument is at fault; it is named, and nothing has been written.
        RuntimeError: the first use of a configuration is inside a CUDA graph capture.
    Traffic:
        `2·itemsize·(H·R + L + R) + 4·R` bytes a token, and its index entries.
    Example:
        >>> import torch, decode_rope
        >>> q, kv = torch.randn(2, 4, 192), torch.randn(2, 512 + 64)
        >>> cache = torch.zeros(8, 16, 576)
        >>> norm = decode_rope.LatentNorm(torch.ones(512), eps=1e-6)
        >>> table = decode_rope.RopeTable.build(64, 4096, is_neox=False)
        >>> block_table = torch.tensor([[3, 5], [0, -1]], dtype=torch.int32)
        >>> q_pe = decode_rope.rope_append_mla_decode(
        ...     q[..., 128:], kv[:, 512:], kv[:, :512], cache, table, torch.tensor([17, 2]), block_table=block_table, kv_norm=norm
        ... )
        >>> bool(cache[5, 1].any() and cache[0, 2].any())
        True
    """
    return _append(
        q_pe, k_pe, kv_c, cache, cos_sin_cache, positions, block_table, slot_mapping, cache_positions, None, tokens_per_request,
        kv_norm, q_out, interleaved_in, interleaved_out, enable_pdl,
    )  # fmt: skip


def rope_append_mla_prefill(
    q_pe: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    cache: Tensor | tuple[Tensor, Tensor],
    cos_sin_cache,
    positions: Tensor,
    *,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    cache_positions: Tensor | None = None,
    tokens_per_request: int = 1,
    cu_seqlens_q: Tensor | None = None,
    kv_norm: LatentNorm | None = None,
    q_out: Tensor | None = None,
    interleaved_in: bool = True,
    interleaved_out: bool | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """`rope_append_mla_decode` for a prefill, or a chunk of one, with requests of different lengths: the same kernel, arguments,
    rows that are skipped, faults and bits.

    Args:
        cu_seqlens_q: `[requests + 1]` int32 or int64, ascending: row r of the block table serves tokens `cu_seqlens_q[r]` …
            `cu_seqlens_q[r + 1] − 1`. Read on the device only. Tokens before its first entry and from its last one on are padding
            rows. If it does not ascend, some tokens go to other rows of the block table, and nothing worse happens.
        All others: as in `rope_append_mla_decode`.
    Returns, raises, traffic: as `rope_append_mla_decode`.
    """
    return _append(
        q_pe, k_pe, kv_c, cache, cos_sin_cache, positions, block_table, slot_mapping, cache_positions, cu_seqlens_q,
        tokens_per_request, kv_norm, q_out, interleaved_in, interleaved_out, enable_pdl,
    )  # fmt: skip


def _append(
    q_pe, k_pe, kv_c, cache, cos_sin_cache, positions, block_table, slot_mapping, cache_positions, cu_seqlens_q,
    tokens_per_request, kv_norm, q_out, interleaved_in, interleaved_out, enable_pdl,
) -> Tensor:  # fmt: skip
    cache, rope_cache, cos_sin, read, written = mla_fields(cache, cos_sin_cache, interleaved_in, interleaved_out)
    call = MLAAppend(
        q_pe, k_pe, kv_c, cache, rope_cache, cos_sin, positions, block_table, slot_mapping, cache_positions, cu_seqlens_q, q_out,
        tokens_per_request=tokens_per_request, interleaved_in=read, interleaved_out=written, enable_pdl=enable_pdl,
        **latent_norm_fields(kv_norm),
    )  # fmt: skip
    return _run(call, CALLS)


def _run(call: MLAAppend, calls: Book) -> Tensor:
    if is_compiling():
        operators.append(call)
    else:
        calls.run(call)
    return call.q_pe if call.q_out is None else call.q_out


class DecodeMLA(Prepared):
    """`rope_append_mla_decode` for one attention shape: what cannot change is said here, once, and everything it may launch can be
    compiled before a CUDA graph is captured.

    Args:
        cos_sin_cache: fp32 `[max_position, R]`, a `RopeTable`, or None (NoPE), as for `rope_append_mla_decode`; on `device`.
        num_heads, rope_dim, latent_dim: query heads, R and L.
        page_size: tokens a page; 1 for a pool of slots.
        two_caches: whether calls give a pair of caches.
        kv_norm: a `LatentNorm`, whose weight is kept; None: no norm.
        interleaved_in, interleaved_out, tokens_per_request, enable_pdl: as for `rope_append_mla_decode`.
        dtype: of q_pe, k_pe, kv_c and the caches.
        device: a CUDA device, or "cpu" for the reference; None: the current CUDA device.
        addressing: "block_table" or "slot_mapping", whichever calls will give.
        positions_dtype, index_dtype: torch.int32 or torch.int64; index_dtype None: int32 for a block table, int64 for slots.
        q_out, cache_positions: whether calls will give these.
        metadata_ready: the promise that `DecodeRope` explains, of positions, block table or slots, cache_positions, the rotary
            table and the norm's weight.
        geometry: an `MLAGeometry` in place of the chosen one; changes time, never results.
    Raises:
        TypeError, ValueError: a fact is at fault; it is named.
    """

    spec = MLA

    def __init__(
        self,
        cos_sin_cache,
        *,
        num_heads: int,
        page_size: int,
        rope_dim: int = 64,
        latent_dim: int = 512,
        two_caches: bool = False,
        kv_norm: LatentNorm | None = None,
        interleaved_in: bool = True,
        interleaved_out: bool | None = None,
        dtype: torch.dtype = torch.bfloat16,
        tokens_per_request: int = 1,
        device: torch.device | str | None = None,
        addressing: str = "block_table",
        positions_dtype: torch.dtype = torch.int64,
        index_dtype: torch.dtype | None = None,
        q_out: bool = False,
        cache_positions: bool = False,
        enable_pdl: bool | None = None,
        metadata_ready: bool = False,
        geometry: MLAGeometry | None = None,
    ):
        check_addressing(addressing)
        sizes = {"num_heads": num_heads, "rope_dim": rope_dim, "latent_dim": latent_dim, "page_size": page_size}
        for name, number in sizes.items():
            check_integer(name, number, 1)
        flags = {"two_caches": two_caches, "q_out": q_out, "cache_positions": cache_positions, "metadata_ready": metadata_ready}
        for name, flag in flags.items():
            check_bool(name, flag)
        index_dtype = index_dtype or (torch.int32 if addressing == "block_table" else torch.int64)
        check_dtypes({"dtype": dtype, "positions_dtype": positions_dtype, "index_dtype": index_dtype})
        self.device = device_of(device)
        _, _, self.cos_sin, read, written = mla_fields(None, cos_sin_cache, interleaved_in, interleaved_out)
        self.num_heads, self.rope_dim, self.latent_dim, self.page_size = num_heads, rope_dim, latent_dim, page_size
        self.two_caches, self.dtype, self.optional = two_caches, dtype, {"q_out": q_out, "cache_positions": cache_positions}
        self.addressing, self.positions_dtype, self.index_dtype = addressing, positions_dtype, index_dtype
        self._fixed = {
            **latent_norm_fields(kv_norm), "tokens_per_request": tokens_per_request, "interleaved_in": read,
            "interleaved_out": written, "enable_pdl": enable_pdl, "metadata_ready": metadata_ready, "geometry": geometry,
        }  # fmt: skip
        self._calls = Book(MLA, self._check)
        check_kept({"cos_sin_cache": self.cos_sin, "kv_norm.weight": self._fixed.get("kv_weight")}, self.device)
        check_mla_table(self.cos_sin, rope_dim)
        self._check_facts()
        check_pdl(enable_pdl, self.device)

    def __call__(
        self,
        q_pe: Tensor,
        k_pe: Tensor,
        kv_c: Tensor,
        cache: Tensor | tuple[Tensor, Tensor],
        positions: Tensor,
        *,
        block_table: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        cache_positions: Tensor | None = None,
        q_out: Tensor | None = None,
    ) -> Tensor:
        """Launch for these tensors; the arguments, effects and result are those of `rope_append_mla_decode`.

        Raises:
            TypeError, ValueError: an argument is at fault, or is not what this op was built for; nothing has been written.
            RuntimeError: a CUDA graph is being captured and `warmup` did not cover this number of tokens.
        """
        call = self._call(q_pe, k_pe, kv_c, cache, positions, block_table, slot_mapping, cache_positions, q_out)
        if is_compiling():
            self._check_built_for(call)
        return _run(call, self._calls)

    def bind(self, q_pe, k_pe, kv_c, cache, positions, **optional) -> Bound:
        """Freeze all buffers, as `DecodeRope.bind` does: the result launches on them, as often as it is called."""
        return self._bound(self._call(q_pe, k_pe, kv_c, cache, positions, **optional))

    def _call(
        self, q_pe, k_pe, kv_c, cache, positions, block_table=None, slot_mapping=None, cache_positions=None, q_out=None
    ) -> MLAAppend:
        cache, rope_cache = cache if isinstance(cache, tuple | list) and len(cache) == 2 else (cache, None)
        return MLAAppend(
            q_pe, k_pe, kv_c, cache, rope_cache, self.cos_sin, positions, block_table, slot_mapping, cache_positions, None, q_out,
            **self._fixed,
        )  # fmt: skip

    def _geometry_of(self, num_tokens: int) -> MLAGeometry:
        return self._fixed["geometry"] or mla_geometry(num_tokens, self.num_heads, self.rope_dim, self.latent_dim)

    def _appends(self, call: MLAAppend) -> bool:
        return True

    def _example(self, num_tokens: int, device: torch.device) -> MLAAppend:
        def make(*shape, dtype=self.dtype):
            return torch.empty(shape, dtype=dtype, device=device)

        latent_dim, rope_dim = self.latent_dim, self.rope_dim
        widths = (latent_dim, rope_dim) if self.two_caches else (latent_dim + rope_dim,)
        caches = tuple(make(1, self.page_size, width) for width in widths)
        index = make(*((num_tokens, 1) if self.addressing == "block_table" else (num_tokens,)), dtype=self.index_dtype)
        optional = {self.addressing: index}
        if self.optional["q_out"]:
            optional["q_out"] = make(num_tokens, self.num_heads, rope_dim)
        if self.optional["cache_positions"]:
            optional["cache_positions"] = make(num_tokens, dtype=self.positions_dtype)
        return self._call(
            make(num_tokens, self.num_heads, rope_dim), make(num_tokens, rope_dim), make(num_tokens, latent_dim),
            caches if self.two_caches else caches[0], make(num_tokens, dtype=self.positions_dtype), **optional,
        )  # fmt: skip

    def _check_built_for(self, call: MLAAppend) -> None:
        """Is it what this op was built, and compiled, for?"""
        self._check_addressing_of(call)
        wanted = self._example(call.q_pe.shape[0], torch.device("meta"))
        for name, role in MLAAppend.ROLES.items():
            got, want = getattr(call, name), getattr(wanted, name)
            if name in ADDRESSING:
                if got is not None and got.dtype != want.dtype:
                    raise TypeError(f"{name}: expected {want.dtype}, as this op was built, got {got.dtype}")
                continue
            if (got is None) != (want is None):
                shown, state = ("cache", "one tensor" if want is None else "a pair") if name == "rope_cache" else (name, None)
                state = state or ("left out" if want is None else "given")
                raise ValueError(f"{shown}: expected {state}, as this op was built; build another DecodeMLA for these calls")
            if role.kind not in (ROW, INDEX) or got is None:
                continue
            sizes = got.shape if name == "q_pe" else (got.shape[0], got.shape[-1])[: want.dim()]
            if got.dtype != want.dtype or (sizes != want.shape and name != "q_out"):
                raise ValueError(
                    f"{name}: expected {want.dtype} of shape {tuple(want.shape)}, as this op was built, "
                    f"got {got.dtype} of {tuple(got.shape)}"
                )
        if call.cache.shape[1] != self.page_size:
            raise ValueError(
                f"cache: expected pages of {self.page_size} tokens, as this op was built, got shape {tuple(call.cache.shape)}"
            )
        if call.q_pe.device != self.device:
            raise ValueError(f"q_pe: expected device {self.device}, as this op was built, got {call.q_pe.device}")
