"""Runs the tests marked `gpu` on 1, 2 and 4 simulated GPUs, for several seeds.

A test runs on the fewest GPUs on which it is not skipped, and on each number of GPUs of
its marker `gpus`. The run fails if it was skipped on one of these. The seeds after the
first run the tests marked `streams`, whose results depend on the order of the streams.
Two seeds run at the same time. `make simgpu` calls this file; its output says how to
repeat a run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
RUN = Path(__file__).with_name("run.sh")
MARKED = "gpu and not gpu_real and not slow"
LONG = "gpu and not gpu_real and slow"
ORDERED = f"{MARKED} and streams"
LATE = "ended by its time limit"
FEWEST_S = 60.0
"""A run with less time left is not begun."""
ENDING_S = 30.0
"""How long pytest has for its report, when its time is over."""


@dataclass(frozen=True)
class Outcome:
    """What one run of pytest has found."""

    passed: Sequence[str]
    """The tests that passed, as `file::name`."""
    failed: Sequence[str]
    """The tests that failed."""
    skipped: Sequence[str]
    """The tests that were skipped."""
    marked: Mapping[str, set[int]]
    """The numbers of GPUs of the tests that have the marker `gpus`."""
    ending: str
    """Why the run is not whole, in words; "" if it is."""

    @property
    def is_good(self) -> bool:
        """Whether no test has failed, and pytest has run."""
        return not self.failed and self.ending in ("", LATE)


def gpu_files() -> list[str]:
    """The files that have tests marked `gpu`. A collection of all files is slow."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text()
    ]


def run(
    out: Path,
    cards: int,
    seed: int,
    tests: Sequence[str],
    left_s: float,
    marked: str = MARKED,
) -> Outcome:
    """Run tests on a number of simulated GPUs, and print pytest's output at the end.

    Args:
        out: The folder of build.sh.
        cards: Number of GPUs.
        seed: The seed of the streams' order.
        tests: Files, folders, or tests as `file::name`.
        left_s: The longest time that the run may take.
        marked: The markers of the tests, as pytest takes them.
    """
    environment = {
        "SIMGPU_SMALL": "1",
        "NBDIST_FORK_LAUNCHES": "1",
        **os.environ,
        "SIMGPU_COUNT": str(cards),
        "SIMGPU_SEED": str(seed),
        "SIMGPU_STATE": str(out.resolve() / f"ledger-{cards}-{seed}"),
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", marked, "--durations=25"]
        command = [str(RUN), str(out), *pytest, f"--junitxml={report}", *tests]
        name = f"SIMGPU_COUNT={cards} SIMGPU_SEED={seed}"
        print(f"-- {name} begins", flush=True)
        log = Path(folder) / "output"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output
            )
        ending = _ending(process, left_s)
        text = log.read_text(encoding="utf-8", errors="replace")
        print(f"-- {name}\n{text}", flush=True)
        return _read(report, ending)


def _ending(process: subprocess.Popen[bytes], left_s: float) -> str:
    """Wait for pytest. Returns why its run is not whole; "" if it is."""
    try:
        code = process.wait(left_s)
        return "" if code in (0, 1, 5) else f"pytest ended with {code}"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest writes its report
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return LATE


def _read(report: Path, ending: str) -> Outcome:
    passed, failed, skipped, marked = [], [], [], {}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            module, name = case.get("classname", ""), case.get("name", "")
            if module:
                name = f"{module.replace('.', '/')}.py::{name}"
            else:  # a whole file was skipped
                name = name.replace(".", "/") + ".py"
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif case.find("skipped") is not None:
                skipped.append(name)
            else:
                passed.append(name)
            if (on := case.find("properties/property[@name='gpus']")) is not None:
                marked[name] = set(map(int, on.get("value", "").split()))
    return Outcome(passed, failed, skipped, marked, ending)


def run_seed(
    seed: int,
    out: Path,
    all_cards: Sequence[int],
    tests: Sequence[str],
    end: float,
    marked: str,
) -> tuple[list[str], bool]:
    """Run tests with one seed. Returns the results in lines, and whether all are good.

    Args:
        seed, out: As for `run`.
        all_cards: Numbers of GPUs. A test that is skipped on one runs on the next.
        tests: As for `run`.
        end: When the runs must end, by the monotonic clock.
        marked: The markers of the tests, as pytest takes them.
    """
    lines, is_good, numbers = [], True, {}
    ran: set[tuple[str, int]] = set()
    for cards in all_cards:
        tests = [*tests, *(each for each, on in numbers.items() if cards in on)]
        tests = list(dict.fromkeys(tests))
        left_s = end - time.monotonic()
        if left_s < FEWEST_S:
            return [*lines, f"no time for {cards} GPUs"], is_good
        if not tests:
            continue
        begun = time.monotonic()
        found = run(out, cards, seed, tests, left_s, marked)
        minutes = (time.monotonic() - begun) / 60
        ending = found.ending and f", {found.ending}"
        lines.append(
            f"{cards} GPUs, seed {seed}: {len(found.passed)} passed, "
            f"{len(found.failed)} failed, {len(found.skipped)} skipped in "
            f"{minutes:.1f} minutes{ending}"
        )
        lines += [f"    {name}" for name in found.failed]
        is_good &= found.is_good
        tests = found.skipped
        numbers |= found.marked
        ran |= {(each, cards) for each in (*found.passed, *found.failed)}
        if found.ending:
            return lines, is_good
    never = [
        f"    {name} has not run on {cards} GPUs"
        for name, on in numbers.items()
        for cards in sorted(on.intersection(all_cards))
        if (name, cards) not in ran
    ]
    return lines + never, is_good and not never


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder of build.sh")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=2, help="seeds at the same time")
    parser.add_argument("--slow", action="store_true", help="the long tests alone")
    parser.add_argument("tests", nargs="*", default=gpu_files())
    given = parser.parse_intermixed_args()
    end = time.monotonic() + 60 * given.minutes
    begun = time.monotonic()

    def run_one(seed: int) -> tuple[list[str], bool]:
        marked = LONG if given.slow else MARKED
        if not given.slow and seed != given.seeds[0]:
            marked = ORDERED
        return run_seed(seed, given.out, given.cards, given.tests, end, marked)

    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(run_one, given.seeds))
    for lines, _ in results:
        print(*lines, sep="\n")
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    return 0 if all(is_good for _, is_good in results) else 1


if __name__ == "__main__":
    sys.exit(main())
