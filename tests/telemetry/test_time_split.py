"""Where a rank's time goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest

from nbdist.ipc.thread_frames import frames_of
from nbdist.telemetry.time_split import FEWEST_LOOKS, LOOKS, RunningCode, TimeSplitter


class Thread:
    """A thread whose stack a test makes of functions in named files."""

    def __init__(self, *, waits: bool = False, blocked: str = "") -> None:
        self.now: RunningCode | None = None
        self.blocked = blocked
        self.device_share = 0.0
        folders = {
            "/comm": "communication",
            "/data/loader.py": "data",
            "/ad": "backward",
            "/engine/debugger.py": "debugger",
            "/engine/input.py": "input",
        }
        self.splitter = TimeSplitter(
            lambda: self.now,
            lambda file, line: f"{file} line {line}" if file == "cell" else "",
            folders,
            blocked_in=lambda: self.blocked,
            waits_in_backward=lambda: waits,
            device_share=lambda: self.device_share,
            end="/engine",
        )

    def look_at(self, *files: str, times: int = 1, key: object = "In[1]") -> None:
        """Look while functions in these files call each other, the outermost first."""
        for _ in range(times):
            self.now = RunningCode(key, stack(["/engine/calls.py", *files]))
            assert self.splitter.look()


def stack(files: list[str]) -> list[FrameType]:
    """The frames of functions in these files that call each other, innermost first."""
    call: Callable[[], list[FrameType]] = partial(frames_of, threading.get_ident())
    for file in reversed(files):
        names = {"call": call}
        exec(compile("def f():\n  return call()", file, "exec"), names)
        call = names["f"]
    return call()


def test_the_innermost_known_file_counts() -> None:
    thread = Thread()
    thread.look_at("cell", times=10)
    thread.look_at("cell", "/comm/ring.py", "/other.py", times=20)
    thread.look_at("cell", "/data/loader.py", "cell", times=30)
    thread.look_at("cell", "/data/loader.pyc", times=5)
    thread.look_at("cell", "/comm/hook.py", "/data/loader.py", times=15)
    thread.look_at("cell", "/ad/graph.py", times=20)
    split = thread.splitter.split()
    assert split is not None
    assert (split.compute, split.communication, split.data) == (0.35, 0.2, 0.45)
    assert (split.place, split.place_share) == ("cell line 2", 0.8)


def test_a_backward_pass_that_waits_communicates() -> None:
    thread = Thread(waits=True)
    thread.look_at("cell", "/ad/graph.py", times=FEWEST_LOOKS)
    thread.look_at("cell", "/ad/graph.py", "/data/loader.py", times=FEWEST_LOOKS)
    split = thread.splitter.split()
    assert split is not None
    assert (split.communication, split.data) == (0.5, 0.5)


def test_what_blocks_the_thread_counts_where_no_file_is_known() -> None:
    thread = Thread(blocked="files")
    thread.look_at("cell", times=10)
    thread.look_at("cell", "/comm/ring.py", times=10)
    thread.look_at("cell", "/ad/graph.py", times=10)
    thread.blocked = "sleep"
    thread.look_at("cell", times=5)
    thread.look_at("cell", "/engine/debugger.py", "/engine/input.py", times=2)
    thread.look_at("cell", "/engine/input.py", times=3)
    split = thread.splitter.split()
    assert split is not None
    assert split.shares == (0.25, 0.25, 0, 0.5)
    assert split.reason == "it reads or writes files"
    assert split.place == "cell line 2"
    debugged = Thread()
    debugged.look_at("cell", "/engine/debugger.py", "/engine/input.py", times=20)
    split = debugged.splitter.split()
    assert split is not None
    assert (split.other, split.reason) == (1, "it is in the debugger")


def test_a_host_that_waits_for_collectives_on_the_gpu_communicates() -> None:
    thread = Thread()
    thread.look_at("cell", times=10)
    thread.look_at("cell", "/comm/ring.py", times=10)
    thread.device_share = 0.8
    split = thread.splitter.split()
    assert split is not None
    assert split.shares == pytest.approx((0.2, 0.8, 0, 0))
    thread.device_share = 0.1  # queued, while the host was in other calls
    split = thread.splitter.split()
    assert split is not None
    assert split.shares == (0.5, 0.5, 0, 0)


def test_the_latest_split_is_of_the_looks_since_the_last_one() -> None:
    thread = Thread()
    assert thread.splitter.latest() is None
    thread.look_at("cell", times=30)
    thread.look_at("cell", "/comm/ring.py", times=10)
    assert_shares(thread, (0.75, 0.25, 0, 0))
    thread.look_at("cell", "/comm/ring.py", times=2)
    assert_shares(thread, (0, 1, 0, 0))
    assert thread.splitter.latest() is None


def assert_shares(thread: Thread, shares: tuple[float, ...]) -> None:
    latest = thread.splitter.latest()
    assert latest is not None
    assert latest.shares == shares


def test_a_split_is_of_the_last_looks_at_one_request() -> None:
    thread = Thread()
    assert not thread.splitter.look()
    thread.look_at("cell", times=FEWEST_LOOKS - 1)
    assert thread.splitter.split() is None
    thread.look_at("cell", times=LOOKS)
    thread.look_at("/comm/ring.py", times=LOOKS)
    split = thread.splitter.split()
    assert split is not None
    assert (split.communication, split.place) == (1.0, "")
    thread.look_at("cell", key="In[2]")
    assert thread.splitter.split() is None
