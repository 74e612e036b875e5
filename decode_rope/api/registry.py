"""The operator registry: `get_op("rope")` for RL engines that compare a candidate kernel with a ground-truth
operator.

Both backends compute, with x in fp32 and `half = D / 2`: `inv_freq = 1 / theta ** (arange(half) / half)`, the
angles `positions · inv_freq`, and `x · cos + rotate_half(x) · sin`, pairing dimensions (i, i + half) as Hugging
Face does.
"""

import torch
from torch import Tensor

from .functions import apply_rope

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_POSITION_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class NativeRoPEOp:
    """RoPE in plain PyTorch, in one fixed order of fp32 operations: the ground truth. Differentiable; any
    device."""

    def forward(self, x: Tensor, positions: Tensor, theta: float = 1_000_000.0) -> Tensor:
        """Rotate `x` `[B, H, S, D]` (fp32, bf16 or fp16, D even) by `positions` (integers, `[S]` or `[B, S]`,
        any value).

        Returns a new tensor of the shape and dtype of x: `forward_fp32`, rounded once. A row of the batch is,
        bit for bit, what it is when computed alone. Raises TypeError or ValueError naming the argument at
        fault.
        """
        return self.forward_fp32(x, positions, theta).to(x.dtype)

    def forward_fp32(self, x: Tensor, positions: Tensor, theta: float = 1_000_000.0) -> Tensor:
        """As `forward`, without the last rounding: computed and returned in float32."""
        _check(x, positions, theta)
        half = x.shape[-1] // 2
        freqs = _angles(positions, _inv_freq(half, theta, x.device))
        if positions.dim() == 2:
            freqs = freqs.unsqueeze(1)  # one head dimension, to broadcast over
        cos = torch.cat([freqs.cos(), freqs.cos()], dim=-1)
        sin = torch.cat([freqs.sin(), freqs.sin()], dim=-1)
        wide = x.float()
        rotated = torch.cat([-wide[..., half:], wide[..., :half]], dim=-1)
        return wide * cos + rotated * sin


class TritonRoPEOp:
    """The same operator through `decode_rope.apply_rope`: three small kernels for the angles, one for the
    rotation.

    The table of a call holds the angles of that call's positions, a row for each, so that it needs to know no
    largest position (which would take a wait for the device), any integer is a position, and CUDA graphs that
    are replayed with other positions stay right. Only the inverse frequencies are kept, by (theta, D, device).
    All of it is computed by the operations of `NativeRoPEOp`, so on one device the results of both agree bit
    for bit.
    """

    def __init__(self):
        self._inv_freqs: dict[tuple, Tensor] = {}

    def forward(self, x: Tensor, positions: Tensor, theta: float = 1_000_000.0) -> Tensor:
        """As `NativeRoPEOp.forward`, in one launch over x."""
        _check(x, positions, theta)
        if x.numel() == 0:
            return x.clone()
        if x.stride(-1) != 1:
            x = x.contiguous()
        return apply_rope(x, *self._table(positions, x, theta), layout="HND")

    def forward_fp32(self, x: Tensor, positions: Tensor, theta: float = 1_000_000.0) -> Tensor:
        """As `NativeRoPEOp.forward_fp32`."""
        _check(x, positions, theta)
        return self.forward(x.float(), positions, theta)

    def _table(self, positions: Tensor, x: Tensor, theta: float) -> tuple[Tensor, Tensor | None]:
        """The angles of `positions`, one row each, and which row each token reads; None: the row of its place
        in the sequence."""
        key = (float(theta), x.shape[-1], x.device)
        inv_freq = self._inv_freqs.get(key)
        if inv_freq is None:
            inv_freq = self._inv_freqs[key] = _inv_freq(x.shape[-1] // 2, theta, x.device)
        freqs = _angles(positions.reshape(-1), inv_freq)
        rows = None
        if positions.dim() == 2:
            rows = torch.arange(positions.numel(), device=x.device).view(positions.shape)
        return torch.cat([freqs.cos(), freqs.sin()], dim=-1), rows


def _inv_freq(half: int, theta: float, device: torch.device) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, half, dtype=torch.float32, device=device) / half))


def _angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    return positions.float()[..., None] * inv_freq


def _check(x: Tensor, positions: Tensor, theta: float) -> None:
    for name, tensor in (("x", x), ("positions", positions)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x: expected dtype float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() != 4 or x.shape[-1] % 2 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape [B, H, S, D] with an even D, got {tuple(x.shape)}")
    if positions.dtype not in _POSITION_DTYPES:
        raise TypeError(f"positions: expected integers, got {positions.dtype}")
    batch, _, seq_len, _ = x.shape
    if tuple(positions.shape) not in ((seq_len,), (batch, seq_len)):
        raise ValueError(
            f"positions: expected shape [{seq_len}] or [{batch}, {seq_len}] for x of shape {tuple(x.shape)}, "
            f"got {tuple(positions.shape)}"
        )
    if positions.device != x.device:
        raise ValueError(f"positions: expected device {x.device} as x, got {positions.device}; move it before the call")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ValueError(f"theta: expected a positive number, got {theta!r}")


_OPS = {"rope": {"native": NativeRoPEOp, "triton": TritonRoPEOp}}
_INSTANCES: dict[tuple[str, str], NativeRoPEOp | TritonRoPEOp] = {}


def get_op(name: str, backend: str | None = None) -> NativeRoPEOp | TritonRoPEOp:
    """The operator called `name`; there is one, "rope".

    Args:
        name: "rope".
        backend: "native" (PyTorch, the ground truth) or "triton" (`apply_rope`). None: native, on every device.
    Returns:
        An object with `forward(x, positions, theta=1e6)` (dtype of x) and `forward_fp32(x, positions,
        theta=1e6)`; the same one in every call.
    Raises:
        ValueError: there is no such operator or backend; the message lists those there are.
    """
    backends = _OPS.get(name)
    if backends is None:
        raise ValueError(f"name: expected one of {sorted(_OPS)}, got {name!r}")
    backend = "native" if backend is None else backend
    if backend not in backends:
        raise ValueError(f"backend: expected None or one of {sorted(backends)}, got {backend!r}")
    if (name, backend) not in _INSTANCES:
        _INSTANCES[name, backend] = backends[backend]()
    return _INSTANCES[name, backend]
