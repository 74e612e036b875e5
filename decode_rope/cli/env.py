"""`python -m decode_rope env`: what this machine has, and which of this package's paths it will take."""

import argparse
import json
import os
import platform
import sys
from importlib import metadata

import torch

from .. import __version__
from ..launch import book, driver
from ..launch import platform as paths

_OPTIONAL = ("flashinfer-python", "transformers", "gguf", "hypothesis", "pytest", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {', '.join(value) if isinstance(value, list) else value}")
    return 0


def collect() -> dict:
    """Versions, devices and paths, as plain values."""
    return {
        "decode_rope": __version__,
        "python": f"{platform.python_version()} ({sys.platform})",
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "cuda": torch.version.cuda or "none",
        "hip": torch.version.hip or "none",
        "driver": _driver_version(),
        "devices": _devices() or ["none"],
        "tensors on the CPU": "kernels, through Triton's interpreter" if paths.INTERPRETED else "PyTorch reference",
        "tensors on the GPU": _gpu_path(),
        "programmatic dependent launch": _pdl(),
        "guards": "torch's TensorGuards" if _tensor_guards() else "plain Python",
        "environment": [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("DECODE_ROPE_", "TRITON_"))] or ["none"],
        "optional packages": [f"{name} {version}" for name in _OPTIONAL if (version := _version(name))] or ["none"],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append(
            f"{p.name}, compute capability {p.major}.{p.minor}, {p.multi_processor_count} multiprocessors, "
            f"{p.total_memory / 2**30:.0f} GiB"
        )
    return found


def _driver_version() -> str:
    return driver.version() if driver.available() else "none"


def _gpu_path() -> str:
    if not torch.cuda.is_available():
        return "none, for there is no GPU"
    if paths.INTERPRETED:
        return "kernels, through Triton's interpreter"
    return "kernels, launched through the driver" if paths.DIRECT else "kernels, launched through kernel[grid]"


def _pdl() -> str:
    if not torch.cuda.is_available():
        return "no, for there is no GPU"
    return "yes" if paths.pdl_supported(torch.device("cuda", torch.cuda.current_device())) else "no"


def _tensor_guards() -> bool:
    return book.TensorGuards is not None
