"""Bringing a cluster up: everything at once, with one deadline and one clean-up."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.cluster.launchers.base import Launcher
from nbdist.cluster.placement import Place
from nbdist.cluster.startup_status import Arrival, End, tail_of
from nbdist.cluster.supervisor_client import Keeper
from nbdist.errors import StartError
from nbdist.ipc import endpoints, private_files, rank_parent
from nbdist.ipc.loopback import confine
from nbdist.ipc.process_files import describe_exit
from nbdist.wire import RankInfo

if TYPE_CHECKING:
    from nbdist.cluster.ipp_client import Link

__all__ = ["Progress", "Started", "start", "write_places"]

POLL_S = 0.02


@dataclass(frozen=True)
class Progress:
    """How far a start is."""

    controller: bool
    stages: Mapping[int, str]
    """What each rank is doing, for those that have begun."""
    ready: int
    places: Sequence[Place]


@dataclass(frozen=True)
class Started:
    """What a finished start leaves behind."""

    keeper: Keeper
    link: Link
    infos: list[RankInfo]


def start(
    launcher: Launcher,
    places: Sequence[Place],
    timeout_s: float,
    on_telemetry: Callable[[Any], None],
    on_progress: Callable[[Progress], None],
) -> Started:
    """Start the controller and every rank, and wait until each of them answers.

    Raises:
        StartError: A rank failed, or was not up in time; nothing is left running.
    """
    try:
        run_dir = private_files.make_run_folder()
    except OSError as error:
        raise StartError(str(error)) from error
    keeper = Keeper(run_dir)
    try:
        private_files.make_memory_folder(run_dir)
        startup = _Start(keeper, places, time.monotonic() + timeout_s, on_progress)
        startup.begin(launcher)
        return startup.finish(on_telemetry, timeout_s)
    except BaseException:
        keeper.close()
        raise


class _Start:
    def __init__(
        self,
        keeper: Keeper,
        places: Sequence[Place],
        deadline: float,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._keeper = keeper
        self._run_dir = keeper.run_dir
        self._places = places
        self._deadline = deadline
        self._on_progress = on_progress
        self._arrivals = [Arrival(self._run_dir, place.rank) for place in places]
        self._ready = 0
        self._shown: Progress | None = None

    def begin(self, launcher: Launcher) -> None:
        """Start the controller and the ranks side by side."""
        write_places(self._run_dir, self._places)
        controller = "nbdist.cluster.ipcontroller"
        self._keeper.start(
            "controller",
            [sys.executable, "-m", controller, str(self._run_dir)],
            dict(os.environ),
        )
        n = len(self._places)
        environment = {
            **os.environ,
            **launcher.environment(n, self._run_dir),
            "NBDIST_RUN_DIR": str(self._run_dir),
            "NBDIST_WORK_DIR": os.getcwd(),
            "NBDIST_PATH": os.pathsep.join(sys.path),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        self._keeper.start(
            "mpiexec", launcher.argv(n, rank_parent.command()), environment
        )

    def finish(self, on_telemetry: Callable[[Any], None], timeout_s: float) -> Started:
        """Connect, and wait for every rank.

        Raises:
            StartError: As for `start`.
        """
        from nbdist.cluster.ipp_client import (
            Link,  # slow to import: while the ranks start
        )

        connection = self._run_dir / "security" / "ipcontroller-client.json"
        self._wait(lambda: _is_written(connection), timeout_s)
        link = Link(connection, on_telemetry)
        try:
            changed = threading.Event()
            link.on_registration(lambda _event: changed.set())

            def all_here() -> bool:
                self._ready = len(link.engines())
                changed.wait(POLL_S)
                changed.clear()
                return self._ready >= len(self._places)

            self._wait(all_here, timeout_s)
            infos = self._greet(link, timeout_s)
            launcher = self._keeper.pid("mpiexec")
            if launcher is not None:
                confine(launcher)
            return Started(self._keeper, link, infos)
        except BaseException:
            link.close()
            raise

    def _greet(self, link: Link, timeout_s: float) -> list[RankInfo]:
        uuids = link.engines().values()
        hellos = [link.send(uuid, endpoints.STATUS).reply for uuid in uuids]
        self._wait(lambda: all(map(Future.done, hellos)), timeout_s)
        infos = [hello.result().value["info"] for hello in hellos]
        return sorted(infos, key=lambda info: info.rank)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Until the condition holds, a rank fails, or the time is up."""
        while not condition():
            self._show_progress()
            self._check_failures()
            if time.monotonic() > self._deadline:
                raise StartError(self._late(timeout_s))
            time.sleep(POLL_S)  # files and other processes' states raise no event
        self._show_progress()

    def _show_progress(self) -> None:
        progress = Progress(
            controller=(self._run_dir / "security/ipcontroller-client.json").exists(),
            stages={
                arrival.rank: stage
                for arrival in self._arrivals
                if (stage := arrival.stage) is not None
            },
            ready=self._ready,
            places=self._places,
        )
        if progress != self._shown:
            self._shown = progress
            self._on_progress(progress)

    def _check_failures(self) -> None:
        for arrival in self._arrivals:
            if (failure := arrival.failure) is not None:
                raise StartError(self._failed(arrival.rank, failure))
        if not self._keeper.alive:
            raise StartError("the guard process ended while the cluster was starting")
        for program in ("mpiexec", "controller"):
            code = self._keeper.exit_code(program)
            if code is not None:
                raise StartError(self._ended(program, code))
        for arrival in self._arrivals:
            if (end := arrival.end()) is not None:
                raise StartError(self._failed(arrival.rank, end))

    def _failed(self, rank: int, end: End) -> str:
        place = self._places[rank]
        return (
            f"rank {rank} of {len(self._places)} on {place.host} ended with {end.how} "
            f"while it was starting; its last lines:\n{end.last_lines}"
        )

    def _ended(self, program: str, code: int) -> str:
        log = tail_of(self._keeper.log(program).read_text(errors="replace"))
        return (
            f"{program} ended with {describe_exit(code)} while it was starting:\n{log}"
        )

    def _late(self, timeout_s: float) -> str:
        late = []
        for place, arrival in zip(self._places, self._arrivals, strict=True):
            stage = arrival.stage or "not begun"
            late.append(f"  rank {place.rank} on {place.host}: {stage}")
            late += [f"    {line}" for line in arrival.last_lines().splitlines()]
        late += tail_of(
            self._keeper.log("mpiexec").read_text(errors="replace")
        ).splitlines()
        return (
            f"{self._ready} of {len(self._places)} ranks were up after "
            f"{timeout_s:g} s: give --timeout more seconds, or see where they are:\n"
            + "\n".join(late)
        )


def write_places(run_dir: Path, places: Sequence[Place]) -> None:
    """Say in the cluster's folder where each rank runs."""
    records = [
        {
            "rank": place.rank,
            "gpu_uuid": place.gpu.uuid if place.gpu else None,
            "gpu_name": place.gpu.name if place.gpu else "CPU",
            "shares_gpu": place.shares_gpu,
            "memory_fraction": place.memory_fraction,
            "threads": place.threads,
        }
        for place in places
    ]
    (run_dir / "places.json").write_text(json.dumps(records), encoding="utf-8")


def _is_written(path: Path) -> bool:
    """Whether a JSON file is there, and whole: the controller writes it in place."""
    try:
        json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return True
