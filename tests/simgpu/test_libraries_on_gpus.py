"""Scripts for several GPUs run unchanged on the ranks of a cluster, as under torchrun.

The scripts are those of the guides of torch, Accelerate, Lightning and Horovod. Under
torchrun they use NCCL without nbdist, except for Horovod's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import Cluster
from tests.gpu_marks import needs_gpus

TESTS = Path(__file__).parents[1]
SCRIPTS = TESTS / "scripts"
HOROVOD = TESTS / "horovod" / "digits.py"
LIBRARIES = ["accelerate", "fabric", "lightning"]
LIMIT_S = 100

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    needs_gpus(2),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, device="cuda", threads=1) as running:
        yield running


def by_torchrun(script: Path, *arguments: str) -> set[str]:
    """The lines that two processes print under torchrun, each with a GPU."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*run, "--nproc-per-node", "2", str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return results(done.stdout)


def by_cluster(cluster: Cluster, script: Path, *arguments: str) -> set[str]:
    """The lines that the ranks print. A rank must name its own GPU."""
    result = cluster.run_script(script, list(arguments), timeout_s=LIMIT_S)
    printed = [result[rank].stdout for rank in range(2)]
    for rank in range(2):
        assert f"on cuda:{rank}" in printed[rank], printed
    return results("".join(printed))


def results(printed: str) -> set[str]:
    """The lines with results. Libraries print other lines, too.

    Below torchrun, a rank may write between another one's line and its end.
    """
    begins = r"epoch \d+:|weights |resumed "
    pattern = rf"(?:{begins}).+?(?={begins}|$)"
    return set(re.findall(pattern, printed, re.MULTILINE))


def assert_usable(cluster: Cluster) -> None:
    cluster.execute(
        "x = torch.full((3,), rank + 1.0, device=device)\n"
        "dist.all_reduce(x)\n"
        "assert x.tolist() == [3.0] * 3\n"
        "assert torch.cuda.current_device() == local_rank",
        timeout_s=LIMIT_S,
    )


def test_a_torchrun_script_trains_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    script = SCRIPTS / "multigpu_ddp.py"
    saved = {how: str(tmp_path / f"{how}.pt") for how in ("torchrun", "cluster")}
    for epochs in ("2", "3"):  # the second time from the snapshot
        expected = by_torchrun(script, epochs, saved["torchrun"])
        assert by_cluster(cluster, script, epochs, saved["cluster"]) == expected
        assert len(expected) == {"2": 4, "3": 5}[epochs], expected
    assert_usable(cluster)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_trains_as_under_torchrun(
    cluster: Cluster, library: str, tmp_path: Path
) -> None:
    needed = "lightning" if library == "fabric" else library
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    script = SCRIPTS / f"multigpu_{library}.py"
    arguments = [str(tmp_path)] if library == "lightning" else []
    expected = by_torchrun(script, *arguments)
    assert len(expected) == 5, expected
    for _ in range(2):
        assert by_cluster(cluster, script, *arguments) == expected
    assert_usable(cluster)


def test_a_horovod_script_trains_unchanged(cluster: Cluster) -> None:
    result = cluster.run_script(HOROVOD, timeout_s=LIMIT_S)
    learned = re.search(r"accuracy: ([\d.]+)%\nall ranks alike: True", result[0].stdout)
    assert learned is not None, result[0].stdout
    assert float(learned[1]) > 90
    assert_usable(cluster)
