"""Sessions of the debugger on ranks, drawn at random."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable

from nbdist import CellError, Cluster
from tests.processes import wait_until
from tests.scripted_user import Answer, Scripted, end_of_input, press

__all__ = ["debug_at_random", "killing"]


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


def debug_at_random(cluster: Cluster, reader: Scripted, count: int) -> None:
    """Stop ranks of three, and go on, quit, interrupt or kill; none may stay waiting.

    Args:
        cluster: Whose reader is `reader`.
        count: The number of sessions.
    """
    seed = int(
        os.environ.get("NBDIST_TEST_SEED") or random.SystemRandom().getrandbits(32)
    )
    print(f"NBDIST_TEST_SEED={seed}")
    draw = random.Random(seed)
    for number in range(count):
        kind, ask = draw.choice([*ASKS.items()])
        stopped = draw.sample(range(3), draw.randint(1, 3))
        indented = ask.replace("\n", "\n    ")
        code = f"if rank in {stopped}:\n    {indented}\nnbdist.barrier()"
        steps: list[Answer] = draw.choices(
            ["n", "s", "p rank", "ranks all p 1", "ranks all n", "c", "up", "bad"],
            k=draw.randint(0, 6),
        )
        ends: list[Answer] = ["c", "ranks all c", "q", press, end_of_input]
        if draw.random() < 0.1:
            ends = [killing(cluster, reader)]
        answers = [*steps, draw.choice(ends)]
        # A session that goes on, such as after another rank's death, continues.
        reader.give(*answers, *["c"] * 20)
        begun = time.monotonic()
        print(number, kind, stopped, answers, flush=True)
        said = ""
        try:
            cluster.execute(code)
        except (CellError, KeyboardInterrupt) as error:
            said = str(error)
        assert "did not react" not in said, (seed, number)
        assert time.monotonic() - begun < 60, (seed, number)
        wait_until(lambda: is_idle(cluster), 10)
        result = cluster.execute("nbdist.barrier()\nprint(rank)")
        assert [each.stdout for each in result] == ["0\n", "1\n", "2\n"], (seed, number)


def is_idle(cluster: Cluster) -> bool:
    return all(state and state["what"] is None for state in cluster.status().values())
