"""Random faults for two Unix users at the same time, each with a cluster of its own."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.draw import draw, spread
from tests.security import other_user

ROOT = Path(__file__).parents[2]
OFTEN, SOAK = 3, 40
"""Draws of each user, in each run and in a soak."""
LIMIT_S = 120.0
"""Seconds for the first draw. Each further one has `DRAW_S` more."""
DRAW_S = 40.0
ENDING_S = 20.0
RUN = """
import os, sys
seeds, temporary, root = sys.argv[1:]
os.environ.update(NBDIST_CHAOS_SEED=seeds, TMPDIR=temporary)
os.chdir(root)
import pytest
# A short path: otherwise multiprocessing's sockets are not in the run folder.
options = ["-q", "-p", "no:cacheprovider", "--basetemp", temporary + "/t"]
sys.exit(pytest.main([*options, "tests/chaos/test_chaos.py"]))
"""


def _seeds(count: int) -> list[int]:
    # Only root can fill a disk.
    possible = (each for each in range(5000, 6000) if draw(each).fault != "disk full")
    return spread(possible, count)


def _run(user: int, home: Path, seeds: list[int]) -> tuple[int, str]:
    """Run some draws as a user. Returns the exit code of pytest, and its output."""
    names = ",".join(map(str, seeds))
    arguments = ["-c", RUN, names, str(home), str(ROOT)]
    with other_user.start(user, home, arguments) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S + DRAW_S * len(seeds))
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=ENDING_S)
            output += "\nended by its time limit"
    return process.returncode, f"draws {names} of user {user}:\n{output}"


@pytest.mark.timeout(LIMIT_S + DRAW_S * SOAK + 2 * ENDING_S)
@pytest.mark.parametrize("count", [OFTEN, pytest.param(SOAK, marks=pytest.mark.slow)])
def test_two_users_have_faults_at_the_same_time(count: int) -> None:
    if why := other_user.why_not():
        pytest.skip(why)
    seeds = _seeds(2 * count)
    print(f"seeds {seeds}")
    users = (other_user.OWNER, seeds[::2]), (other_user.STRANGER, seeds[1::2])
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(users)))
        runs = [
            pool.submit(_run, user, stack.enter_context(other_user.home_of(user)), mine)
            for user, mine in users
        ]
        results = [run.result() for run in runs]
    for code, output in results:
        assert code == 0, output
        assert f"{count} passed" in output, output
