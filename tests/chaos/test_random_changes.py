"""A cell replaces something that Python, torch and the rank share; no call hangs.

A draw that fails prints its seed. `NBDIST_CHAOS_SEED=1234 pytest` runs only this draw.
"""

from __future__ import annotations

import ast
import builtins
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nbdist import Cluster, NbdistError
from nbdist.session import Session
from tests.clusters.test_hostile_cells import DIE, WAIT, WORK
from tests.processes import wait_until

N = 3
DEADLINE_S = 60.0
"""Seconds in which each call must end, without a time-out of its own."""
OFTEN = range(3000, 3006)
SOAK = range(4000, 4100)
PACKAGE = Path(__file__).parents[2] / "nbdist"
NOT_REPLACED = ("zmq", "ipykernel")
"""Modules that carry the messages; no user replaces their parts."""
ON_RANKS = ("engine", "ipc", "collectives", "telemetry", "training")
REPLACEMENTS = {
    "nothing": "None",
    "a text": "'text'",
    "an error": "fails",
    "an exit": "leaves",
    "nothing returned": "lambda *_, **__: None",
}
CHANGE = """
import importlib
def fails(*_, **__): raise RuntimeError("replaced by a cell")
def leaves(*_, **__): raise SystemExit("replaced by a cell")
replace = importlib.import_module({module!r}).__dict__.__setitem__
if rank in {ranks}:
    replace({name!r}, {replacement})
"""


@dataclass(frozen=True)
class Draw:
    """What is replaced by what, on which ranks, and the calls that follow."""

    module: str
    name: str
    replacement: str
    ranks: tuple[int, ...]
    calls: tuple[str, ...]


@cache
def used_names() -> list[tuple[str, str]]:
    """What the sources of a rank use of other modules, and Python's own functions."""
    found = {
        ("builtins", name)
        for name in dir(builtins)
        if callable(getattr(builtins, name)) and not name.startswith("__")
    }
    for folder in ON_RANKS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            modules = {
                alias.asname or alias.name.partition(".")[0]: (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                for node in ast.walk(tree)
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            found |= {
                (modules[node.value.id], node.attr)
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and not modules.get(node.value.id, "nbdist").startswith("nbdist")
            }
    return sorted(pair for pair in found if pair[0] not in NOT_REPLACED)


def draw(seed: int) -> Draw:
    """The draw of a seed."""
    chooses = random.Random(seed)
    module, name = chooses.choice(used_names())
    return Draw(
        module,
        name,
        chooses.choice(list(REPLACEMENTS)),
        chooses.choice([(0,), (1,), (2,), (0, 1, 2)]),
        ("work", *chooses.sample(list(CALLS), 4), "work"),
    )


def interrupt(cluster: Cluster) -> None:
    """Interrupt a cell once it runs on some rank."""

    def begun() -> bool:
        states = cluster.status().values()
        return any(state is not None and state["what"] is not None for state in states)

    def run() -> None:
        with pytest.raises(NbdistError):
            cluster.execute(WAIT)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: begun() or not thread.is_alive(), 20)
    cluster.interrupt()
    thread.join()


def look(cluster: Cluster) -> None:
    """Look at the ranks' variables."""
    session = Session()
    session._cluster = cluster
    session.inspect_table("total")


CALLS: dict[str, Callable[[Cluster], Any]] = {
    "work": lambda cluster: cluster.execute(WORK),
    "error": lambda cluster: cluster.execute("1 / 0"),
    "interrupt": interrupt,
    "push": lambda cluster: cluster.push(pushed=[1, 2]),
    "pull": lambda cluster: cluster["total"],
    "run": lambda cluster: cluster.run(len, "four"),
    "status": lambda cluster: cluster.status(),
    "look": look,
    "death": lambda cluster: cluster.execute(DIE.format(cluster.infos[1].pid)),
}


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[Cluster]]:
    """The cluster of the draws in a list, which is empty before it is started."""
    found: list[Cluster] = []
    yield found
    for cluster in found:
        cluster.stop()


def ends(call: Callable[[], Any]) -> bool:
    """Whether a call ends in time, with a result or an error of nbdist's."""
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except NbdistError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised below
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    for error in outcome:
        raise error
    return not thread.is_alive()


def seeds() -> list[Any]:
    only = os.environ.get("NBDIST_CHAOS_SEED")
    if only:
        return [int(seed) for seed in only.split(",")]
    return [*OFTEN, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SOAK)]


@pytest.mark.timeout(9 * DEADLINE_S)
@pytest.mark.parametrize("seed", seeds())
def test_no_call_hangs(clusters: list[Cluster], seed: int) -> None:
    drawn = draw(seed)
    print(f"seed {seed}: {drawn}")
    cluster = clusters.pop() if clusters else Cluster(N, device="cpu").start()
    cluster.on_note = print
    change = CHANGE.format(
        module=drawn.module,
        name=drawn.name,
        ranks=drawn.ranks,
        replacement=REPLACEMENTS[drawn.replacement],
    )
    try:
        assert ends(lambda: cluster.execute(change)), "the change hangs"
        for name in drawn.calls:
            assert ends(lambda name=name: CALLS[name](cluster)), f"{name} hangs"
        cluster.restart()
        cluster.execute(WORK, timeout_s=DEADLINE_S)
        assert cluster["total"] == [15] * N
    except BaseException:
        cluster.stop()
        raise
    clusters.append(cluster)
