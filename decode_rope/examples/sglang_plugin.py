"""SGLang: this package in the place of its fused rotary and cache kernel, as a plugin.

Put `register` under the entry-point group that SGLang reads, in the pyproject.toml of a package of yours:

    [project.entry-points."sglang.srt.plugins"]
    decode_rope = "decode_rope.examples.sglang_plugin:register"
"""

from torch import Tensor

from decode_rope import rope_append_decode, rope_append_prefill

TARGET = "sglang.kernels.ops.attention.rope.apply_rope_inplace_with_kvcache"  # as of SGLang 0.5.23
_DECODE_TOKENS = 512  # a decode step is not larger; both functions write the same bits


def register() -> None:
    """What SGLang's `load_plugins` calls in every process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, apply_rope_inplace_with_kvcache, HookType.REPLACE)


def apply_rope_inplace_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    *,
    is_neox: bool,
    rope_dim: int = 0,
) -> None:
    """Rotate q and k in place, and write k and v into the rows `out_loc` of SGLang's flat pools.

    Args:
        q, k: `[T, heads, head_dim]`, both rotated in place.
        v: as k, or `[T, num_kv_heads * head_dim]`.
        k_cache, v_cache: `[slots, num_kv_heads * head_dim]` or `[slots, num_kv_heads, head_dim]`, dtype of k.
        cos_sin_cache: fp32 `[max_position, rope_dim]`.
        positions: int32 or int64 `[T]`.
        out_loc: int32 or int64 `[T]`; `< 0`: not written.
        rope_dim: columns of `cos_sin_cache`; 0: all.
    """
    if rope_dim not in (0, cos_sin_cache.shape[1]):
        raise ValueError(f"rope_dim: expected 0 or the {cos_sin_cache.shape[1]} columns of cos_sin_cache, got {rope_dim}")
    v = v.view(k.shape)
    k_cache, v_cache = (cache.view(-1, *k.shape[1:]) for cache in (k_cache, v_cache))
    append = rope_append_decode if q.shape[0] <= _DECODE_TOKENS else rope_append_prefill
    append(q, k, v, k_cache, v_cache, cos_sin_cache, positions, slot_mapping=out_loc, is_neox=is_neox, k_out=k)
