"""Names are loaded and stored at their first use, or refused in the notebook."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NAMES = [
    "rank", "all_reduce", "elastic.run", "horovod.allreduce",
    "horovod.elastic.TorchState", "keras.allreduce",
]  # fmt: skip


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


@pytest.fixture(scope="module", params=[False, True])
def said(request: pytest.FixtureRequest) -> dict[str, list[object]]:
    """For each name, used before or not: the error, whether torch is loaded, and the
    name's docstring."""
    program = f"""
import json, operator, sys
import nbdist, nbdist.horovod, nbdist.keras
from nbdist import lazy
said = {{}}
def look(name):
    return operator.attrgetter(name)(nbdist)
for name in {NAMES}:
    if {request.param}:
        look(name)
lazy.refuse_rank_names()
for name in {NAMES}:
    try:
        look(name)(1, of=2)
    except nbdist.NbdistError as error:
        found = [type(error).__name__, str(error), "torch" in sys.modules]
        said[name] = [*found, look(name).__doc__]
print(json.dumps([{request.param}, said]))
"""
    used_before, found = json.loads(run(program))
    return {name: [used_before, *answer] for name, answer in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_in_the_notebook_a_name_of_a_rank_raises_wrong_process(
    name: str, said: dict[str, list[object]]
):
    text = f"nbdist.{name} runs on a rank: put it in a %%distributed cell"
    used_before, *found = said[name]
    assert found == ["WrongProcess", text, used_before, f"{text}."]
