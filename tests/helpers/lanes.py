"""Where this process runs the kernels: on a GPU, under Triton's interpreter, or not at all. `conftest.py` says what a lane is."""

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
ON_GPU = torch.cuda.is_available() and not INTERPRETED
