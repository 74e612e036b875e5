"""Rotate the Q and K of a decode step and write K and V into a paged KV cache, in one Triton launch."""

from . import reference
from ._version import __version__
from .api import rope_append_decode
from .cache import CacheFull, PagedKVCache
from .faults import check_faults
from .prefill import rope_append_prefill
from .prepared import DecodeRope
from .registry import get_op
from .rope import apply_rope
from .tables import RopeTable

__all__ = [
    "CacheFull",
    "DecodeRope",
    "PagedKVCache",
    "RopeTable",
    "__version__",
    "apply_rope",
    "check_faults",
    "get_op",
    "reference",
    "rope_append_decode",
    "rope_append_prefill",
]
