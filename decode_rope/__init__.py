"""Rotate the Q and K of a decode step and write K and V into a paged KV cache, in one Triton launch."""

from . import reference
from ._version import __version__
from .api import rope_append_decode
from .cache import CacheFull, PagedKVCache
from .faults import check_faults
from .prepared import DecodeRope
from .tables import RopeTable

__all__ = [
    "CacheFull",
    "DecodeRope",
    "PagedKVCache",
    "RopeTable",
    "__version__",
    "check_faults",
    "reference",
    "rope_append_decode",
]
