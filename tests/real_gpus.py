"""The marks of tests that only a real GPU can pass."""

from __future__ import annotations

import os

import pytest
import torch

_IS_SIMULATED = "simgpu" in os.environ.get("LD_PRELOAD", "")
NEEDS_A_REAL_GPU = [
    pytest.mark.gpu,
    pytest.mark.gpu_real,
    pytest.mark.skipif(
        _IS_SIMULATED or not torch.cuda.is_available(),
        reason="only a real GPU can show it: needs a CUDA GPU and not a simulated one",
    ),
]
