"""The codes in names of tests are those of BUGS.md, and each is tested where it says."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+) \| (.+) \|$", re.M)


def codes_in_tests() -> dict[str, set[str]]:
    """The files in which each code begins the name of a test."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for codes in re.findall(r"^\s*def test_((?:[A-Z]\d+_)+)", path.read_text(), re.M):
            for code in codes.rstrip("_").split("_"):
                found.setdefault(code, set()).add(path.relative_to(TESTS).as_posix())
    return found


def test_every_code_is_explained_and_tested_where_the_list_says():
    rows = ROW.findall((TESTS / "BUGS.md").read_text())
    listed = {code: set(re.findall(r"`([^`]+)`", files)) for code, _, files in rows}
    assert len(listed) == len(rows) > 30
    assert listed == codes_in_tests()


def test_every_code_is_explained_in_one_sentence():
    for code, words, _ in ROW.findall((TESTS / "BUGS.md").read_text()):
        assert re.fullmatch(r"[^.]+\.", words), code
