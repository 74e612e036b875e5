"""How exact a cos/sin table is, by how it was made and how far the positions go: `python -m bench.table_error`.

Rows are ways to make a table, columns are windows of 1024 positions that end at 1k, 32k, ... Every cell is
`angle / relative / output`: the largest error of an angle in radians, the largest error between two positions of the window
(what a dot product of q and k sees), and the largest error of a rotated element for q drawn from N(0, 1) in bf16, before the
result is rounded. The truth is float64 frequencies, products and trigonometry. Runs on a CPU in seconds.
"""

import argparse
import json

import torch

from decode_rope import scaling
from decode_rope.accuracy import WINDOW, angle_error
from decode_rope.tables import rows

METHODS = {
    "hf": "fp32 frequencies, product and trigonometry (transformers, SGLang)",
    "fp64": "the same fp32 frequencies, product and trigonometry in float64, rounded once",
    "hf in bf16": "the first one rounded to bf16 (vLLM's table in a bf16 model)",
}
ENDS = {"1k": 2**10, "32k": 2**15, "128k": 2**17, "1M": 2**20}


def table_rows(method: str, inv_freq: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """cos and sin `[stop - start, R]` as `method` makes them."""
    if method == "hf in bf16":
        return rows(inv_freq, 1.0, start, stop, "hf").bfloat16().float()
    return rows(inv_freq, 1.0, start, stop, "hf" if method == "hf" else "fp64")


def output_error(cos_sin: torch.Tensor, exact_inv_freq: torch.Tensor, start: int) -> float:
    """Largest error of a rotated element, before the output is rounded."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(cos_sin.shape, generator=generator).bfloat16().double()
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos_sin.double().chunk(2, dim=-1)
    angle = torch.arange(start, start + x.shape[0], dtype=torch.float64)[:, None] * exact_inv_freq
    cos_error, sin_error = cos - angle.cos(), sin - angle.sin()
    errors = (first * cos_error - second * sin_error, second * cos_error + first * sin_error)
    return max(float(error.abs().max()) for error in errors)


def measure(theta: float, rotary_dim: int) -> dict[str, dict[str, tuple[float, float, float]]]:
    """`{method: {end: (angle, relative, output)}}`."""
    inv_freq, _ = scaling.default(rotary_dim, theta)
    exact, _ = scaling.default(rotary_dim, theta, dtype=torch.float64)
    results: dict[str, dict[str, tuple[float, float, float]]] = {}
    for method in METHODS:
        results[method] = {}
        for name, end in ENDS.items():
            start = end - WINDOW
            made = table_rows(method, inv_freq, start, end)
            results[method][name] = (*angle_error(made, exact, start), output_error(made, exact, start))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--theta", type=float, default=1e6)
    parser.add_argument("--rotary-dim", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = measure(args.theta, args.rotary_dim)
    if args.json:
        print(json.dumps({"theta": args.theta, "rotary_dim": args.rotary_dim, "errors": results}, indent=2))
        return
    print(f"theta {args.theta:g}, rotary_dim {args.rotary_dim}: angle / relative / output\n")
    print(f"{'table':<12}" + "".join(f"{name:<32}" for name in ENDS).rstrip())
    for method, cells in results.items():
        print(f"{method:<12}" + "  |  ".join(" / ".join(f"{value:.1e}" for value in cell) for cell in cells.values()))
    print("\n" + "\n".join(f"{method}: {meaning}" for method, meaning in METHODS.items()))


if __name__ == "__main__":
    main()
