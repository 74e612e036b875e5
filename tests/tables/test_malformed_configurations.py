"""A config.json is a file from somebody else: a value of a wrong type is refused by the name of its field and makes no table."""

import math

import numpy as np
import pytest
import torch

from decode_rope import RopeTable
from decode_rope.tables.hf.reader import CONFIG_FIELDS, ROPE_FIELDS, flag, integer, number, size, text

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128, "rope_theta": 1e4}
VALUES = [True, 0, -1, 0.5, math.nan, math.inf, "x", [], [object()], {}, {"x": 1}, object(), np.zeros(2), torch.zeros(2), b"x", 1j]
# Wrong for a field whatever else the configuration says.
WRONG = {
    integer: lambda value: isinstance(value, bool) or not isinstance(value, int) or value < 0,
    size: lambda value: isinstance(value, bool) or not isinstance(value, int) or value < 1,
    number: lambda value: isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf,
    flag: lambda value: not isinstance(value, bool),
    text: lambda value: not isinstance(value, str),
}


def is_wrong(check, value) -> bool:
    if check in WRONG:
        return WRONG[check](value)
    if check is CONFIG_FIELDS["rope_scaling"]:
        return not isinstance(value, dict)
    return not isinstance(value, list | int | float | bool) or (isinstance(value, list) and bool(value))


def shown(value) -> str:
    return f"{type(value).__name__}-{value!r}" if isinstance(value, bool | int | float | str) else type(value).__name__


def refused(call, name: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value).startswith(name), str(caught.value)


@pytest.mark.parametrize("value", VALUES, ids=shown)
@pytest.mark.parametrize("name", CONFIG_FIELDS)
def test_a_field_of_a_wrong_type_is_refused_by_name(name, value):
    if not is_wrong(CONFIG_FIELDS[name], value):
        pytest.skip("not wrong for this field")
    refused(lambda: RopeTable.from_hf({**LLAMA, name: value}), name)


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", VALUES, ids=shown)
@pytest.mark.parametrize("name", ROPE_FIELDS)
def test_a_rope_parameter_of_a_wrong_type_is_refused_by_its_dotted_name(name, value, where):
    if not is_wrong(ROPE_FIELDS[name], value):
        pytest.skip("not wrong for this field")
    refused(lambda: RopeTable.from_hf({**LLAMA, where: {"rope_type": "default", name: value}}), f"{where}.{name}")
    refused(lambda: RopeTable.build(16, 128, scaling={"rope_type": "default", name: value}), f"scaling.{name}")


def test_parameters_of_one_kind_of_layer_are_looked_at_too():
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": "x"}, "sliding_attention": {"rope_theta": 1e4}}
    refused(lambda: RopeTable.from_hf({**LLAMA, "rope_parameters": kinds}), "rope_parameters.full_attention.rope_theta")


@pytest.mark.parametrize("sizes", [{0: {"head_dim": "x"}}, {"a": {}}, {0: 1}], ids=["head_dim", "no index", "no mapping"])
def test_sizes_of_one_layer_are_looked_at_too(sizes):
    refused(lambda: RopeTable.from_hf({**LLAMA, "per_layer_config": sizes}), "per_layer_config")


ARGUMENTS = {
    "rotary_dim": lambda value: not (isinstance(value, int) and not isinstance(value, bool) and value > 0),
    "max_position": lambda value: not (isinstance(value, int) and not isinstance(value, bool) and value > 0),
    "theta": lambda value: isinstance(value, bool) or not isinstance(value, int | float) or not value > 0,
    "scaling": lambda value: not isinstance(value, dict),
    "is_neox": lambda value: not isinstance(value, bool),
    "axis_map": lambda value: not isinstance(value, list | torch.Tensor),
    "exactness": lambda value: True,
    "device": lambda value: isinstance(value, bool) or not isinstance(value, str | int),
}


@pytest.mark.parametrize("value", VALUES, ids=shown)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_build_of_a_wrong_type_is_refused_by_name(name, value):
    if not ARGUMENTS[name](value):
        pytest.skip("not wrong for this argument")
    refused(lambda: RopeTable.build(**{"rotary_dim": 16, "max_position": 8, name: value}), name)


@pytest.mark.parametrize("value", VALUES, ids=shown)
@pytest.mark.parametrize("name", ["max_position", "layer_type", "long", "exactness", "config"])
def test_an_argument_of_from_hf_of_a_wrong_type_is_refused_by_name(name, value):
    if name == "long" and value is True:
        name, value = "long", True  # right in type, and still wrong: no LongRoPE here
    if (name == "layer_type" and type(value) is int and value == 0) or (name == "config" and isinstance(value, dict)):
        pytest.skip("not wrong for this argument")
    refused(lambda: RopeTable.from_hf(**{"config": LLAMA, name: value}), name)


@pytest.mark.parametrize("name", CONFIG_FIELDS)
def test_none_means_absent(name):
    if name in ("hidden_size", "num_attention_heads", "max_position_embeddings", "model_type"):
        pytest.skip("this configuration needs it")
    RopeTable.from_hf({**LLAMA, name: None})


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("low, high", [(4.0, 1.0), (1.0, 1.0), (0.0, 1.0)])
def test_llama3_with_frequency_factors_that_leave_no_middle_is_refused(low, high):
    scaling = {**LLAMA3, "low_freq_factor": low, "high_freq_factor": high}
    refused(lambda: RopeTable.build(16, 128, scaling=scaling), "low_freq_factor")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 0.5},
        {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 0.5, "max_position_embeddings": 128},
        {**LLAMA3, "factor": 0.5, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_a_factor_below_one_warns_by_name_as_in_transformers(scaling):
    with pytest.warns(UserWarning, match="^factor: expected at least 1"):
        RopeTable.build(16, 128, scaling=scaling)
