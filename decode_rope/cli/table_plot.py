"""The picture of `python -m decode_rope table --plot`: wavelengths of the pairs, and errors of the angles by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from decode_rope.tables import Exactness, accuracy, scaling

if TYPE_CHECKING:
    from .table import Kind

_BF16_ROUNDING = 2.0**-9  # half a unit in the last place of a bf16 number near 1
_COLORS: dict[Exactness, str] = {"hf": "#c44e52", "fp64": "#4c72b0"}


def draw(path: str, model_type: str, kinds: Mapping[str, Kind]) -> None:
    """Write the picture, one row per kind of layer. ImportError names the extra when matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'decode_rope[bench]'") from error
    if not kinds:
        raise ValueError("--plot: nothing to draw, no layer has a rotary embedding")
    figure, grid = pyplot.subplots(len(kinds), 2, figsize=(12, 4.4 * len(kinds)), squeeze=False, layout="constrained")
    figure.suptitle(f"Rotary embedding of {model_type or 'the model'}", fontsize=14, fontweight="bold")
    for (name, kind), (left, right) in zip(kinds.items(), grid, strict=True):
        title = f"{name}: {kind.rope_type}, theta {kind.spec.theta:g}" if len(kinds) > 1 else ""
        _draw_wavelengths(left, kind, title or f"{kind.rope_type}, theta {kind.spec.theta:g}: tokens per turn of each pair")
        _draw_errors(right, kind)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_wavelengths(axes: Any, kind: Kind, title: str) -> None:
    waves = kind.wavelengths()
    turning = torch.isfinite(waves)
    pairs = torch.arange(len(waves))
    if kind.spec.rope_type != "default":
        plain = 2 * torch.pi / scaling.default(kind.spec.rotary_dim, kind.spec.theta, dtype=torch.float64)[0]
        axes.plot(pairs, plain, color="0.6", linewidth=1.2, label="without scaling")
    axes.plot(pairs[turning], waves[turning], color="#55a868", marker="o", markersize=3, linewidth=1.5, label="this table")
    if not turning.all():
        axes.axvspan(int(turning.sum()) - 0.5, len(waves) - 0.5, color="0.92", label="pairs that stand still")
    lengths = {"max position": kind.max_position, "original max position": kind.original_max_position}
    for (label, length), style in zip(lengths.items(), ("--", ":"), strict=True):
        if length:
            axes.axhline(length, color="0.25", linestyle=style, linewidth=1, label=f"{label} {length}")
    axes.set(yscale="log", title=title, xlabel="pair", ylabel="wavelength [tokens]")
    _finish(axes)


def _draw_errors(axes: Any, kind: Kind) -> None:
    last = kind.max_position - 1
    positions = sorted({min(2**power - 1, last) for power in range(7, 31)})
    for exactness, color in _COLORS.items():
        absolute, relative = zip(
            *(accuracy.error_at(kind.inv_freq, kind.exact_inv_freq, p, exactness) for p in positions), strict=True
        )
        axes.plot(positions, absolute, color=color, linestyle=":", label=f"{exactness}: of the angle")
        between = f"{exactness}: between tokens up to {accuracy.WINDOW} apart"
        axes.plot(positions, relative, color=color, marker="o", markersize=3, label=between)
    axes.axhline(_BF16_ROUNDING, color="0.25", linestyle="--", linewidth=1, label="rounding of a bf16 number")
    if kind.original_max_position and kind.original_max_position < last:
        axes.axvline(kind.original_max_position, color="0.25", linestyle=":", linewidth=1, label="original max position")
    axes.set(yscale="log", title="largest error against exact angles", xlabel="position", ylabel="error [rad]")
    axes.set_xscale("log", base=2)
    axes.set_xticks(positions[::2], [_thousands(position + 1) for position in positions[::2]])
    _finish(axes)


def _thousands(number: int) -> str:
    return next((f"{number // size}{unit}" for size, unit in ((2**20, "M"), (1024, "k")) if number >= size), str(number))


def _finish(axes: Any) -> None:
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, framealpha=0.9)
