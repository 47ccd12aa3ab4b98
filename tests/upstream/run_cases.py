"""Runs the cases of one file of PyTorch's or Horovod's tests, each by itself.

    python tests/upstream/run_cases.py pytorch FILE [--backend gloo] [--only REGEX]
    python tests/upstream/run_cases.py horovod FILE -n 4 [--only REGEX]

Prints a line of JSON for each case, an `Outcome` with the case's name. A case runs in
forked processes, which are killed at its deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from case_file import FAILED, Outcome, cases_of, load, run  # noqa: E402
from forked import Ended, Forked, first_ended  # noqa: E402

GRACE_S = 10.0
Function = Callable[[], Outcome]


@dataclass(frozen=True)
class Case:
    """One case, and what became of it."""

    name: str
    kind: str
    reason: str
    uses_nbdist: bool
    """Whether the case made a process group of nbdist's."""
    seconds: float


def main() -> None:
    options = _options()
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(options.deadline))
    with contextlib.redirect_stdout(io.StringIO()):  # files print when imported
        functions = dict(_functions(options))
    chosen = {name: f for name, f in functions.items() if options.only.search(name)}
    for case in run_all(chosen, options.deadline + GRACE_S, options.jobs):
        print(json.dumps(asdict(case)), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=["pytorch", "horovod"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend", default="nbdist", help="pytorch: nbdist or gloo")
    parser.add_argument("-n", type=int, default=2, help="horovod: the number of ranks")
    parser.add_argument("--only", type=re.compile, default=re.compile(""))
    parser.add_argument("--deadline", type=float, default=60, help="seconds per case")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    return parser.parse_args()


@contextlib.contextmanager
def _torchruns_variables() -> Iterator[None]:
    """Import nbdist in this block, so that it leaves MPI to the forked ranks."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(dict.fromkeys(names, "0"))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def _functions(options: argparse.Namespace) -> Iterator[tuple[str, Function]]:
    if options.suite == "pytorch":
        with _torchruns_variables():
            import torch_backends

        torch_backends.fork_ranks()
        if options.backend == "nbdist":
            torch_backends.replace_gloo()
        run_one = run
    else:
        with _torchruns_variables():
            import horovod_names

            horovod_names.install()
        run_one = functools.partial(horovod_names.run, n=options.n)
    module = load(options.file)
    for name, kind in cases_of(module).items():
        case = functools.partial(kind, name.partition(".")[2])
        yield name, functools.partial(_run_new, run_one, case)


def _run_new(run_one: Callable[..., Outcome], case: Callable[[], object]) -> Outcome:
    return run_one(case())


def run_all(
    functions: dict[str, Function], deadline_s: float, jobs: int
) -> Iterator[Case]:
    """Run each function in a process of its own, some at the same time."""
    waiting = list(functions.items())
    running: dict[Forked, tuple[str, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, function = waiting.pop(0)
            running[Forked(function)] = name, time.monotonic()
        oldest = min(start for _, start in running.values())
        left_s = oldest + deadline_s - time.monotonic()
        first = first_ended(list(running), max(0.0, left_s))
        process = first or next(p for p in running if running[p][1] == oldest)
        name, start = running.pop(process)
        used, ended = process.used(), process.wait(0)
        yield _case(name, ended, used, time.monotonic() - start)


def _case(name: str, ended: Ended, uses_nbdist: bool, seconds: float) -> Case:
    outcome = ended.value or Outcome(FAILED, str(ended.failure))
    reason = outcome.reason
    if outcome.kind == FAILED:
        reason = f"{reason}\n{ended.text}"
    return Case(name, outcome.kind, reason, uses_nbdist, round(seconds, 1))


if __name__ == "__main__":
    main()
