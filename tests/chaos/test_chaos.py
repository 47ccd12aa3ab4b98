"""After any fault on any process at any moment, the cluster ends in an expected state.

A draw that fails prints its seed. `NBDIST_CHAOS_SEED=1234 pytest tests/chaos` runs
only this draw. Several seeds are separated by commas.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
from _pytest.mark.structures import ParameterSet

from nbdist import NbdistError
from nbdist.ipc import flight_record
from tests.chaos import faults
from tests.chaos.draw import RANKS, Draw, draw, spread
from tests.chaos.expectations import (
    DEATHS,
    ENDED,
    HELPER,
    RENEWED,
    REPLACED,
    WHOLE,
    Expectation,
    expected,
)
from tests.chaos.moments import CALLS, NotebookCall
from tests.chaos.report import Report
from tests.chaos.reused_cluster import ReusedCluster
from tests.cluster_processes import census
from tests.processes import HANG_S, wait_until

OFTEN = spread(range(1000, 3000), 20)
"""The seeds of each run, which cover the processes, faults and moments."""
SOAK = range(300)
SAID_WITHIN_S = 3.0
"""Seconds that a helper stays stopped if no note is made. A note is due in 2 s."""
STOPPED_S = 1.0
"""Seconds that a rank, its parent or a worker stays stopped. No note is needed."""
LET_GO_S = 15.0
"""Seconds in which an interrupt must end an overdue call."""


def _params() -> list[ParameterSet]:
    only = os.environ.get("NBDIST_CHAOS_SEED")
    if only:
        return [_param(int(seed)) for seed in only.split(",")]
    soak = [_param(seed, pytest.mark.slow) for seed in SOAK]
    return [*(_param(seed) for seed in OFTEN), *soak]


def _param(seed: int, *marks: pytest.MarkDecorator) -> ParameterSet:
    return pytest.param(draw(seed), marks=marks, id=str(draw(seed)))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("drawn", _params())
def test_a_draw(reused: ReusedCluster, report: Report, drawn: Draw) -> None:
    if drawn.fault == "disk full" and reused.full is None:
        pytest.skip("a full disk needs a file system of its own, which root can mount")
    report.tried(drawn)
    print(f"run it alone: NBDIST_CHAOS_SEED={drawn.seed} pytest tests/chaos")
    _run_draw(reused, drawn, expected(drawn))
    report.held(drawn)


def _run_draw(reused: ReusedCluster, drawn: Draw, wanted: Expectation) -> None:
    if drawn.moment != "start":
        _prepare(reused, drawn)
    call = CALLS[drawn.moment](reused, drawn)
    call.prepare()
    reused.said.clear()
    reused.marks.arm()
    before = None if drawn.moment == "start" else Before(reused)
    injector = _Injector(reused, call)
    with injector:
        ended = attempt(lambda: _act(call), wanted.within_s)
    outcome = Outcome(drawn, injector, ended, reused.said)
    outcome.require(not injector.failed, "the fault could not be brought about")
    outcome.require(not ended.overdue, f"it had not ended after {wanted.within_s:g} s")
    if drawn.process in HELPER and drawn.fault in DEATHS and ended.error is None:
        # Calls that need only the ranks may end before the death is noticed.
        wait_until(lambda: _has_noticed(reused), HANG_S)
    after = outcome.after = attempt(lambda: _next_cell(reused), wanted.within_s)
    outcome.require(not after.overdue, "the next cell did not end")
    for pattern in wanted.says:
        outcome.require(
            bool(re.search(pattern, outcome.said)), f"not said: {pattern!r}"
        )
    if wanted.raises is not None:
        raised = ended.error is not None
        outcome.require(
            raised == wanted.raises, "raised" if raised else "did not raise"
        )
    if not reused.running:
        outcome.require(ENDED in wanted.ends, "the cluster has ended")
        reused.close()
        reused.assert_nothing_left()
        reused.ready()
        reused.assert_sums()
        return
    outcome.require(set(wanted.ends) != {ENDED}, "the cluster still runs")
    outcome.require(after.error is None, "the next cell does not work")
    new = set() if before is None else before.new_ranks(reused)
    ends = {WHOLE: set(), REPLACED: set(wanted.new), RENEWED: set(range(RANKS))}
    right = new in [ends[end] for end in wanted.ends if end in ends]
    outcome.require(right, f"the processes of ranks {sorted(new)} are new")
    _assert_right(reused, call, new, before)


def _prepare(reused: ReusedCluster, drawn: Draw) -> None:
    """Make sure that three ranks run, each with its variable."""
    reused.ready()
    reused.keep()
    if drawn.process == "worker":
        reused.cluster.execute("on_ranks.fetch()")
        reused.workers = dict(enumerate(reused.cluster["on_ranks.workers()"]))


def _act(call: NotebookCall) -> None:
    """Make the notebook's call, and a loop that shows a broken loader."""
    call.make()
    if call.draw.process == "worker":
        call.reused.cluster.execute("on_ranks.fetch(4)")


def _has_noticed(reused: ReusedCluster) -> bool:
    """Whether the notebook knows that a helper process has ended."""
    return not reused.running or reused.cluster._is_lost or bool(reused.said)


def _next_cell(reused: ReusedCluster) -> None:
    if reused.started:
        reused.cluster.execute("pass")
        reused.look_up()


def _assert_right(
    reused: ReusedCluster, call: NotebookCall, new: set[int], before: Before | None
) -> None:
    """Check that all ranks work and have their variables, and nothing is left over."""
    reused.assert_sums()
    if before is not None:
        reused.assert_kept(but=new)
    if not (call.draw.process == "worker" and call.draw.fault in DEATHS):
        call.check()  # a worker's death ends the call of its rank
    if reused.cluster.size != RANKS:
        reused.cluster.scale(RANKS, drop=True)
        reused.look_up()
    if call.draw.process == "worker":
        reused.cluster.execute("on_ranks.drop_loader()")
    elif before is not None:
        before.assert_nothing_more(reused)


class Before:
    """The processes and files at the beginning of a draw.

    Args:
        reused: the cluster of the draw.
    """

    def __init__(self, reused: ReusedCluster) -> None:
        self._pids = {rank: process.pid for rank, process in reused.ranks.items()}
        self._in_memory = without_records(reused.processes.in_memory())

    def new_ranks(self, reused: ReusedCluster) -> set[int]:
        """The ranks that are new processes now."""
        pids = self._pids
        return {rank for rank in pids if reused.ranks[rank].pid != pids[rank]}

    def assert_nothing_more(self, reused: ReusedCluster) -> None:
        """Check that no process and no file in shared memory is left over."""
        processes, whole = reused.processes, census(reused.infos)
        wait_until(lambda: processes.census() == whole, 10.0, processes.describe)
        found = processes.in_memory()
        assert without_records(found) <= {*self._in_memory, "commit"}
        # Those of the last dead ranks stay until the world changes again.
        assert len(found - without_records(found)) <= 3 * RANKS


def without_records(names: set[str]) -> set[str]:
    """The names of files that are no flight records."""
    return {name for name in names if not name.endswith(flight_record.SUFFIX)}


@dataclass
class Ended:
    """The end of a call of the notebook."""

    seconds: float
    error: BaseException | None = None
    overdue: str = ""
    """The stack of the call when its time was up; "" if it had ended."""

    @property
    def text(self) -> str:
        """The text that a user sees."""
        rendered = getattr(self.error, "rendered", ())
        return "\n".join(["" if self.error is None else str(self.error), *rendered])

    @property
    def description(self) -> str:
        """A description for the message of a failed test."""
        error = "no error" if self.error is None else repr(self.error)
        where = f", overdue at\n{self.overdue}" if self.overdue else ""
        return f"{self.seconds:.1f} s: {error}{where}"


def attempt(act: Callable[[], None], within_s: float) -> Ended:
    """Make a call, and interrupt it if it has not ended in time."""
    main = threading.get_ident()
    ended = Ended(0.0)
    over = threading.Event()

    def watch() -> None:
        wait_s = within_s
        while not over.wait(wait_s):
            frame = sys._current_frames()[main]
            ended.overdue += "".join(traceback.format_stack(frame)[-8:])
            os.kill(os.getpid(), signal.SIGINT)
            wait_s = LET_GO_S

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.monotonic()
    try:
        act()
    except (NbdistError, KeyboardInterrupt) as error:
        ended.error = error
    finally:
        ended.seconds = time.monotonic() - begun
        over.set()
        watcher.join()
    return ended


@dataclass
class Outcome:
    """The outcome of a draw, in words for the message of a failed test."""

    drawn: Draw
    injector: _Injector
    ended: Ended
    notes: list[str]
    after: Ended | None = None

    @property
    def said(self) -> str:
        """The text that a user has seen."""
        after = "" if self.after is None else self.after.text
        return "\n".join([self.ended.text, after, *self.notes])

    def require(self, condition: bool, what: str) -> None:
        """Fail the test with a description unless the condition holds."""
        if condition:
            return
        lines = [
            f"{self.drawn}: {what}",
            f"the fault: {self.injector.description}",
            f"it ended after {self.ended.description}",
            ""
            if self.after is None
            else f"the next cell after {self.after.description}",
            f"notes: {self.notes}",
        ]
        text = "\n".join(filter(None, lines))
        print(text)
        pytest.fail(text, pytrace=False)


class _Injector:
    """Waits on another thread until a call is in its middle, and injects the fault."""

    def __init__(self, reused: ReusedCluster, call: NotebookCall) -> None:
        self._reused, self._call = reused, call
        self._thread = threading.Thread(target=self._run)
        self.failed = False
        self.description = "not injected"

    def __enter__(self) -> _Injector:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join()
        if self._reused.full is not None:
            self._reused.full.free()

    def _run(self) -> None:
        drawn = self._call.draw
        try:
            self._call.wait()
            targets = self._call.targets()
            assert targets or drawn.process == "folder", "there is no such process"
            self.description = f"{[process.pid for process in targets]}"
            with self._injecting() as on_injected:
                self._inject(targets, on_injected)
        except Exception:  # noqa: BLE001 - the main thread says it
            self.failed = True
            self.description += f", then {traceback.format_exc()}"
            self._report_injected()

    @contextlib.contextmanager
    def _injecting(self) -> Iterator[Callable[[], None]]:
        yield self._report_injected
        self._report_injected()

    def _report_injected(self) -> None:
        self._call.injected.set()
        self._reused.marks.let_go()

    def _inject(
        self, targets: list[psutil.Process], on_injected: Callable[[], None]
    ) -> None:
        reused, drawn = self._reused, self._call.draw
        if drawn.fault == "SIGKILL":
            faults.kill(targets)
        elif drawn.fault == "SIGSTOP":
            helper = not drawn.victims
            faults.stop_and_continue(
                targets,
                on_injected,
                lambda: helper and (reused.said_stopped() or not reused.running),
                SAID_WITHIN_S if helper else STOPPED_S,
            )
        elif drawn.fault == "disk full":
            assert reused.full is not None
            reused.full.fill()
        elif drawn.fault == "wrong message":
            uuids = [info.engine_uuid for info in reused.infos]
            faults.send_wrong(reused.processes.run_dir, drawn.port, uuids)
        else:
            faults.exit_code(targets, reused.folder, int(drawn.fault.split()[-1]))
