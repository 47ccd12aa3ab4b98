"""The example notebooks on ranks that share a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = [
    "quickstart", "ring_allreduce", "a_rank_dies", "data_pipeline", "elastic",
    "horovod", "model_parallel", "parameter_server", "strategies", "workers",
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_on_a_gpu(name: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() != 1:
        pytest.skip("needs one GPU")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("--device cpu", "--ranks-per-gpu 4")
    assert any("--ranks-per-gpu" in cell.source for cell in notebook.cells)
    path = tmp_path / f"{name}.ipynb"
    nbformat.write(notebook, path)
    spec = importlib.util.spec_from_file_location("run_example", EXAMPLES / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.execute(path, tmp_path / "executed" / path.name)
