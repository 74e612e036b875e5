"""Hugging Face models over this package: `PagedModel` decodes one through a `PagedKVCache`, `enable` keeps transformers' own loops.

Needs the `hf` extra; transformers is imported when it is used, not before.
"""

from .families import Support, supports
from .model import PagedModel
from .patch import disable, enable

__all__ = ["PagedModel", "Support", "disable", "enable", "supports"]
