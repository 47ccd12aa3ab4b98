"""`hvd.run`, and the modules that `nbdist.horovod` imports in a notebook."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nbdist.horovod as hvd
from nbdist import Cluster
from nbdist.errors import CellError, UsageError
from nbdist.horovod import launch


@pytest.fixture
def running(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Make the shared cluster the notebook's running cluster."""
    monkeypatch.setattr(launch, "running_cluster", lambda: cluster)
    return cluster


def ranks(base: int, *, factor: int = 1) -> tuple[int, float]:
    import torch

    import nbdist.horovod as hvd

    hvd.init()
    print(f"here is {hvd.rank()}")
    total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)
    return base + factor * hvd.rank(), total.item()


def test_results_are_in_rank_order(
    running: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [(10 + 2 * rank, 4.0) for rank in range(4)]
    assert hvd.run(ranks, (10,), {"factor": 2}) == expected
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[{rank}] here is {rank}" for rank in range(4)]
    assert hvd.run(ranks, (10,), {"factor": 2}, np=4) == expected  # init() once more


def test_another_number_of_ranks_is_refused(running: Cluster) -> None:
    with pytest.raises(UsageError, match="has 4 ranks"):
        hvd.run(ranks, (10,), np=2)
    with pytest.raises(UsageError, match="has 4 ranks"):
        hvd.run(ranks, (10,), num_proc=2, use_mpi=True)
    with pytest.raises(UsageError, match="expected one of them"):
        hvd.run(ranks, (10,), np=4, num_proc=2)


def test_an_error_names_its_rank(running: Cluster) -> None:
    def fail() -> None:
        import nbdist.horovod as hvd

        hvd.init()
        if hvd.rank() == 2:
            raise ValueError("broken")

    with pytest.raises(CellError, match=r"rank 2.*broken"):
        hvd.run(fail)


def test_without_a_cluster_one_is_started() -> None:
    program = """
import sys
import nbdist.horovod as hvd

def ranks():
    import nbdist.horovod as hvd
    hvd.init()
    return hvd.rank(), hvd.size()

if __name__ == "__main__":
    print(hvd.run(ranks, np=2, hosts="localhost:2"))
    print({"torch", "mpi4py"} & sys.modules.keys())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[(0, 2), (1, 2)]", "set()"]


def test_in_a_notebook_names_of_a_rank_raise_wrong_process() -> None:
    program = """
import sys
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance().run_line_magic("load_ext", "nbdist")
import nbdist.horovod as hvd
assert "allreduce" in dir(hvd)
try:
    hvd.allreduce(1)
except RuntimeError as error:
    print(error)
print({"torch", "mpi4py", "ipyparallel"} & sys.modules.keys())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "nbdist.horovod.allreduce runs on a rank: put it in a %%distributed cell",
        "set()",
    ]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hvd.nothing
