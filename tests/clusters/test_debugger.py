"""pdb and `input` on ranks, with a reader that answers for the user."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist import CellError, CellInterrupted, CellTimeout, Cluster, UsageError
from nbdist.clusters import call_supervisor
from nbdist.clusters.observer import Quiet
from nbdist.errors import CollectiveTimeout, NoInput
from tests.debugger_sessions import debug_at_random, killing
from tests.scripted_user import Answer, Scripted, end_of_input, press

pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture
def user(cluster: Cluster) -> Iterator[Scripted]:
    reader, supervisor = Scripted(), cluster._live_supervisor()
    before, supervisor.reader = supervisor.reader, reader
    yield reader
    supervisor.reader = before
    assert reader.answers == []


def stdout(result: Any) -> list[str]:
    return [each.stdout for each in result]


STOP = """value = rank * 10
if rank == {rank}:
    breakpoint()
after = value + 1
nbdist.barrier()
print("end", after)
"""


@pytest.mark.parametrize("rank", [0, 1, 3], ids=["first", "middle", "last"])
def test_one_rank_stops_and_continues(cluster: Cluster, user: Scripted, rank: int):
    user.give("p value", "n", "n", "w", "value = 7", "continue")
    result = cluster.execute(STOP.format(rank=rank), number=5)
    assert stdout(result) == [f"end {r * 10 + 1}\n" for r in range(4)]
    host = cluster.ranks[rank].host
    assert user.seen[:5] == [
        f"debugger on rank {rank} of 4 ({host}), In[5] line 3",
        f"[{rank}] > In[5] line 3, <module>()",
        f"[{rank}] -> breakpoint()",
        f"[{rank}] (Pdb) p value",
        f"[{rank}] {rank * 10}",
    ]
    assert f"[{rank}] -> after = value + 1" in user.seen
    assert f"[{rank}] -> nbdist.barrier()" in user.seen
    assert "engine" not in user.text  # `w` shows the user's frames only
    assert cluster["value"][rank] == 7


def test_the_line_that_calls_a_function_of_a_module_is_named(
    cluster: Cluster, user: Scripted, tmp_path: Path
):
    (tmp_path / "installed_here.py").write_text(
        "import pdb\n\ndef work(x):\n    y = x + 1\n    pdb.set_trace()\n    return y\n"
    )
    user.give("p y", "up", "p rank", "c")
    cluster.execute(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport installed_here\n"
        "sys.path.pop(0)\n\nz = installed_here.work(rank)\nnbdist.barrier()",
        ranks=[1],
        number=8,
        check=False,
    )
    assert "installed_here.py line 5, called in In[8] line 6" in user.seen[0]
    assert "[1] 2" in user.seen
    assert "[1] 1" in user.seen


def test_next_and_step_follow_the_cell_and_end_with_it(
    cluster: Cluster, user: Scripted
):
    code = (
        "import asyncio\ndef double(x):\n    return 2 * x\n"
        "breakpoint()\na = double(2)\nawait asyncio.sleep(0.01)\nb = 3\nstr(a)"
    )
    user.give("n", "s", "n", "n", "n", "n", "n", "n")
    cluster.execute(code, [2], number=3)
    lines = [line[7:] for line in user.seen if line.startswith("[2] -> ")]
    assert lines == [
        "breakpoint()", "a = double(2)", "def double(x):", "return 2 * x",
        "return 2 * x", "await asyncio.sleep(0.01)", "b = 3", "str(a)",
    ]  # fmt: skip
    user.give()
    assert stdout(cluster.execute("print('free')", [2])) == ["free\n"]
    assert cluster.run(lambda: sys.gettrace() is None) == [True] * 4


def test_ranks_are_asked_one_after_another_the_lowest_first(
    cluster: Cluster, user: Scripted
):
    user.give("p 1", "c", "c", "c", "c")
    cluster.execute("breakpoint()\nnbdist.barrier()")
    asked = [re.sub(r"\D", "", prompt) for prompt in user.prompts]
    assert asked == ["0", "0", "1", "2", "3"]


def test_a_command_goes_to_several_ranks(cluster: Cluster, user: Scripted):
    user.give("ranks all p rank * 7", "ranks 1,3 p -rank", "ranks 2,8 p 1", "ranks",
              "ranks all n", "ranks all c")  # fmt: skip
    result = cluster.execute("breakpoint()\nx = 1\nprint(x)")
    assert stdout(result) == ["1\n"] * 4
    for rank in range(4):
        assert user.seen.count(f"[{rank}] {rank * 7}") == 1
        assert f"[{rank}] -> x = 1" in user.seen
    assert [f"[{rank}] {-rank}" in user.seen for rank in (1, 2, 3)] == [1, 0, 1]
    assert user.text.count("rank 0-3 has stopped") == 2


@pytest.mark.parametrize("how", ["quit", "q", "ranks all q", end_of_input])
@pytest.mark.parametrize("rank", [0, 3])
def test_quit_frees_all_ranks(cluster: Cluster, user: Scripted, rank: int, how: Answer):
    user.give(how)
    with pytest.raises(CellInterrupted) as stopped:
        cluster.execute(f"kept = 1\n{STOP.format(rank=rank)}", number=5)
    said = f"the debugger was quit on rank {rank} in In[5] line 4, and the others"
    assert said in str(stopped.value)
    assert stopped.value.rendered == []
    assert cluster["kept"] == [1] * 4


LATE = """
import signal
if rank == 3:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
if rank == 1:
    breakpoint()
nbdist.barrier()
"""
CLEAN = """
signal.sigtimedwait([signal.SIGINT], 0)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
"""


def test_quit_shows_no_error_of_a_rank_that_is_released_before_its_interrupt(
    cluster: Cluster, user: Scripted
):
    user.give("q")
    try:
        with pytest.raises(CellInterrupted) as stopped:
            cluster.execute(LATE)
    finally:
        cluster.execute(CLEAN, [3])
    assert stopped.value.rendered == []
    assert stopped.value.result is not None
    failures = {each.rank: each.ename for each in stopped.value.result.failures}
    assert failures[3] == "CollectiveAborted"


BACKWARD = """
from torch.nn.parallel import DistributedDataParallel
layer = torch.nn.Linear(4, 4)
ddp = DistributedDataParallel(layer)
if rank == {rank}:
    layer.weight.register_hook(lambda gradient: breakpoint())
loss = ddp(torch.ones(2, 4)).sum()
loss.backward()
"""


@pytest.mark.parametrize("rank", [0, 1, 3], ids=["first", "middle", "last"])
def test_quit_releases_ranks_that_wait_in_ddp_first(
    cluster: Cluster,
    user: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
):
    monkeypatch.setattr(call_supervisor, "RELEASE_AFTER_S", 3600.0)  # of all ranks
    user.give("q")
    with pytest.raises(CellInterrupted) as stopped:
        cluster.execute(BACKWARD.format(rank=rank))
    assert stopped.value.rendered == []
    result = cluster.execute(BACKWARD.format(rank=-1))
    assert result.ok


def test_quit_ends_a_cell_that_catches_every_exception(
    cluster: Cluster, user: Scripted
):
    user.give("q")
    code = "while True:\n    try: breakpoint()\n    except Exception: pass"
    with pytest.raises(CellInterrupted):
        cluster.execute(code, [1])


@pytest.mark.parametrize(
    "code",
    [
        STOP.format(rank=0),
        STOP.format(rank=3),
        "breakpoint()",
        "input()",
        "dist.breakpoint(1)",
        "try:\n    breakpoint()\nexcept BaseException:\n    breakpoint()",
        "while True:\n    try:\n        input()\n    except BaseException as e:\n"
        "        if isinstance(e, EOFError): raise",
    ],
)
def test_an_interrupt_at_the_prompt_ends_the_cell_on_all_ranks(
    cluster: Cluster, user: Scripted, code: str
):
    user.give(press)
    with pytest.raises(CellInterrupted) as stopped:
        cluster.execute(code)
    assert "did not react" not in str(stopped.value)


def test_an_expression_at_the_prompt_is_interrupted(cluster: Cluster, user: Scripted):
    user.give("p [print('here'), __import__('time').sleep(60)]")
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(CellInterrupted):
        cluster.execute("breakpoint()", [1])
    timer.join()


def test_the_time_limit_leaves_out_the_time_at_the_prompt(
    cluster: Cluster, user: Scripted
):
    user.give(lambda: time.sleep(1.5) or "c")
    assert cluster.execute(STOP.format(rank=1), timeout_s=1.0).ok
    user.give(lambda: time.sleep(1.5) or "p __import__('time').sleep(60)")
    with pytest.raises(CellTimeout):
        cluster.execute(STOP.format(rank=1), timeout_s=1.0)


def test_the_time_limit_of_a_function_leaves_it_out_too(
    cluster: Cluster, user: Scripted
):
    class Slow:
        """Takes a while to unpickle, here in the notebook."""

        def __reduce__(self) -> Any:
            return time.sleep, (0.2,)

    def work() -> Slow:
        breakpoint()
        return Slow()

    user.give(lambda: time.sleep(1.2) or "c")
    assert cluster.run(work, ranks=[1], timeout_s=1.0) == [None]


@pytest.mark.parametrize(
    "call",
    [
        "nbdist.all_reduce(x, timeout=0.5)",
        "nbdist.all_reduce(x, async_op=True).wait(0.5)",
        "nbdist.send(x, 0) if rank else nbdist.recv(x, 1, timeout=0.5)",
    ],
)
def test_collectives_do_not_time_out_meanwhile(
    cluster: Cluster, user: Scripted, call: str
):
    code = f"x = torch.ones(2)\nif rank == 1: breakpoint()\nif rank < 2 or {{}}: {call}"
    alone = "send" not in call
    user.give(lambda: time.sleep(1.2) or "c")
    assert cluster.execute(code.format(alone)).ok
    late = code.format(alone).replace("breakpoint()", "import time; time.sleep(1.2)")
    with pytest.raises(CellError, match=CollectiveTimeout.__name__):
        cluster.execute(late)


def test_the_others_are_said_to_wait(cluster: Cluster, user: Scripted):
    class Noticed(Quiet):
        texts: list[str] = []  # noqa: RUF012

        def notice(self, text: str) -> None:
            self.texts.append(text)

    seen = Noticed()
    user.give("c")
    cluster.execute(STOP.format(rank=2), observer=seen)
    assert seen.texts == ["rank 0-1,3 wait for the debugger on 2", ""]


def test_a_status_names_the_prompt(cluster: Cluster, user: Scripted):
    doing: list[Any] = []

    def look() -> str:
        doing.append((cluster.status()[1] or {})["where"])
        return "c"

    user.give(look)
    cluster.execute(STOP.format(rank=1), number=5)
    assert doing == ["at the prompt of breakpoint(), In[5] line 3"]


def test_input_asks_for_each_rank(cluster: Cluster, user: Scripted):
    user.give("a", "b", "c", "d")
    result = cluster.execute("print(input('name? '))")
    assert stdout(result) == ["a\n", "b\n", "c\n", "d\n"]
    assert user.prompts == [f"[{rank}] name? " for rank in range(4)]
    user.give("secret")
    code = "import getpass\nprint(len(getpass.getpass()))"
    assert stdout(cluster.execute(code, [2])) == ["6\n"]
    assert user.prompts == ["[2] Password: (hidden)"]
    user.give(end_of_input)
    with pytest.raises(CellError, match=r"NoInput: input\(\): the user has ended"):
        cluster.execute("input()", [2])


def test_other_debuggers_read_lines_too(cluster: Cluster, user: Scripted):
    user.give("up", "p rank", "c")
    result = cluster.execute("dist.breakpoint(2)\nprint('on')")
    assert all(text.endswith("on\n") for text in stdout(result))
    with pytest.raises(CellError):
        cluster.execute("a = 1 / 0", [1])
    user.give("p 6 * 7", "q")
    assert "42" in stdout(cluster.execute("%debug", [1]))[0]


def test_functions_and_scripts_stop_too(
    cluster: Cluster, user: Scripted, tmp_path: Path
):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nstep = 3\nif os.environ['RANK'] == '2':\n    breakpoint()\n"
    )
    user.give("p step", "c")
    assert cluster.run_script(script).ok
    assert "train.py line 4" in user.seen[0]
    assert "[2] 3" in user.seen

    def work(x: int) -> int:
        breakpoint()
        return x + 1

    user.give("p x", "n", "n")
    assert cluster.run(work, 4, ranks=[3]) == [5]
    assert "test_debugger.py line" in user.seen[0]
    assert "[3] 4" in user.seen


@pytest.mark.parametrize("asks", ["input()", "breakpoint()"])
def test_a_rank_in_the_background_gets_an_error_at_once(cluster: Cluster, asks: str):
    future = cluster.execute(asks, wait=False)
    error = future.exception(timeout=10)
    assert isinstance(error, CellError)
    assert f"NoInput: {asks}: a call in the background or in another" in str(error)
    assert "without -b" in str(error)


def test_threads_and_child_processes_get_an_error(cluster: Cluster, user: Scripted):
    code = """
import os, threading
def ask():
    try:
        input()
    except EOFError as error:
        print(error, flush=True)
thread = threading.Thread(target=ask, name="mine")
thread.start(); thread.join()
if os.fork() == 0:
    ask()
    os._exit(0)
os.wait()
"""
    text = stdout(cluster.execute(code, [1]))[0]
    assert "only the main thread of rank 1 can ask, and this is mine" in text
    assert "a child process of rank 1 cannot ask" in text
    assert user.prompts == []


def test_a_reader_that_fails_leaves_no_rank_waiting(cluster: Cluster, user: Scripted):
    def fail() -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")

    user.give(fail)
    with pytest.raises(CellError, match="the input cannot be read: UnicodeDecodeErr"):
        cluster.execute("input()", [1])


# -- after a failure -------------------------------------------------------------------

FAILS = """
def half(x):
    part = x / (rank - 2)
    return part
nbdist.barrier()
half(rank)
nbdist.barrier()
"""


def test_a_post_mortem_opens_where_the_first_rank_has_failed(
    cluster: Cluster, user: Scripted
):
    with pytest.raises(CellError):
        cluster.execute(FAILS, number=6)
    user.give("p x, rank", "up", "l", "down", "q")
    cluster.debug()
    assert user.seen[0].endswith("In[6] line 3")
    assert "[2] (2, 2)" in user.seen
    assert "[2] -> half(rank)" in user.seen
    assert "IPython" not in user.text
    user.give("c")
    cluster.debug(3)  # it was released from the barrier
    assert user.seen[0].endswith(", called in In[6] line 7")
    user.give(press)
    with pytest.raises(CellInterrupted):
        cluster.debug(2)


def test_a_post_mortem_without_a_failure_is_an_error(cluster: Cluster):
    cluster.execute("1")
    with pytest.raises(UsageError, match="the last cell has not failed"):
        cluster.debug()
    with pytest.raises(CellError):
        cluster.execute("1 / (rank - 1)")
    with pytest.raises(UsageError, match=r"rank 0 has not failed .* %dist_debug -r 1"):
        cluster.debug(0)
    with pytest.raises(CellError):
        cluster.execute("x = (")
    with pytest.raises(CellError, match="failed before it ran a line on rank 2"):
        cluster.debug(2)


def test_a_post_mortem_without_a_terminal_is_an_error(cluster: Cluster):
    with pytest.raises(CellError):
        cluster.execute("1 / 0")
    with pytest.raises(CellError, match=NoInput.__name__):
        cluster.debug()


# -- a rank dies -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Cluster]:
    with Cluster(3, device="cpu") as cluster:
        cluster._live_supervisor().reader = Scripted()
        yield cluster


def reader_of(cluster: Cluster) -> Scripted:
    reader = cluster._live_supervisor().reader
    assert isinstance(reader, Scripted)
    return reader


@pytest.mark.parametrize("rank", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("asks", ["breakpoint()", "input()"])
def test_the_death_of_a_rank_ends_its_prompt(
    own_cluster: Cluster, rank: int, asks: str
):
    own_cluster.execute("kept = 5")
    reader = reader_of(own_cluster)
    reader.give(killing(own_cluster, reader))
    code = f"if rank == {rank}:\n    {asks}\nnbdist.barrier()"
    with pytest.raises(CellError, match=f"rank {rank} of 3: RankDied"):
        own_cluster.execute(code)
    assert "press Enter in it" in reader.text
    assert own_cluster["kept"] == [5] * 3


@pytest.mark.parametrize("rank", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_rank_that_dies_post_mortem_is_replaced_at_once(
    own_cluster: Cluster, rank: int
):
    own_cluster.execute("kept = 6")
    with pytest.raises(CellError, match="ZeroDivisionError"):
        own_cluster.execute(f"if rank == {rank}:\n    1 / 0\nnbdist.barrier()")
    reader = reader_of(own_cluster)
    reader.give("p rank", killing(own_cluster, reader))
    before = own_cluster.ranks[rank].pid
    with pytest.raises(CellError, match=f"rank {rank} of 3: RankDied") as died:
        own_cluster.debug()
    assert f"rank {rank} was replaced (pid {own_cluster.ranks[rank].pid}" in str(
        died.value
    )
    assert own_cluster.ranks[rank].pid != before
    assert own_cluster["kept"] == [6] * 3


def test_another_rank_dies_meanwhile(own_cluster: Cluster):
    def kill() -> str:
        os.kill(own_cluster.ranks[0].pid, signal.SIGKILL)
        return "p 'still here'"

    reader = reader_of(own_cluster).give(kill, "c")
    with pytest.raises(CellError, match="rank 0 of 3: RankDied"):
        own_cluster.execute(
            "import time\nif rank == 1: breakpoint()\n"
            "if rank == 0: time.sleep(60)\nnbdist.barrier()"
        )
    assert "[1] 'still here'" in reader.seen
    assert stdout(own_cluster.execute("print(rank)")) == ["0\n", "1\n", "2\n"]


@pytest.mark.slow
def test_no_session_of_two_hundred_leaves_a_rank_waiting(own_cluster: Cluster):
    sessions = debug_at_random(own_cluster, reader_of(own_cluster), 200)
    print(sessions)
    assert len(sessions.kinds) == 7
    assert len(sessions.ends) == 6
