"""What IPython shows of errors fails the cell, and its text is bounded."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nbdist import CellError, CellInterrupted, Cluster
from nbdist.clusters.result import CellResult
from tests.processes import wait_until

DEADLINE_S = 60.0
FILES = {
    "fails.py": "1/0\n",
    "syntax.py": "def f(:\n",
    "exits.py": "import sys\nsys.exit(int(sys.argv[1]))\n",
    "fails.ipy": "x = 1\n1/0\n",
    "first_rank.py": "import torch.distributed as dist\n"
    "if dist.get_rank() == 0: raise ValueError('only this rank')\n"
    "dist.barrier()\n",
    "waits.py": "print('waits', flush=True)\nimport time\ntime.sleep(1e6)\n",
}
BAD = "class Bad:\n    def {0}(self, *_, **__): raise RuntimeError('{0}')\n"
DROPPED = {
    "%run fails.py": "ZeroDivisionError",
    "%run -i fails.py": "ZeroDivisionError",
    "%run fails.ipy": "ZeroDivisionError",
    "%run syntax.py": "SyntaxError",
    "%run exits.py 4": "SystemExit",
    "get_ipython().run_cell('1/0')": "ZeroDivisionError",
    "get_ipython().run_cell('def f(:')": "SyntaxError",
    "get_ipython().run_cell('return')": "SyntaxError",
    "get_ipython().run_cell('%no_magic')": "UsageError",
    "get_ipython().run_cell('raise ExceptionGroup(\"g\", [KeyError(1)])')": "Exception",
    BAD.format("__repr__") + "Bad()": "RuntimeError",
    BAD.format("_repr_html_") + "Bad()": "RuntimeError",
    BAD.format("_repr_mimebundle_") + "display(Bad())": "RuntimeError",
    BAD.format("_ipython_display_") + "display(Bad())": "RuntimeError",
    "import pandas\ndisplay(pandas.DataFrame([1]).style.map(lambda _: 1/0))": "ZeroDiv",
    "def late(*_):\n    get_ipython().events.unregister('post_run_cell', late)\n"
    "    1/0\nget_ipython().events.register('post_run_cell', late)": "ZeroDiv",
}
KEPT_OK = {
    "%run exits.py 0": "",
    "%run -e exits.py 4": "",
    "try: 1/0\nexcept Exception: get_ipython().showtraceback()": "ZeroDivisionError",
    "import traceback\ntry: 1/0\nexcept Exception: traceback.print_exc()": "ZeroDiv",
}


@pytest.fixture(autouse=True)
def _folder(cluster: Cluster, tmp_path: Path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    cluster.execute(f"import os; before = os.getcwd(); os.chdir({str(tmp_path)!r})")
    yield
    cluster.execute("os.chdir(before)")


def run(cluster: Cluster, code: str) -> CellResult:
    return cluster.execute(code, check=False)


@pytest.mark.parametrize("code", DROPPED)
def test_an_error_that_ipython_drops_fails_the_cell(cluster: Cluster, code: str):
    result = run(cluster, f"{code}\n")
    assert len(result.failures) == 4
    for each, failure in zip(result, result.failures, strict=True):
        assert DROPPED[code] in failure.ename
        assert failure.location
        # The traceback is printed where it happened, or the exit has none.
        assert DROPPED[code] in each.stderr or failure.ename == "SystemExit"
    assert run(cluster, "pass").ok


@pytest.mark.parametrize("code", KEPT_OK)
def test_an_error_that_code_has_caught_and_shown_fails_nothing(
    cluster: Cluster, code: str
):
    result = run(cluster, code)
    assert result.ok
    assert all(KEPT_OK[code] in each.stderr for each in result)


def test_the_cell_goes_on_after_a_script_that_has_failed(cluster: Cluster):
    result = run(cluster, "%run fails.py\nprint('on')\n%run exits.py 3")
    assert {each.stdout for each in result} == {"on\n"}
    assert {failure.ename for failure in result.failures} == {"ZeroDivisionError"}


def test_the_error_of_the_cell_itself_comes_first(cluster: Cluster):
    result = run(cluster, "%run fails.py\nraise KeyError('own')")
    assert {failure.ename for failure in result.failures} == {"KeyError"}
    assert all("ZeroDivisionError" in each.stderr for each in result)
    assert all("KeyError" not in each.stderr for each in result)


def test_a_rank_whose_script_has_failed_releases_the_others(cluster: Cluster):
    with pytest.raises(CellError, match=r"rank 0 of 4.*only this rank") as failed:
        cluster.execute("%run first_rank.py")
    names = {f.rank: f.ename for f in failed.value.result.failures}
    assert names == {0: "ValueError"} | dict.fromkeys((1, 2, 3), "CollectiveAborted")


def test_an_interrupt_of_a_script_ends_the_cell(cluster: Cluster):
    future = cluster.execute("%run waits.py\nprint('on')", wait=False)
    busy = [{"what": "In[0]"}]  # until the scripts have begun
    wait_until(lambda: any(cluster.status().values()) and busy, DEADLINE_S)
    future.interrupt()
    with pytest.raises(CellInterrupted):
        future.result(DEADLINE_S)
    assert {each.stdout for each in run(cluster, "print(1)")} == {"1\n"}


def test_an_exception_group_is_shown_once(cluster: Cluster):
    run(cluster, "1/0")
    result = run(cluster, "raise ExceptionGroup('group', [KeyError('part')])")
    failure = result.failures[0]
    assert "".join(failure.traceback).count("part") == 2  # its line, and its text
    assert "ZeroDivisionError" not in "".join(failure.traceback)
    assert result[0].stderr == ""


LOOP = """
class Odd(Exception):
    def __str__(self):
        import time
        while True:
            try:
                try: time.sleep(0.01)
                except BaseException: pass
            except BaseException: pass
"""


def test_a_text_that_catches_every_error_ends(cluster: Cluster):
    result = run(cluster, LOOP + "raise Odd")
    assert {f.ename: f.evalue for f in result.failures} == {
        "Odd": "<its __str__ took longer than 3 s>"
    }
    assert {f.location.rpartition(" ")[2] for f in result.failures} == {"10"}
    assert run(cluster, "pass").ok


def test_the_error_of_an_interrupted_text_says_what_ran(cluster: Cluster):
    code = """
class Slow(Exception):
    def __str__(self):
        import time
        print("begun", flush=True)
        time.sleep(1e6)
raise Slow
"""
    begun = threading.Event()

    class Watch:
        def take(self, event):
            if event.output and "begun" in str(event.output["content"]):
                begun.set()

        def due(self):
            return None

        def notice(self, _text):
            pass

        def make_room(self):
            pass

    future = cluster.execute(code, wait=False, observer=Watch())
    assert begun.wait(DEADLINE_S)
    future.interrupt()
    with pytest.raises(CellInterrupted, match=r"calling Slow\.__str__, at In"):
        future.result(DEADLINE_S)


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.setrecursionlimit(30_000)\ndef f(n): return f(n + 1)\n"
        "try: f(0)\nfinally: sys.setrecursionlimit(1000)",
        "raise ValueError('x' * 10**7)",
        "error = None\nfor n in range(20_000):\n    new = ValueError(n)\n"
        "    new.__cause__ = error\n    error = new\nraise error",
    ],
    ids=["frames", "message", "chain"],
)
def test_the_text_of_a_large_error_is_bounded(cluster: Cluster, code: str):
    failures = run(cluster, code).failures
    assert len(failures) == 4
    for failure in failures:
        assert len(failure.evalue) < 101_000
        assert sum(map(len, failure.traceback)) < 1_000_000
    del failures
    assert run(cluster, "pass").ok
