"""The stand-in for AMD's package amdsmi, for the tests of this folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from nbdist.clusters.hosts import amd_gpus


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, imported anew. The installed torch counts as a ROCm build."""
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(amd_gpus, "torch_is_built_for_them", lambda: True)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    stand_in = importlib.import_module("amdsmi")
    yield stand_in
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    assert stand_in.users == 0
