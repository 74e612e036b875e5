"""Every fault of an argument of a latent append, found before anything is launched or written."""

from torch import Tensor

from .arguments import MLAAppend, given_tensors
from .checks import check_addressing, check_cu_seqlens, check_per_token
from .rules import (
    MAX_TOKENS,
    check_aliasing,
    check_bool,
    check_dense,
    check_device,
    check_dtype,
    check_enable_pdl,
    check_integer,
    check_last_dim,
    check_like,
    check_needs_no_grad,
    check_table,
    check_tensor,
)


def check_mla(call: MLAAppend) -> None:
    """All rules of `rope_append_mla_decode` and of `rope_append_mla_prefill`.

    Raises:
        TypeError: something is not a tensor, or has a type or dtype of the wrong kind.
        ValueError: shapes, strides, devices or combinations that cannot be launched.
    """
    check_bool("interleaved_in", call.interleaved_in)
    check_bool("interleaved_out", call.interleaved_out)
    check_enable_pdl(call.enable_pdl)
    check_integer("tokens_per_request", call.tokens_per_request, 1)
    _rows(call)
    num_tokens, _, rope_dim = call.q_pe.shape
    check_mla_table(call.cos_sin_cache, rope_dim)
    check_per_token("positions", call.positions, num_tokens)
    _weight(call)
    _caches(call)
    if call.cu_seqlens_q is not None:
        check_cu_seqlens(call)
    check_addressing(call, num_tokens, call.cache.shape[1], True)
    if call.q_out is not None:
        check_like("q_out", call.q_out, "q_pe", call.q_pe)
    shown = {"kv_weight": "kv_norm.weight"} | ({} if call.rope_cache is None else {"cache": "cache[0]", "rope_cache": "cache[1]"})
    given = {shown.get(name, name): x for name, x in given_tensors(call).items()}
    check_device("q_pe", given)
    check_needs_no_grad(given)
    in_place = "q_pe" if call.q_out is None else "q_out"
    check_aliasing(given, (in_place, "cache", "cache[0]", "cache[1]"), {"q_out": "q_pe"})


def check_mla_table(cos_sin_cache, rope_dim: int) -> None:
    """The rules for a rotary table, or None."""
    if cos_sin_cache is not None:
        check_table(cos_sin_cache, rope_dim)
        if cos_sin_cache.shape[1] != rope_dim:
            raise ValueError(
                f"cos_sin_cache: expected rotary_dim {rope_dim}, the last dimension of q_pe, got {cos_sin_cache.shape[1]}"
            )


def _rows(call: MLAAppend) -> None:
    q = call.q_pe
    check_tensor("q_pe", q)
    check_dtype("q_pe", q)
    if q.dim() != 3 or q.shape[1] < 1 or q.shape[2] < 1:
        raise ValueError(
            f"q_pe: expected shape [tokens, heads, rope_dim], got {tuple(q.shape)}; "
            f"it is the rotary part of q, e.g. q.view(tokens, heads, -1)[..., nope_dim:]"
        )
    check_last_dim("q_pe", q)
    if q.shape[0] >= MAX_TOKENS:
        raise ValueError(f"q_pe: expected fewer than {MAX_TOKENS} tokens, got {q.shape[0]}; split the call")
    for name, last in (("k_pe", q.shape[2]), ("kv_c", None)):
        x = getattr(call, name)
        check_tensor(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q_pe, {q.dtype}, got {x.dtype}; cast it before the call")
        wanted = "latent_dim" if last is None else last
        if x.dim() not in (2, 3) or (x.dim() == 3 and x.shape[1] != 1) or x.shape[-1] < 1 or last not in (None, x.shape[-1]):
            raise ValueError(f"{name}: expected shape [tokens, {wanted}] or [tokens, 1, {wanted}], got {tuple(x.shape)}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected {q.shape[0]} tokens as in q_pe, got {x.shape[0]}")
        check_last_dim(name, x)


def _weight(call: MLAAppend) -> None:
    weight = call.kv_weight
    if weight is None:
        return
    check_dtype("kv_norm.weight", weight)
    if tuple(weight.shape) != (call.kv_c.shape[-1],):
        raise ValueError(f"kv_norm.weight: expected shape [{call.kv_c.shape[-1]}], one per element, got {tuple(weight.shape)}")
    check_dense("kv_norm.weight", weight)


def _caches(call: MLAAppend) -> None:
    """The rules for the cache of latents and keys, or for the pair of them."""
    latent_dim, rope_dim = call.kv_c.shape[-1], call.q_pe.shape[-1]
    if call.rope_cache is None:
        _cache("cache", call.cache, call, latent_dim + rope_dim)
        return
    _cache("cache[0]", call.cache, call, latent_dim)
    _cache("cache[1]", call.rope_cache, call, rope_dim)
    if call.cache.shape[:2] != call.rope_cache.shape[:2]:
        pages, page_size = call.cache.shape[:2]
        raise ValueError(
            f"cache[1]: expected {pages} pages of {page_size} tokens as in cache[0], got shape {tuple(call.rope_cache.shape)}"
        )


def _cache(name: str, cache: Tensor, call: MLAAppend, width: int) -> None:
    if isinstance(cache, tuple | list):
        raise TypeError(f"{name}: expected one tensor or a pair (latents, rotary keys), got {len(cache)} of them")
    check_tensor(name, cache)
    if cache.dtype != call.kv_c.dtype:
        raise TypeError(f"{name}: expected the dtype of kv_c, {call.kv_c.dtype}, got {cache.dtype}")
    if cache.dim() not in (3, 4) or (cache.dim() == 4 and cache.shape[2] != 1) or cache.shape[-1] != width or cache.shape[1] < 1:
        raise ValueError(
            f"{name}: expected shape [pages, page_size, {width}] or [pages, page_size, 1, {width}] (a pool of slots: "
            f"[slots, 1, {width}]), got {tuple(cache.shape)}"
        )
    check_last_dim(name, cache)
