"""How far the angles of a table are from exact ones, measured from the cos and sin it really holds."""

import torch

from .table import Exactness, rows

WINDOW = 1024  # tokens compared with each other


def angle_error(cos_sin: torch.Tensor, exact_inv_freq: torch.Tensor, start: int) -> tuple[float, float]:
    """Largest error in radians of the rows `cos_sin [n, R]` of positions `start .. start + n - 1`, over rows and pairs.

    Returns `(absolute, relative)`: against the exact angle `position * exact_inv_freq` (float64 `[R / 2]`), and between any two
    of the rows, which is what a dot product of q and k sees. A factor inside cos and sin does not count.
    """
    pairs = exact_inv_freq.shape[0]
    cos, sin = cos_sin.double().split(pairs, dim=-1)
    exact = torch.arange(start, start + cos.shape[0], dtype=torch.float64)[:, None] * exact_inv_freq
    error = torch.atan2(sin * exact.cos() - cos * exact.sin(), cos * exact.cos() + sin * exact.sin())
    spread = error.max(dim=0).values - error.min(dim=0).values
    return float(error.abs().max()), float(spread.max())


def error_at(inv_freq: torch.Tensor, exact_inv_freq: torch.Tensor, position: int, exactness: Exactness) -> tuple[float, float]:
    """`angle_error` of the last `WINDOW` rows up to `position`, of a table with these frequencies."""
    start = max(position + 1 - WINDOW, 0)
    return angle_error(rows(inv_freq, 1.0, start, position + 1, exactness), exact_inv_freq, start)
