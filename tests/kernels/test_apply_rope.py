"""The plain rotation: every layout and kind of positions, out and in place, backwards, and its gradient."""

import pytest
import torch
from cases import FLOATS, bits
from lanes import ON_GPU

import decode_rope
from decode_rope import apply_rope, reference
from decode_rope.append.faults import fault_buffer

ROWS = 32  # of the table


def table(rotary_dim: int, device, seed: int = 0) -> torch.Tensor:
    angle = torch.rand(ROWS, rotary_dim // 2, generator=torch.Generator().manual_seed(seed)) * 6.3
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(device)


def randn(*shape: int, device, dtype=torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def run_both(x, cos_sin, positions=None, **options):
    """The public function's result and faults are the reference's, bit for bit. Returns the result."""
    buffer = fault_buffer(x.device)
    fresh = torch.tensor([0, decode_rope.reference.NO_RECORD], device=x.device)
    faults = fresh.clone()
    want = reference.apply_rope(x.clone(), cos_sin, positions, faults=faults, **options)
    buffer.copy_(fresh)
    got = apply_rope(x, cos_sin, positions, **options)
    assert got.shape == x.shape and got.dtype == x.dtype
    assert torch.equal(bits(got), bits(want))
    assert buffer.tolist() == faults.tolist()
    return got


BATCHED = torch.randint(0, ROWS, (3, 7), generator=torch.Generator().manual_seed(5))
POSITIONS = {
    "none": None,
    "[S]": BATCHED[0],
    "[B, S]": BATCHED,
    "[1, S]": BATCHED[1:2],
    "[B, S] of a wider one": BATCHED.repeat(1, 2)[:, 3:10],
    "[S] expanded to [B, S]": BATCHED[2].expand(3, 7),
    "int32": BATCHED.int(),
}


@pytest.mark.kernel
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("inverse", [False, True], ids=["forwards", "backwards"])
def test_layouts_and_positions(positions, layout, inverse, device):
    x = randn(*(3, 7, 5, 64) if layout == "NHD" else (3, 5, 7, 64), device=device, dtype=torch.bfloat16)
    positions = None if positions is None else positions.to(device)
    run_both(x, table(64, device), positions, layout=layout, inverse=inverse)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 64), (96, 96), (80, 20), (16, 2)])
def test_dtypes_pairings_and_partial_rotation(dtype, is_neox, head_dim, rotary_dim, device):
    x = randn(9, 4, head_dim, device=device, dtype=dtype)
    got = run_both(x, table(rotary_dim, device), BATCHED.flatten()[:9].to(device), is_neox=is_neox)
    assert torch.equal(bits(got[..., rotary_dim:]), bits(x[..., rotary_dim:]))
    assert not torch.equal(got[..., :rotary_dim], x[..., :rotary_dim])


VIEWS = {
    "part of a packed qkv": lambda d: randn(2, 6, 12 * 64, device=d, dtype=torch.float16)[..., 128:448].unflatten(-1, (5, 64)),
    "transposed to NHD": lambda d: randn(2, 5, 6, 64, device=d, dtype=torch.float16).transpose(1, 2),
    "one element off": lambda d: randn(2 * 6 * 5 * 64 + 1, device=d, dtype=torch.float16)[1:].view(2, 6, 5, 64),
    "odd rows": lambda d: randn(2, 6, 5, 67, device=d, dtype=torch.float16)[..., :64],
    "batch expanded": lambda d: randn(1, 6, 5, 64, device=d, dtype=torch.float16).expand(2, 6, 5, 64),
    "batch of one": lambda d: randn(1, 6, 5, 64, device=d, dtype=torch.float16),
    "one token": lambda d: randn(2, 1, 5, 64, device=d, dtype=torch.float16),
    "one head": lambda d: randn(2, 6, 1, 64, device=d, dtype=torch.float16),
    "empty batch": lambda d: randn(0, 6, 5, 64, device=d, dtype=torch.float16),
    "empty sequence": lambda d: randn(2, 0, 5, 64, device=d, dtype=torch.float16),
}  # fmt: skip


@pytest.mark.kernel
@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_any_strides_out_and_in_place(make, device):
    x, cos_sin = make(device), table(64, device)
    whole = x if x._base is None else x._base
    before = whole.clone()
    want = run_both(x, cos_sin)
    assert torch.equal(bits(whole), bits(before)), "x is not to be changed"
    out = torch.full_like(want, float("nan"))
    assert apply_rope(x, cos_sin, out=out) is out
    assert torch.equal(bits(out), bits(want))
    if 0 not in x.stride():
        assert apply_rope(x, cos_sin, out=x) is x
        assert torch.equal(bits(x), bits(want))
        x.copy_(before.as_strided(x.shape, x.stride(), x.storage_offset()))
        assert torch.equal(bits(whole), bits(before)), "nothing beside x is to be changed"


@pytest.mark.kernel
def test_bad_rows_pass_through_and_are_counted_once_a_token(device):
    x = randn(2, 4, 3, 32, device=device, dtype=torch.bfloat16)
    positions = torch.tensor([[1, -1, ROWS, 2], [2**40, 0, -5, 3]], device=device)
    got = run_both(x, table(32, device), positions)
    assert fault_buffer(x.device)[0] == 2
    for b, s in ((0, 1), (0, 2), (1, 0), (1, 2)):
        assert torch.equal(bits(got[b, s]), bits(x[b, s]))
    run_both(x, table(32, device), torch.tensor([0, ROWS, ROWS + 1, 1], device=device))
    assert fault_buffer(x.device)[0] == 4
    with pytest.raises(IndexError, match="row 1: position 32 is past the end"):
        decode_rope.check_faults()


@pytest.mark.kernel
def test_numbers_are_those_of_the_append(device):
    q = randn(6, 4, 64, device=device, dtype=torch.bfloat16)
    positions, cos_sin = BATCHED.flatten()[:6].to(device), table(64, device)
    want = decode_rope.rope_append_decode(q.clone(), None, None, None, None, cos_sin, positions)
    assert torch.equal(bits(apply_rope(q, cos_sin, positions)), bits(want))


@pytest.mark.anywhere
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_row_of_a_batch_is_that_row_alone(layout, device):
    x = randn(3, 7, 7, 32, device=device, dtype=torch.bfloat16)
    positions, cos_sin = BATCHED.to(device), table(32, device)
    whole = apply_rope(x, cos_sin, positions, layout=layout)
    for row in range(3):
        alone = apply_rope(x[row : row + 1], cos_sin, positions[row : row + 1], layout=layout)
        assert torch.equal(bits(alone[0]), bits(whole[row]))


@pytest.mark.anywhere
def test_turning_back_undoes_it(device):
    x, cos_sin = randn(5, 3, 64, device=device), table(64, device)
    assert torch.allclose(apply_rope(apply_rope(x, cos_sin), cos_sin, inverse=True), x, atol=1e-6)


@pytest.mark.anywhere
def test_a_table_object_brings_its_pairing(device):
    class Table:
        cos_sin_cache, is_neox, axis_map = table(32, device), False, None

    x = randn(5, 3, 32, device=device)
    assert torch.equal(apply_rope(x, Table()), apply_rope(x, Table.cos_sin_cache, is_neox=False))
    assert not torch.equal(apply_rope(x, Table()), apply_rope(x, Table.cos_sin_cache))


class TestGradients:
    """The gradient is the inverse rotation of the gradient."""

    @pytest.mark.parametrize("options", [dict(), dict(is_neox=False), dict(inverse=True, layout="HND")], ids=str)
    def test_gradcheck_in_float64(self, options):
        x = torch.randn(2, 3, 3, 6, dtype=torch.float64, requires_grad=True)
        positions = torch.tensor([[1, 5, -1], [9, 40, 3]])

        def rotate(x):
            return apply_rope(x, table(4, "cpu"), positions, **options)

        assert torch.autograd.gradcheck(rotate, (x,))
        assert torch.autograd.gradgradcheck(rotate, (x,))

    @pytest.mark.anywhere
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
    def test_gradient_is_that_of_autograd_through_the_reference(self, dtype, is_neox, device):
        x = randn(2, 6, 3, 64, device=device, dtype=dtype).requires_grad_()
        positions = torch.tensor([[3, 1, -1, 7, 31, 0], [5, 6, 7, ROWS, 2, 1]], device=device)
        weight = randn(2, 6, 3, 64, device=device, dtype=dtype, seed=2)
        grads = []
        for function in (apply_rope, reference.apply_rope):
            x.grad = None
            function(x, table(48, device), positions, is_neox=is_neox).backward(weight)
            grads.append(x.grad)
        assert grads[0].dtype == dtype
        assert torch.equal(*grads)

    @pytest.mark.anywhere
    def test_gradients_that_are_expanded_or_strided(self, device):
        x = randn(2, 6, 3, 32, device=device).requires_grad_()
        apply_rope(x, table(32, device)).sum().backward()
        want = reference.apply_rope(torch.ones_like(x), table(32, device), inverse=True)
        assert torch.equal(x.grad, want)
        x.grad = None
        apply_rope(x, table(32, device)).transpose(-1, -2).contiguous().sum(1).square().sum().backward()
        assert x.grad.isfinite().all() and x.grad.abs().sum() > 0

    @pytest.mark.anywhere
    def test_in_place_and_out_keep_the_graph(self, device):
        leaf = randn(2, 6, 3, 32, device=device).requires_grad_()
        cos_sin, grads = table(32, device), []
        for place in ("new", "x", "other"):
            leaf.grad = None
            x = leaf * 2
            out = {"new": None, "x": x, "other": torch.empty_like(x)}[place]
            y = apply_rope(x, cos_sin, out=out)
            assert out is None or y is out
            assert y.requires_grad
            (y * y).sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])

    @pytest.mark.anywhere
    def test_faults_are_not_counted_again_on_the_way_back(self, device):
        x = randn(4, 3, 32, device=device).requires_grad_()
        y = apply_rope(x, table(32, device), torch.tensor([0, ROWS, 1, 2], device=device))
        y.sum().backward()
        assert fault_buffer(x.device)[0] == 1

    @pytest.mark.anywhere
    def test_positions_changed_before_the_gradient_are_an_error(self, device):
        x = randn(4, 3, 32, device=device).requires_grad_()
        positions = torch.arange(4, device=device)
        y = apply_rope(x, table(32, device), positions)
        positions += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    @pytest.mark.anywhere
    def test_without_gradients_anything_may_need_one(self, device):
        x, cos_sin = randn(4, 3, 32, device=device), table(32, device)
        with torch.no_grad():
            assert not apply_rope(x.clone().requires_grad_(), cos_sin).requires_grad


@pytest.mark.anywhere
def test_out_that_overlaps_x_is_noticed_even_with_a_plan(device):
    memory, cos_sin = randn(5, 3, 32, device=device).flatten(), table(32, device)
    x = memory[: 4 * 96].view(4, 3, 32)
    apply_rope(x, cos_sin, out=torch.empty_like(x))
    with pytest.raises(ValueError, match="out: expected memory of its own, or x itself"):
        apply_rope(x, cos_sin, out=memory[32 : 32 + 4 * 96].view(4, 3, 32))
    halves = randn(4, 6, 32, device=device)
    want = apply_rope(halves[:, :3].contiguous(), cos_sin)
    for _ in range(2):
        assert torch.equal(apply_rope(halves[:, :3], cos_sin, out=halves[:, 3:]), want)


def test_the_driver_gets_every_parameter_in_its_place(fake_driver):
    """A direct launch without a GPU: what is packed is what the kernel's parameters are called."""
    x, out = randn(2, 5, 7, 72, device="cpu")[..., :64], torch.empty(2, 5, 9, 64)[:, :, :7]
    cos_sin, positions = table(64, "cpu"), torch.zeros(3, 4, 9, dtype=torch.int64)[:, 1:3, 2:]
    axis_map = torch.zeros(32, dtype=torch.int8)
    for _ in range(2):
        apply_rope(x, cos_sin, positions, axis_map=axis_map, out=out, layout="HND")
    want = {"x_ptr": x, "out_ptr": out, "cos_sin_ptr": cos_sin, "positions_ptr": positions, "axis_map_ptr": axis_map}
    want = {name: tensor.data_ptr() for name, tensor in (want | {"faults_ptr": fault_buffer(x.device)}).items()}
    want |= {"num_tokens": 14, "seq_len": 7, "max_position": ROWS, "stride_axis": 36, "stride_positions_b": 9}
    for name, tensor in (("x", x), ("out", out)):
        b, h, s, _ = tensor.stride()
        want |= {f"stride_{name}_b": b, f"stride_{name}_s": s, f"stride_{name}_h": h}
    assert fake_driver.arguments == [want] * 2


@pytest.mark.anywhere
def test_what_is_refused_once_is_refused_after_a_good_call(device):
    x, cos_sin = randn(2, 6, 3, 32, device=device), table(32, device)
    apply_rope(x, cos_sin)
    apply_rope(x, cos_sin, inverse=True)
    for change in ({"is_neox": 1}, {"inverse": 1}, {"inverse": 0}):
        for _ in range(2):
            with pytest.raises(TypeError):
                apply_rope(x, cos_sin, **change)


@pytest.mark.skipif(not ON_GPU, reason="the reference takes float64")
def test_float64_is_for_the_reference():
    with pytest.raises(TypeError, match="float64 on the CPU"):
        apply_rope(torch.zeros(2, 2, 32, dtype=torch.float64, device="cuda"), table(32, "cuda"))


@pytest.mark.gpu
class TestOnAGpu:
    def test_a_graph_reads_positions_at_every_replay(self, device):
        x, positions, cos_sin = (
            randn(2, 4, 8, 64, device=device),
            torch.zeros(8, dtype=torch.int64, device=device),
            table(64, device),
        )
        apply_rope(x, cos_sin, positions, layout="HND")
        out, stream = torch.empty_like(x), torch.cuda.Stream()
        apply_rope(x, cos_sin, positions, layout="HND", out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
            apply_rope(x, cos_sin, positions, layout="HND", out=out)
        for start in (0, 3, 20):
            positions.copy_(torch.arange(start, start + 8))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, reference.apply_rope(x, cos_sin, positions, layout="HND"))

    def test_more_than_2_31_elements(self, device):
        """One tensor of 2^31 + 2^27 elements; the last token is far past what 32 bits can say."""
        tokens = 2**19 + 2**15
        x = torch.ones(tokens, 32, 128, dtype=torch.bfloat16, device=device)
        cos_sin = table(128, device)
        positions = torch.arange(tokens, device=device) % ROWS
        apply_rope(x, cos_sin, positions, out=x)
        want = reference.apply_rope(torch.ones(ROWS, 32, 128, dtype=torch.bfloat16, device=device), cos_sin)
        assert all(torch.equal(x[i : i + ROWS], want) for i in (0, ROWS, 2**18, 2**19, tokens - ROWS))
