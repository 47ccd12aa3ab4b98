"""Transfer of values whose pickling code is slow or ends a rank."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nbdist import (
    CellError,
    CellInterrupted,
    CellTimeout,
    Cluster,
    TransferError,
    UsageError,
)
from nbdist.magics import parse_ranks
from tests.processes import wait_until

SLOW = """
import time
class Slow:
    def __init__(self, where, ranks=(), folder=""):
        self.where, self.ranks, self.folder = where, ranks, folder
    def wait(self, where, rank):
        if where == self.where and rank in self.ranks:
            open(f"{self.folder}/{where}-{rank}", "w").close()
            time.sleep(3600)
    def __reduce__(self):
        import nbdist
        from nbdist.engine.rank import is_rank
        self.wait("pickling" if is_rank() else "pickling here",
                  nbdist.rank() if is_rank() else None)
        return _made, (Slow, self.where, self.ranks, self.folder)
    def __repr__(self):
        import nbdist
        self.wait("printing", nbdist.rank())
        return "a slow one"
def _made(kind, *args):
    import nbdist
    from nbdist.engine.rank import is_rank
    made = kind(*args)
    made.wait("unpickling" if is_rank() else "unpickling here",
              nbdist.rank() if is_rank() else None)
    return made
"""


@contextmanager
def pressed_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Interrupt when the condition holds. This must end the block."""

    def press() -> None:
        wait_until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        yield
    finally:
        presser.join()


@pytest.fixture
def slow() -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SLOW, names)
    kind: Callable[..., Any] = names["Slow"]
    return kind


def the_next_cell_works(cluster: Cluster) -> None:
    cluster.execute("t = torch.ones(2)\nnbdist.all_reduce(t)")
    assert [t.tolist() for t in cluster["t"]] == [[4.0, 4.0]] * 4


@pytest.mark.parametrize("ranks", [(0,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_an_interrupt_ends_a_push(
    cluster: Cluster, slow: Callable[..., Any], tmp_path: Path, ranks: tuple[int, ...]
):
    value = slow("unpickling", ranks, str(tmp_path))
    started = [tmp_path / f"unpickling-{rank}" for rank in ranks]
    with pytest.raises(CellInterrupted) as stopped:  # noqa: SIM117
        with pressed_when(lambda: all(path.exists() for path in started)):
            cluster.push(fine=1, thing=value)
    said = re.search(
        r"ranks? (\S+) of 4: .* while unpickling 'thing'", str(stopped.value)
    )
    assert said is not None, str(stopped.value)
    assert set(ranks) <= set(parse_ranks(said[1]) or [])
    has_thing = cluster["'thing' in globals()"]
    assert [has_thing[rank] for rank in ranks] == [False] * len(ranks)
    assert cluster["'fine' in globals()"] == has_thing, "all of them, or none"
    the_next_cell_works(cluster)


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("how", ["pull", "run", "inspect"])
def test_an_interrupt_ends_a_pull(
    cluster: Cluster, tmp_path: Path, rank: int, how: str
):
    where = "printing" if how == "inspect" else "pickling"
    cluster.execute(f"{SLOW}\nthing = Slow({where!r}, ({rank},), {str(tmp_path)!r})")
    actions: dict[str, Callable[[], Any]] = {
        "pull": lambda: cluster["thing"],
        "run": lambda: cluster.run(eval_there, "thing"),
        "inspect": lambda: cluster.inspect("thing"),
    }
    with pytest.raises(CellInterrupted) as stopped:  # noqa: SIM117
        with pressed_when((tmp_path / f"{where}-{rank}").exists):
            actions[how]()
    what = "pickling the result" if how == "run" else f"{where} 'thing'"
    assert f"rank {rank} of 4" in str(stopped.value)
    assert f"while {what}, at In[" in str(stopped.value)
    the_next_cell_works(cluster)


def eval_there(expression: str) -> object:
    from IPython import get_ipython

    return eval(expression, get_ipython().user_ns)


@pytest.mark.parametrize("how", ["push", "pull", "run's argument", "run's result"])
def test_an_interrupt_ends_slow_pickling_in_this_process(
    cluster: Cluster, slow: Callable[..., Any], tmp_path: Path, how: str
):
    out = how in ("push", "run's argument")
    where = "pickling here" if out else "unpickling here"
    value = slow(where, (None,), str(tmp_path))
    if not out:
        cluster.push(thing=value)
    actions: dict[str, Callable[[float | None], Any]] = {
        "push": lambda s: cluster.push(None, s, thing=value),
        "pull": lambda s: cluster.pull("thing", timeout_s=s),
        "run's argument": lambda s: cluster.run(print, value, timeout_s=s),
        "run's result": lambda s: cluster.run(eval_there, "thing", timeout_s=s),
    }
    running = tmp_path / f"{where}-None"
    with pytest.raises(CellInterrupted, match=where.split()[0]):  # noqa: SIM117
        with pressed_when(running.exists):
            actions[how](None)
    running.unlink()
    with pytest.raises(CellTimeout, match=r"after 0\.3 s.*in this process"):
        actions[how](0.3)
    assert [t.name for t in threading.enumerate() if "timer" in t.name] == []
    the_next_cell_works(cluster)


def test_a_timeout_names_rank_variable_and_line(
    cluster: Cluster, slow: Callable[..., Any], tmp_path: Path
):
    value = slow("unpickling", (1, 2), str(tmp_path))
    with pytest.raises(CellTimeout, match="rank 1 at unpickling 'thing'"):
        cluster.push(None, 0.5, thing=value)
    cluster.execute(f"{SLOW}\nthing = Slow('pickling', (3,), {str(tmp_path)!r})")
    for action in (
        lambda: cluster.pull("thing", timeout_s=0.5),
        lambda: cluster.run(eval_there, "thing", timeout_s=0.5),
    ):
        with pytest.raises(CellTimeout, match=r"rank 3 at pickling .*, In\[\d+\] line"):
            action()
    cluster.execute(f"thing = Slow('printing', (3,), {str(tmp_path)!r})")
    with pytest.raises(CellTimeout, match="rank 3 at printing 'thing'"):
        cluster.inspect("thing", timeout_s=0.5)
    for timeout_s in (0, -1):
        with pytest.raises(UsageError, match="seconds above 0"):
            cluster.push(None, timeout_s, x=1)
    the_next_cell_works(cluster)


def test_an_exit_in_the_pickling_of_a_value_is_a_transfer_error(cluster: Cluster):
    class Exits:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit(3)",)

    with pytest.raises(
        TransferError, match="rank 0-3: unpickling 'thing': SystemExit: 3"
    ):
        cluster.push(thing=Exits())
    with pytest.raises(TransferError, match="SystemExit"):
        cluster.run(print, Exits())
    cluster.execute(
        "class Exits:\n"
        "    def __reduce__(self): return exec, ('raise SystemExit(3)',)\n"
        "class Refuses:\n"
        "    def __reduce__(self): raise SystemExit(4)"
    )
    with pytest.raises(TransferError, match=r"in this process \(SystemExit: 3\)"):
        _ = cluster["Exits()"]
    with pytest.raises(TransferError, match=r"rank 0-3: .*Refuses.*SystemExit: 4"):
        _ = cluster["Refuses()"]
    the_next_cell_works(cluster)


def test_an_error_whose_str_raises_arrives(cluster: Cluster):
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    def fail() -> None:
        raise Silent

    with pytest.raises(CellError, match="Silent: <its __str__ raised ValueError>"):
        cluster.run(fail, timeout_s=20)
    with pytest.raises(CellError, match="line 3: Silent: <its __str__ raised Value"):
        cluster.execute(
            "class Silent(Exception):\n"
            "    def __str__(self): raise ValueError\n"
            "raise Silent"
        )
    the_next_cell_works(cluster)


def test_a_slow_repr_delays_neither_status_nor_interrupt(
    cluster: Cluster, tmp_path: Path
):
    cluster.execute(
        "import pathlib, time\n"
        "class Slow:\n"
        "    def __repr__(self):\n"
        f"        pathlib.Path({str(tmp_path)!r}, str(nbdist.rank())).touch()\n"
        "        time.sleep(4)\n"
        "        return 'slow'\n"
        "thing = Slow()"
    )
    found: list[Any] = []
    looking = threading.Thread(target=lambda: found.append(cluster.variables("thing")))
    looking.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
    assert all(state is not None for state in cluster.status().values())
    with pytest.raises(CellTimeout):
        cluster.execute("time.sleep(60)", timeout_s=0.3)
    assert looking.is_alive(), "not after the variables were described"
    looking.join()
    shown = [found[0][rank][0].value for rank in range(4)]
    assert shown == ["<repr takes longer than 2 s>"] * 4
