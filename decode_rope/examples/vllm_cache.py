"""vLLM: one launch in the place of its rotary embedding and `reshape_and_cache_flash`.

An attention backend of yours calls it from `do_rope_and_kv_cache_update`, whose arguments these are:

    def fused_rope_kvcache_supported(self):
        return True

    def do_rope_and_kv_cache_update(self, layer, query, key, value, positions, cos_sin_cache, is_neox, kv_cache, slot_mapping):
        rope_and_cache(query, key, value, positions, table, is_neox, kv_cache, slot_mapping, self.kv_cache_dtype,
                       layer._k_scale, layer._v_scale)
"""

import torch
from torch import Tensor

from decode_rope import rope_append_decode, rope_append_prefill

_DECODE_TOKENS = 512  # a decode step is not larger; both functions write the same bits
_CODES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rope_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Rotate query and key in place, and write key and value into vLLM's cache.

    Args:
        query, key, value: `[T, heads, head_size]`, or `[T, heads * head_size]` as `qkv.split` leaves them, any row stride.
        positions: int64 `[T]`.
        cos_sin_cache: fp32 `[max_position, rotary_dim]`, or a `RopeTable`. vLLM's own buffer has the model's dtype, which loses
            digits of every angle: build the table from the config, `RopeTable.from_hf(config)`.
        kv_cache: one layer's, K beside V in the last dimension: `[blocks, num_kv_heads, block_size, 2 * head_size]` in logical
            order, whatever its strides. uint8 where `kv_cache_dtype` is fp8.
        slot_mapping: int64, at most T entries; −1: not written.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: fp32, one number or one for each head; for fp8.
    """
    head_size = kv_cache.shape[-1] // 2
    query, key, value = (x.unflatten(-1, (-1, head_size)) if x.dim() == 2 else x for x in (query, key, value))
    k_cache, v_cache = kv_cache.split(head_size, dim=-1)
    quantised = {}
    if kv_cache_dtype != "auto":
        quantised = dict(k_scale=k_scale, v_scale=v_scale, kv_dtype=_CODES[kv_cache_dtype])
    append = rope_append_decode if query.shape[0] <= _DECODE_TOKENS else rope_append_prefill
    append(
        query,
        key,
        value,
        k_cache,
        v_cache,
        cos_sin_cache,
        positions,
        slot_mapping=slot_mapping,
        is_neox=is_neox,
        kv_layout="HND",
        k_out=key,
        **quantised,
    )
