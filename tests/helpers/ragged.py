"""Prefill calls that several tests make: a batch of sequences, the same tokens by slots, and geometries."""

import torch
from cases import Case, Spec, build

from decode_rope.append.arguments import Append, resolved
from decode_rope.launch.book import Book
from decode_rope.launch.prefill import PREFILL, PrefillGeometry

# Four sequences that begin at 0, 5, 9 and 0, the third of them empty, and a token of padding after the last.
CU_SEQLENS = [0, 7, 12, 12, 19]
POSITIONS = [*range(7), *range(5, 10), *range(7), 33]
BLOCK_TABLE = [[5, 2, -1], [0, 6, 3], [-1, -1, -1], [4, 1, -1]]
RAGGED = Spec(POSITIONS, BLOCK_TABLE)
SLOTS = [20, 21, 22, 23, 8, 9, 10, 25, 26, 27, 12, 13, 16, 17, 18, 19, 4, 5, 6]
# Of calls that rotate nothing.
STILL = [dict(), dict(q_out=True), dict(heads=(4, 0)), dict(heads=(4, 0), q_out=True), dict(k_out="own"), dict(head_dim=20)]


def ragged(device, spec: Spec = RAGGED, cu_seqlens=CU_SEQLENS, dtype=torch.int32) -> Case:
    """The case of a spec whose block table has a row for each of the sequences of `cu_seqlens`."""
    return build(spec.but(options=spec.options | {"cu_seqlens_q": torch.tensor(cu_seqlens, dtype=dtype, device=device)}), device)


def live(device, cu_seqlens=None, **changes) -> Case:
    """A call that rotates q and k and has no cache."""
    case = build(Spec(POSITIONS, slots=SLOTS, **changes), device)
    for name in ("v", "k_cache", "v_cache", "slot_mapping"):
        case.views[name] = None
    if cu_seqlens is not None:
        case.options["cu_seqlens_q"] = torch.tensor(cu_seqlens, device=device)
    return case


def prefill_in(geometry: PrefillGeometry):
    """`rope_append_prefill` with a geometry of its own, which the public function does not take."""
    book = Book(PREFILL)

    def function(**arguments):
        call = Append(**arguments, geometry=geometry)
        book.run(resolved(call))
        return call.q if call.q_out is None else call.q_out

    return function
