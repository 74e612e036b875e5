"""Rotate the Q and K of a decode step and write K and V into a paged KV cache, in one Triton launch."""

from . import reference
from .api.functions import apply_rope, rope_append_decode, rope_append_prefill
from .api.prepared import DecodeRope
from .api.registry import get_op
from .append.faults import check_faults
from .append.norm import QKNorm
from .cache import CacheFull, PagedKVCache
from .tables import RopeTable

__version__ = "0.1.0"

__all__ = [
    "CacheFull",
    "DecodeRope",
    "PagedKVCache",
    "QKNorm",
    "RopeTable",
    "__version__",
    "apply_rope",
    "check_faults",
    "get_op",
    "reference",
    "rope_append_decode",
    "rope_append_prefill",
]
