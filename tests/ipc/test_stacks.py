"""The first frame of the user's code in a rank's stack is found."""

from __future__ import annotations

import inspect

import pytest

from nbdist.engine import calls, run_script
from nbdist.ipc.stacks import Frame, from_user_code

ENGINE = [Frame("/lib/runpy.py", 88, "_run_code"), Frame("/lib/asyncio.py", 3, "run")]
OURS = Frame("/site-packages/nbdist/collectives/group.py", 7, "start")


def test_the_stack_begins_with_the_cell() -> None:
    cell = Frame("<ipython-input-12-0ab>", 4, "<module>", "load()")
    assert from_user_code([*ENGINE, cell, OURS]) == [cell, OURS]
    assert cell.location == "In[12] line 4"
    assert str(cell) == "  In[12] line 4, in <module>\n    load()"


@pytest.mark.parametrize("module", [calls, run_script])
def test_the_stack_begins_with_the_script_or_function(module: object) -> None:
    caller = Frame(inspect.getfile(module), 9, "_run")  # type: ignore[arg-type]
    script = Frame("/scripts/train.py", 3, "main")
    assert from_user_code([*ENGINE, caller, caller, script, OURS]) == [script, OURS]
    assert str(script) == "  /scripts/train.py line 3, in main"
    assert script.location == "train.py line 3"


def test_an_idle_rank_runs_no_user_code() -> None:
    assert from_user_code(ENGINE) == []
