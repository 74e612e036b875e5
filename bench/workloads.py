"""What is measured: attention shapes by model name, batch sizes, and the bytes one call has to move."""

from dataclasses import dataclass

PAGE_SIZE = 16
BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
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


def traffic(model: Model, tokens: int, *, sequence: int | None = None) -> Traffic:
    """Least bytes of one rotate-and-append call of `tokens` tokens in 16-bit elements, paged by a block table.

    Read: Q, K and V rows, one int64 position and one int32 page a token, one fp32 cos/sin row a token, or, where all tokens are at
    the first `sequence` positions, a row for each of these.
    Written: Q, the K row and the V row.
    """
    rows = tokens * model.heads * model.head_dim * 2
    angles = model.head_dim * 4 * (tokens if sequence is None else min(tokens, sequence))
    return Traffic(read=rows + tokens * (8 + 4) + angles, written=rows)
