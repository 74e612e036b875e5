"""Every fault of a norm, an axis map or a scale is an error that names it, before anything is written."""

from dataclasses import dataclass

import pytest
import torch
from cases import moved
from norm_cases import BF16, FP32, FUNCTIONS, NormSpec, build, run

import decode_rope
from decode_rope import QKNorm
from decode_rope.append.norm import NormFacts, norm_fields

both = pytest.mark.parametrize("name", FUNCTIONS)
D, TOKENS = 64, 3
SPEC = NormSpec(tokens=TOKENS, heads=(2, 1), head_dim=D, scaled=True, axes=3, q_out=True)


@dataclass
class Wrong:
    """A field of the norm, or an argument, with a value that means nothing. said: how the message begins, a regular expression."""

    value: object
    error: type
    said: str


def on_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


NORM = {
    "eps": [
        Wrong("1e-6", TypeError, "expected a number, got str"),
        Wrong(None, TypeError, "expected a number, got NoneType"),
        Wrong(True, TypeError, "expected a number, got bool"),
        Wrong(torch.tensor(1e-6), TypeError, "expected a number, got Tensor"),
        Wrong(0.0, ValueError, "expected a finite number of at least 1e-25, got 0.0"),
        Wrong(-1e-6, ValueError, "expected a finite number of at least 1e-25, got -1e-06"),
        Wrong(1e-34, ValueError, "expected a finite number of at least 1e-25, got 1e-34"),
        Wrong(float("inf"), ValueError, "expected a finite number of at least 1e-25, got inf"),
        Wrong(float("nan"), ValueError, "expected a finite number of at least 1e-25, got nan"),
    ],
    "weight_offset": [
        Wrong("1", TypeError, "expected a number, got str"),
        Wrong(False, TypeError, "expected a number, got bool"),
        Wrong(float("-inf"), ValueError, "expected a finite number, got -inf"),
        Wrong(float("nan"), ValueError, "expected a finite number, got nan"),
    ],
    "order": [
        Wrong("Before", ValueError, 'expected "before" or "after", got \'Before\''),
        Wrong(1, ValueError, 'expected "before" or "after", got 1'),
        Wrong(["after"], ValueError, 'expected "before" or "after", got '),
    ],
    "v_norm": [Wrong(1, TypeError, "expected a bool, got int"), Wrong(None, TypeError, "expected a bool, got NoneType")],
    "rounded": [Wrong(0, TypeError, "expected a bool, got int")],
}
WEIGHT = [
    Wrong(1.0, TypeError, "expected a torch.Tensor, got float"),
    Wrong([1.0] * D, TypeError, "expected a torch.Tensor, got list"),
    Wrong(torch.ones(D, dtype=torch.float64), TypeError, "expected dtype bfloat16, float16 or float32, got torch.float64"),
    Wrong(torch.ones(D, dtype=torch.int32), TypeError, "expected dtype bfloat16, float16 or float32, got torch.int32"),
    Wrong(torch.ones(D - 1), ValueError, rf"expected shape \[{D}\], one per element of a head, got \({D - 1},\)"),
    Wrong(torch.ones(2 * D), ValueError, rf"expected shape \[{D}\].*over all heads together needs a launch of its own"),
    Wrong(torch.ones(1, D), ValueError, rf"expected shape \[{D}\], one per element of a head, got \(1, {D}\)$"),
    Wrong(torch.ones(()), ValueError, rf"expected shape \[{D}\], one per element of a head, got \(\)$"),
    Wrong(torch.ones(2 * D)[::2], ValueError, r"expected stride 1, got 2; call \.contiguous"),
    Wrong(torch.ones(1).expand(D), ValueError, r"expected stride 1, got 0; call \.contiguous"),
    Wrong(on_meta(torch.ones(D)), ValueError, "expected device .* as q, got meta; move it"),
    Wrong(with_gradient(torch.ones(D)), ValueError, "expected a tensor that needs no gradient"),
]
ARGUMENTS = {
    "q_token_scale": [
        Wrong(2.0, TypeError, "expected a torch.Tensor, got float"),
        Wrong(torch.ones(TOKENS, dtype=BF16), TypeError, "expected float32, got torch.bfloat16"),
        Wrong(torch.ones(TOKENS, dtype=torch.float64), TypeError, "expected float32, got torch.float64"),
        Wrong(torch.ones(TOKENS + 1), ValueError, rf"expected shape \[{TOKENS}\], one per token of q, got \({TOKENS + 1},\)"),
        Wrong(torch.ones(TOKENS, 1), ValueError, rf"expected shape \[{TOKENS}\], one per token of q, got \({TOKENS}, 1\)"),
        Wrong(torch.ones(()), ValueError, rf"expected shape \[{TOKENS}\]"),
        Wrong(torch.ones(2 * TOKENS)[::2], ValueError, r"expected stride 1, got 2; call \.contiguous"),
        Wrong(on_meta(torch.ones(TOKENS)), ValueError, "expected device .* as q, got meta; move it"),
        Wrong(with_gradient(torch.ones(TOKENS)), ValueError, "expected a tensor that needs no gradient"),
    ],
    "axis_map": [
        Wrong([0, 1], TypeError, "expected a torch.Tensor, got list"),
        Wrong(torch.zeros(D // 2, dtype=torch.int32), TypeError, "expected int8, got torch.int32"),
        Wrong(torch.zeros(D // 2 + 1, dtype=torch.int8), ValueError, rf"expected shape \[{D // 2}\]"),
        Wrong(torch.zeros(D, dtype=torch.int8)[::2], ValueError, "expected stride 1, got 2"),
        Wrong(on_meta(torch.zeros(D // 2, dtype=torch.int8)), ValueError, "expected device .* as q, got meta"),
    ],
    "norm": [
        Wrong(1e-6, TypeError, "expected a decode_rope.QKNorm or None, got float"),
        Wrong((None, None, 1e-6, 0.0, "before", False, False), TypeError, "expected a decode_rope.QKNorm or None, got tuple"),
        Wrong(NormFacts(1e-6, 0.0, False, False, False), TypeError, "expected a decode_rope.QKNorm or None, got NormFacts"),
    ],
}
CASES = [(f"norm.{field}", wrong) for field, found in NORM.items() for wrong in found]
CASES += [(f"norm.{field}", wrong) for field in ("q_weight", "k_weight") for wrong in WEIGHT]
CASES += [(argument, wrong) for argument, found in ARGUMENTS.items() for wrong in found]


def arguments_with(case, at: str, value) -> dict:
    value, field = moved(value, case["q"].device), at.removeprefix("norm.")
    return case.arguments() | ({"norm": case.norm._replace(**{field: value})} if field != at else {at: value})


def assert_refused(case, function, at: str, wrong: Wrong) -> None:
    before = case.clone()
    with torch.enable_grad(), pytest.raises(wrong.error, match=rf"^{at}: {wrong.said}"):
        function(**arguments_with(case, at, wrong.value))
    for storage, x in before.storages.items():
        assert torch.equal(case.storages[storage], x), storage


@pytest.mark.anywhere
@both
@pytest.mark.parametrize(("at", "wrong"), CASES, ids=[f"{at}-{i}" for i, (at, _) in enumerate(CASES)])
def test_a_fault_is_named_and_nothing_is_written(device, name, at, wrong):
    assert_refused(build(SPEC, device), FUNCTIONS[name], at, wrong)


@pytest.mark.kernel
@both
def test_a_fault_is_found_after_a_good_call_too(device, name):
    """When there is a plan for such calls already."""
    case = build(SPEC, device)
    run(case, FUNCTIONS[name])
    for at, wrong in CASES:
        assert_refused(case, FUNCTIONS[name], at, wrong)


@pytest.mark.anywhere
@both
def test_weights_and_scales_may_not_be_what_is_written(device, name):
    case = build(SPEC.but(dtype=FP32, axes=0), device)
    arguments = case.arguments()
    inside = arguments["q_out"].view(-1)[:D] if arguments["q_out"].is_contiguous() else arguments["q_out"][0, 0]
    with pytest.raises(ValueError, match=r"^q_out: expected memory of its own, got memory shared with norm\.q_weight"):
        FUNCTIONS[name](**arguments | {"norm": case.norm._replace(q_weight=inside)})
    with pytest.raises(ValueError, match=r"^k_cache: expected memory of its own, got memory shared with q_token_scale"):
        FUNCTIONS[name](**arguments | {"q_token_scale": arguments["k_cache"][0, 0, 0, :TOKENS]})


@pytest.mark.anywhere
@both
def test_what_is_right_though_it_looks_odd(device, name):
    """One weight for both, integers for numbers, weights while gradients are off, k alone with a weight that only q has."""
    case = build(SPEC.but(axes=0), device)
    weight = case["q_weight"]
    FUNCTIONS[name](**case.arguments() | {"norm": QKNorm(weight, weight, 1, 1)})
    with torch.no_grad():
        FUNCTIONS[name](**case.arguments() | {"norm": QKNorm(with_gradient(weight), None, 1e-6)})
    FUNCTIONS[name](**build(SPEC.but(axes=0, heads=(2, 0)), device).arguments())


def test_the_fields_of_a_norm():
    weight = torch.ones(4)
    got = norm_fields(QKNorm(weight, None, 1, 2, "after", True, True))
    assert got == {"q_weight": weight, "k_weight": None, "norm": NormFacts(1.0, 2.0, True, True, True)}
    assert [type(x) for x in got["norm"][:2]] == [float, float]
    assert norm_fields(None) == {}


def test_a_prepared_op_refuses_the_same(device="cpu"):
    shape = dict(num_q_heads=2, num_kv_heads=1, head_dim=D, page_size=4, dtype=BF16, device=device)
    table = decode_rope.RopeTable.build(D, 32)
    good = QKNorm(torch.ones(D), torch.ones(D), 1e-6)
    decode_rope.DecodeRope(table, norm=good, **shape)
    for at, wrong in CASES:
        field = at.removeprefix("norm.")
        if at == "norm":
            norm = wrong.value
        elif field != at and "gradient" not in wrong.said:
            norm = good._replace(**{field: wrong.value})
        else:
            continue
        said = wrong.said.replace(" as q, got meta; move it", ", got meta")
        with pytest.raises(wrong.error, match=rf"^{at}: {said}"):
            decode_rope.DecodeRope(table, norm=norm, **shape)
    with pytest.raises(TypeError, match=r"^axis_map: expected a torch.Tensor, got list"):
        decode_rope.DecodeRope(table, axes=3, axis_map=[0] * (D // 2), **shape)
    with pytest.raises(ValueError, match=r"^axis_map: expected one with axes=3"):
        decode_rope.DecodeRope(table, axes=3, **shape)
    with pytest.raises(TypeError, match=r"^axes: expected an int"):
        decode_rope.DecodeRope(table, axes=True, **shape)
