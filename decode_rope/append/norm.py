"""`QKNorm`: the RMSNorm of query and key heads that an append carries out beside the rotation."""

import math
from typing import NamedTuple

from torch import Tensor

_ORDERS = ("before", "after")
WEIGHTS = ("q_weight", "k_weight")  # as fields of `Append`
_LEAST_EPS = 1e-25  # with less, fp32 cannot hold the scaled mean of a head of zeros


class QKNorm(NamedTuple):
    """RMSNorm of every head of q and k, and on request of v: `x / sqrt(mean(x²) + eps) · (weight + weight_offset)`, in fp32.

    The mean is over all D elements of a head, also where a part of them rotates (Zhang and Sennrich 2019, arXiv:1910.07467).
    Results do not depend on the batch, the kernel or its geometry, bit for bit.

    Attributes:
        q_weight, k_weight: `[D]` fp32, bf16 or fp16, contiguous, on the device of q; or None for a norm without weights.
        eps: added to the mean, inside the root; at least 1e-25.
        weight_offset: added to the weights in fp32; 1.0 for Gemma's, which are stored around 0.
        order: "before" the rotation (Qwen3, Gemma 3, GLM-4.5) or "after" it (Llama 4, HunYuan).
        v_norm: whether v is normalised too, without weights (Gemma 4).
        rounded: whether values are rounded to the dtype of q between norm and rotation, as models with separate modules do. False,
            the default, rounds once, at the end, and is nearer to the exact result.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    weight_offset: float = 0.0
    order: str = "before"
    v_norm: bool = False
    rounded: bool = False


class LatentNorm(NamedTuple):
    """RMSNorm of the latents of multi-head latent attention: `x / sqrt(mean(x²) + eps) · weight`, in fp32, rounded once (Zhang and
    Sennrich 2019, arXiv:1910.07467). Results do not depend on the batch or the geometry, bit for bit.

    Attributes:
        weight: `[L]` fp32, bf16 or fp16, contiguous, on the device of kv_c.
        eps: added to the mean, inside the root; at least 1e-25.
    """

    weight: Tensor
    eps: float


class NormFacts(NamedTuple):
    """What a kernel is compiled for, of a `QKNorm`."""

    eps: float
    weight_offset: float
    after: bool
    v_norm: bool
    rounded: bool


def norm_fields(norm: QKNorm | None) -> dict:
    """The fields of `Append` that a `QKNorm` fills. Raises TypeError or ValueError, naming `norm`, for one that means nothing."""
    if norm is None:
        return {}
    if not isinstance(norm, QKNorm):
        raise TypeError(f"norm: expected a decode_rope.QKNorm or None, got {type(norm).__name__}")
    _check_number("norm.eps", norm.eps, _LEAST_EPS)
    _check_number("norm.weight_offset", norm.weight_offset, -math.inf)
    if not isinstance(norm.order, str) or norm.order not in _ORDERS:
        raise ValueError(f'norm.order: expected "before" or "after", got {norm.order!r}')
    for name in ("v_norm", "rounded"):
        if not isinstance(getattr(norm, name), bool):
            raise TypeError(f"norm.{name}: expected a bool, got {type(getattr(norm, name)).__name__}")
    facts = NormFacts(float(norm.eps), float(norm.weight_offset), norm.order == "after", norm.v_norm, norm.rounded)
    return {"q_weight": norm.q_weight, "k_weight": norm.k_weight, "norm": facts}


def latent_norm_fields(kv_norm: LatentNorm | None) -> dict:
    """The fields of `MLAAppend` that a `LatentNorm` fills. Raises TypeError or ValueError, naming `kv_norm`."""
    if kv_norm is None:
        return {}
    if not isinstance(kv_norm, LatentNorm):
        raise TypeError(f"kv_norm: expected a decode_rope.LatentNorm or None, got {type(kv_norm).__name__}")
    if not isinstance(kv_norm.weight, Tensor):
        raise TypeError(f"kv_norm.weight: expected a torch.Tensor, got {type(kv_norm.weight).__name__}")
    _check_number("kv_norm.eps", kv_norm.eps, _LEAST_EPS)
    return {"kv_weight": kv_norm.weight, "eps": float(kv_norm.eps)}


def _check_number(name: str, number, least: float) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{name}: expected a number, got {type(number).__name__}")
    if not (-math.inf < number < math.inf and number >= least):  # comparisons alone, which a compiler can trace
        wanted = "a finite number" if least < 0 else f"a finite number of at least {least:g}"
        raise ValueError(f"{name}: expected {wanted}, got {number}")


def by_public_name(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of an `Append`, by the names that its caller knows."""
    return {f"norm.{name}" if name in WEIGHTS else name: x for name, x in tensors.items()}
