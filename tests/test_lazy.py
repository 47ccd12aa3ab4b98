"""Names are loaded and stored at their first use, or refused in the notebook."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_importing_nbdist_loads_nothing_of_it_and_no_dependency():
    program = """
import sys
import nbdist
print(sorted(name for name in sys.modules if name.startswith("nbdist")))
print({"torch", "mpi4py", "numpy", "IPython", "ipyparallel"} & sys.modules.keys())
"""
    assert run(program) == "['nbdist', 'nbdist.lazy']\nset()\n"


def test_a_public_name_is_looked_up_once():
    program = """
import nbdist
before = nbdist.__getattr__
asked = []
def counted(name):
    asked.append(name)
    return before(name)
nbdist.__getattr__ = counted
nbdist.UsageError, nbdist.UsageError, nbdist.CellError, nbdist.UsageError
print(asked)
"""
    assert run(program) == "['UsageError', 'CellError']\n"


@pytest.mark.parametrize(
    "name",
    [
        "rank", "all_reduce", "elastic.run", "horovod.allreduce",
        "horovod.elastic.TorchState", "keras.allreduce",
    ],
)  # fmt: skip
@pytest.mark.parametrize("used_before", [False, True])
def test_in_the_notebook_a_name_of_a_rank_raises_wrong_process(
    name: str, used_before: bool
):
    program = f"""
import sys
import nbdist, nbdist.horovod, nbdist.keras
from nbdist import lazy
if {used_before}:
    nbdist.{name}
lazy.refuse_rank_names()
try:
    nbdist.{name}(1, of=2)
except nbdist.NbdistError as error:
    print(type(error).__name__, error)
print("torch" in sys.modules, nbdist.{name}.__doc__)
"""
    said = f"nbdist.{name} runs on a rank: put it in a %%distributed cell"
    assert run(program) == f"WrongProcess {said}\n{used_before} {said}.\n"
