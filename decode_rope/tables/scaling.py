"""Inverse frequencies of rotary embeddings: one pure function per `rope_type`.

Every function takes plain numbers and returns `(inv_freq, attention_scaling)`:

* `inv_freq`: CPU tensor `[ceil(rotary_dim / 2)]`; pair `j` turns by `position * inv_freq[j]` radians.
* `attention_scaling`: float that multiplies both cos and sin (1.0 for most types).

The arithmetic follows, operation by operation in float32, the functions of Hugging Face transformers
(`modeling_rope_utils.py` and the rotary classes of its models), so the results are bit-equal to theirs. CPU only, on
purpose: a GPU `pow` differs from the CPU's in the last bit. `dtype=torch.float64` evaluates the same formulas in double,
for measuring errors; models were trained with the float32 values.

Below, `f_j = theta ** (-2 j / rotary_dim)`, and L0 is `original_max_position_embeddings`.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Frequencies = tuple[torch.Tensor, float]


def default(rotary_dim: int, theta: float, *, dtype: torch.dtype = torch.float32) -> Frequencies:
    """`f_j`: the original rotary embedding (Su et al., RoFormer, 2021)."""
    return 1.0 / _wavelengths(rotary_dim, theta, dtype), 1.0


def linear(rotary_dim: int, theta: float, *, factor: float, dtype: torch.dtype = torch.float32) -> Frequencies:
    """`f_j / factor`: position interpolation (Chen et al., 2023).

    transformers divides the frequencies; vLLM and SGLang divide the positions, one ulp away."""
    _require_positive("factor", factor)
    _warn_below_one("factor", factor)
    return default(rotary_dim, theta, dtype=dtype)[0] / factor, 1.0


def proportional(
    rotary_dim: int,
    theta: float,
    *,
    partial_rotary_factor: float = 1.0,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Frequencies:
    """Gemma-4 global layers: the first `int(partial_rotary_factor * rotary_dim // 2)` pairs get `f_j / factor`, the rest 0.

    `rotary_dim` is the whole head: pairs are `(j, j + head_dim / 2)`, exponents are divided by `head_dim`, and a pair
    with frequency 0 does not turn."""
    _require_positive("factor", factor)
    rotated = int(partial_rotary_factor * rotary_dim // 2)
    exponents = torch.arange(0, 2 * rotated, 2, dtype=torch.int64, device="cpu").to(dtype) / rotary_dim
    turning = 1.0 / (theta**exponents)
    still = torch.zeros(rotary_dim // 2 - rotated, dtype=dtype, device="cpu")
    return torch.cat((turning, still)) / factor, 1.0


def dynamic(
    rotary_dim: int,
    theta: float,
    *,
    factor: float,
    max_position_embeddings: int,
    seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Frequencies:
    """Dynamic NTK, frozen at `L = max(seq_len, max_position_embeddings)` (reddit users bloc97 and emozilla).

    `f_j` with theta replaced by `theta * (factor * L / Lmax - (factor - 1)) ** (R / (R - 2))`. transformers re-evaluates
    this whenever a longer sequence arrives, which leaves the keys already cached on the old base; a table is one L."""
    _require_positive("factor", factor)
    _warn_below_one("factor", factor)
    length = max(seq_len or 0, max_position_embeddings)
    stretch = (factor * length / max_position_embeddings) - (factor - 1)
    return default(rotary_dim, theta * stretch ** _ntk_exponent(rotary_dim), dtype=dtype)


def ntk_alpha(rotary_dim: int, theta: float, *, alpha: float, dtype: torch.dtype = torch.float32) -> Frequencies:
    """`f_j` with theta replaced by `theta * alpha ** (R / (R - 2))`: HunYuan's `"dynamic"` with an `alpha`."""
    _require_positive("alpha", alpha)
    return default(rotary_dim, theta * alpha ** _ntk_exponent(rotary_dim), dtype=dtype)


def yarn(
    rotary_dim: int,
    theta: float,
    *,
    factor: float,
    original_max_position_embeddings: int,
    attention_factor: float | None = None,
    beta_fast: float = 32,
    beta_slow: float = 1,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Frequencies:
    """YaRN (Peng et al., 2023): `f_j / factor` for slow pairs, `f_j` for fast ones, a linear ramp over j between.

    The ramp runs between `d(beta_fast)` and `d(beta_slow)` with `d(r) = R ln(L0 / (2 pi r)) / (2 ln theta)`, rounded
    outwards when `truncate`. A beta of 0 means its default.

    attention_scaling is the first that applies: `attention_factor`; `g(mscale) / g(mscale_all_dim)` when both are non-zero
    (DeepSeek: 1.0, its softmax scale carries the rest); `g(1)`. Here `g(m) = 0.1 m ln(factor) + 1`, or 1 when factor <= 1.
    """
    _require_positive("factor", factor)
    _warn_below_one("factor", factor)
    _require_positive("original_max_position_embeddings", original_max_position_embeddings)

    def ramp_end(rotations: float) -> float:
        return (rotary_dim * math.log(original_max_position_embeddings / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = ramp_end(beta_fast or 32), ramp_end(beta_slow or 1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero

    wavelengths = _wavelengths(rotary_dim, theta, dtype)
    steps = torch.arange(len(wavelengths), dtype=dtype, device="cpu")
    kept = 1 - torch.clamp((steps - low) / (high - low), 0, 1)
    inv_freq = (1.0 / (factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
    if attention_factor is None:
        attention_factor = _yarn_attention_factor(factor, mscale, mscale_all_dim)
    return inv_freq, float(attention_factor)


def longrope(
    rotary_dim: int,
    theta: float,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    long: bool,
    original_max_position_embeddings: int,
    factor: float,
    attention_factor: float | None = None,
    short_mscale: float | None = None,
    long_mscale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Frequencies:
    """LongRoPE (Ding et al., 2024): `f_j / ext_j`, ext being `long_factor` or `short_factor` as `long` says.

    attention_scaling is the first that applies: `long_mscale` or `short_mscale` (Phi-3.5-MoE); `attention_factor`;
    `sqrt(1 + ln factor / ln L0)`, or 1 when factor <= 1."""
    name, extension = ("long_factor", long_factor) if long else ("short_factor", short_factor)
    wavelengths = _wavelengths(rotary_dim, theta, dtype)
    if len(extension) != len(wavelengths):
        raise ValueError(
            f"{name}: expected {len(wavelengths)} numbers (rotary_dim / 2), got {len(extension)}; "
            "check rotary_dim (head_dim times the partial rotary factor)"
        )
    inv_freq = 1.0 / (torch.tensor(extension, dtype=dtype, device="cpu") * wavelengths)
    scaling = long_mscale if long else short_mscale
    if scaling is None:
        scaling = attention_factor
    if scaling is None and factor > 1.0:
        scaling = math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))
    return inv_freq, 1.0 if scaling is None else float(scaling)


def llama3(
    rotary_dim: int,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
    dtype: torch.dtype = torch.float32,
) -> Frequencies:
    """Llama 3.1, by wavelength `w = 2 pi / f_j`: `f_j` below `L0 / high_freq_factor`, `f_j / factor` above
    `L0 / low_freq_factor`, and a blend of the two in between (Meta's llama-models reference code)."""
    _require_positive("factor", factor)
    _warn_below_one("factor", factor)
    if not 0 < low_freq_factor < high_freq_factor:
        raise ValueError(
            f"low_freq_factor: expected a number above 0 and below high_freq_factor, got {low_freq_factor} and {high_freq_factor}"
        )
    inv_freq, _ = default(rotary_dim, theta, dtype=dtype)
    wavelength = 2 * math.pi / inv_freq
    is_long = wavelength > original_max_position_embeddings / low_freq_factor
    is_short = wavelength < original_max_position_embeddings / high_freq_factor
    scaled = torch.where(is_long, inv_freq / factor, inv_freq)
    smooth = (original_max_position_embeddings / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(~is_short & ~is_long, blended, scaled), 1.0


ROPE_TYPES: dict[str, Callable[..., Frequencies]] = {
    "default": default,
    "linear": linear,
    "proportional": proportional,
    "dynamic": dynamic,
    "ntk_alpha": ntk_alpha,
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
}


def parameter_names(rope_type: str) -> dict[str, bool]:
    """The parameters that `rope_type` takes, each with whether it is required. ValueError for an unknown type."""
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type: expected one of {', '.join(ROPE_TYPES)}, got {rope_type!r}; "
            "compute its cos/sin table yourself and pass the tensor as cos_sin_cache"
        )
    return {
        name: parameter.default is parameter.empty
        for name, parameter in inspect.signature(ROPE_TYPES[rope_type]).parameters.items()
        if name not in ("rotary_dim", "theta", "dtype")
    }


def inverse_frequencies(
    parameters: Mapping[str, Any], rotary_dim: int, theta: float, *, dtype: torch.dtype = torch.float32
) -> Frequencies:
    """Call the function that `parameters["rope_type"]` names, with those of `parameters` it takes.

    `None` counts as absent, and keys the function does not take are ignored, as in transformers. Raises ValueError for an
    unknown type, a missing parameter, and a theta that is not above 0.
    """
    rope_type = parameters.get("rope_type") or "default"
    taken = parameter_names(rope_type)
    _require_positive("theta", theta)
    given = {name: parameters[name] for name in taken if parameters.get(name) is not None}
    missing = [name for name, required in taken.items() if required and name not in given]
    if missing:
        raise ValueError(f"rope_type {rope_type!r}: missing {', '.join(missing)}; got {sorted(parameters)}")
    return ROPE_TYPES[rope_type](rotary_dim, theta, dtype=dtype, **given)


def _wavelengths(rotary_dim: int, theta: float, dtype: torch.dtype) -> torch.Tensor:
    """`1 / f_j`, positions per radian, of `ceil(rotary_dim / 2)` pairs."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").to(dtype) / rotary_dim
    return theta**exponents


def softmax_factor(parameters: Mapping[str, Any]) -> float:
    """What a model with multi-head latent attention multiplies the scale of its softmax by: `g(mscale_all_dim)²` with the `g` of
    `yarn`; 1 for the default rope type and without `mscale_all_dim`. It is no part of `attention_scaling`, nor of a table."""
    mscale_all_dim, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if not mscale_all_dim or not factor or (parameters.get("rope_type") or "default") == "default":
        return 1.0
    return _magnitude(factor, mscale_all_dim) ** 2


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    if mscale and mscale_all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return _magnitude(factor, 1)


def _ntk_exponent(rotary_dim: int) -> float:
    if rotary_dim <= 2:
        raise ValueError(f"rotary_dim: NTK scaling needs more than 2, got {rotary_dim}")
    return rotary_dim / (rotary_dim - 2)


def _warn_below_one(name: str, value: float) -> None:
    """Transformers warns of these too: such a factor shortens the context instead of stretching it."""
    if value < 1:
        warnings.warn(f"{name}: expected at least 1, got {value}; the table is built as it says", UserWarning, stacklevel=2)


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
