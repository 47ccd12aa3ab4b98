"""A session of random steps, beside a model of each variable on each rank."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from nbdist import Cluster
from nbdist.clusters.observer import Event, Quiet
from nbdist.clusters.startup_status import ends_within
from nbdist.errors import CellError, CellInterrupted
from tests.seed import SEED

MOST_RANKS = 4
WITHIN_S = 120.0
MOST_GROWTH_BYTES = 64 << 20
"""Of the notebook's process. Caches fill in the first hundreds of steps."""
READ = "{k: v for k, v in globals().items() if k.startswith('v_')}"
ENDLESS = (
    "while True: v_i += 1",
    "import time\nwhile True: time.sleep(0.01)",
    "while True: nbdist.all_reduce(torch.ones(3))",
    "while True: dist.barrier()",
    "nbdist.barrier() if rank else __import__('time').sleep(1000)",
)
DEATHS = (
    f"os.kill(os.getpid(), {signal.SIGKILL})",
    f"os.kill(os.getpid(), {signal.SIGSEGV})",
    "os._exit(3)",
    "os.abort()",
)


class Printed(Quiet):
    """Knows when a rank has printed."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def take(self, event: Event) -> None:
        self.event.set()


class Session:
    """Takes random steps, and compares the ranks with the model after each."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.draw = random.Random(seed)
        self.model: list[dict[str, Any]] = [{} for _ in cluster.infos]
        self.number = 0
        self.kinds: list[Callable[[], None]] = [
            self.some_set, self.all_reduce, self.one_fails, self.one_is_killed,
            self.one_dies, self.replace, self.scale, self.push, self.pull,
            self.interrupt, self.look, self.in_background,
        ]  # fmt: skip

    def step(self, kind: Callable[[], None]) -> None:
        """Take a step, and compare."""
        self.number += 1
        said = f"step {self.number}: {kind.__name__}"
        print(said, flush=True)
        kind()
        assert self.cluster.pull(READ) == self.model, said
        assert self.cluster["rank"] == list(range(len(self.model))), said

    @property
    def size(self) -> int:
        return len(self.model)

    def name(self) -> str:
        return f"v_{self.draw.randrange(10)}"

    def some(self) -> list[int]:
        return sorted(
            self.draw.sample(range(self.size), self.draw.randint(1, self.size))
        )

    def victim(self) -> int:
        """A rank beside others."""
        if self.size == 1:
            self.scale_to(2)
        return self.draw.randrange(self.size)

    def replaced(self, *ranks: int) -> None:
        """A new process has what the lowest of the others has."""
        lowest = min(set(range(self.size)) - set(ranks))
        for rank in ranks:
            self.model[rank] = dict(self.model[lowest])

    # -- the steps ---------------------------------------------------------------------

    def some_set(self) -> None:
        name, ranks = self.name(), self.some()
        self.cluster.execute(f"{name} = rank * 1000 + {self.number}", ranks)
        for rank in ranks:
            self.model[rank][name] = rank * 1000 + self.number

    def all_reduce(self) -> None:
        call = self.draw.choice(["nbdist.all_reduce", "dist.all_reduce"])
        self.cluster.execute(
            f"_t = torch.ones(4) * (rank + 1)\n{call}(_t)\nv_sum = int(_t[0])"
        )
        for each in self.model:
            each["v_sum"] = self.size * (self.size + 1) // 2

    def one_fails(self) -> None:
        name, rank = self.name(), self.draw.randrange(self.size)
        with pytest.raises(CellError, match=f"no {self.number}"):
            self.cluster.execute(
                f"{name} = {self.number}\n"
                f"if rank == {rank}: raise ValueError('no {self.number}')\n"
                "nbdist.barrier()"
            )
        for each in self.model:
            each[name] = self.number

    def one_is_killed(self) -> None:
        """While all ranks are idle."""
        rank, cluster = self.victim(), self.cluster
        os.kill(cluster.infos[rank].pid, signal.SIGKILL)
        assert cluster._live().await_deaths(lambda died: rank in died, WITHIN_S)
        self.replaced(rank)

    def one_dies(self) -> None:
        """In a cell, while the others wait for it."""
        name, rank = self.name(), self.victim()
        with pytest.raises(CellError, match=f"rank {rank} "):
            self.cluster.execute(
                f"import os\n{name} = {self.number}\n"
                f"if rank == {rank}: {self.draw.choice(DEATHS)}\nnbdist.barrier()"
            )
        for each in self.model:
            each[name] = self.number
        self.replaced(rank)

    def replace(self) -> None:
        self.victim()
        ranks = self.draw.sample(range(self.size), self.draw.randint(1, self.size - 1))
        self.cluster.replace(ranks)
        self.replaced(*ranks)

    def scale(self) -> None:
        self.scale_to(self.draw.randint(1, MOST_RANKS))

    def scale_to(self, n: int) -> None:
        self.cluster.scale(n, drop=True)
        added = [dict(self.model[0]) for _ in range(n - self.size)]
        self.model = [*self.model[:n], *added]

    def push(self) -> None:
        value = self.draw.choice([5, "t" * 10, list(range(1000)), b"z" * 3_000_000])
        ranks = self.some()
        self.cluster.on(ranks).push(v_p=value)
        for rank in ranks:
            self.model[rank]["v_p"] = value

    def pull(self) -> None:
        ranks = self.some()
        assert self.cluster.pull("rank * 2", ranks) == [2 * rank for rank in ranks]

    def interrupt(self) -> None:
        printed = Printed()
        code = f"v_i = 0\nprint('begun')\n{self.draw.choice(ENDLESS)}"
        cell = self.cluster.in_background(
            lambda: self.cluster.execute(code, observer=printed), "a cell"
        )
        assert printed.event.wait(WITHIN_S)
        cell.interrupt()
        with pytest.raises(CellInterrupted):
            cell.result(WITHIN_S)
        self.cluster.execute("v_i = 0")
        for each in self.model:
            each["v_i"] = 0

    def look(self) -> None:
        cluster, ranks = self.cluster, set(range(self.size))
        assert cluster.status().keys() == ranks
        assert cluster.variables().keys() == ranks
        assert cluster.stacks().keys() == ranks

    def in_background(self) -> None:
        name, cells = self.name(), []
        for more in range(self.draw.randint(1, 3)):
            code = f"{name} = {self.number + more}"
            cells.append(
                self.cluster.in_background(
                    lambda code=code: self.cluster.execute(code), code
                )
            )
        for cell in cells:
            cell.result(WITHIN_S)
        for each in self.model:
            each[name] = self.number + len(cells) - 1


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    seed = getattr(request, "param", SEED)
    print(f"seed {seed}")
    with Cluster(3, device="cpu", threads=1) as cluster:
        cluster.on_note = lambda _: None
        yield Session(cluster, seed)


def test_a_session_of_a_few_random_steps_is_the_models(session: Session) -> None:
    """Each kind of step once, and some more."""
    kinds = session.draw.sample(session.kinds, len(session.kinds))
    for kind in [*kinds, *session.draw.choices(session.kinds, k=3)]:
        session.step(kind)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("session", range(1, 6), indirect=True)
def test_a_session_of_many_random_steps_is_the_models(session: Session) -> None:
    """The notebook's process grows neither by descriptors nor threads nor memory."""
    for kind in session.kinds * 2:
        session.step(kind)
    before = _census(session)
    for kind in session.draw.choices(session.kinds, k=300):
        session.step(kind)
    after = _census(session)
    assert after[:2] == before[:2]
    assert after[2] < before[2] + MOST_GROWTH_BYTES


def _census(session: Session) -> tuple[int, int, int]:
    """Descriptors, threads and resident bytes, with two ranks."""
    before = session.cluster.infos
    session.scale_to(2)
    for info in before[2:]:  # what is held of them is given back at the next change
        assert ends_within(info.parent_pid, WITHIN_S)
    session.step(session.replace)
    session.step(session.look)
    process = psutil.Process()
    return process.num_fds(), process.num_threads(), process.memory_info().rss
