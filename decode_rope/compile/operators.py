"""What the PyTorch operators of this package have in common: how one is registered, and what no compiler may make of it.

Eager calls never come here: PyTorch's dispatcher would cost them as much as the launch does. A compiled graph calls an operator,
whose schema says what it writes, and which does what an eager call does: checks, plan, launch, or the CPU reference.
"""

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes

from ..append.faults import fault_buffer

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

# What graphs being compiled write: by the shapes of their trace, (argument, the input that is written, which knows its shapes).
_WRITTEN: WeakKeyDictionary = WeakKeyDictionary()
LIBRARY = torch.library.Library("decode_rope", "FRAGMENT")  # what is registered lives as long as this object


def make_fault_record(device: torch.device) -> None:
    """Now, while tracing, for the first run of a CUDA graph would make it in the graph's own memory pool."""
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_initialized()):
        with _disable_current_modes():
            fault_buffer(device)


def _trace(written: dict[str, Tensor]) -> None:
    """What an operator that returns nothing does to the tensors of a compiler: nothing.

    Raises:
        NotImplementedError: Inductor would not do to memory what was asked. Dynamo breaks the graph there, and the call runs
            eagerly; under `fullgraph=True` this is the error.
    """
    make_fault_record(next(iter(written.values())).device)
    homes = {name: _home(name, x) for name, x in written.items()}
    for name, x in written.items():
        home = homes[name]
        if home is not None and any(y is not home and y is not None and _storage(y) == _storage(home) for y in homes.values()):
            raise NotImplementedError(_SHARED.format(name))
        if x is not home and _is_misplaced(x, home):
            raise NotImplementedError(_MISPLACED.format(name))
        _look_again(name, x, home)


def _look_again(name: str, x: Tensor, home: Tensor | None) -> None:
    """Dynamo learns of inputs as code uses them, so one that shares the storage may come after this call. AOTAutograd, which traces
    the graph when Dynamo has seen all of it, and knows no homes, is when the homes are looked at again."""
    shapes = getattr(getattr(x, "fake_mode", None), "shape_env", None)
    if shapes is None:
        return
    if home is not None:
        _WRITTEN.setdefault(shapes, []).append((name, ref(home)))
        return
    for other_name, reference in _WRITTEN.get(shapes, ()):
        other = reference()
        if other is not None and any(y is not other and _meet(y, other) for y in _inputs(other, shapes)):
            # The one exception that Dynamo takes from AOTAutograd as a reason to break the graph.
            raise UnsupportedOperatorException(_SHARED.format(other_name))


def _inputs(x: Tensor, shapes) -> list[Tensor]:
    """The inputs, so far, of the graph that Dynamo traces that share a storage with `x`."""
    # What an input is a view of is tracked as well, and is no input.
    tracked = [entry.fake for entry in shapes.tracked_fakes or () if getattr(entry.source, "member", None) != "_base"]
    return [y for y in tracked if isinstance(y, Tensor) and _storage(y) == _storage(x)]


def _home(name: str, x: Tensor) -> Tensor | None:
    """The input that `x` is, or is a slice of, among those so far of the graph that Dynamo traces."""
    shapes = getattr(getattr(x, "fake_mode", None), "shape_env", None)
    inputs = [] if shapes is None else _inputs(x, shapes)
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


def define(name: str, arguments: str, run: Callable, fields: Iterable[str], same: dict[str, str] | None = None):
    """Register an operator that returns nothing and writes what its arguments say it writes.

    Args:
        name: of the operator.
        arguments: those of its schema.
        run: what it does to real tensors, by keyword.
        fields: what `run` takes. None is given for what the operator does not take.
        same: arguments of `run` that are another argument of the operator.
    Returns:
        The operator, and the names of its arguments.
    """
    split = [argument.split() for argument in arguments.split(", ")]
    names = [name for _, name in split]
    absent = dict.fromkeys(field for field in fields if field not in names)

    def work(*values) -> None:
        given = dict(zip(names, values, strict=True)) | absent
        for field, other in (same or {}).items():
            given[field] = given[other]
        run(**given)

    def trace(*values) -> None:
        _trace({name: x for (kind, name), x in zip(split, values, strict=True) if "!" in kind and x is not None})

    return define_as(f"{name}({arguments}) -> ()", work, trace), names


def define_as(schema: str, run: Callable, trace: Callable):
    """Register an operator by its schema, what it does to real tensors and what a compiler is to think it does."""

    @torch._disable_dynamo  # after a break in the graph, Dynamo would trace what an operator does as well
    def untraced(*values):
        return run(*values)

    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=_TAGS)
    for device in ("CPU", "CUDA"):  # "CUDA" is ROCm's too
        LIBRARY.impl(name, untraced, device)
    LIBRARY._register_fake(name, trace)
    return getattr(torch.ops.decode_rope, name).default
