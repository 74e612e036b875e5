"""Lanes. A test says where it makes sense, and runs there and nowhere else:

marker      | plain `pytest`, no GPU | child with TRITON_INTERPRET=1 | plain `pytest` on a GPU
------------|------------------------|-------------------------------|------------------------
(none)      | yes                    | no                            | yes
`kernel`    | no                     | yes                           | yes, on the GPU
`anywhere`  | yes, CPU reference     | yes                           | yes, on the CPU and on the GPU
`gpu`       | no                     | no                            | yes

Triton decides whether it interprets when it is imported, so the child is a process of its own; `test_interpreter.py` starts it.
"""

import os

import pytest

os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "triton"))
if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core: threads inside each would only fight over them
    os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")

import torch
from lanes import INTERPRETED, ON_GPU

MARKERS = {
    "kernel": "launches Triton kernels: on a GPU, or under the interpreter",
    "anywhere": "true of the reference as of the kernels",
}


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("kernel") and not ON_GPU and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="runs in the interpreter lane"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # under xdist the longest must not begin last


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker
        everywhere = ON_GPU and marked("anywhere") and not marked("gpu")
        names = ["cpu", "cuda:0"] if everywhere else ["cuda:0" if ON_GPU else "cpu"]
        metafunc.parametrize("device", [torch.device(name) for name in names], ids=str)


@pytest.fixture
def on_gpu() -> bool:
    """Whether this lane can afford GPU sizes."""
    return ON_GPU


@pytest.fixture
def fake_driver(monkeypatch):
    """Launches go to a stand-in for the CUDA driver."""
    from fake_driver import FakeDriver

    return FakeDriver().install(monkeypatch)


@pytest.fixture(autouse=True)
def room_on_the_gpu():
    """Processes of tests share a GPU: what a large test leaves in PyTorch's cache is another one's failure."""
    yield
    if ON_GPU and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def no_pending_faults():
    """Fault records outlive a launch; no test may see another one's."""
    from decode_rope import reference
    from decode_rope.append import faults

    for buffer in faults._BUFFERS.values():
        buffer.copy_(torch.tensor([0, reference.NO_RECORD]))
