"""`apply_rope` under torch.compile: whole graphs, the bits and the gradients of eager calls, faults counted once."""

import pytest
import torch
from compilers import inductor, recorded

import decode_rope
from decode_rope import apply_rope, get_op, reference
from decode_rope.append import faults
from decode_rope.append.faults import fault_buffer
from decode_rope.compile import rope as operators

LAYOUTS = ("NHD", "HND")


def made(layout: str, device, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x of 2 sequences, 5 tokens, 3 heads of 16; a table of 32 positions; positions with padding among them."""
    shape = (2, 5, 3, 16) if layout == "NHD" else (2, 3, 5, 16)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device, dtype)
    table = decode_rope.RopeTable.build(8, 32, device=device).cos_sin_cache
    return x, table, torch.tensor([[3, 1, -1, 31, 7], [0, 2, 4, 6, 8]], device=device)


def compiled(backend="aot_eager"):
    return torch.compile(apply_rope, fullgraph=True, backend=backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["new", "in place", "out"])
def test_opcheck(way, layout, device):
    x, table, positions = made(layout, device)
    out = {"new": None, "in place": x, "out": torch.empty_like(x)}[way]
    ((operator, arguments),) = recorded(operators.rotate, x, out, table, positions, True, None, False, layout)
    assert operator.name() == "decode_rope::apply_rope_v2" + {"new": "", "in place": "_in_place", "out": "_out"}[way]
    if way == "new":
        arguments = (arguments[0].clone().requires_grad_(), *arguments[1:])
    outcome = torch.library.opcheck(operator, arguments)
    assert len(outcome) == 4 and set(outcome.values()) == {"SUCCESS"}


@pytest.mark.anywhere
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, dict(is_neox=False), dict(inverse=True)], ids=str)
def test_bits_of_every_way_to_give_the_result(options, layout, device):
    x, table, positions = made(layout, device, torch.bfloat16)
    want = apply_rope(x, table, positions, layout=layout, **options)
    function = compiled()
    assert torch.equal(function(x, table, positions, layout=layout, **options), want)
    out, own = torch.zeros_like(x), x.clone()
    assert function(x, table, positions, layout=layout, out=out, **options) is out
    assert function(own, table, positions, layout=layout, out=own, **options) is own
    assert torch.equal(out, want) and torch.equal(own, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_through_a_graph(layout, transposed, device):
    """Also for gradients whose last dimension is not the contiguous one."""
    x, table, positions = made(layout, device)
    weight = torch.randn(x.shape[-1:] + x.shape[:-1], device=device).movedim(0, -1) if transposed else torch.randn_like(x)

    def loss(function, x):
        return (function(x * 2, table, positions, layout=layout) * weight).sum()

    grads = []
    for function in (apply_rope, compiled(), torch.compile(apply_rope, backend="aot_eager", dynamic=True)):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(function, leaf), leaf)
        grads.append(grad)
    assert all(torch.equal(grad, grads[0]) for grad in grads[1:])


def test_gradcheck_of_the_operator():
    x, table, positions = made("NHD", "cpu", torch.float64)

    def call(x):
        return operators.rotate(x, None, table, positions, True, None, False, "NHD")

    leaf = x.requires_grad_()
    assert torch.autograd.gradcheck(call, leaf) and torch.autograd.gradgradcheck(call, leaf)


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_through_an_output(in_place, device):
    x, table, positions = made("NHD", device)

    def loss(x):
        y = x * 2
        out = y if in_place else torch.zeros_like(y)
        apply_rope(y, table, positions, out=out)
        return (out * out.detach().sin()).sum()

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        function(leaf).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_faults_of_a_graph_are_counted_once(device):
    x, table, _ = made("NHD", device)
    positions = torch.tensor([3, 99, 0, -1, 5], device=device)
    leaf = x.clone().requires_grad_()
    compiled()(leaf, table, positions).sum().backward()
    with pytest.raises(IndexError, match=r"2 faulty row\(s\).*row 1: position 99 is past"):
        decode_rope.check_faults()


def test_the_fault_record_is_made_while_tracing(device, monkeypatch):
    monkeypatch.setattr(faults, "_BUFFERS", {})
    x, table, _ = made("NHD", device)
    torch.compile(apply_rope, fullgraph=True, backend=lambda graph, _: lambda *arguments: (x,))(x, table)
    assert list(faults._BUFFERS) == [fault_buffer(x.device).device]


@inductor
def test_a_layer_compiled_by_inductor_trains_as_an_eager_one(device):
    x, table, positions = made("HND", device)
    weight = torch.randn(16, 16, device=device)

    def layer(x, weight):
        q = apply_rope(x @ weight, table, positions, layout="HND")
        return (q @ q.mT).softmax(-1).sum(dim=-1).square().mean() + q.square().mean()

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        leaf = weight.clone().requires_grad_()
        value = function(x, leaf)
        value.backward()
        results.append((value, leaf.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_the_registry_operator_compiles_whole(backend, device):
    x, _, positions = made("HND", device)
    op = get_op("rope", backend)
    for at in (positions.clamp(0), positions[0].clamp(0)):
        got = torch.compile(op.forward, fullgraph=True, backend="aot_eager")(x, at)
        assert torch.equal(got, op.forward(x, at))


def test_errors_are_those_of_eager_calls(device):
    x, table, positions = made("NHD", device)
    with pytest.raises(TypeError, match=r"^positions: expected"):
        torch.compile(apply_rope, backend="aot_eager")(x, table, positions.float())
    with pytest.raises(ValueError, match=r"^cos_sin_cache: expected a tensor that needs no gradient"):
        torch.compile(apply_rope, backend="aot_eager")(x, table.clone().requires_grad_(), positions)


BAD_OUTS = {
    "dtype": lambda x: torch.zeros_like(x, dtype=torch.bfloat16),
    "broadcast": lambda x: torch.zeros(1, *x.shape, device=x.device),
    "strides": lambda x: torch.zeros(*x.shape[:2], 16, 3, device=x.device).mT,
    "expanded": lambda x: torch.zeros_like(x[:1]).expand_as(x),
}


@pytest.mark.parametrize("name", BAD_OUTS)
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_an_out_that_an_eager_call_refuses(wants_gradient, name, device):
    x, table, positions = made("NHD", device)
    out = BAD_OUTS[name](x)

    def call(x, out):
        return apply_rope(x * 2, table, positions, out=out)

    leaf = x.clone().requires_grad_(wants_gradient)
    errors = []
    for function in (call, torch.compile(call, backend="aot_eager")):
        with pytest.raises((TypeError, ValueError), match=r"^out: expected") as error:
            function(leaf, out)
        errors.append(str(error.value))
    assert errors[0] == errors[1] and not out.any()


def test_forward_mode_is_refused_and_not_forgotten(device):
    from torch.autograd import forward_ad

    x, table, positions = made("NHD", device)

    def tangent(x):
        return torch.func.jvp(lambda x: apply_rope(x, table, positions), (x,), (torch.ones_like(x),))[1]

    def dual(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(apply_rope(forward_ad.make_dual(x, torch.ones_like(x)), table, positions)).tangent

    for function in (tangent, dual):
        for way in (function, torch.compile(function, backend="aot_eager")):
            with pytest.raises(NotImplementedError, match=r"^apply_rope: no derivative in forward mode"):
                way(x)
    with forward_ad.dual_level():
        assert torch.equal(apply_rope(x, table, positions), reference.apply_rope(x, table, positions))


def test_gradients_by_functional_transforms(device):
    x, table, positions = made("NHD", device)
    weight = torch.randn_like(x)
    gradient = torch.func.grad(lambda x: (apply_rope(x, table, positions) * weight).sum())(x)
    assert torch.equal(gradient, apply_rope(weight, table, positions, inverse=True))


def test_export(device):
    x, table, positions = made("HND", device)

    class Turn(torch.nn.Module):
        def forward(self, x, positions):
            return apply_rope(x, table, positions, layout="HND") + 1

    program = torch.export.export(Turn(), (x, positions))
    assert sum("apply_rope" in str(node.target) for node in program.graph.nodes) == 1
    assert torch.equal(program.module()(x, positions), apply_rope(x, table, positions, layout="HND") + 1)
