"""The types of the configuration values that a rotary table depends on.

A config.json is a file from somebody else. Every value is looked at once, before anything is computed of it: a value of a wrong
type raises an error that begins with the name of its field. None means absent, as in transformers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any


def integer(name: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {_shown(value)}; correct it in the configuration")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}; correct it in the configuration")


def size(name: str, value: Any) -> None:
    integer(name, value, 1)


def number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {_shown(value)}; correct it in the configuration")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: expected a finite number that is not negative, got {value}; correct it in the configuration")


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected true or false, got {_shown(value)}; correct it in the configuration")


def text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {_shown(value)}; correct it in the configuration")


def mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a mapping, got {_shown(value)}; correct it in the configuration")


def either(one: Callable, other: Callable, kind: type | tuple[type, ...]) -> Callable:
    """`other` for values of `kind`, `one` for all others."""
    return lambda name, value: (other if isinstance(value, kind) else one)(name, value)


def list_of(item: Callable) -> Callable:
    """A list whose items pass `item`; None is allowed among them."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name}: expected a list, got {_shown(value)}; correct it in the configuration")
        for i, x in enumerate(value):
            if x is not None:
                item(f"{name}[{i}]", x)

    return check


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}" if isinstance(value, bool | int | float | str) else type(value).__name__


# Values of `rope_scaling` and `rope_parameters`, and of each kind of layer in them.
ROPE_FIELDS: dict[str, Callable] = {
    "rope_type": text,
    "type": text,
    "rope_theta": number,
    "factor": number,
    "alpha": number,
    "partial_rotary_factor": number,
    "rope_dim": integer,
    "original_max_position_embeddings": size,
    "max_position_embeddings": size,
    "seq_len": size,
    "attention_factor": number,
    "beta_fast": number,
    "beta_slow": number,
    "mscale": number,
    "mscale_all_dim": number,
    "truncate": flag,
    "short_factor": list_of(number),
    "long_factor": list_of(number),
    "short_mscale": number,
    "long_mscale": number,
    "low_freq_factor": number,
    "high_freq_factor": number,
    "long": flag,
    "mrope_section": list_of(number),
    "xdrope_section": list_of(number),
    "mrope_interleaved": flag,
    "use_fope": flag,
}
_SIZES = (
    "head_dim attention_head_dim kv_channels global_head_dim hidden_size n_embd d_model num_attention_heads n_head n_heads "
    "num_heads decoder_num_attention_heads max_position_embeddings n_positions max_seq_len seq_length model_max_length "
    "original_max_position_embeddings num_hidden_layers no_rope_layer_interval"
)
_NUMBERS = (
    "rotary_emb_base partial_rotary_factor rotary_pct rotary_emb_fraction rope_ratio rope_local_base_freq local_rope_theta "
    "global_rope_theta swa_rope_theta compress_rope_theta"
)
CONFIG_FIELDS: dict[str, Callable] = {
    **dict.fromkeys(_SIZES.split(), size),
    **dict.fromkeys(_NUMBERS.split(), number),
    **dict.fromkeys(("qk_rope_head_dim", "rope_dim", "rotary_dim", "sliding_window"), integer),
    "rope_theta": either(number, list_of(number), (list, tuple)),
    "model_type": text,
    "rope_interleave": flag,
    "rope_scaling": mapping,
    "rope_parameters": mapping,
    "per_layer_config": mapping,
    "layer_rope_theta": list_of(number),
    "partial_rotary_factors": list_of(number),
    "layer_types": list_of(text),
    "layers_block_type": list_of(text),
    "mlp_layer_types": list_of(text),
    "no_rope_layers": list_of(either(integer, flag, bool)),
    "rope_scaling_layers": list_of(integer),
}


def check_config(values: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError, beginning with the name of the field, for a value that cannot be what it should be."""
    _check(values, CONFIG_FIELDS, "")
    for name in ("rope_scaling", "rope_parameters"):
        if values.get(name) is not None:
            check_rope(values[name], f"{name}.")
    for index, sizes in (values.get("per_layer_config") or {}).items():
        if not str(index).isdigit():
            raise ValueError(f"per_layer_config: expected layer indices as keys, got {index!r}; correct it in the configuration")
        mapping(f"per_layer_config.{index}", sizes)
        _check(sizes, CONFIG_FIELDS, f"per_layer_config.{index}.")


def check_rope(values: Mapping[str, Any], prefix: str = "") -> None:
    """The same for rope parameters, and for those of each kind of layer among them."""
    _check(values, ROPE_FIELDS, prefix)
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check(value, ROPE_FIELDS, f"{prefix}{name}.")


def _check(values: Mapping[str, Any], fields: Mapping[str, Callable], prefix: str) -> None:
    for name, check in fields.items():
        if values.get(name) is not None:
            check(f"{prefix}{name}", values[name])
