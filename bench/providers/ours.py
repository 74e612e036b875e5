"""decode_rope: bound launches with and without PDL, prefill, and the PyTorch reference."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.buffers import Case, Layer, Meta
from bench.package import chosen_geometry, geometry
from bench.providers import need
from bench.workloads import UsageError

# variant -> (enable_pdl, metadata_ready, `Geometry.pdl` where it is not the package's own choice)
_LAUNCHES = {
    "default": (None, False, None),
    "plain": (False, False, None),
    "pdl": (True, False, None),
    "late": (True, False, 2),
    "last": (True, False, 3),
    "meta": (True, True, None),
    "meta-last": (True, True, 3),
    "tuned": (None, False, None),
}
_FUNCTIONS = {
    "function": ("decode_rope", "rope_append_decode"),
    "prefill": ("decode_rope", "rope_append_prefill"),
    "reference": ("decode_rope.reference", "rope_append_decode"),
}


class Bound:
    """A prepared launch with every buffer frozen. `tuned`: whole steps choose its geometry with `DecodeRope.tune`."""

    group, exact, slow, cpu = "ours", True, False, True
    modules = ("decode_rope",)

    def __init__(self, name: str, variant: str, tiles: tuple[int, ...] | None = None) -> None:
        self.name, self.tiles, self.tuned = name, tiles, variant == "tuned"
        self.enable_pdl, self.metadata_ready, self.pdl = _LAUNCHES[variant]
        self._ops: dict[tuple, tuple[Tensor, Any]] = {}
        self._normed: dict[int, tuple[Tensor, Any]] = {}

    def op(self, case: Case, meta: Meta) -> Any:
        """The DecodeRope of this case; only the last one is kept."""
        key = (case, meta.cos_sin.data_ptr())
        if key not in self._ops:
            # The table is kept with the op: its address is part of the key.
            self._ops = {key: (meta.cos_sin, self.make_op(case, meta))}
        return self._ops[key][1]

    def make_op(self, case: Case, meta: Meta, **options: Any) -> Any:
        """A DecodeRope without warm-up: binding compiles what the case needs and no more."""
        if self.tiles is not None:
            options.setdefault("geometry", geometry(self.tiles))
        if self.pdl is not None:
            options.setdefault("geometry", chosen_geometry(case.model, case.tokens)._replace(pdl=self.pdl))
        return need("decode_rope", "DecodeRope")(
            meta.cos_sin,
            num_q_heads=case.model.num_q_heads,
            num_kv_heads=case.model.num_kv_heads,
            head_dim=case.model.head_dim,
            page_size=case.page_size,
            kv_layout="NHD",
            dtype=case.dtype,
            device=case.device,
            enable_pdl=self.enable_pdl,
            metadata_ready=self.metadata_ready,
            **options,
        )

    def launch_object(self, case: Case, meta: Meta, layer: Layer, op: Any = None) -> Any:
        """What `DecodeRope.bind` returns: call it to launch."""
        bind = (op or self.op(case, meta)).bind
        return bind(layer.q, layer.k, layer.v, layer.k_cache, layer.v_cache, meta.positions, block_table=meta.block_table)

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        return self.launch_object(case, meta, layer)

    def bind_normed(
        self, case: Case, meta: Meta, layer: Layer, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> Callable[[], Tensor]:
        """With the heads' RMSNorm fused; Unavailable where this decode_rope has none."""
        key = q_weight.data_ptr()
        if key not in self._normed or self._normed[key][0] is not q_weight:
            norm = need("decode_rope", "QKNorm")(q_weight, k_weight, eps)
            self._normed[key] = (q_weight, self.make_op(case, meta, norm=norm))
        return self.launch_object(case, meta, layer, self._normed[key][1])

    def tune(self, step: Callable[[], Any], case: Case, meta: Meta) -> None:
        """Let whole steps choose the geometry of the ops that were used so far; `step` binds them anew and runs."""
        first, *others = [op for _, op in self._normed.values()] or [self.op(case, meta)]
        first.tune(step, case.tokens, together_with=others)


class Function:
    """A plain public function, of decode_rope or of decode_rope.reference.

    By block table where that has a row a token (decode), else by slot mapping (prefill).
    """

    group, exact, slow, cpu = "ours", True, False, True
    modules = ("decode_rope",)

    def __init__(self, name: str, module: str, function: str) -> None:
        self.name = name
        self.module, self.function = module, function

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        function = need(self.module, self.function)
        arguments = (layer.q, layer.k, layer.v, layer.k_cache, layer.v_cache, meta.cos_sin, meta.positions)
        if meta.block_table.shape[0] == case.tokens:
            index = {"block_table": meta.block_table}
        else:
            index = {"slot_mapping": meta.slots}
        return lambda: function(*arguments, **index)


def of_tiles(name: str, numbers: str) -> Bound:
    """The default launch with a geometry of its own: tokens/heads of q/tokens/heads of k and v/warps/pdl/carveout."""
    try:
        return Bound(name, "default", tuple(map(int, numbers.split("/"))))
    except ValueError:
        raise UsageError(f"--peers: expected numbers between slashes after ours@, got {numbers!r}") from None


def make(name: str, variant: str) -> Bound | Function:
    return Function(name, *_FUNCTIONS[variant]) if variant in _FUNCTIONS else Bound(name, variant)
