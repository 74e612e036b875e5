"""Axis maps of multi-axis rotary embeddings (M-RoPE): which row of `positions [axes, T]` each pair takes its angle from.

Every function returns one axis per pair, `rotary_dim / 2` ints; `RopeTable.axis_map` holds them as int8. With text only, and in
every decode step of the models that use them, all rows are equal and the map does not matter.
"""

from collections.abc import Sequence


def chunked(sections: Sequence[int]) -> tuple[int, ...]:
    """`sections[0]` pairs for axis 0, then `sections[1]` for axis 1, ... Qwen2-VL (time, height, width), GLM-4V, HunYuan-VL."""
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


def interleaved(sections: Sequence[int], pairs: int) -> tuple[int, ...]:
    """T H W T H W ... T T: pair j is height if `j % 3 == 1` and `j < 3 h`, width if `j % 3 == 2` and `j < 3 w`, else time.

    Qwen3-VL and Qwen3.5; `sections` is (t, h, w)."""
    return tuple(j % 3 if j % 3 and j < 3 * sections[j % 3] else 0 for j in range(pairs))


def ernie(sections: Sequence[int]) -> tuple[int, ...]:
    """Height and width alternate over `h + w` pairs, then time. `sections` is (h, w, t), rows of positions are (t, h, w)."""
    height, width, time = sections
    return tuple(1 + j % 2 for j in range(height + width)) + (0,) * time


def alternating(pairs: int) -> tuple[int, ...]:
    """Two axes in turn: row, column, row, column, ... NeoMME."""
    return tuple(j % 2 for j in range(pairs))


def axis_map(kind: str, sections: Sequence[int] | None, pairs: int) -> tuple[int, ...] | None:
    """The map of one `kind` above; None when it needs sections and there are none. ValueError when they do not fit `pairs`."""
    if kind == "alternating":
        return alternating(pairs)
    if sections is None:
        return None
    if kind == "interleaved":
        if len(sections) != 3:
            raise ValueError(f"mrope_section: expected 3 sections (time, height, width), got {list(sections)}")
        return interleaved(sections, pairs)
    if kind == "ernie" and (len(sections) != 3 or sections[0] != sections[1]):
        raise ValueError(f"mrope_section: expected (height, width, time) with height == width, got {list(sections)}")
    if sum(sections) != pairs:
        raise ValueError(f"mrope_section: expected sections that add up to {pairs} pairs, got {list(sections)}")
    return ernie(sections) if kind == "ernie" else chunked(sections)
