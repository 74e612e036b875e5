"""Find the rotary embedding of every layer in a model configuration, in every spelling that config.json files use.

`read(config)` takes the dict of a config.json, or a transformers config object (anything with `to_dict()`), and returns a
`RopeConfig`: one `RopeSpec` per kind of layer. No tensor is made here and transformers is never imported.

Precedence is transformers': a value in `rope_scaling` / `rope_parameters`, then the top level of the config, then the
default of the model type (`families`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import families
from .reader import check_config
from .spec import (
    PARTIAL_KEYS,
    ROTARY_DIM_KEYS,
    THETA_KEYS,
    Model,
    Parameters,
    RopeSpec,
    build_spec,
)

_TEXT_KEYS = ("thinker_config", "decoder", "text_config", "llm_config", "language_config")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_ratio", *THETA_KEYS, *PARTIAL_KEYS, *ROTARY_DIM_KEYS)
_LAYER_TYPE_KEYS = ("layer_types", "layers_block_type")
_FULL = "full_attention"


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of every layer of a model; a spec of None is a layer without one (NoPE).

    `nested`: the config itself tells kinds of layers apart, so the layer type may be left out only if the kinds agree.
    `by_layer` is None and `layer_labels` empty when the config does not say which layer is of which kind. `mixed` are layer
    types whose layers differ.
    """

    model_type: str
    by_type: dict[str, RopeSpec | None]
    by_layer: list[RopeSpec | None] | None = None
    layer_labels: tuple[str, ...] = ()
    nested: bool = False
    mixed: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def select(self, layer_type: str | int | None = None) -> RopeSpec:
        """The spec of a layer type, of a layer index, or the only one there is. ValueError lists the choices."""
        if layer_type is None:
            spec = self._only()
        elif isinstance(layer_type, int) and not isinstance(layer_type, bool):
            spec = self._at(layer_type)
        elif isinstance(layer_type, str):
            spec = self._named(layer_type)
        else:
            raise TypeError(f"layer_type: expected a string, a layer index or None, got {type(layer_type).__name__}")
        if spec is None:
            raise ValueError(
                f"layer_type={layer_type!r} of model type {self.model_type!r} has no rotary embedding (NoPE); "
                "pass cos_sin_cache=None for it"
            )
        return spec

    def choices(self) -> str:
        """What `select` takes, for messages."""
        names = [f"{name!r}{' (NoPE)' if spec is None else ''}" for name, spec in self.by_type.items()]
        names += [f"{name!r} (differs by layer)" for name in self.mixed]
        if self.by_layer:
            names.append(f"a layer index below {len(self.by_layer)}")
        return ", ".join(names)

    def _only(self) -> RopeSpec | None:
        distinct: list[RopeSpec | None] = []
        for spec in [*self.by_type.values(), *(self.by_layer or [])]:
            # Outside a nested config, layers without rope share the model's one table: there is only one answer.
            if (spec is not None or self.nested) and spec not in distinct:
                distinct.append(spec)
        if len(distinct) > 1:
            raise ValueError(f"layer_type: {self.model_type!r} has several kinds of layers; expected {self.choices()}, got None")
        return distinct[0] if distinct else None

    def _at(self, index: int) -> RopeSpec | None:
        if index < 0:
            raise ValueError(f"layer_type: expected a layer index of at least 0, got {index}")
        if self.by_layer is None and len(self.by_type) == 1:
            return next(iter(self.by_type.values()))
        if self.by_layer is None:
            raise ValueError(f"layer_type: the config does not list its layers; expected {self.choices()}, got {index}")
        if not 0 <= index < len(self.by_layer):
            raise ValueError(f"layer_type: expected a layer index below {len(self.by_layer)}, got {index}")
        return self.by_layer[index]

    def _named(self, name: str) -> RopeSpec | None:
        label = self.aliases.get(name, name)
        if label in self.mixed:
            raise ValueError(f"layer_type: layers of type {name!r} differ; pass the index of the layer instead")
        if label not in self.by_type:
            raise ValueError(f"layer_type: expected {self.choices()}, got {name!r}")
        return self.by_type[label]


def read(config: Any) -> RopeConfig:
    """Every kind of layer of `config` (see the module).

    Raises TypeError for what is neither a dict nor a config, ValueError for a model without rotary embedding or with a size
    missing, NotImplementedError for a rotary embedding that no table of this package can hold."""
    model = _model(config)
    _refuse_unsupported(model)
    _refuse_without_rope(model)
    raw = model.values.get("rope_scaling") or model.values.get("rope_parameters") or {}
    kinds = _kinds(model, raw)
    if kinds is not None:
        return _read_nested(model, kinds)
    return _read_flat(model, raw)


def _model(config: Any) -> Model:
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_dict"):
            raise TypeError(f"config: expected the dict of a config.json or a transformers config, got {type(config).__name__}")
        config = config.to_dict()
        if not isinstance(config, Mapping):
            raise TypeError(f"config: expected to_dict() to return a dict, got {type(config).__name__}")
    values: Mapping[str, Any] = config
    while inner := next((values[key] for key in _TEXT_KEYS if isinstance(values.get(key), Mapping)), None):
        values = {**inner, "model_type": inner.get("model_type") or values.get("model_type")}
    check_config(values)
    model_type = values.get("model_type") or ""
    return Model(values, model_type.replace("-", "_").removesuffix("_text"))


def _refuse_unsupported(model: Model) -> None:
    reason = families.UNSUPPORTED.get(model.family)
    if reason is None and model.values.get("dual_chunk_attention_config"):
        reason = "dual chunk attention uses five tables per query; remove dual_chunk_attention_config to serve without it"
    if reason is None and "yarn" in model.values:
        reason = "this is Mistral's params.json; use the config.json of the same model"
    if reason is not None:
        raise NotImplementedError(f"model type {model.family!r}: {reason}")


def _refuse_without_rope(model: Model) -> None:
    values, family = model.values, model.family
    kind = values.get("position_embedding_type")
    has_none = (
        family in families.NOPE
        or bool(values.get("alibi"))
        or (isinstance(kind, str) and kind not in ("rope", "rotary"))
        or (family == "granitemoehybrid" and kind is None)
        or (family == "zamba2" and not values.get("use_mem_rope"))
        or values.get("qk_rope_head_dim") == 0
    )
    if has_none:
        raise ValueError(f"model type {family!r} has no rotary embedding (NoPE); pass cos_sin_cache=None")
    if not model.is_known and all(values.get(key) is None for key in _ROPE_KEYS):
        raise ValueError(
            f"config: nothing in it says that model type {family!r} has a rotary embedding; "
            "add rope_theta if it has, pass cos_sin_cache=None if not"
        )
    if family in families.NEEDS_PARAMETERS and not (values.get("rope_scaling") or values.get("rope_parameters")):
        raise ValueError(
            f"rope_parameters: {family!r} configs need them; "
            "pass transformers.AutoConfig.from_pretrained(...), which fills in the model type's defaults"
        )


def _kinds(model: Model, raw: Parameters) -> dict[str, Parameters | None] | None:
    """Rope parameters by kind of layer, when the config (or the old spelling of its model type) tells kinds apart."""
    labels = _labels(model)
    kinds: dict[str, Parameters | None] | None = None
    if any(isinstance(value, Mapping) for value in raw.values()):
        common = {"truncate": raw["truncate"]} if "truncate" in raw else {}
        kinds = {
            key: None if value is None else {**common, **value}
            for key, value in raw.items()
            if isinstance(value, Mapping) or (value is None and (key in labels or not labels))
        }
    elif split := families.SPLIT.get(model.family):
        kinds = _split_kinds(model, raw, split)
    if kinds and labels:
        kinds = {key: value for key, value in kinds.items() if key in labels} or kinds
    return kinds


def _split_kinds(model: Model, raw: Parameters, split: families.Split) -> dict[str, Parameters | None]:
    kinds: dict[str, Parameters | None] = {}
    for kind, (key, default) in split.thetas.items():
        parameters = {}
        if kind in split.scaled and raw:
            parameters = {**dict(split.extra), **raw}
        parameters["rope_theta"] = model.values.get(key) or default
        kinds[kind] = parameters
    return kinds


def _read_nested(model: Model, kinds: Mapping[str, Parameters | None]) -> RopeConfig:
    labels = _labels(model)

    def spec(label: str, index: int | None) -> RopeSpec | None:
        raw = kinds.get(label)
        return None if raw is None else build_spec(model, raw, _overrides(model, label, index), nested=True)

    return RopeConfig(
        model_type=model.values.get("model_type") or "",
        by_type={label: spec(label, labels.index(label) if label in labels else None) for label in kinds},
        by_layer=[spec(label, index) for index, label in enumerate(labels)] or None,
        layer_labels=tuple(labels),
        nested=True,
        aliases=families.LAYER_ALIASES.get(model.family, {}),
    )


def _read_flat(model: Model, raw: Parameters) -> RopeConfig:
    model_type = model.values.get("model_type") or ""
    labels = _labels(model)
    layers = _raw_by_layer(model, raw, labels)
    by_type: dict[str, RopeSpec | None]
    if layers is None:
        only = build_spec(model, raw, {}, nested=False)
        by_type = dict.fromkeys(labels or [_FULL], only)
        if not labels and _window_decides(model):
            by_type = {"sliding_attention": only, _FULL: None}
        return RopeConfig(model_type, by_type, [only] * len(labels) or None, tuple(labels))

    labels = (labels or [_FULL] * len(layers))[: len(layers)]
    specs = [
        None if own is None else build_spec(model, own, _overrides(model, label, index), nested=False)
        for index, (own, label) in enumerate(zip(layers, labels, strict=False))
    ]
    grouped: dict[str, list[RopeSpec | None]] = {}
    for label, spec in zip(labels, specs, strict=True):
        grouped.setdefault(label, []).append(spec)
    by_type = {label: own[0] for label, own in grouped.items() if all(spec == own[0] for spec in own)}
    mixed = tuple(label for label in grouped if label not in by_type)
    return RopeConfig(model_type, by_type, specs, tuple(labels), mixed=mixed)


def _raw_by_layer(model: Model, raw: Parameters, labels: list[str]) -> list[Parameters | None] | None:
    """Rope parameters of each layer (None: NoPE), when a flat config has lists of them; None when all layers are alike."""
    values = model.values
    thetas = values.get("rope_theta")
    if isinstance(thetas, list):  # Step-3.5
        partials = values.get("partial_rotary_factors") or [None] * len(thetas)
        kinds = labels or [_FULL] * len(thetas)
        return [
            {**(raw if kind == _FULL else {}), "rope_theta": theta, "partial_rotary_factor": partial}
            for kind, theta, partial in zip(kinds, thetas, partials, strict=False)
        ]
    if thetas := values.get("layer_rope_theta"):  # 0 is NoPE
        own_theta = model.family.endswith("_swa")  # Muse models rotate all other layers by the global theta
        return [({**raw, "rope_theta": theta} if own_theta else raw) if theta else None for theta in thetas]
    if (scaled := values.get("rope_scaling_layers")) is not None:  # Molmo2
        plain = {"rope_theta": raw.get("rope_theta")} if raw.get("rope_theta") else {}
        return [raw if i in scaled else plain for i in range(values["num_hidden_layers"])]
    nope = _nope_flags(model, labels)
    if nope is None and any("head_dim" in sizes for sizes in (_per_layer(model) or {}).values()):
        nope = [False] * len(labels)
    return None if nope is None else [None if flag else raw for flag in nope]


def _nope_flags(model: Model, labels: list[str]) -> list[bool] | None:
    values = model.values
    count = values.get("num_hidden_layers") or 0
    if flags := values.get("no_rope_layers"):
        return [not flag for flag in flags]
    if model.family in families.NOPE_INTERVAL and count:
        interval = values.get("no_rope_layer_interval") or families.NOPE_INTERVAL[model.family]
        return [(index + 1) % interval == 0 for index in range(count)]
    if not labels or not _window_decides(model):
        return None
    dense = values.get("mlp_layer_types") or []
    if model.family != "cohere2_moe" or values.get("prefix_dense_sliding_window_pattern", 1) != 1:
        dense = []
    keeps_rope = {index for index, kind in enumerate(dense) if kind == "dense"}
    return [label == _FULL and index not in keeps_rope for index, label in enumerate(labels)]


def _window_decides(model: Model) -> bool:
    """Whether this model's full-attention layers are NoPE and its sliding ones are not."""
    needs_window = families.NOPE_FULL_ATTENTION.get(model.family)
    return needs_window is not None and not (needs_window and model.values.get("sliding_window") is None)


def _labels(model: Model) -> list[str]:
    """The kind of each layer under the name that rope parameters use; empty when the config does not list them."""
    names = model.first(_LAYER_TYPE_KEYS) or []
    aliases = families.LAYER_ALIASES.get(model.family, {})
    return [aliases.get(name, name) for name in names if name != "mlp"]  # Dory lists (attention, mlp) blocks


def _overrides(model: Model, label: str, index: int | None) -> Mapping[str, Any]:
    """Sizes of a layer that differ from the model's."""
    per_layer = _per_layer(model)
    if per_layer and index is None:
        raise ValueError("layer_types: needed to read per_layer_config, but the config has none")
    if per_layer is not None:
        return per_layer.get(index, {}) if index is not None else {}
    if label == _FULL and model.family in families.GLOBAL_HEAD_DIM:
        return {"head_dim": model.values.get("global_head_dim") or families.GLOBAL_HEAD_DIM[model.family]}
    return {}


def _per_layer(model: Model) -> dict[int, Mapping[str, Any]] | None:
    """`per_layer_config` by layer index; an empty one says that no layer differs, None that the config has none."""
    per_layer = model.values.get("per_layer_config")
    return None if per_layer is None else {int(index): sizes for index, sizes in per_layer.items()}
