"""`rope_append_decode` as PyTorch operators, for torch.compile and torch.export.

Eager calls never come here: PyTorch's dispatcher would cost them as much as the launch does. A compiled graph calls an operator,
whose schema says what it writes, and which does what an eager call does: checks, plan, launch, or the CPU reference. Operators
return nothing, have no gradient and bump no version counter.
"""

from inspect import signature
from operator import itemgetter

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .checks import _no_grad
from .dispatch import check_call, decode_plans
from .faults import fault_buffer
from .geometry import Geometry
from .plan import Call

# Part of every name. Raise it with any change of a schema: graphs cached on disk know an operator by its name alone.
_VERSION = 1

# A schema cannot say "q is written unless q_out is given", so each way of giving outputs has an operator: by
# (q is rotated in place, k is rotated in place), its suffix and what it takes before the arguments that all of them take.
_ROWS = {
    (True, False): ("", "Tensor(a!) q, Tensor? k, Tensor? v, Tensor(d!)? k_out"),
    (True, True): ("_k_in_place", "Tensor(a!) q, Tensor(d!) k, Tensor? v"),
    (False, False): ("_q_out", "Tensor q, Tensor(a!) q_out, Tensor? k, Tensor? v, Tensor(d!)? k_out"),
    (False, True): ("_q_out_k_in_place", "Tensor q, Tensor(a!) q_out, Tensor(d!) k, Tensor? v"),
}
_REST = (
    "Tensor(b!)? k_cache, Tensor(c!)? v_cache, Tensor? cos_sin_cache, Tensor positions, Tensor? block_table, "
    "Tensor? slot_mapping, Tensor? cache_positions, SymInt tokens_per_request, bool is_neox, str kv_layout, bool? enable_pdl, "
    "bool metadata_ready, int[]? geometry"
)
# Compiled graphs must hand over the strides that were traced: of a cache in another layout, only a copy could be given.
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),)

_SHARED = (
    "{}: inputs of the graph share its storage, and torch.compile would write to a copy, or elsewhere in a later call; give the "
    "graph the one tensor they are slices of, and slice it in the compiled function"
)
_MISPLACED = (
    "{}: a slice, made in the compiled function, of a tensor of dynamic sizes or of an input that is a slice itself, which "
    "torch.compile would misplace; keep sizes but the number of tokens static, and give the graph the whole tensor"
)

_FORGETFUL = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)

_LIBRARY = torch.library.Library("decode_rope", "FRAGMENT")  # what is registered lives as long as this object
_PLANS = decode_plans()  # of its own: guards made inside an operator do not match outside, where autograd is in other states


def _run(
    q, k, v, k_cache, v_cache, cos_sin_cache, positions, block_table, slot_mapping, cache_positions, q_out, k_out,
    tokens_per_request, is_neox, kv_layout, enable_pdl, metadata_ready, geometry,
) -> None:  # fmt: skip
    """What an operator does to real tensors: an eager call."""
    paged = slot_mapping is None
    index = block_table if paged else slot_mapping
    everything = (q, k, v, k_cache, v_cache, cos_sin_cache, positions, index, cache_positions, q_out, k_out)
    given = tuple([x for x in everything if x is not None])
    geometry = None if geometry is None else Geometry(*geometry)._replace(pdl=bool(geometry[-1]))
    facts = (tokens_per_request, is_neox, kv_layout, enable_pdl, metadata_ready, geometry)
    flags = (paged, *[x is None for x in everything], *facts)
    plan = _PLANS.find(flags, given) if paged or block_table is None else None
    if plan is None or not plan.submit(*everything):
        call = Call(*everything[:8], paged, *everything[8:], *facts)
        check_call(call, block_table=block_table, slot_mapping=slot_mapping)
        _PLANS.run_checked(call, flags, given)


def _trace(written: dict[str, Tensor]) -> None:
    """What an operator does to the tensors of a compiler: nothing, for it returns nothing.

    Raises:
        NotImplementedError: Inductor would not do to memory what was asked. Dynamo breaks the graph there, and the call runs
            eagerly; under `fullgraph=True` this is the error.
    """
    device = next(iter(written.values())).device
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_initialized()):
        with _disable_current_modes():
            fault_buffer(device)  # now, for the first run of a CUDA graph would make it in the graph's own memory pool
    homes = {name: _home(name, x) for name, x in written.items()}
    for name, x in written.items():
        home = homes[name]
        if home is not None and any(y is not home and y is not None and _storage(y) == _storage(home) for y in homes.values()):
            raise NotImplementedError(_SHARED.format(name))
        if x is not home and _is_misplaced(x, home):
            raise NotImplementedError(_MISPLACED.format(name))


def _home(name: str, x: Tensor) -> Tensor | None:
    """The input that `x` is, or is a slice of, among those so far of the graph that Dynamo traces."""
    tracked = getattr(getattr(getattr(x, "fake_mode", None), "shape_env", None), "tracked_fakes", None) or ()
    # What an input is a view of is tracked as well, and is no input.
    inputs = [entry.fake for entry in tracked if getattr(entry.source, "member", None) != "_base"]
    inputs = [y for y in inputs if isinstance(y, Tensor) and _storage(y) == _storage(x)]
    if len(inputs) < 2:
        return inputs[0] if inputs else None
    home = next((y for y in inputs if _meet(x, y)), None)
    # AOTAutograd makes one input of those that overlap, and has no guard for where in it they lie.
    if home is not None and any(y is not home and _meet(y, home) for y in inputs):
        raise NotImplementedError(_SHARED.format(name))
    return home


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _meet(x: Tensor, y: Tensor) -> bool:
    """Whether the ranges of bytes of two views of one storage overlap."""
    (x_start, x_end), (y_start, y_end) = _range(x), _range(y)
    return x_start < y_end and y_start < x_end


def _range(x: Tensor):
    """`layout.span` for what has no address: first byte of a view in its storage and the byte after its last one."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.storage_offset() * x.element_size(), (x.storage_offset() + last + 1) * x.element_size()


def _is_misplaced(x: Tensor, home: Tensor | None) -> bool:
    """Would Inductor write to the wrong place for `x`, a slice of the input `home` or of something the graph makes?

    It loses distances that are dynamic, and forgets where in its storage an input begins: before PyTorch 2.13 for all slices of
    it, since then for those of equal strides. (What AOTAutograd traces has neither home nor base.)"""
    if isinstance(x.storage_offset(), torch.SymInt) and (home is not None or x._base is not None):
        return True
    if home is None or (isinstance(home.storage_offset(), int) and home.storage_offset() == 0):
        return False
    return _FORGETFUL or (x.dim() == home.dim() and x.stride() == home.stride())


def _define(suffix: str, rows: str, k_in_place: bool):
    """Register an operator; returns it and the names of its arguments."""
    name = f"rope_append_decode_v{_VERSION}{suffix}"
    arguments = [argument.split() for argument in f"{rows}, {_REST}".split(", ")]
    names = [name for _, name in arguments]
    places = {name: place for place, name in enumerate(names)}
    if k_in_place:
        places["k_out"] = places["k"]
    # In the order of `_run`; None, put last, for what this operator does not take.
    in_order = itemgetter(*[places.get(name, len(names)) for name in signature(_run).parameters])

    @torch._disable_dynamo  # after a break in the graph, Dynamo would trace what an operator does as well
    def run(*values) -> None:
        _run(*in_order((*values, None)))

    def trace(*values) -> None:
        _trace({name: x for (kind, name), x in zip(arguments, values, strict=True) if "!" in kind and x is not None})

    _LIBRARY.define(f"{name}({rows}, {_REST}) -> ()", tags=_TAGS)
    for device in ("CPU", "CUDA"):  # "CUDA" is ROCm's too
        _LIBRARY.impl(name, run, device)
    _LIBRARY._register_fake(name, trace)
    return getattr(torch.ops.decode_rope, name).default, names


_OPERATORS = {in_place: _define(suffix, rows, in_place[1]) for in_place, (suffix, rows) in _ROWS.items()}


def rope_append_decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    cos_sin_cache,
    positions: Tensor,
    *,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    cache_positions: Tensor | None,
    tokens_per_request: int,
    is_neox: bool,
    kv_layout: str,
    q_out: Tensor | None,
    k_out: Tensor | None,
    enable_pdl: bool | None,
    metadata_ready: bool = False,
    geometry: Geometry | None = None,
) -> Tensor:
    """The public function while a compiler traces it: one operator in the graph.

    Shapes and the like are looked at when the operator runs, so that tracing one batch size does not tie the graph to it.
    """
    if cos_sin_cache is not None and not isinstance(cos_sin_cache, Tensor):
        is_neox = getattr(cos_sin_cache, "is_neox", is_neox)
        cos_sin_cache = getattr(cos_sin_cache, "cos_sin_cache", cos_sin_cache)
    if k is None:
        k_cache = v_cache = None
    given = dict(
        q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, cos_sin_cache=cos_sin_cache, positions=positions,
        block_table=block_table, slot_mapping=slot_mapping, cache_positions=cache_positions, q_out=q_out, k_out=k_out,
    )  # fmt: skip
    _no_grad({name: x for name, x in given.items() if x is not None})  # compiled graphs run where autograd sees nothing
    given.update(
        tokens_per_request=tokens_per_request, is_neox=is_neox, kv_layout=kv_layout, enable_pdl=enable_pdl,
        metadata_ready=metadata_ready, geometry=None if geometry is None else [int(x) for x in geometry],
    )  # fmt: skip
    operator, names = _OPERATORS[q_out is None or q_out is q, k is not None and k_out is k]
    operator(*[given[name] for name in names])
    return q if q_out is None else q_out
