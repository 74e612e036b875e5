"""What is measured: attention shapes by model name, batch sizes, and the bytes one call has to move."""

from dataclasses import dataclass

PAGE_SIZE = 16
BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
STEP_CONTEXT = 1024  # tokens of every request of a whole step
PREFILL_TOKENS = (1, 16, 128, 1024, 4096, 16384, 65536, 131072)


class UsageError(ValueError):
    """A command-line argument is at fault; the message names it."""


@dataclass(frozen=True)
class Model:
    """One attention layer's shape. `hidden` is the width the QKV projection reads."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int

    @property
    def shape(self) -> str:
        return f"{self.num_q_heads}/{self.num_kv_heads}/{self.head_dim}"

    @property
    def heads(self) -> int:
        return self.num_q_heads + 2 * self.num_kv_heads


MODELS = {
    model.name: model
    for model in (
        Model("llama-3-8b", 32, 8, 128, 4096),
        Model("llama-3-70b-tp8", 8, 1, 128, 8192),
        Model("gpt-oss-20b", 64, 8, 64, 2880),
        Model("qwen3-0.6b", 16, 8, 128, 1024),
        Model("llama-3-405b", 128, 8, 128, 16384),
        Model("smollm2-135m", 9, 3, 64, 576),
    )
}
TINY = Model("tiny", 4, 2, 16, 64)


def find_models(names: list[str] | None) -> list[Model]:
    """Models by name (`llama-3-8b`) or by shape (`32/8/128`); None or `all` is every model."""
    if not names or names == ["all"]:
        return list(MODELS.values())
    by_shape = {model.shape: model for model in MODELS.values()}
    found = []
    for name in names:
        model = MODELS.get(name) or by_shape.get(name)
        if model is None:
            known = ", ".join(f"{m.name} ({m.shape})" for m in MODELS.values())
            raise UsageError(f"--model: expected one of {known}; got {name!r}")
        found.append(model)
    return found


@dataclass(frozen=True)
class Traffic:
    """Bytes one call reads and writes, each input read once and each output written once."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def traffic(
    model: Model,
    tokens: int,
    *,
    element_size: int = 2,
    out_element_size: int | None = None,
    rotary_dim: int | None = None,
    sequence: int | None = None,
) -> Traffic:
    """Least bytes of one rotate-and-append call of `tokens` tokens, paged by a block table; all of a head turns, or
    `rotary_dim` elements of it.

    Read: what turns of Q, K and V rows, one int64 position and one int32 page a token, one fp32 cos/sin row a token, or, where
    all tokens are at the first `sequence` positions, a row for each of these.
    Written: what turns of Q, the K row and the V row, in `out_element_size` bytes an element (1 for an fp8 cache and Q).
    """
    out = element_size if out_element_size is None else out_element_size
    turning = model.head_dim if rotary_dim is None else rotary_dim
    row = model.num_q_heads * turning + 2 * model.num_kv_heads * model.head_dim
    angles = turning * 4 * (tokens if sequence is None else min(tokens, sequence))
    return Traffic(read=tokens * (row * element_size + 8 + 4) + angles, written=tokens * row * out)
