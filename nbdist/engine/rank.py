"""The state of this rank, which the modules of the engine share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from nbdist.engine.interrupts import Interrupts
from nbdist.engine.output import Output
from nbdist.errors import CollectiveError, WrongProcess
from nbdist.ipc.device_assignment import DeviceAssignment
from nbdist.ipc.process_files import report_reason
from nbdist.ipc.thread_frames import frames_of
from nbdist.telemetry.recorder import Recorder
from nbdist.wire import InputRequest, Notice, RankInfo

__all__ = ["Activity", "Rank", "become", "is_rank", "this_rank"]

END_CODE = 70
"""The exit code of a rank that ends itself: EX_SOFTWARE of sysexits.h."""


@dataclass(frozen=True)
class Activity:
    """The request that the main thread works on."""

    what: str
    """"In[7]" for a cell, else the name of a request."""
    since: float = field(default_factory=time.monotonic)


@dataclass
class Rank:
    """This rank. `info` changes when the world's members change."""

    info: RankInfo
    shell: Any
    output: Output
    interrupts: Interrupts
    recorder: Recorder
    assignment: DeviceAssignment
    run_dir: Path
    notify: Callable[[Notice | InputRequest], None]
    """Sends the notebook a notice as part of the request that runs."""
    main_thread: int = field(default_factory=threading.get_ident)
    activity: Activity | None = None
    step: str = ""
    """User code that runs outside of cells and functions, such as "pickling 'x'"."""
    released: CollectiveError | None = None
    """Why the current cell was released from NCCL, and must end; None if it was not."""
    request: str = ""
    """The unique name of the notebook's request that the main thread works on."""

    def frames(self) -> list[FrameType]:
        """The main thread's frames, innermost first. Any thread may call."""
        return frames_of(self.main_thread)

    def end(self, why: str) -> NoReturn:
        """End this process. The notebook shows why, and replaces or drops the rank."""
        try:
            report_reason(self.run_dir, self.info.name, why)
            self.output.close()
        finally:
            os._exit(END_CODE)

    def tell_namespace(self) -> None:
        """Put this rank's numbers into the user's namespace, hidden from %who."""
        numbers = {
            "rank": self.info.rank,
            "world_size": self.info.world_size,
            "local_rank": self.info.local_rank,
        }
        self.shell.push(numbers, interactive=False)


_this: Rank | None = None


def become(rank: Rank) -> None:
    """Set this process's rank. Called once, at the end of the start."""
    global _this
    _this = rank


def is_rank() -> bool:
    """Whether this process is a rank of a notebook's cluster."""
    return _this is not None


def this_rank() -> Rank:
    """The rank of this process.

    Raises:
        WrongProcess: This process is not a rank of a notebook's cluster.
    """
    if _this is None:
        raise WrongProcess(
            "this runs on a rank: put it in a %%distributed cell, after %dist_start"
        )
    return _this
