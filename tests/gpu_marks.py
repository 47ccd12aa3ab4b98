"""The marks of tests that need GPUs."""

from __future__ import annotations

import os

import pytest
import torch

GPUS = torch.cuda.device_count()
_IS_SIMULATED = "simgpu" in os.environ.get("LD_PRELOAD", "")
simulated = pytest.mark.skipif(not _IS_SIMULATED, reason="no simulated GPU")
NEEDS_A_REAL_GPU = [
    pytest.mark.gpu,
    pytest.mark.gpu_real,
    pytest.mark.skipif(
        _IS_SIMULATED or not torch.cuda.is_available(),
        reason="only a real GPU can show it: needs a CUDA GPU and not a simulated one",
    ),
]


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip where torch can use fewer GPUs."""
    return pytest.mark.skipif(count > GPUS, reason=f"needs {count} GPUs")
