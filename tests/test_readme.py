"""The README's Python runs as written."""

import re
from pathlib import Path

import torch

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def test_first_screen_is_twelve_lines_and_writes_the_cache():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 12
    names: dict = {}
    exec(BLOCKS[0], names)
    v_cache, v = names["v_cache"], names["v"]
    assert torch.equal(v_cache[3, 1], v[0]) and torch.equal(v_cache[9, 4], v[1])
    v_cache[3, 1] = v_cache[9, 4] = 0
    assert not v_cache.any()


def test_prepared_snippet_runs_after_the_first_one():
    names: dict = {}
    exec(BLOCKS[0] + BLOCKS[1], names)
    assert names["k_cache"][3, 1].any() and names["k_cache"][9, 4].any()
