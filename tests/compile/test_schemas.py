"""The schemas of the operators are made of the record: every field of a call reaches what runs it, once and by its own name."""

import inspect

import pytest
import torch

import decode_rope
from decode_rope.append.arguments import ROW, Append, Rotation
from decode_rope.append.norm import NormFacts
from decode_rope.compile import append, rope

SCHEMAS = {operator.name(): (operator._schema, way) for (_, way), (operator, _) in append.OPERATORS.items()}
OUTPUTS = {"q_out": 0, "k_out": 1}  # which part of a way says that it is written in place


@pytest.mark.parametrize("name", SCHEMAS)
def test_all_fields_of_an_append_are_arguments(name):
    schema, way = SCHEMAS[name]
    names = [argument.name for argument in schema.arguments]
    absent = {output for output, place in OUTPUTS.items() if way[place]}
    assert len(names) == len(set(names)) and set(names) == set(Append._fields) - absent


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_an_operator_writes_is_what_its_way_says(name):
    schema, (q_in_place, k_in_place) = SCHEMAS[name]
    written = {argument.name for argument in schema.arguments if argument.is_write}
    always = {"k_cache", "v_cache", "k_scale_out", "v_scale_out"}
    assert written == {"q" if q_in_place else "q_out", "k" if k_in_place else "k_out"} | always
    assert not schema.returns


@pytest.mark.parametrize("name", SCHEMAS)
def test_kinds_are_those_of_the_record(name):
    """What may be None in a record may be in a schema."""
    schema, _ = SCHEMAS[name]
    hints = inspect.get_annotations(Append)
    for argument in schema.arguments:
        optional = "None" in str(hints[argument.name]) or argument.name == "geometry"
        tensor = argument.name in Append.ROLES
        kind = str(argument.type)
        assert kind.startswith("Optional[") == optional or Append.ROLES[argument.name].kind == ROW, argument.name
        assert ("Tensor" in kind) == tensor, argument.name


def test_the_operator_gets_every_argument_of_a_call(monkeypatch):
    """Values that are all different, so that one in another one's place shows."""
    q, k, v = torch.ones(3, 2, 16), torch.ones(3, 1, 16), torch.ones(3, 1, 16)
    others = [torch.ones(n) for n in range(1, len(Append.ROLES) - 2)]
    values = dict(zip(Append.ROLES, [q, k, v, *others], strict=True))
    values |= dict(
        tokens_per_request=7, is_neox=False, kv_layout="HND", enable_pdl=True, norm=NormFacts(1e-5, 1.0, True, False, True),
        kv_dtype=torch.int8, metadata_ready=True, geometry=[1, 2, 1, 2, 4, 1, -1],
    )  # fmt: skip
    seen = []
    for function, run in append._RUNNERS.items():
        monkeypatch.setattr(run.book, "run", seen.append)
        append.append(function, Append(**values))
        call = seen.pop()
        for name in Append.ROLES:
            assert getattr(call, name) is values[name], (function, name)
        assert [getattr(call, name) for name in ("tokens_per_request", "is_neox", "kv_layout")] == [7, False, "HND"]
        assert (call.enable_pdl, call.metadata_ready, list(call.geometry)) == (True, True, values["geometry"])
        assert (call.norm, call.kv_dtype) == (values["norm"], torch.int8)


def test_the_record_is_the_public_functions():
    """Their arguments are its fields, but for what is said of a `DecodeRope` alone, and for what decode does not know."""
    of_prefill = set(inspect.signature(decode_rope.rope_append_prefill).parameters)
    # A norm brings its weights, and whether a scale is read or written shows in its shape.
    inside = {"q_weight", "k_weight", "k_scale_out", "v_scale_out"}
    assert of_prefill == set(Append._fields) - {"metadata_ready", "geometry"} - inside
    assert set(inspect.signature(decode_rope.rope_append_decode).parameters) == of_prefill - {"cu_seqlens_q"}
    assert set(inspect.signature(decode_rope.apply_rope).parameters) == set(Rotation._fields) - {"report", "geometry"}


@pytest.mark.parametrize("operator", [rope._ROTATE, rope._ROTATE_IN_PLACE, rope._ROTATE_OUT], ids=lambda operator: operator.name())
def test_operators_of_a_rotation_take_its_fields(operator):
    names = {argument.name for argument in operator._schema.arguments}
    assert names | {"out", "report"} == set(Rotation._fields) - {"geometry"}
    assert {argument.name for argument in operator._schema.arguments if argument.is_write} <= {"x", "out"}
