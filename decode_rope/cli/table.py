"""`python -m decode_rope table`: what a config.json says about its rotary embedding, and how exact its table is."""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decode_rope.tables import accuracy, frequencies
from decode_rope.tables.hf import config as hf_config
from decode_rope.tables.hf.config import RopeConfig
from decode_rope.tables.hf.spec import RopeSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    add = parser.add_argument
    add("--config", required=True, metavar="PATH", help="a config.json, or the folder it is in")
    add("--layer-type", metavar="X", help="only this kind of layer: a layer type or a layer index")
    add("--max-position", type=int, metavar="N", help="rows of the table, default: what the config is made for")
    add("--exactness", choices=("hf", "fp64"), default="hf", help="whose error to print, see RopeTable.build")
    add("--json", action="store_true", help="print JSON")
    add("--plot", metavar="PNG", help="draw wavelengths and errors; needs matplotlib: pip install 'decode_rope[bench]'")


def run(args: argparse.Namespace) -> int:
    """Print, and draw if asked; 2 with a message on stderr when the config cannot be read."""
    try:
        config = hf_config.read(_load(Path(args.config)))
        specs = _specs(config, args.layer_type)
        kinds = {name: None if spec is None else Kind(spec, args) for name, spec in specs.items()}
        if args.plot:
            from .table_plot import draw

            draw(args.plot, config.model_type, {name: kind for name, kind in kinds.items() if kind})
    except (OSError, TypeError, ValueError, NotImplementedError, ImportError) as error:
        print(f"table: {error}", file=sys.stderr)
        return 2
    if args.json:
        layer_types = {name: None if kind is None else kind.facts() for name, kind in kinds.items()}
        print(json.dumps({"model_type": config.model_type, "layer_types": layer_types}, indent=2))
        return 0
    print(config.model_type or "no model_type")
    for name, kind in kinds.items():
        print(f"\n{name}{_share(config, name)}")
        print("  no rotary embedding (NoPE): pass cos_sin_cache=None" if kind is None else kind.text())
    if args.plot:
        print(f"\ndrawn: {args.plot}")
    return 0


class Kind:
    """One kind of layer with its frequencies, in fp32 as the table has them and in float64."""

    def __init__(self, spec: RopeSpec, args: argparse.Namespace) -> None:
        rows = spec.max_position if args.max_position is None else args.max_position
        if rows is None:
            raise ValueError("the config has no max_position_embeddings; pass --max-position")
        if rows < 1:
            raise ValueError(f"--max-position: expected a number of rows above 0, got {rows}")
        self.spec = spec
        self.max_position: int = rows
        self.exactness = args.exactness
        self.inv_freq, self.attention_scaling, self.rope_type = frequencies(spec, rows)
        self.exact_inv_freq, _, _ = frequencies(spec, rows, dtype=torch.float64)

    @property
    def original_max_position(self) -> int | None:
        """The length the model was trained at, where the scaling names it."""
        return self.spec.parameters.get("original_max_position_embeddings")

    def wavelengths(self) -> torch.Tensor:
        """Tokens per full turn of each pair, inf for a pair that does not turn."""
        return 2 * math.pi / self.exact_inv_freq.abs()

    def facts(self) -> dict[str, Any]:
        """All of it, for `--json`."""
        spec = self.spec
        absolute, relative = accuracy.error_at(self.inv_freq, self.exact_inv_freq, self.max_position - 1, self.exactness)
        turning = self.wavelengths()[self.exact_inv_freq != 0]
        return {
            "rope_type": spec.rope_type,
            "parameters": spec.parameters,
            "theta": spec.theta,
            "head_dim": spec.head_dim,
            "rotary_dim": 2 * self.inv_freq.shape[0],
            "pairs_that_turn": turning.shape[0],
            "is_neox": spec.is_neox,
            "rotates_tail": spec.rotates_tail,
            "axis_map": spec.axis_map,
            "attention_scaling": self.attention_scaling,
            "max_position": self.max_position,
            "table_bytes": self.max_position * 2 * self.inv_freq.shape[0] * 4,
            "shortest_wavelength": float(turning.min()),
            "longest_wavelength": float(turning.max()),
            "exactness": self.exactness,
            "angle_error_at_the_end": absolute,
            "angle_error_within_1024_tokens": relative,
        }

    def text(self) -> str:
        """The same for people."""
        facts, spec = self.facts(), self.spec
        rotary_dim = facts["rotary_dim"]
        place = "last" if spec.rotates_tail else "first"
        rotated = "all" if rotary_dim == spec.head_dim else f"the {place} {rotary_dim} of"
        pairs = f"(i, i + {rotary_dim // 2}), NeoX" if spec.is_neox else "(2i, 2i + 1), interleaved"
        still = rotary_dim // 2 - facts["pairs_that_turn"]
        absolute, relative = facts["angle_error_at_the_end"], facts["angle_error_within_1024_tokens"]
        lines = {
            "rope": f"{self.rope_type}, theta {spec.theta:g}",
            "parameters": _parameters(spec.parameters),
            "rotates": f"{rotated} {spec.head_dim} dims of a head, pairs {pairs}",
            "stands still": f"{still} of {rotary_dim // 2} pairs" if still else "",
            "axes": _axes(spec.axis_map),
            "cos and sin": "" if self.attention_scaling == 1 else f"multiplied by {self.attention_scaling:.6g}",
            "wavelengths": f"{facts['shortest_wavelength']:.4g} to {facts['longest_wavelength']:.4g} tokens per turn",
            "table": f"{self.max_position} positions, {_size(facts['table_bytes'])} in fp32",
            "angle error": f"{absolute:.1e} rad at the last position, {relative:.1e} within its last 1024 ({self.exactness})",
        }
        return "\n".join(f"  {name:<12} {value}" for name, value in lines.items() if value)


def _load(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _specs(config: RopeConfig, layer_type: str | None) -> Mapping[str, RopeSpec | None]:
    if layer_type is not None:
        chosen = int(layer_type) if layer_type.isdecimal() else layer_type
        return {f"layer {chosen}" if isinstance(chosen, int) else chosen: config.select(chosen)}
    mixed = {f"layer {i}": spec for i, spec in enumerate(config.by_layer or [])} if config.mixed else {}
    return {**config.by_type, **mixed}


def _share(config: RopeConfig, name: str) -> str:
    counts = Counter(config.layer_labels)
    return f", {counts[name]} of {len(config.layer_labels)} layers" if counts[name] else ""


def _parameters(parameters: Mapping[str, Any]) -> str:
    shown = {
        name: f"{len(value)} numbers" if isinstance(value, list) else value
        for name, value in parameters.items()
        if name != "rope_type"
    }
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def _axes(axis_map: tuple[int, ...] | None) -> str:
    if axis_map is None:
        return ""
    return f"{max(axis_map) + 1} rows of positions; axis of each pair: {''.join(map(str, axis_map))}"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
