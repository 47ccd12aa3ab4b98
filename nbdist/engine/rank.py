"""This process as a rank: what its parts need of each other, in one place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbdist.engine.interrupts import Interrupts
from nbdist.engine.output import Output
from nbdist.errors import WrongProcess
from nbdist.ipc.device_assignment import DeviceAssignment
from nbdist.telemetry.recorder import Recorder
from nbdist.wire import Notice, RankInfo

__all__ = ["Activity", "Rank", "become", "is_rank", "this_rank"]


@dataclass(frozen=True)
class Activity:
    """What the main thread is doing."""

    what: str
    """"In[7]" for a cell, else the name of a request."""
    since: float = field(default_factory=time.monotonic)


@dataclass
class Rank:
    """One rank's life. `info` changes with the membership of the world."""

    info: RankInfo
    shell: Any
    output: Output
    interrupts: Interrupts
    recorder: Recorder
    assignment: DeviceAssignment
    run_dir: Path
    notify: Callable[[Notice], None]
    """Tells the notebook something out of turn, as part of the request that runs."""
    main_thread: int = field(default_factory=threading.get_ident)
    activity: Activity | None = None
    step: str = ""
    """What it does of the user's beside cells and functions: "pickling 'x'"."""
    request: str = ""
    """The name of the notebook's request that the main thread works on."""

    def tell_namespace(self) -> None:
        """Give the user's namespace this rank's numbers, hidden from %who and so on."""
        numbers = {
            "rank": self.info.rank,
            "world_size": self.info.world_size,
            "local_rank": self.info.local_rank,
        }
        self.shell.push(numbers, interactive=False)


_this: Rank | None = None


def become(rank: Rank) -> None:
    """Say who this process is; called once, at the end of the start."""
    global _this
    _this = rank


def is_rank() -> bool:
    """Whether this process is a rank of a notebook's cluster."""
    return _this is not None


def this_rank() -> Rank:
    """The rank this process is.

    Raises:
        WrongProcess: This process is no rank of a cluster.
    """
    if _this is None:
        raise WrongProcess(
            "this runs on a rank: put it in a %%distributed cell, after %dist_start"
        )
    return _this
