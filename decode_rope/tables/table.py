"""`RopeTable`: the cos/sin table that the functions of this package read, from numbers or from a model configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from . import scaling
from .hf import config as hf_config
from .hf.reader import check_rope
from .hf.spec import RopeSpec, scaling_parameters

Exactness = Literal["hf", "fp64"]
_ROWS_AT_A_TIME = 8192  # temporaries stay at tens of MiB, also for a million positions in float64


@dataclass(frozen=True, eq=False, repr=False)
class RopeTable:
    """Cos and sin of every position, ready to be passed as `cos_sin_cache`.

    Attributes:
        cos_sin_cache: fp32 `[max_position, rotary_dim]`, contiguous; the first half of a row is cos, the second sin.
            `attention_scaling` is multiplied in, once. Takes `max_position * rotary_dim * 4` bytes: 64 MiB at 128k
            positions and rotary_dim 128, 512 MiB at 1M.
        rotary_dim: how many dims of a head rotate.
        is_neox: True pairs dims (i, i + rotary_dim / 2), False pairs (2i, 2i + 1).
        axis_map: int8 `[rotary_dim / 2]`, the row of `positions [axes, T]` each pair reads (M-RoPE); None with one row.
        attention_scaling: the factor inside cos and sin (YaRN, LongRoPE), else 1.0.
        inv_freq: fp32 CPU `[rotary_dim / 2]`, radians per position.
        rope_type: one of `decode_rope.tables.scaling.ROPE_TYPES`.
        description: the rope type and what it is scaled by, for people.
        softmax_factor: what a model with multi-head latent attention multiplies the scale of its softmax by, `(nope_dim + rope_dim)
            ** -0.5` (YaRN with mscale_all_dim, as in DeepSeek-V3 and Kimi-K2), else 1.0. It is not in the table.
        rotates_tail: the last `rotary_dim` dims of a head rotate, not the first: pass that slice of q and k (DeepSeek-V4).
    """

    cos_sin_cache: torch.Tensor
    rotary_dim: int
    is_neox: bool
    axis_map: torch.Tensor | None
    attention_scaling: float
    inv_freq: torch.Tensor
    rope_type: str
    description: str
    rotates_tail: bool = False
    softmax_factor: float = 1.0

    @property
    def max_position(self) -> int:
        """Rows of the table: positions `0 .. max_position - 1` can be rotated."""
        return self.cos_sin_cache.shape[0]

    @property
    def device(self) -> torch.device:
        """Where `cos_sin_cache` and `axis_map` live."""
        return self.cos_sin_cache.device

    def to(self, device: torch.device | str | int) -> "RopeTable":
        """The same table on `device`; `inv_freq` stays on the CPU. Itself when it is there already."""
        cache = self.cos_sin_cache.to(_device(device))
        if cache is self.cos_sin_cache:
            return self
        axis_map = None if self.axis_map is None else self.axis_map.to(device)
        return replace(self, cos_sin_cache=cache, axis_map=axis_map)

    def __repr__(self) -> str:
        pairs = "NeoX" if self.is_neox else "interleaved"
        axes = "" if self.axis_map is None else f", {int(self.axis_map.max()) + 1} axes"
        return (
            f"RopeTable({self.description}, max_position={self.max_position}, rotary_dim={self.rotary_dim}, {pairs} pairs"
            f"{axes}, attention_scaling={self.attention_scaling:.6g}, device={str(self.device)!r})"
        )

    @classmethod
    def build(
        cls,
        rotary_dim: int,
        max_position: int,
        theta: float = 1e4,
        scaling: Mapping[str, Any] | None = None,
        *,
        is_neox: bool = True,
        axis_map: torch.Tensor | Sequence[int] | None = None,
        exactness: Exactness = "hf",
        device: torch.device | str | int | None = None,
    ) -> "RopeTable":
        """Build a table from numbers.

        The table is computed on the CPU (a GPU `pow` differs in the last bit), a few thousand rows at a time, then moved.

        Args:
            rotary_dim: dims of a head that rotate, even. For `proportional` the whole head.
            max_position: rows; see `cos_sin_cache` above for the bytes.
            theta: base of the frequencies.
            scaling: None, or a dict like transformers' `rope_parameters`: `rope_type` and the parameters of the function of
                that name in `decode_rope.scaling`. `long` (LongRoPE) defaults to
                `max_position > original_max_position_embeddings`; `seq_len` is where `dynamic` is frozen.
            is_neox, axis_map: see the attributes. They change no number of the table.
            exactness: `"hf"`: position times frequency, cos, sin, and the product with attention_scaling in fp32, bit-equal to
                transformers (Llama-4 and DeepSeek-V2 within 1 ulp: theirs is `torch.polar`). `"fp64"`: the same fp32
                frequencies, all the rest in float64, rounded once. Up to about 32k positions the two differ by less than
                bf16 activations are rounded; beyond, only `"fp64"` keeps angles exact relative to each other
                (`python -m decode_rope table` shows how far both are off).
            device: where the table ends up; None is the CPU.

        Raises:
            ValueError: an argument out of range, an unknown `rope_type`, a parameter missing, `dynamic` past its `seq_len`.

        Example:
            >>> RopeTable.build(64, 4096, theta=5e5)
            RopeTable(default, max_position=4096, rotary_dim=64, NeoX pairs, attention_scaling=1, device='cpu')
        """
        if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, int) or rotary_dim <= 0 or rotary_dim % 2:
            raise ValueError(f"rotary_dim: expected an even number above 0, got {rotary_dim!r}")
        if isinstance(theta, bool) or not isinstance(theta, int | float):
            raise TypeError(f"theta: expected a number, got {type(theta).__name__}")
        if not isinstance(is_neox, bool):
            raise TypeError(f"is_neox: expected a bool, got {type(is_neox).__name__}")
        if scaling is not None and not isinstance(scaling, Mapping):
            raise TypeError(f"scaling: expected a dict such as transformers' rope_parameters, got {type(scaling).__name__}")
        parameters = dict(scaling or {})
        check_rope(parameters, "scaling.")
        own_theta = parameters.get("rope_theta") or theta
        if own_theta != theta and theta != 1e4:
            raise ValueError(f"theta: got {theta}, but scaling has rope_theta={own_theta}; give it once")
        length = parameters.get("max_position_embeddings")
        spec = RopeSpec(
            head_dim=rotary_dim,
            rotary_dim=rotary_dim,
            theta=own_theta,
            parameters=scaling_parameters(parameters, length, parameters.get("original_max_position_embeddings") or length),
            max_position=None,
            is_neox=is_neox,
            axis_map=_axes(axis_map),
        )
        return _from_spec(spec, max_position, parameters.get("long"), exactness, device)

    @classmethod
    def from_hf(
        cls,
        config: Any,
        *,
        max_position: int | None = None,
        layer_type: str | int | None = None,
        long: bool | None = None,
        exactness: Exactness = "hf",
        device: torch.device | str | int | None = None,
    ) -> "RopeTable":
        """Build the table of a model, or of one kind of its layers, from its configuration.

        Understands every `rope_type` and spelling of transformers: `rope_parameters`, `rope_scaling`, `type`, partial factors
        under all their names, parameters per layer type or per layer, M-RoPE sections, and multimodal configs (the text
        part is read). transformers is not imported.

        `is_neox` is what the model type's published weights use. Layout is a property of the loaded weights: if a loader
        permuted the q and k projections (GGUF files, Meta checkpoints, some servers), set the other one with
        `dataclasses.replace(table, is_neox=...)`. MLA models rotate a slice of `qk_rope_head_dim`; their transformers
        classes also un-interleave the result, which permutes q and k alike and leaves every score the same.
        DeepSeek-V4 rotates the last `rotary_dim` dims of a head: pass that slice.

        Args:
            config: the dict of a config.json, or a transformers config object.
            max_position: rows; default `max_position_embeddings`, or `factor * original_max_position_embeddings` of YaRN where
                that is more.
            layer_type: `"sliding_attention"`, `"full_attention"`, ..., or the index of a layer. May be left out when all
                layers with a rotary embedding share one.
            long: LongRoPE only: long or short factors. Default: long if
                `max_position > original_max_position_embeddings`, for every position alike. (transformers switches per
                call, which leaves the keys already cached on the other factors.)
            exactness, device: as for `build`.

        Raises:
            ValueError: several kinds of layers and no `layer_type` (the message lists them); a layer or model without rotary
                embedding (pass `cos_sin_cache=None` there); a size missing; parameters missing or out of range.
            NotImplementedError: what no single table holds: dynamic NTK that grows past `max_position_embeddings`, LeRoPE,
                FoPE, dual chunk attention, 2-D vision embeddings.
            TypeError: `config` is neither.
        """
        spec = hf_config.read(config).select(layer_type)
        length = spec.max_position if max_position is None else max_position
        if length is None:
            raise ValueError("max_position: the config has no max_position_embeddings; pass max_position=")
        return _from_spec(spec, length, long, exactness, device)


def rows(inv_freq: torch.Tensor, attention_scaling: float, start: int, stop: int, exactness: Exactness = "hf") -> torch.Tensor:
    """Rows `start .. stop - 1` of a table: fp32 CPU `[stop - start, 2 * len(inv_freq)]`, see `RopeTable.build`."""
    dtype = torch.float32 if exactness == "hf" else torch.float64
    positions = torch.arange(start, stop, dtype=torch.int64, device="cpu").to(dtype)
    angles = positions[:, None] * inv_freq.to(dtype)
    out = torch.empty(stop - start, 2 * inv_freq.shape[0], dtype=torch.float32, device="cpu")
    cos, sin = out.chunk(2, dim=-1)
    cos.copy_(angles.cos() * attention_scaling)
    sin.copy_(angles.sin() * attention_scaling)
    return out


def frequencies(
    spec: RopeSpec, max_position: int, long: bool | None = None, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, float, str]:
    """inv_freq (CPU), attention_scaling, and the rope type in words, of a table with `max_position` rows.

    `dtype=torch.float64` evaluates the formulas in double: the truth that errors are measured against."""
    parameters = _settle_length(spec, max_position, long)
    inv_freq, attention_scaling = scaling.inverse_frequencies(parameters, spec.rotary_dim, spec.theta, dtype=dtype)
    return -inv_freq if spec.backwards else inv_freq, attention_scaling, _describe(parameters)


def _from_spec(
    spec: RopeSpec,
    max_position: int,
    long: bool | None,
    exactness: Exactness,
    device: torch.device | str | int | None,
) -> RopeTable:
    if isinstance(max_position, bool) or not isinstance(max_position, int) or max_position <= 0:
        raise ValueError(f"max_position: expected a number of rows above 0, got {max_position!r}")
    if not isinstance(exactness, str) or exactness not in ("hf", "fp64"):
        raise ValueError(f"exactness: expected 'hf' or 'fp64', got {exactness!r}")
    if long is not None and not isinstance(long, bool):
        raise TypeError(f"long: expected True, False or None, got {type(long).__name__}")
    where = None if device is None else _device(device)
    inv_freq, attention_scaling, described = frequencies(spec, max_position, long)
    pairs = inv_freq.shape[0]
    axis_map = _axis_tensor(spec.axis_map, pairs)
    cache = torch.empty(max_position, 2 * pairs, dtype=torch.float32, device="cpu")
    for start in range(0, max_position, _ROWS_AT_A_TIME):
        stop = min(start + _ROWS_AT_A_TIME, max_position)
        cache[start:stop] = rows(inv_freq, attention_scaling, start, stop, exactness)
    table = RopeTable(
        cos_sin_cache=cache,
        rotary_dim=2 * pairs,
        is_neox=spec.is_neox,
        axis_map=axis_map,
        attention_scaling=attention_scaling,
        inv_freq=inv_freq,
        rope_type=spec.rope_type,
        description=described,
        rotates_tail=spec.rotates_tail,
        softmax_factor=scaling.softmax_factor(spec.parameters),
    )
    return table if where is None else table.to(where)


def _device(device: Any) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise TypeError(f"device: expected a torch.device, a string, an index or None, got {type(device).__name__}")
    try:
        return torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"device: expected a device that torch knows, got {device!r}: {error}") from None


def _axes(axis_map: Any) -> tuple[int, ...] | None:
    if axis_map is None:
        return None
    values = axis_map.tolist() if isinstance(axis_map, torch.Tensor) else axis_map
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"axis_map: expected a tensor or a sequence of integers, got {type(axis_map).__name__}")
    if not all(isinstance(axis, int) and not isinstance(axis, bool) for axis in values):
        raise TypeError("axis_map: expected integers, the axis of each pair, got something else among them")
    return tuple(values)


def _settle_length(spec: RopeSpec, max_position: int, long: bool | None) -> dict[str, Any]:
    """The scaling parameters with the choices that depend on the length of the table made."""
    parameters = dict(spec.parameters)
    if spec.rope_type == "longrope":
        trained = parameters.get("original_max_position_embeddings") or max_position
        parameters["long"] = max_position > trained if long is None else long
    elif long is not None:
        raise ValueError(f"long: only LongRoPE has long and short factors, this rope_type is {spec.rope_type!r}")
    if spec.rope_type == "dynamic":
        frozen_at = max(parameters.get("seq_len") or 0, parameters.get("max_position_embeddings") or 0)
        if 0 < frozen_at < max_position:
            raise NotImplementedError(
                f"rope_type 'dynamic' changes all frequencies once a sequence passes {frozen_at} tokens, and max_position is "
                f"{max_position}; pass max_position={frozen_at}, or freeze it with seq_len={max_position} in rope_parameters"
            )
    return parameters


def _axis_tensor(axis_map: tuple[int, ...] | None, pairs: int) -> torch.Tensor | None:
    if axis_map is None:
        return None
    if len(axis_map) != pairs or not all(0 <= axis < 128 for axis in axis_map):
        raise ValueError(f"axis_map: expected {pairs} axes (rotary_dim / 2) of 0..127, got {list(axis_map)}")
    return torch.tensor(axis_map, dtype=torch.int8, device="cpu")


def _describe(parameters: Mapping[str, Any]) -> str:
    rope_type = parameters["rope_type"]
    if rope_type == "longrope":
        return f"longrope, {'long' if parameters['long'] else 'short'} factors"
    if rope_type == "dynamic":
        return f"dynamic NTK frozen at {max(parameters.get('seq_len') or 0, parameters['max_position_embeddings'])}"
    shown = {"linear": "factor", "yarn": "factor", "llama3": "factor", "ntk_alpha": "alpha"}.get(rope_type)
    return f"{rope_type} {shown}={parameters[shown]:g}" if shown else rope_type
