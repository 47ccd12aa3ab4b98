"""Draws of a fault, its victims and its moment: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["CHANGES", "FAULTS", "MOMENTS", "RANKS", "STAGES", "Draw", "draw", "spread"]

RANKS = 3

FAULTS = {
    "rank": ("SIGKILL", "SIGSTOP", "exit code 7"),
    "rank parent": ("SIGKILL", "SIGSTOP"),
    "controller": ("SIGKILL", "SIGSTOP", "wrong message"),
    "mpiexec": ("SIGKILL", "SIGSTOP"),
    "process supervisor": ("SIGKILL", "SIGSTOP"),
    "worker": ("SIGKILL", "SIGSTOP", "exit code 7"),
    "folder": ("disk full",),
}
"""The faults of each kind of process; "folder" is the folder of the cluster's files."""

WEIGHTS = {"rank": 3, "rank parent": 2}
"""The weight with which each kind of process is drawn; 1 for the others."""

MOMENTS = (
    "start",
    "idle",
    "cell",
    "collective",
    "push",
    "pull",
    "scale",
    "restart",
    "commit",
    "save",
    "recovery",
)
CHANGES = ("scale", "restart", "recovery")
"""The moments at which a new rank starts."""

STAGES = (
    "starting Python",
    "loading torch",
    "joining MPI",
    "starting torch.distributed",
    "registering",
    "setup cell",
)
"""The stages of a rank's start. A rank of the first start runs no setup cell."""

PORTS = ("registration", "iopub of the ranks", "hb_pong", "mux", "control")
"""The controller's ports, by the beginning of their names in `tests.security`."""

SEVERAL = ("rank", "rank parent", "worker")


@dataclass(frozen=True)
class Draw:
    """One fault, on one or several processes of one kind, at one moment."""

    seed: int
    process: str
    """A key of FAULTS."""
    fault: str
    moment: str
    count: str
    """"one", "two" or "all" processes; "one" if a cluster has only one of this kind."""
    victims: tuple[int, ...]
    """The ranks that get the fault, or whose parent or worker gets it; else empty."""
    first: int
    """In a change of the members, the rank that starts."""
    stage: str
    """The stage of that rank; at a start, the stage of the victims. Else empty."""
    port: str
    """The controller's port to which a wrong message is sent."""

    def __str__(self) -> str:
        whose = ",".join(map(str, self.victims))
        who = f"{self.process} {whose}".rstrip()
        when = f"{self.moment} ({self.stage})" if self.stage else self.moment
        return f"{self.seed}: {who}, {self.fault}, {when}".replace("/", " ")


def possible(process: str, fault: str, moment: str) -> bool:
    """Whether the process exists at this moment, and the fault can be injected."""
    if moment != "start":
        return True
    # A loader starts in a cell, and so does the thread that receives an exit code.
    return process != "worker" and not fault.startswith("exit")


def draw(seed: int) -> Draw:
    """The draw of a seed: the process by WEIGHTS, fault and moment uniformly."""
    chance = random.Random(seed)
    (process,) = chance.choices(list(FAULTS), [WEIGHTS.get(p, 1) for p in FAULTS])
    fault = chance.choice(FAULTS[process])
    moments = [moment for moment in MOMENTS if possible(process, fault, moment)]
    moment = chance.choice(moments)
    first = RANKS if moment == "scale" else chance.randrange(RANKS)
    count = chance.choice(["one", "two", "all"]) if process in SEVERAL else "one"
    return Draw(
        seed=seed,
        process=process,
        fault=fault,
        moment=moment,
        count=count,
        victims=_victims(chance, process, moment, first, count),
        first=first,
        stage=_stage(chance, fault, moment),
        port=chance.choice(PORTS),
    )


def _victims(
    chance: random.Random, process: str, moment: str, first: int, count: str
) -> tuple[int, ...]:
    if process not in SEVERAL:
        return ()
    ranks = list(range(RANKS + 1 if moment == "scale" else RANKS))
    if process == "worker" and moment in CHANGES:
        ranks.remove(first)  # it has no loader yet
    wanted = {"one": 1, "two": 2, "all": len(ranks)}[count]
    return tuple(sorted(chance.sample(ranks, wanted)))


def _stage(chance: random.Random, fault: str, moment: str) -> str:
    if moment in CHANGES:
        # Before its setup cell, no thread of a new rank receives an exit code.
        return "setup cell" if fault.startswith("exit") else chance.choice(STAGES)
    return chance.choice(STAGES[:-1]) if moment == "start" else ""


def spread(seeds: Iterable[int], count: int) -> list[int]:
    """Choose `count` seeds that together cover as many cases as possible.

    Each next seed adds the most new cases: first pairs of process and fault, then these
    with a moment, then the number of processes.
    """
    left = {seed: set(_covers(draw(seed))) for seed in seeds}
    covered: set[tuple[int, str, str]] = set()
    chosen: list[int] = []
    while left and len(chosen) < count:
        best = max(left, key=lambda s: (_worth(left[s] - covered), -s))
        covered |= left.pop(best)
        chosen.append(best)
    return sorted(chosen)


def _covers(draw: Draw) -> Iterator[tuple[int, str, str]]:
    """The cases that a draw covers, each with its importance."""
    yield 100, draw.process, draw.fault
    yield 100, "moment", draw.moment
    yield 10, draw.process, draw.moment
    yield 5, draw.fault, draw.moment
    yield 5, draw.process, draw.count


def _worth(parts: set[tuple[int, str, str]]) -> int:
    return sum(part[0] for part in parts)
