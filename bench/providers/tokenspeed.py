"""TokenSpeed's one-launch Triton prologue (tokenspeed_kernel); it allocates a fresh Q in every call."""

from collections.abc import Callable

from torch import Tensor

from bench.buffers import Case, Layer, Meta
from bench.providers import need

_PROLOGUE = "tokenspeed_kernel.ops.attention.prologue"


class TokenSpeed:
    group, exact, slow, cpu = "peer", False, False, False
    modules = (_PROLOGUE,)

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        prologue = need(_PROLOGUE, "gqa_prologue")
        rows = (-1, case.model.num_kv_heads, case.model.head_dim)
        cache = need(_PROLOGUE, "HeadKVCache")(
            k_cache=layer.k_cache.view(rows), v_cache=layer.v_cache.view(rows), scales=None, slots=meta.slots
        )
        rotary = need(_PROLOGUE, "Rotary")(
            cos_sin_cache=meta.cos_sin,
            positions=meta.positions,
            style=need(_PROLOGUE, "RopeStyle").NEOX,
            mrope=None,
        )
        q, k, v = layer.q, layer.k.flatten(1), layer.v.flatten(1)

        def call() -> Tensor:
            return prologue(
                q,
                k,
                v,
                norm=None,
                rotary=rotary,
                cache=cache,
                return_kv=False,
                solution="triton",
                override=None,
            ).q

        return call


def make(name: str, _: str) -> TokenSpeed:
    return TokenSpeed(name)
