"""An interrupt ends a cell wherever its ranks are, and the next cell runs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nbdist import CellError, CellInterrupted, CellTimeout, Cluster, UsageError
from nbdist.clusters import call_supervisor
from nbdist.clusters.call import Call
from nbdist.clusters.call_supervisor import RELEASE_AFTER_S
from nbdist.clusters.observer import Event, Quiet
from nbdist.clusters.rank_registry import RankRegistry
from nbdist.ipc import endpoints
from tests.processes import wait_until
from tests.seed import SEED

pytestmark = pytest.mark.usefixtures("patience")

BLOCKED = {
    "a loop": "while True: pass",
    "a sleep": "import time; time.sleep(3600)",
    "a lock": "import threading; threading.Event().wait(3600)",
    "an await": "import asyncio\nawait asyncio.sleep(3600)",
    "an async loop": "async def spin():\n    while True: pass\nawait spin()",
    "tasks of its own": (
        "import asyncio\n"
        "async def spin():\n"
        "    while True: pass\n"
        "await asyncio.gather(asyncio.sleep(3600), spin())"
    ),
    "a shell command": "!sleep 3600",
    "a subprocess": "import subprocess; subprocess.run(['sleep', '3600'])",
    "our collective": "if rank: nbdist.all_reduce(torch.ones(3))\n"
    "else: import time; time.sleep(3600)",
    "torch's collective": (
        "if rank: dist.barrier()\nelse: import time; time.sleep(3600)"
    ),
    "mpi4py's receive": "nbdist.comm().recv(source=(rank + 1) % 4)",
    "mpi4py's all-reduce": (
        "import numpy\n"
        "if rank: nbdist.comm().Allreduce(numpy.ones(3), numpy.ones(3))\n"
        "else: import time; time.sleep(3600)"
    ),
    "mpi4py's all-reduce of objects": (
        "if rank: nbdist.comm().allreduce(rank)\nelse: import time; time.sleep(3600)"
    ),
    "one rank only": "if rank == 2:\n    while True: pass",
    "a destructor": (
        "import time\n"
        "class Slow:\n"
        "    def __del__(self): time.sleep(0.2)\n"
        "while True: Slow()"
    ),
    "many destructors": (
        "class Slow:\n"
        "    def __del__(self): sum(range(10**6))\n"
        "while True:\n"
        "    several = [Slow() for _ in range(100)]\n"
        "    del several"
    ),
    "the workers of a DataLoader": (
        "loader = torch.utils.data.DataLoader(range(3), num_workers=1)\n"
        "while True:\n"
        "    for _ in loader: pass"
    ),
    "a context that cleans up": (
        "import contextlib, time\n"
        "with contextlib.ExitStack() as stack:\n"
        "    stack.callback(time.sleep, 0.2)\n"
        "    time.sleep(3600)"
    ),
    "a clean-up that waits for a rank whose cell has ended": (
        "import time\n"
        "try: time.sleep(3600)\n"
        "finally:\n"
        "    if rank != 1:\n"
        "        time.sleep(1)\n"
        "        nbdist.barrier()"
    ),
}


class Press(Quiet):
    """An observer that presses the interrupt button when all ranks have printed."""

    def __init__(self, ranks: int, after_s: float = 0.0, times: int = 1) -> None:
        self._left, self._after_s, self._times = ranks, after_s, times
        self.at = 0.0

    def take(self, event: Event) -> None:
        if event.output is not None and event.output["msg_type"] == "stream":
            self._left -= 1
            if self._left == 0:
                threading.Timer(self._after_s, self._press).start()

    def _press(self) -> None:
        self.at = time.time()
        for _ in range(self._times):
            os.kill(os.getpid(), signal.SIGINT)


def interrupted(cluster: Cluster, code: str, press: Press) -> CellInterrupted:
    with pytest.raises(CellInterrupted) as stopped:
        cluster.execute(f"print('here')\n{code}", observer=press)
    assert "did not react" not in str(stopped.value)
    mark = cluster.collector.marks[-1]
    assert mark.text.endswith("was interrupted")
    assert mark.time > press.at
    return stopped.value


@pytest.mark.parametrize("code", BLOCKED.values(), ids=BLOCKED)
def test_the_cell_ends_and_the_next_one_runs(cluster: Cluster, code: str):
    cluster.execute("kept = rank")
    error = interrupted(cluster, code, Press(4, after_s=0.1))
    assert "keep their variables" in str(error)
    assert {f.ename for f in error.result.failures} <= {
        "KeyboardInterrupt", "CollectiveAborted", "CollectiveInterrupted",
    }  # fmt: skip
    assert cluster["kept"] == [0, 1, 2, 3]
    cluster.execute("t = torch.ones(2)\nnbdist.all_reduce(t)\ndist.all_reduce(t)")
    cluster.execute("assert nbdist.comm().allreduce(rank) == 6")
    assert [t.tolist() for t in cluster["t"]] == [[16.0, 16.0]] * 4


@pytest.mark.parametrize(
    "name", ["a loop", "a sleep", "an await", "tasks of its own", "our collective"]
)
@pytest.mark.parametrize("times", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_several_times_in_a_row(cluster: Cluster, name: str, times: int):
    for number in range(times):
        interrupted(cluster, BLOCKED[name], Press(4))
        result = cluster.execute(f"print({number})")
        assert [result[rank].stdout for rank in range(4)] == [f"{number}\n"] * 4


@pytest.mark.parametrize(
    ("code", "step_s"),
    [("import time; time.sleep(3600)", 0.0005), ("!sleep 3600", 0.002)],
)
def test_an_interrupt_at_any_moment_of_a_cell_is_delivered(
    cluster: Cluster, code: str, step_s: float
):
    """Also before a rank has begun and after it has ended. None is lost or late."""

    def pressing(timer: threading.Timer) -> None:
        timer.start()
        cluster.execute(code)

    draw = random.Random(SEED)
    for number in range(16):
        after_s = (number + draw.random()) * step_s
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt) as stopped:
            pressing(timer)
        timer.join()
        assert "did not react" not in str(stopped.value)
        result = cluster.execute(f"print({number})")
        assert [result[rank].stdout for rank in range(4)] == [f"{number}\n"] * 4


def package(folder: Path, name: str, last: str = "") -> str:
    """Write a package of slow submodules. Returns the code that uses all of them."""
    modules = [f"{name}.part{number}" for number in range(8)]
    (folder / name).mkdir()
    for number in range(8):
        text = "import time\nfor _ in range(5): time.sleep(0.01)\n"
        (folder / name / f"part{number}.py").write_text(text)
    imports = [f"import {module}" for module in modules]
    uses = [f"{module}.time" for module in modules]
    (folder / name / "__init__.py").write_text("\n".join([*imports, *uses, last]))
    return "\n".join([f"import {name}", *uses])


def test_an_import_is_whole_after_an_interrupt(
    cluster: Cluster, tmp_path: Path
) -> None:
    draw = random.Random(SEED)
    cluster.execute(f"import sys, time; sys.path.append({str(tmp_path)!r})")
    for number in range(8):
        code = package(tmp_path, f"interrupted_{SEED}_{number}")
        press = Press(4, after_s=draw.uniform(0, 0.5))
        interrupted(cluster, f"{code}\ntime.sleep(3600)", press)
        cluster.execute(code)


@pytest.mark.parametrize("how", ["cluster.interrupt", "SIGINT"])
def test_an_import_that_does_not_end_is_cut(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    release = tmp_path / "release"
    waits = f"import os\nwhile not os.path.exists({str(release)!r}): time.sleep(0.01)"
    name = f"endless_{random.randrange(10**9)}"
    code = package(tmp_path, name, f"import time\nprint('in', {name!r})\n{waits}")
    cluster.execute(f"import sys, time; sys.path.append({str(tmp_path)!r})")
    if how == "SIGINT":
        alarm = "import os, signal, threading\nme = threading.main_thread().ident\n"
        alarm += "threading.Timer(1, signal.pthread_kill, (me, signal.SIGINT)).start()"
        with pytest.raises(CellError) as stopped:
            cluster.execute(f"{alarm}\n{code}")
        ended = {f.ename for f in stopped.value.result.failures}
        assert ended == {"KeyboardInterrupt"}
    else:
        interrupted(cluster, code, Press(8))
    release.touch()
    cluster.execute(code)


def test_a_release_after_the_end_of_the_cell_has_no_effect(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    ask = RankRegistry.ask

    def ask_late(self: RankRegistry, target: str, *args: Any, **options: Any) -> Any:
        if target == endpoints.RELEASE:
            wait_until(lambda: not any(doing(cluster)))
        return ask(self, target, *args, **options)

    monkeypatch.setattr(RankRegistry, "ask", ask_late)
    code = (
        "import time\n"
        "try: time.sleep(3600)\n"
        f"except KeyboardInterrupt: time.sleep({RELEASE_AFTER_S + 0.3})"
    )
    interrupted(cluster, code, Press(4))
    cluster.execute("assert nbdist.comm().allreduce(rank) == 6")


def doing(cluster: Cluster) -> list[str | None]:
    """The request of each rank; None for an idle rank."""
    return [None if s is None else s["what"] for s in cluster.status().values()]


def test_two_interrupts_in_quick_succession(cluster: Cluster):
    for _ in range(5):
        press = Press(4, times=2)
        with pytest.raises(KeyboardInterrupt):
            cluster.execute(
                "print('here')\nimport time\n"
                "try: time.sleep(3600)\n"
                "finally: time.sleep(0.3)",
                observer=press,
            )
        assert after_the_rest(lambda: cluster["rank"]) == [0, 1, 2, 3]


def after_the_rest(action: Callable[[], Any]) -> Any:
    """Once the notebook knows that the ranks that were left behind are idle."""
    done: list[Any] = []

    def is_done() -> bool:
        with suppress(UsageError):
            done.append(action())
        return bool(done)

    wait_until(is_done)
    return done[0]


def test_a_rank_that_ignores_an_interrupt_is_named_and_the_others_continue(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(call_supervisor, "INTERRUPT_GRACE_S", 5.0)
    release = tmp_path / "release"
    stubborn = (
        "import os, time\n"
        f"while rank == 1 and not os.path.exists({str(release)!r}):\n"
        "    try: time.sleep(0.05)\n"
        "    except KeyboardInterrupt: pass"
    )
    with pytest.raises(CellInterrupted, match="Rank 1 did not react within 5 s"):
        cluster.execute(f"print('here')\n{stubborn}", observer=Press(4))
    with pytest.raises(UsageError, match="busy with an earlier cell: rank 1 at In"):
        cluster.execute("1")
    assert cluster.execute("rank", ranks=[0, 2, 3]).ok
    release.touch()
    assert after_the_rest(lambda: cluster["rank"]) == [0, 1, 2, 3]


def test_a_reply_that_is_interrupted_is_not_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    handle, taken = Call._handle, []

    def interrupted_once(run: Call, uuid: str, message: Any) -> bool:
        if message is None and not taken:
            taken.append(uuid)
            raise KeyboardInterrupt
        return handle(run, uuid, message)

    monkeypatch.setattr(Call, "_handle", interrupted_once)
    with pytest.raises(CellInterrupted) as stopped:
        cluster.execute("rank")
    assert "did not react" not in str(stopped.value)
    assert cluster["rank"] == [0, 1, 2, 3]


def test_an_interrupt_ends_a_function(cluster: Cluster):
    async def wait_long() -> None:
        import asyncio

        await asyncio.sleep(3600)

    def sleep_long() -> None:
        import time

        time.sleep(3600)

    for function in (wait_long, sleep_long):
        with pytest.raises(CellTimeout) as stopped:
            cluster.run(function, timeout_s=0.5)
        assert "did not react" not in str(stopped.value)
        assert cluster["rank"] == [0, 1, 2, 3]


def test_cluster_interrupt_works_from_another_thread(cluster: Cluster):
    class FromThread(Press):
        def _press(self) -> None:
            cluster.interrupt()

    with pytest.raises(CellError) as stopped:
        cluster.execute(f"print(1)\n{BLOCKED['a sleep']}", observer=FromThread(4))
    assert {f.ename for f in stopped.value.result.failures} == {"KeyboardInterrupt"}


def test_an_interrupt_of_idle_ranks_has_no_effect(cluster: Cluster):
    for _ in range(10):
        cluster.interrupt()
        assert cluster.execute("rank").ok


@pytest.mark.gpu
def test_ranks_that_wait_in_nccl_are_released():
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each of two ranks")
    waiting = "t = torch.ones(3, device=device)\nif rank: dist.all_reduce(t)\n"
    with Cluster(2, device="cuda") as cluster:
        with pytest.raises(CellError, match="the cell of rank 0 has ended"):
            cluster.execute(waiting)  # NCCL has not connected the ranks
        for _ in range(3):
            cluster.execute("t = torch.ones(3, device=device)\ndist.all_reduce(t)")
            assert [t.tolist() for t in cluster["t"]] == [[2.0] * 3] * 2
            interrupted(cluster, f"{waiting}torch.cuda.synchronize()", Press(2, 0.5))


HANDLES = """
import os, signal
heard = []

def handle(signum, frame):
    heard.append(signum)
    raise ValueError("from the handler")

signal.signal(signal.SIGUSR1, handle)
"""


def test_a_signal_handler_of_a_cell_raises_in_user_code_only(cluster: Cluster):
    """torch's handler of SIGCHLD raises if a loader's worker dies between two cells."""
    cluster.execute(HANDLES)
    try:
        for info in cluster.ranks:
            os.kill(info.pid, signal.SIGUSR1)
        wait_until(lambda: cluster["len(heard)"] == [1] * 4)
        with pytest.raises(CellError, match=r"^ranks 0-3 .*ValueError: from the"):
            cluster.execute("os.kill(os.getpid(), signal.SIGUSR1)")
        assert cluster["len(heard)"] == [2] * 4
    finally:
        cluster.execute("signal.signal(signal.SIGUSR1, signal.SIG_DFL)")


def test_an_interrupt_leaves_a_block_that_it_has_entered(cluster: Cluster):
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        cluster.execute(
            "import _thread\n"
            "left = False\n"
            "class Block:\n"
            "    __enter__ = staticmethod(_thread.interrupt_main)\n"
            "    def __exit__(self, *error):\n"
            "        global left\n"
            "        left = True\n"
            "with Block():\n"
            "    while True: pass",
            timeout_s=60,
        )
    assert cluster["left"] == [True] * 4
