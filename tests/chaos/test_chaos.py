"""After any fault on any process at any moment, the cluster ends in an expected state.

A draw that fails prints its seed. `NBDIST_CHAOS_SEED=1234 pytest tests/chaos` plays
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
from tests.chaos.moments import SCENES, Scene
from tests.chaos.report import Report
from tests.chaos.stage import Stage
from tests.cluster_processes import census
from tests.processes import wait_until

OFTEN = spread(range(1000, 3000), 20)
"""The seeds of each run, which cover the processes, faults and moments."""
SOAK = range(300)
NOTICED_WITHIN_S = 10.0
"""Seconds in which the notebook notices that a helper process has ended."""
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
def test_a_draw(stage: Stage, report: Report, drawn: Draw) -> None:
    if drawn.fault == "disk full" and stage.full is None:
        pytest.skip("a full disk needs a file system of its own, which root can mount")
    report.tried(drawn)
    print(f"run it alone: NBDIST_CHAOS_SEED={drawn.seed} pytest tests/chaos")
    _play(stage, drawn, expected(drawn))
    report.held(drawn)


def _play(stage: Stage, drawn: Draw, wanted: Expectation) -> None:
    if drawn.moment != "start":
        _prepare(stage, drawn)
    scene = SCENES[drawn.moment](stage, drawn)
    scene.prepare()
    stage.said.clear()
    stage.marks.arm()
    before = None if drawn.moment == "start" else Before(stage)
    striker = _Striker(stage, scene)
    with striker:
        ended = attempt(lambda: _act(scene), wanted.within_s)
    story = Story(drawn, striker, ended, stage.said)
    story.require(not striker.failed, "the fault could not be brought about")
    story.require(not ended.overdue, f"it had not ended after {wanted.within_s:g} s")
    if drawn.process in HELPER and drawn.fault in DEATHS and ended.error is None:
        # Calls that need only the ranks may end before the death is noticed.
        wait_until(lambda: _has_noticed(stage), NOTICED_WITHIN_S)
    after = story.after = attempt(lambda: _next_cell(stage), wanted.within_s)
    story.require(not after.overdue, "the next cell did not end")
    for pattern in wanted.says:
        story.require(bool(re.search(pattern, story.said)), f"not said: {pattern!r}")
    if wanted.raises is not None:
        raised = ended.error is not None
        story.require(raised == wanted.raises, "raised" if raised else "did not raise")
    if not stage.running:
        story.require(ENDED in wanted.ends, "the cluster has ended")
        stage.close()
        stage.assert_nothing_left()
        stage.ready()
        stage.assert_sums()
        return
    story.require(set(wanted.ends) != {ENDED}, "the cluster still runs")
    story.require(after.error is None, "the next cell does not work")
    new = set() if before is None else before.new_ranks(stage)
    ends = {WHOLE: set(), REPLACED: set(wanted.new), RENEWED: set(range(RANKS))}
    right = new in [ends[end] for end in wanted.ends if end in ends]
    story.require(right, f"the processes of ranks {sorted(new)} are new")
    _assert_right(stage, scene, new, before)


def _prepare(stage: Stage, drawn: Draw) -> None:
    """Make sure that three ranks run, each with its variable."""
    stage.ready()
    stage.keep()
    if drawn.process == "worker":
        stage.cluster.execute("on_ranks.fetch()")
        stage.workers = dict(enumerate(stage.cluster["on_ranks.workers()"]))


def _act(scene: Scene) -> None:
    """Make the notebook's call, and a loop that shows a broken loader."""
    scene.act()
    if scene.draw.process == "worker":
        scene.stage.cluster.execute("on_ranks.fetch(4)")


def _has_noticed(stage: Stage) -> bool:
    """Whether the notebook knows that a helper process has ended."""
    return not stage.running or stage.cluster._is_lost or bool(stage.said)


def _next_cell(stage: Stage) -> None:
    if stage.started:
        stage.cluster.execute("pass")
        stage.look_up()


def _assert_right(
    stage: Stage, scene: Scene, new: set[int], before: Before | None
) -> None:
    """Check that all ranks work and have their variables, and nothing is left over."""
    stage.assert_sums()
    if before is not None:
        stage.assert_kept(but=new)
    if not (scene.draw.process == "worker" and scene.draw.fault in DEATHS):
        scene.check()  # a worker's death ends the call of its rank
    if stage.cluster.size != RANKS:
        stage.cluster.scale(RANKS, drop=True)
        stage.look_up()
    if scene.draw.process == "worker":
        stage.cluster.execute("on_ranks.drop_loader()")
    elif before is not None:
        before.assert_nothing_more(stage)


class Before:
    """The processes and files at the beginning of a draw.

    Args:
        stage: the stage of the draw.
    """

    def __init__(self, stage: Stage) -> None:
        self._pids = {rank: process.pid for rank, process in stage.ranks.items()}
        self._in_memory = stage.processes.in_memory()

    def new_ranks(self, stage: Stage) -> set[int]:
        """The ranks that are new processes now."""
        pids = self._pids
        return {rank for rank in pids if stage.ranks[rank].pid != pids[rank]}

    def assert_nothing_more(self, stage: Stage) -> None:
        """Check that no process and no file in shared memory is left over."""
        processes, whole = stage.processes, census(stage.infos)
        wait_until(lambda: processes.census() == whole, 10.0, processes.describe)
        assert processes.in_memory() <= {*self._in_memory, "commit"}


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
    def story(self) -> str:
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
class Story:
    """A description of a draw, for the message of a failed test."""

    drawn: Draw
    striker: _Striker
    ended: Ended
    notes: list[str]
    after: Ended | None = None

    @property
    def said(self) -> str:
        """The text that a user has seen."""
        after = "" if self.after is None else self.after.text
        return "\n".join([self.ended.text, after, *self.notes])

    def require(self, condition: bool, what: str) -> None:
        """Fail the test with the story unless the condition holds."""
        if condition:
            return
        lines = [
            f"{self.drawn}: {what}",
            f"struck: {self.striker.story}",
            f"it ended after {self.ended.story}",
            "" if self.after is None else f"the next cell after {self.after.story}",
            f"notes: {self.notes}",
        ]
        story = "\n".join(filter(None, lines))
        print(story)
        pytest.fail(story, pytrace=False)


class _Striker:
    """Waits on another thread until a scene is in its middle, and injects the fault."""

    def __init__(self, stage: Stage, scene: Scene) -> None:
        self._stage, self._scene = stage, scene
        self._thread = threading.Thread(target=self._run)
        self.failed = False
        self.story = "nothing yet"

    def __enter__(self) -> _Striker:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join()
        if self._stage.full is not None:
            self._stage.full.lift()

    def _run(self) -> None:
        drawn = self._scene.draw
        try:
            self._scene.wait()
            targets = self._scene.targets()
            assert targets or drawn.process == "folder", "there is no such process"
            self.story = f"{[process.pid for process in targets]}"
            with self._letting_go() as struck:
                self._strike(targets, struck)
        except Exception:  # noqa: BLE001 - the main thread says it
            self.failed = True
            self.story += f", then {traceback.format_exc()}"
            self._struck()

    @contextlib.contextmanager
    def _letting_go(self) -> Iterator[Callable[[], None]]:
        yield self._struck
        self._struck()

    def _struck(self) -> None:
        self._scene.struck.set()
        self._stage.marks.let_go()

    def _strike(
        self, targets: list[psutil.Process], struck: Callable[[], None]
    ) -> None:
        stage, drawn = self._stage, self._scene.draw
        if drawn.fault == "SIGKILL":
            faults.kill(targets)
        elif drawn.fault == "SIGSTOP":
            helper = not drawn.victims
            faults.stop_and_continue(
                targets,
                struck,
                lambda: helper and (stage.said_stopped() or not stage.running),
                SAID_WITHIN_S if helper else STOPPED_S,
            )
        elif drawn.fault == "disk full":
            assert stage.full is not None
            stage.full.strike()
        elif drawn.fault == "wrong message":
            uuids = [info.engine_uuid for info in stage.infos]
            faults.send_wrong(stage.processes.run_dir, drawn.port, uuids)
        else:
            faults.exit_code(targets, stage.folder, int(drawn.fault.split()[-1]))
