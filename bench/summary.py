"""`python -m bench.summary`: the README's table of decode times, from the results files."""

import json
from pathlib import Path

from bench.decode import FLOORS

RESULTS = Path(__file__).parent / "results"
SHAPES = ("32/8/128", "8/1/128", "64/8/64")
BATCHES = (1, 8, 64, 256, 1024)
COLUMNS = {
    "`ours`, metadata ready": "ours-meta",
    "`ours`": "ours",
    "SGLang": "sglang",
    "TokenSpeed": "tokenspeed",
    "FlashInfer rope + append": "flashinfer",
    "empty kernel": "empty-pdl",
    "copy of as many bytes": "copy-pdl",
}


def table(results: dict) -> str:
    """Medians in microseconds, one row a shape and batch; the fastest correct implementation in bold."""
    lines = ["| heads | B | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for shape in SHAPES:
        for row in results["rows"]:
            if row["shape"] == shape and row["tokens"] in BATCHES:
                lines.append(f"| {shape} | {row['tokens']} | " + " | ".join(_cells(row)) + " |")
    return "\n".join(lines)


def _cells(row: dict) -> list[str]:
    values = {name: row["us"][key]["median"] for name, key in COLUMNS.items()}
    best = min(value for name, value in values.items() if COLUMNS[name] not in FLOORS)
    return [f"**{value:.2f}**" if value == best else f"{value:.2f}" for value in values.values()]


def caption(results: dict) -> str:
    """What the numbers are, and of which run."""
    run, layers = results["environment"], results["arguments"]["layers"]
    versions = run["versions"]
    return (
        f"µs a launch on an {run['gpu']}: {layers} launches in a CUDA graph, each layer its own cache; medians of one run "
        f"(driver {run['driver']}, torch {versions['torch']}, Triton {versions['triton']}, SGLang {versions['sglang']}, "
        f"TokenSpeed {versions['tokenspeed-kernel']}, FlashInfer {versions['flashinfer-python']}, {run['time'][:10]})."
    )


def load(name: str = "nvidia-h200-decode.json") -> dict:
    return json.loads((RESULTS / name).read_text())


if __name__ == "__main__":
    found = load()
    print(caption(found), table(found), sep="\n\n")
