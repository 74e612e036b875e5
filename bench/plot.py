"""Draws a results file: microseconds against the batch, or GB/s against the tokens, one panel a model."""

import json
from pathlib import Path
from typing import Any

from bench.workloads import UsageError

_KEYS = {"decode": "us", "decode-hot": "us", "prefill": "gbps"}
_KEYS |= dict.fromkeys(("decode-in-model", "decode-in-model-attention-pdl"), "added")
_STYLES = {"ours-plain": ":", "ours-pdl": "--", "ours-meta": "-.", "ours-last": "--", "empty-pdl": "--", "copy-pdl": ":"}
_LOOKS = {"ours": ("black", 2.2), "peer": (None, 1.2), "floor": ("grey", 1.0)}


def series(rows: list[dict[str, Any]], key: str) -> dict[str, list[tuple[int, float]]]:
    """name -> (tokens, median) of one model's rows; `key` is `us`, `added` or `gbps`."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.get(key, {}).items():
            median = value["median"] if isinstance(value, dict) else value
            lines.setdefault(name, []).append((row["tokens"], median))
    return lines


def panels(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows by model and, for prefill, by state."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        title = " ".join(filter(None, (row["model"], row.get("shape"))))
        if report["mode"] == "prefill":
            title += " hot" if row["state"] == "hot" else " rotated"
        groups.setdefault(title, []).append(row)
    return groups


def _look(name: str) -> tuple[str | None, float]:
    kind = "ours" if name.startswith("ours") else "floor" if name.startswith(("empty", "copy")) else "peer"
    return _LOOKS[kind]


def draw(report: dict[str, Any], path: str) -> None:
    """Writes a PNG (or whatever the suffix says).

    Raises:
        ImportError: matplotlib is missing; it comes with the extra `bench`.
        UsageError: this mode has nothing to draw.
    """
    key = _KEYS.get(report.get("mode"))
    if key is None or not report["rows"]:
        held = f"{len(report.get('rows', ()))} of {report.get('mode')}"
        raise UsageError(f"plot: expected rows of {', '.join(_KEYS)}; got {held}")
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'decode_rope[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = [color for color in pyplot.get_cmap("tab10").colors if len(set(color)) > 1]  # grey is for floors
    groups = panels(report)
    across = min(3, len(groups))
    down = -(-len(groups) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(5.2 * across, 3.8 * down), squeeze=False, layout="constrained")
    for axis, (title, rows) in zip(axes.flat, groups.items(), strict=False):
        axis.set_prop_cycle(color=colors)
        for name, points in series(rows, key).items():
            color, width = _look(name)
            axis.plot(
                *zip(*points, strict=True), label=name, color=color, linewidth=width, linestyle=_STYLES.get(name, "-"), marker="."
            )
        axis.set_xscale("log", base=2)
        if key == "us":
            axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel("tokens")
        axis.set_ylabel({"us": "µs per launch", "added": "added µs per launch", "gbps": "GB/s"}[key])
    for axis in list(axes.flat)[len(groups) :]:
        axis.set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 + 2 * across, fontsize=8)
    figure.suptitle(f"decode_rope, {report['environment']['gpu'] or 'CPU'}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_files(paths: list[str]) -> int:
    """A picture beside every results file, with its name and the suffix .png; 0."""
    for path in map(Path, paths):
        try:
            draw(json.loads(path.read_text()), str(path.with_suffix(".png")))
        except UsageError as error:
            print(f"skip {path.name}: {error}")
        else:
            print(f"wrote {path.with_suffix('.png').name}")
    return 0
