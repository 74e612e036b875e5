"""The pages of the docstrings: one command of a standard tool makes them, and every public name has its place."""

import importlib
import subprocess
import sys

import pytest

MODULES = ("decode_rope", "decode_rope.hf", "decode_rope.examples.server")


def test_every_public_name_is_on_its_page(tmp_path):
    pytest.importorskip("pdoc")
    command = [sys.executable, "-m", "pdoc", "--docformat", "google", *MODULES, "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stderr
    for name in MODULES:
        page = (tmp_path / (name.replace(".", "/") + ".html")).read_text()
        public = getattr(importlib.import_module(name), "__all__", ["Server", "Request"])
        assert not [each for each in public if f'id="{each}"' not in page and not each.startswith("__") and each != "reference"]


@pytest.mark.parametrize("name", MODULES)
def test_what_is_public_has_a_docstring(name):
    module = importlib.import_module(name)
    for each in getattr(module, "__all__", ["Server", "Request"]):
        thing = getattr(module, each)
        assert isinstance(thing, str) or thing.__doc__, each
        if isinstance(thing, type):
            methods = [getattr(thing, method) for method in vars(thing) if not method.startswith("_")]
            assert all(method.__doc__ for method in methods if callable(method) and method.__module__ == thing.__module__), each
