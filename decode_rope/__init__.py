"""Rotate the Q and K of a decode step and write K and V into a paged KV cache, in one Triton launch."""

from . import reference
from ._version import __version__
from .api import rope_append_decode
from .faults import check_faults
from .prepared import DecodeRope

__all__ = [
    "DecodeRope",
    "__version__",
    "check_faults",
    "reference",
    "rope_append_decode",
]
