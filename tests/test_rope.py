"""The operator registry, against the RoPE document of RL engines: its formula, its contract, and both backends."""

import pytest
import torch
from cases import moved

from decode_rope.api.registry import NativeRoPEOp, TritonRoPEOp, get_op

pytestmark = pytest.mark.anywhere
BACKENDS = ["native", "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QWEN3_QUERY, QWEN3_KEY = 32, 8  # heads of Qwen3-8B, of 128 elements


def document(x: torch.Tensor, positions: torch.Tensor, theta: float = 1_000_000.0) -> torch.Tensor:
    """The document's lines, with the head dimension that batched positions broadcast over."""
    half = x.shape[-1] // 2
    inv_freq = 1.0 / (theta ** (torch.arange(0, half, dtype=torch.float32, device=x.device) / half))
    freqs = positions.float()[..., None] * inv_freq
    cos = torch.cat([freqs.cos(), freqs.cos()], dim=-1)
    sin = torch.cat([freqs.sin(), freqs.sin()], dim=-1)
    if positions.dim() == 2:
        cos, sin = cos[:, None], sin[:, None]
    a, b = x.float()[..., :half], x.float()[..., half:]
    rotated = torch.cat([-b, a], dim=-1)
    return x.float() * cos + rotated * sin


def randn(*shape, device, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def some_positions(kind: str, batch: int, seq_len: int, device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (seq_len,) if kind == "[S]" else (batch, seq_len)
    return torch.randint(0, 40_000, shape, generator=generator).to(device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["[S]", "[B, S]"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_document_bit_for_bit(backend, kind, dtype, device):
    op = get_op("rope", backend)
    for theta in (1_000_000.0, 10_000):
        x, positions = randn(3, 4, 9, 64, device=device, dtype=dtype), some_positions(kind, 3, 9, device)
        before = x.clone()
        want = document(x, positions, theta)
        gold, out = op.forward_fp32(x, positions, theta=theta), op.forward(x, positions, theta=theta)
        assert gold.dtype == torch.float32 and torch.equal(gold, want)
        assert out.dtype == dtype and torch.equal(out, want.to(dtype))
        assert out.shape == gold.shape == x.shape
        assert torch.equal(x, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_half_as_hugging_face_does(backend, dtype, device):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, positions = randn(2, 4, 6, 32, device=device, dtype=dtype), some_positions("[B, S]", 2, 6, device)
    inv_freq = 1.0 / (1e6 ** (torch.arange(0, 32, 2, dtype=torch.int64, device=device).float() / 32))
    angle = positions[..., None].float() * inv_freq
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    want, _ = llama.apply_rotary_pos_emb(x.float(), x.float(), cos, sin)
    assert torch.allclose(get_op("rope", backend).forward_fp32(x, positions), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["[S]", "[B, S]"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slice_of_the_batch_is_the_batch_of_a_slice(backend, kind, dtype, device, on_gpu):
    op = get_op("rope", backend)
    heads, seq_len, head_dim = (32, 333, 128) if on_gpu else (2, 5, 32)
    x = randn(3, heads, seq_len, head_dim, device=device, dtype=dtype)
    positions = some_positions(kind, 3, seq_len, device)
    whole, gold = op.forward(x, positions), op.forward_fp32(x, positions)
    for rows in (slice(0, 1), slice(2, 3), slice(1, 3)):
        own = positions if kind == "[S]" else positions[rows]
        assert torch.equal(op.forward(x[rows], own), whole[rows])
        assert torch.equal(op.forward_fp32(x[rows], own), gold[rows])


@pytest.mark.parametrize("backend", BACKENDS)
def test_qwen3_queries_and_keys_after_their_norm(backend, device):
    """RMSNorm(q), RMSNorm(k) -> RoPE(theta=1e6): shapes of Qwen3-8B, and scores that depend on distance alone."""
    op, positions = get_op("rope", backend), torch.arange(3, device=device)
    weight = 1 + 0.1 * randn(128, device=device)
    q, k = (
        torch.nn.functional.rms_norm(randn(1, heads, 3, 128, device=device, seed=heads), (128,), weight, 1e-6)
        for heads in (QWEN3_QUERY, QWEN3_KEY)
    )
    scores = []
    for shift in (0, 1000):
        rotated_q, rotated_k = op.forward(q, positions + shift), op.forward(k, positions + shift)
        assert rotated_q.shape == (1, QWEN3_QUERY, 3, 128) and rotated_k.shape == (1, QWEN3_KEY, 3, 128)
        assert torch.equal(rotated_q, document(q, positions + shift))
        assert torch.equal(rotated_k, document(k, positions + shift))
        scores.append(rotated_q @ rotated_k.repeat_interleave(QWEN3_QUERY // QWEN3_KEY, dim=1).transpose(-1, -2))
    assert torch.allclose(*scores, rtol=0, atol=0.02)
    assert torch.equal(op.forward(q, positions)[:, :, 0], q[:, :, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_agree_for_any_integer_position(dtype, device):
    """Negative ones, those past 2^24, which fp32 rounds, and every integer dtype."""
    x = randn(2, 2, 5, 32, device=device, dtype=dtype)
    positions = torch.tensor([-7, 0, 2**24 + 1, 2**31 - 1, 123_456], device=device)
    for given in (positions, positions.int(), positions[None].expand(2, 5), (positions % 100).to(torch.uint8)):
        native, triton = (get_op("rope", backend).forward(x, given) for backend in BACKENDS)
        assert torch.equal(native, triton)


def test_positions_changed_in_place_are_seen(device):
    op, x, positions = get_op("rope", "triton"), randn(1, 2, 4, 32, device=device), torch.arange(4, device=device)
    op.forward(x, positions)
    positions += 100
    assert torch.equal(op.forward(x, positions), document(x, positions))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides_of_x(backend, device):
    op, positions = get_op("rope", backend), some_positions("[B, S]", 2, 5, device)
    base = randn(2, 5, 3, 64, device=device)
    for x in (base.transpose(1, 2), base.transpose(1, 2)[..., :32], randn(2, 3, 32, 5, device=device).transpose(-1, -2)):
        assert torch.equal(op.forward(x, positions), document(x, positions))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_is_that_of_the_document(backend, device):
    x, positions = randn(2, 3, 5, 32, device=device).requires_grad_(), some_positions("[S]", 2, 5, device)
    weight, grads = randn(2, 3, 5, 32, device=device, seed=9), []
    for function in (get_op("rope", backend).forward, document):
        x.grad = None
        function(x, positions).backward(weight)
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 3, 16), (2, 0, 3, 16), (2, 2, 0, 16)], ids=str)
def test_empty_tensors(backend, shape, device):
    x = torch.zeros(shape, device=device)
    assert get_op("rope", backend).forward(x, torch.zeros(shape[2], dtype=torch.int64, device=device)).shape == shape


def test_dispatch():
    assert isinstance(get_op("rope"), NativeRoPEOp)
    assert isinstance(get_op("rope", backend="native"), NativeRoPEOp)
    assert isinstance(get_op("rope", backend="triton"), TritonRoPEOp)
    assert get_op("rope", "triton") is get_op("rope", "triton")
    with pytest.raises(ValueError, match="name: expected one of \\['rope'\\], got 'ropes'"):
        get_op("ropes")
    with pytest.raises(ValueError, match="backend: expected None or one of \\['native', 'triton'\\], got 'cuda'"):
        get_op("rope", backend="cuda")


BAD = [
    (TypeError, "x: expected a torch.Tensor", dict(x=1)),
    (TypeError, "x: expected dtype float32, bfloat16 or float16", dict(x=torch.zeros(1, 2, 3, 16, dtype=torch.float64))),
    (ValueError, "x: expected shape \\[B, H, S, D\\]", dict(x=torch.zeros(2, 3, 16))),
    (ValueError, "x: expected shape .* even D", dict(x=torch.zeros(1, 2, 3, 15))),
    (TypeError, "positions: expected a torch.Tensor", dict(positions=[0, 1, 2])),
    (TypeError, "positions: expected integers, got torch.float32", dict(positions=torch.zeros(3))),
    (TypeError, "positions: expected integers, got torch.bool", dict(positions=torch.zeros(3, dtype=torch.bool))),
    (ValueError, "positions: expected shape \\[3\\] or \\[1, 3\\]", dict(positions=torch.zeros(4, dtype=torch.int64))),
    (ValueError, "positions: expected shape", dict(positions=torch.zeros(2, 3, dtype=torch.int64))),
    (ValueError, "theta: expected a positive number, got 0", dict(theta=0)),
    (ValueError, "theta: expected a positive number, got '1e6'", dict(theta="1e6")),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("error", "message", "change"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_arguments_are_named(backend, error, message, change, device):
    arguments = dict(x=torch.zeros(1, 2, 3, 16), positions=torch.zeros(3, dtype=torch.int64), theta=1e6) | change
    arguments = {name: moved(value, device) for name, value in arguments.items()}
    for function in (get_op("rope", backend).forward, get_op("rope", backend).forward_fp32):
        with pytest.raises(error, match=message):
            function(**arguments)


@pytest.mark.gpu
def test_no_wait_and_any_positions_in_a_graph(device):
    op, x, positions = get_op("rope", "triton"), randn(2, 4, 6, 64, device=device), torch.arange(6, device=device)
    op.forward(x, positions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.forward(x, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.forward(x, positions)
    for start in (0, 5, 100_000):
        positions.copy_(torch.arange(start, start + 6))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, document(x, positions))
