"""Resolve the rotary embedding of one kind of layer: names, aliases, defaults and sizes of a model configuration.

`config` finds out which kinds of layers a model has; `families` holds what only the model type tells.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import axes, scaling
from . import families

Parameters = Mapping[str, Any]

THETA_KEYS = ("rope_theta", "rotary_emb_base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
ROTARY_DIM_KEYS = ("rope_dim", "rotary_dim")
_HEAD_DIM_KEYS = ("head_dim", "attention_head_dim", "kv_channels")
_HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
_HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_num_attention_heads")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_SECTION_KEYS = ("mrope_section", "xdrope_section")
_TYPE_ALIASES = {"su": "longrope", "mrope": "default", "xdrope": "dynamic", "deepseek_yarn": "yarn"}
_WITH_ORIGINAL_LENGTH = ("yarn", "longrope", "llama3")
_AUTOCONFIG_HINT = "add it, or pass transformers.AutoConfig.from_pretrained(...), which fills in the model type's defaults"


@dataclass(frozen=True)
class RopeSpec:
    """What decides the table of one kind of layer.

    `parameters` is what `scaling.inverse_frequencies` takes. `max_position` is the length the config is made for, None if it
    does not say. `rotates_tail`: the rotary dims are the last of the head. `backwards`: the model turns by minus the angle.
    """

    head_dim: int
    rotary_dim: int
    theta: float
    parameters: dict[str, Any]
    max_position: int | None
    is_neox: bool = True
    axis_map: tuple[int, ...] | None = None
    rotates_tail: bool = False
    backwards: bool = False

    @property
    def rope_type(self) -> str:
        """One of `scaling.ROPE_TYPES`."""
        return self.parameters["rope_type"]


@dataclass(frozen=True)
class Model:
    """The text part of a model configuration as a dict, and its name in `families`."""

    values: Mapping[str, Any]
    family: str

    def first(self, keys: Iterable[str]) -> Any:
        """The first of `keys` that is there and not None."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    @property
    def is_known(self) -> bool:
        """Whether the families say how this model type reads a partial rotary factor."""
        return self.family in families.IGNORES_PARTIAL or self.family in families.HONOURS_PARTIAL


def build_spec(model: Model, raw: Parameters, overrides: Mapping[str, Any], *, nested: bool) -> RopeSpec | None:
    """The spec of the layers whose rope parameters are `raw`; None where they say there is no rotary embedding.

    `overrides` are sizes that differ from the model's (`per_layer_config`); `nested` says that `raw` is one of several."""
    theta = _theta(model, raw)
    if not theta or overrides.get("qk_rope_head_dim") == 0:
        return None
    parameters = _parameters(model, raw, nested)
    model = Model({**model.values, **overrides}, model.family)
    head_dim, rotary_dim = _dims(model, raw, parameters["rope_type"])
    if parameters["rope_type"] == "proportional":
        parameters.setdefault("partial_rotary_factor", _partial(model, raw) or 1.0)
    return RopeSpec(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        theta=theta,
        parameters=parameters,
        max_position=_table_length(model, parameters),
        is_neox=_is_neox(model),
        axis_map=_axis_map(model, raw, pairs=(rotary_dim + 1) // 2),
        rotates_tail=model.family in families.ROTATES_TAIL,
        backwards=model.family in families.BACKWARDS,
    )


def _parameters(model: Model, raw: Parameters, nested: bool) -> dict[str, Any]:
    own, top_level = (where.get("original_max_position_embeddings") for where in (raw, model.values))
    length = model.first(_LENGTH_KEYS)
    # Phi-3 keeps the trained length at the top level, and there it wins.
    candidates = (own, top_level, length) if nested else (top_level, own, length)
    original = next((value for value in candidates if value is not None), None)
    return scaling_parameters(raw, length, original, early_phi3=model.family in ("phi3", "phi4_multimodal"))


def scaling_parameters(raw: Parameters, length: int | None, original: int | None, *, early_phi3: bool = False) -> dict[str, Any]:
    """`raw` with its type under its current name, and the lengths that the formulas need filled in: `length` is what the model is
    made for, `original` what it was trained for."""
    rope_type = raw.get("rope_type") or raw.get("type") or "default"
    rope_type = _TYPE_ALIASES.get(rope_type, rope_type)
    if rope_type in ("dynamic", "ntk") and raw.get("alpha"):
        rope_type = "ntk_alpha"
    if rope_type == "yarn" and early_phi3:
        rope_type = "longrope"
    if rope_type == "axial":
        raise NotImplementedError("rope_type 'axial': a vision tower's 2-D rotary embedding, not a decoder's")
    if raw.get("use_fope") or any(key.startswith("fope_") for key in raw):
        raise NotImplementedError("FoPE: its cos and sin differ per head, which no cos/sin table holds")

    filled = dict(raw)
    if rope_type in _WITH_ORIGINAL_LENGTH:
        filled["original_max_position_embeddings"] = original
        if rope_type != "llama3" and raw.get("factor") is None and length and original:
            filled["factor"] = length / original
    if rope_type == "dynamic":
        filled["max_position_embeddings"] = length
    taken = scaling.parameter_names(rope_type)
    return {"rope_type": rope_type, **{name: filled[name] for name in taken if filled.get(name) is not None}}


def _theta(model: Model, raw: Parameters) -> float | None:
    """theta, or None / 0 where the config says NoPE: an explicit null with nothing at the top level, or 0."""
    theta = raw.get("rope_theta")
    if theta is None:
        theta = model.first(THETA_KEYS)
    if theta is None and "rope_theta" not in raw:
        theta = families.THETA.get(model.family, 10000.0) * (model.values.get("rope_ratio") or 1)
    return theta


def _dims(model: Model, raw: Parameters, rope_type: str) -> tuple[int, int]:
    latent = model.values.get("qk_rope_head_dim")
    if latent:
        return latent, latent  # MLA rotates a slice of its own, whatever head_dim and partial factors say
    head_dim = _head_dim(model)
    if rope_type == "proportional" or (rope_type == "default" and model.family in families.IGNORES_PARTIAL):
        return head_dim, head_dim
    partial = _partial(model, raw)
    if partial is None:
        rotary_dim = raw.get("rope_dim") or model.first(ROTARY_DIM_KEYS) or head_dim
    else:
        rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim + rotary_dim % 2 <= head_dim:
        raise ValueError(f"rotary_dim: expected pairs within head_dim {head_dim}, got {rotary_dim} (partial factor {partial})")
    return head_dim, rotary_dim


def _head_dim(model: Model) -> int:
    head_dim = model.first(_HEAD_DIM_KEYS) or families.HEAD_DIM.get(model.family)
    if head_dim:
        return head_dim
    hidden, heads = model.first(_HIDDEN_KEYS), model.first(_HEADS_KEYS)
    if not hidden or not heads:
        raise ValueError(f"head_dim: the config has neither it nor both hidden_size and num_attention_heads; {_AUTOCONFIG_HINT}")
    return hidden // heads


def _partial(model: Model, raw: Parameters) -> float | None:
    partial = raw.get("partial_rotary_factor")
    if partial is None:
        partial = model.first(PARTIAL_KEYS)
    if partial is None and not raw.get("rope_dim") and model.first(ROTARY_DIM_KEYS) is None:
        partial = families.PARTIAL.get(model.family)
    return partial


def _is_neox(model: Model) -> bool:
    if model.family in families.INTERLEAVED:
        return False
    latent = model.family in families.INTERLEAVED_MLA or (not model.is_known and model.values.get("qk_rope_head_dim") is not None)
    return not (latent and model.values.get("rope_interleave", True))


def _axis_map(model: Model, raw: Parameters, pairs: int) -> tuple[int, ...] | None:
    sections = next((raw[key] for key in _SECTION_KEYS if raw.get(key)), None)
    if model.family in families.MROPE:
        kind, default = families.MROPE[model.family]
    elif model.is_known or sections is None:
        return None
    else:
        kind, default = "interleaved" if raw.get("mrope_interleaved") else "chunked", None
    sections = sections or default
    return axes.axis_map(kind, None if sections is None else [int(size) for size in sections], pairs)


def _table_length(model: Model, parameters: Parameters) -> int | None:
    """`max_position_embeddings`, or what YaRN stretches the trained length to where that is longer."""
    length = model.first(_LENGTH_KEYS)
    original, factor = parameters.get("original_max_position_embeddings"), parameters.get("factor")
    if parameters["rope_type"] != "yarn" or original is None or factor is None:
        return length
    return max(length or 0, int(original * factor))
