"""Sessions of the debugger on ranks, drawn at random."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nbdist import CellError, Cluster
from tests.processes import wait_until
from tests.scripted_user import Answer, Scripted, end_of_input, press
from tests.seed import SEED

__all__ = ["Sessions", "debug_at_random", "killing"]


def killing(cluster: Cluster, reader: Scripted) -> Callable[[], str]:
    """An answer that kills the rank that asks."""

    def kill() -> str:
        found = re.match(r"\[(\d)\]", reader.prompts[-1])
        assert found is not None
        os.kill(cluster.ranks[int(found[1])].pid, signal.SIGKILL)
        time.sleep(60)
        return ""

    return kill


ASKS = {
    "top": "breakpoint()",
    "function": "def f(x):\n    y = x\n    breakpoint()\n    return y\nf(rank)",
    "loop": "for i in range(2):\n    breakpoint()\n    x = i",
    "caught": "try:\n    breakpoint()\nexcept Exception:\n    pass",
    "input": "input()",
    "module": "import pdb; pdb.set_trace()",
}
FAILS = "def g(x):\n    y = x\n    return 1 / (y - y)\ng(rank)"
POST_MORTEM = "post-mortem"
STEPS = ["n", "s", "p rank", "ranks all p 1", "ranks all n", "c", "up", "bad"]
LOOKS = ["p rank", "up", "down", "w", "l", "p y", "bad"]


@dataclass
class Sessions:
    """What `debug_at_random` has seen."""

    kinds: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    quit_s: list[float] = field(default_factory=list)
    """Seconds from each "quit" in a running cell until the cell has ended."""

    def __str__(self) -> str:
        quits = sorted(self.quit_s)
        seconds = f"{len(quits)} quits"
        if quits:
            median = statistics.median(quits)
            seconds += f", median {median:.3f} s, slowest {quits[-1]:.3f} s"
        return f"{dict(self.kinds)}; ended by {dict(self.ends)}; {seconds}"


def debug_at_random(cluster: Cluster, reader: Scripted, count: int) -> Sessions:
    """Stop ranks of three, and go on, quit, interrupt or kill; none may stay waiting.

    Args:
        cluster: Whose reader is `reader`.
        count: The number of sessions.
    """
    draw = random.Random(SEED)
    sessions = Sessions()
    quit_at: list[float] = []

    def quit_() -> str:
        quit_at.append(time.monotonic())
        return "q"

    ends: dict[str, Answer] = {
        "continue": "c",
        "continue all": "ranks all c",
        "quit": quit_,
        "interrupt": press,
        "end of input": end_of_input,
    }
    for number in range(count):
        kind = draw.choice([*ASKS, POST_MORTEM])
        stopped = draw.sample(range(3), draw.randint(1, 3))
        choices = LOOKS if kind == POST_MORTEM else STEPS
        steps: list[Answer] = draw.choices(choices, k=draw.randint(0, 6))
        end = draw.choice([*ends]) if draw.random() >= 0.1 else "kill"
        last = killing(cluster, reader) if end == "kill" else ends[end]
        print(number, kind, stopped, steps, end, flush=True)
        quit_at.clear()
        said = ""
        try:
            if kind == POST_MORTEM:
                with pytest.raises(CellError, match="ZeroDivisionError"):
                    cluster.execute(_where(stopped, FAILS))
                reader.give(*steps, last, *["c"] * 20)
                cluster.debug(stopped[0])
            else:
                # A session that goes on, such as after another's death, continues.
                reader.give(*steps, last, *["c"] * 20)
                cluster.execute(_where(stopped, ASKS[kind]))
        except (CellError, KeyboardInterrupt) as error:
            said = str(error)
        ended = time.monotonic()
        assert "did not react" not in said, number
        if "the debugger was quit" in said and quit_at:
            sessions.quit_s.append(ended - quit_at[-1])
        sessions.kinds[kind] += 1
        sessions.ends[end] += 1
        wait_until(lambda: is_idle(cluster))
        result = cluster.execute("nbdist.barrier()\nprint(rank)")
        assert [each.stdout for each in result] == ["0\n", "1\n", "2\n"], number
    return sessions


def _where(ranks: list[int], code: str) -> str:
    """A cell that runs a code on some ranks, for which the others wait."""
    indented = code.replace("\n", "\n    ")
    return f"if rank in {ranks}:\n    {indented}\nnbdist.barrier()"


def is_idle(cluster: Cluster) -> bool:
    return all(state and state["what"] is None for state in cluster.status().values())
