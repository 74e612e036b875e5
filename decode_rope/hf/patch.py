"""`enable`: transformers' own loops with attention modules that norm, rotate and append through this package.

Classes are replaced by transformers' own mechanism (`register_patch_mapping`) when a model is loaded.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn

from .. import RopeTable, rope_append_prefill
from .families import FAMILIES, Layer, read_layer, supports

# transformers chooses their frequencies anew in every call, by the longest position in it.
_ROPES_THAT_CHANGE = ("dynamic", "longrope")
_CACHE_NAMES = ("cache", "past_key_values", "layer_past")
_TABLES: dict[int, dict[str, RopeTable | None]] = {}  # by id of the config that a model's layers share
_SLOTS: WeakKeyDictionary[Any, tuple[Tensor, Tensor]] = WeakKeyDictionary()


class _PagedCache(NamedTuple):
    k_pages: Tensor
    v_pages: Tensor
    slot_mapping: Tensor
    read_index: Tensor
    tokens: tuple[Tensor, Tensor]  # K and V as `read_index` counts them


def enable() -> None:
    """Let models of the supported families that are loaded from now on rotate and append through this package.

    `from_pretrained` and `from_config` build them with replaced attention modules; weights and names stay the same. In
    `generate` a launch norms and rotates q and k in place. In `generate_batch` (continuous batching) it writes K and V
    into transformers' paged cache as well, for layers of full attention; FlashAttention's decode path appends by itself,
    and layers with a window are written by transformers. Training, LongRoPE and dynamic NTK, and configurations that
    `supports` refuses, run transformers' own code. Models loaded before do not change. Calling it again changes nothing.

    Positions past `config.max_position_embeddings` are faults; see `decode_rope.check_faults`.

    Raises:
        ImportError: transformers is missing, or has no `register_patch_mapping` (before 5.0).
    """
    from transformers.monkey_patching import get_patch_mapping, register_patch_mapping

    missing = {family.attention for family in FAMILIES.values()} - get_patch_mapping().keys()
    register_patch_mapping({name: cls for name, cls in _replacements().items() if name in missing})


def disable() -> None:
    """Undo `enable` for models that are loaded from now on."""
    from transformers.monkey_patching import get_patch_mapping, unregister_patch_mapping

    unregister_patch_mapping([name for name, cls in get_patch_mapping().items() if issubclass(cls, _Replaced)])


def _replacements() -> dict[str, type[nn.Module]]:
    found: dict[str, type[nn.Module]] = {}
    for model_type, family in FAMILIES.items():
        name = model_type.removesuffix("_text")
        original = getattr(import_module(f"transformers.models.{name}.modeling_{name}"), family.attention)
        found[family.attention] = type(family.attention, (_Replaced, original), {"__module__": original.__module__})
    return found


class _Replaced(nn.Module):
    """What a replaced attention class runs; the original class follows it in the method resolution order."""

    _layer: Layer | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        positions = kwargs.get("position_ids")
        wants_grad = torch.is_grad_enabled() and hidden_states.requires_grad
        if args or positions is None or self.training or wants_grad or not self._is_served():
            return super().forward(hidden_states, *args, **kwargs)
        kwargs.pop("position_embeddings", None)
        mask = kwargs.pop("attention_mask", None)
        cache = None
        for name in _CACHE_NAMES:
            cache = kwargs.pop(name, None) if cache is None else cache
        layer = self._read()
        batch, length = hidden_states.shape[:2]
        q, k, v = layer.project(hidden_states.flatten(0, 1))
        positions = positions.expand(batch, length).flatten()
        q, k, v = _rotate_and_append(layer, q, k, v, positions, cache, kwargs, (batch, length))
        interface = _attention_interface(self)
        if layer.sinks is not None:
            kwargs["s_aux"] = self.sinks
        if layer.window is not None:
            kwargs["sliding_window"] = layer.window
        out, weights = interface(self, q, k, v, mask, dropout=0.0, scaling=layer.scale, **kwargs)
        return layer.output(out.flatten(0, 1)).unflatten(0, (batch, length)), weights

    def _is_served(self) -> bool:
        if "_served" not in self.__dict__:
            ropes = getattr(self.config, "rope_parameters", None) or {}
            nested = [value for value in ropes.values() if isinstance(value, dict)] or [ropes]
            changes = any(rope.get("rope_type") in _ROPES_THAT_CHANGE for rope in nested)
            self.__dict__["_served"] = bool(supports(self.config)) and not changes
        return self.__dict__["_served"]

    def _read(self) -> Layer:
        device = next(self.parameters()).device
        layer = self.__dict__.get("_layer")
        if layer is None or self.__dict__["_layer_device"] != device:
            tables = _tables(self.config)
            on_device = {kind: table.to(device) if table is not None else None for kind, table in tables.items()}
            layer = read_layer(self, self.config.max_position_embeddings, on_device)
            tables.update(on_device)
            self.__dict__.update(_layer=layer, _layer_device=device)
        return layer


def _tables(config: Any) -> dict[str, RopeTable | None]:
    if id(config) not in _TABLES:
        _TABLES[id(config)] = {}
        finalize(config, _TABLES.pop, id(config), None)
    return _TABLES[id(config)]


def _rotate_and_append(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cache: Any, kwargs: dict[str, Any], shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, and all keys and values it attends to, each `[batch, heads, tokens, head_dim]`, as transformers' interfaces take them."""
    paged = _paged_cache(layer, cache, kwargs)
    if paged is not None:
        given = (q, k, v, paged.k_pages, paged.v_pages, layer.table, positions)
        rope_append_prefill(*given, slot_mapping=paged.slot_mapping, norm=layer.norm, k_out=k)
        if paged.read_index.numel():
            k, v = (tokens.index_select(0, paged.read_index) for tokens in paged.tokens)
        return tuple(x.transpose(0, 1)[None] for x in (q, k, v))
    if layer.table is not None or layer.norm is not None:
        rope_append_prefill(q, k, None, None, None, layer.table, positions, norm=layer.norm, k_out=k)
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
    if cache is not None:
        # GPT-NeoX's own call leaves `kwargs` out; a paged cache needs them.
        more = {"kwargs": kwargs} if hasattr(cache, "layer_to_allocator") else {}
        k, v = cache.update(k, v, layer.index, **more)
    return q, k, v


def _paged_cache(layer: Layer, cache: Any, kwargs: dict[str, Any]) -> _PagedCache | None:
    """Where the tokens of a step go in transformers' paged cache; None where it has to write itself."""
    allocators = getattr(cache, "layer_to_allocator", None)
    if allocators is None or kwargs.get("block_table") is not None:
        return None
    allocator = allocators[layer.index]
    # A window's slots are overwritten while they are still to be read.
    if not getattr(allocator, "supports_block_table", False) or not hasattr(allocator, "_kv_token_views"):
        return None
    kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][allocator.layer_type].to(torch.int32)
    kwargs["max_length_k"] = kwargs["max_length_k"][allocator.layer_type]
    # A block is, for each layer, a page of K and one of V. Its indices count tokens through all of them.
    size, place = allocator.tokens_per_page, allocator.layer_indices.index(layer.index)
    pages = allocator.cache_tensor.view(-1, 2 * allocator.pages_per_block, size, *allocator.cache_tensor.shape[2:])
    write_index = kwargs["write_index"][allocator.index]
    known = _SLOTS.get(allocator)
    if known is None or known[0] is not write_index:  # the first layer of a step; the others are given the same tensor
        stride = allocator.block_physical_stride
        known = _SLOTS[allocator] = (write_index, write_index - write_index // stride * (stride - size))
    read_index = kwargs["read_index"][allocator.index]
    return _PagedCache(pages[:, 2 * place], pages[:, 2 * place + 1], known[1], read_index, allocator._kv_token_views[layer.index])


def _attention_interface(module: nn.Module) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
