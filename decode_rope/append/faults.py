"""Rows that pointed outside their tensors: counted on the device as they happen, raised when asked for."""

import torch
from torch import Tensor

from ..reference import COLUMN, NO_RECORD, PAGE_ID, POSITION, SLOT

_WHAT = {
    POSITION: "position {} is past the end of cos_sin_cache",
    COLUMN: "block-table column {} is past the table's width",
    PAGE_ID: "page {} is past the number of pages in the cache",
    SLOT: "slot {} is past the capacity of the cache",
}
_BUFFERS: dict[torch.device, Tensor] = {}


def fault_buffer(device: torch.device) -> Tensor:
    """The int64 `[2]` fault record of a device: a count, and the lowest faulty row since the last check. Never freed."""
    buffer = _BUFFERS.get(device)
    if buffer is None:
        with torch.inference_mode(False):  # an inference tensor could not be cleared outside that mode
            buffer = torch.tensor([0, NO_RECORD], dtype=torch.int64, device=device)
        buffer = _BUFFERS.setdefault(device, buffer)  # another thread's, if it was first
    return buffer


def check_faults() -> None:
    """Wait for every device this package has used; raise if a row since the last check pointed outside its tensors.

    Such rows wrote nothing to a cache and read nothing they should not have. The count starts anew. Not for use while a CUDA
    graph is being captured.

    Raises:
        IndexError: how many rows, and of the lowest one its kind, row and value.
    """
    found = []
    for device, buffer in list(_BUFFERS.items()):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count, record = buffer.tolist()
        if count:
            buffer.copy_(torch.tensor([0, NO_RECORD]))
            row, kind, value = record >> 35, (record >> 32) & 7, record & 0xFFFFFFFF
            shown = f"{value} or more" if value == 0xFFFFFFFF else value
            found.append(f"{device}: {count} faulty row(s), their K and V were not written; row {row}: {_WHAT[kind].format(shown)}")
    if found:
        raise IndexError("; ".join(found))
