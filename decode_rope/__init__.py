"""Rotate the Q and K of a decode step and write K and V into a paged KV cache, in one Triton launch.

Rooms, from the top down; imports point down only:

    cli/        the commands                examples/   a server loop, adapters for other servers
    hf/         model.py (PagedModel)  families.py  attention.py  flashinfer_attention.py  graphs.py  patch.py (enable)  loading.py
    api/        functions.py  mla.py  prepared.py (DecodeRope)  bound.py (what prepared ops share)  tuning.py  registry.py (get_op)
    compile/    PyTorch operators for torch.compile: operators.py (what all share)  append.py  mla.py  rope.py
    launch/     spec.py (what differs from kernel to kernel)  decode.py  prefill.py  mla.py  rope.py  append.py (what appends share)
                book.py (finds plans)  plan.py  compiled.py  driver.py  platform.py  tiles.py
    append/     arguments.py (the records and the roles of their tensors)  checks.py  mla.py  rules.py  layout.py  norm.py  codes.py
                faults.py
    kernels/    decode.py  prefill.py  mla.py  rope.py, made of rotation.py  heads.py  norm.py  quant.py
    reference.py  tables/ (RopeTable; hf/ reads configurations)  cache.py: know nobody

The way of a call:

    eager     functions -> Book.find -> Plan.again -> driver                                   a call seen before, memory too
                        -> Book.run  -> Plan.launch_apart -> Compiled.pack -> driver           other memory
                        -> checks -> Spec.values -> Plan -> compiled -> Plan.launch_checked    a configuration's first call
    bound     DecodeRope.bind -> checks -> Plan.fitting;  Bound() -> driver
    compiled  functions -> compile.append -> operator in the graph;  the operator -> Book.run, as above
    CPU       functions -> checks -> reference

To add

    an argument      signature (api/functions.py), record and role (append/arguments.py), check (append/checks.py),
                     reference.py, kernel (kernels/decode.py, prefill.py), spec (launch/append.py)
    a rope type      a function in tables/scaling.py
    a model family   tables/hf/families.py; to run it, hf/families.py
    a kernel         a file in kernels/, its spec in launch/, a section of append/checks.py
    a peer           a file in bench/providers/, a line in its registry
"""

from . import reference
from .api.functions import apply_rope, rope_append_decode, rope_append_prefill
from .api.mla import DecodeMLA, rope_append_mla_decode, rope_append_mla_prefill
from .api.prepared import DecodeRope
from .api.registry import get_op
from .append.faults import check_faults
from .append.norm import LatentNorm, QKNorm
from .cache import CacheFull, PagedKVCache
from .tables import RopeTable

__version__ = "0.1.0"

__all__ = [
    "CacheFull",
    "DecodeMLA",
    "DecodeRope",
    "LatentNorm",
    "PagedKVCache",
    "QKNorm",
    "RopeTable",
    "__version__",
    "apply_rope",
    "check_faults",
    "get_op",
    "reference",
    "rope_append_decode",
    "rope_append_mla_decode",
    "rope_append_mla_prefill",
    "rope_append_prefill",
]
