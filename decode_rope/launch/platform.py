"""What this process can do: interpret or compile kernels, launch them through the driver, launch them early (PDL)."""

import os

import torch
import triton

# Triton decides this when a kernel is defined, by TRITON_INTERPRET in the environment.
INTERPRETED = bool(triton.knobs.runtime.interpret)
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_TRIED_VERSIONS = ((3, 6), (3, 9))
# Whether kernels are launched through the driver: not on AMD, not with a Triton version that nobody has tried.
DIRECT = (
    not INTERPRETED
    and not torch.version.hip
    and _TRIED_VERSIONS[0] <= _VERSION <= _TRIED_VERSIONS[1]
    and os.environ.get("DECODE_ROPE_LAUNCH", "direct") != "jit"
)


def runs_reference(device: torch.device) -> bool:
    """CPU tensors go to the PyTorch reference, unless Triton interprets its kernels."""
    return device.type == "cpu" and not INTERPRETED


def casts_float8(device: torch.device) -> bool:
    """Whether a GPU has instructions that round to 8-bit floats: NVIDIA's from compute capability 8.9 on."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def pdl_supported(device: torch.device) -> bool:
    """Programmatic dependent launch needs an NVIDIA GPU of compute capability 9.0; DECODE_ROPE_PDL=0 turns it off."""
    if os.environ.get("DECODE_ROPE_PDL", "1") == "0" or INTERPRETED or device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def pdl_mode(device: torch.device, chosen: int, asked: bool | None) -> int:
    """How a launch uses PDL, as `Geometry.pdl` numbers it: as its geometry chose, unless the caller asked for it or against it."""
    if not pdl_supported(device) or asked is False:
        return 0
    return int(chosen or bool(asked))


def check_pdl(enable_pdl: bool | None, device: torch.device) -> None:
    """Refuse `enable_pdl=True` on a GPU without it; without a GPU it means nothing."""
    if not enable_pdl or device.type != "cuda":
        return
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] < 9:
        raise ValueError(
            f"enable_pdl: expected None or False on {torch.cuda.get_device_name(device)}, because programmatic dependent launch "
            f"needs an NVIDIA GPU of compute capability 9.0 or later, got True"
        )
