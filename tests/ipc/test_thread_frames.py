"""The frames of a thread that runs on, and whose memory others use meanwhile."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from types import FrameType

from nbdist.ipc.thread_frames import frames_of, take_locals
from tests.processes import HANG_S

LEAVES = """
import gc, sys, threading, time
from types import FrameType
from nbdist.ipc.thread_frames import frames_of, take_locals
class Late:
    def __del__(self):
        time.sleep(1e-5)  # lets the other thread run
def make():
    late = Late()
    late.itself = late
def leaf():
    make()
    time.sleep(0)
def inner(a=1, b=2, c=3):
    leaf()
def innermost():
    inner()
shared = {}
def other():
    a = b = c = d = e = f = g = h = i = j = k = l = m = n = o = p = q = r = shared
    return deep(3, a, b, c, d, e, f)
def deep(n, a, b, c, d, e, f):
    g = h = i = j = k = shared
    return n and deep(n - 1, a, b, c, d, e, f)
def work():
    while not done:
        inner()
        other()
        innermost()
        other()
done = False
thread = threading.Thread(target=work, daemon=True)
thread.start()
sys.setswitchinterval(1e-6)
gc.set_threshold(15, 1000000, 1000000)
for turn in range(2000):
    kept = [[] for _ in range(turn % 16)]  # the collection begins here or there
    for frame in frames_of(thread.ident):
        assert isinstance(frame, FrameType), frame
        if frame.f_code.co_name == "deep":
            assert set(take_locals(frame)) <= {*"nabcdefghijk"}
    time.sleep(0)
assert gc.isenabled()
done = True
thread.join()
"""


def test_the_frames_of_a_thread_that_leaves_them_are_frames() -> None:
    command = [sys.executable, "-c", LEAVES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


def test_the_innermost_frame_comes_first() -> None:
    own = sys._getframe()
    frames = frames_of(threading.get_ident())
    assert frames[frames.index(own) :][:2] == [own, own.f_back]
    assert take_locals(own)["frames"] is frames


def test_an_ended_thread_has_no_frames() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert frames_of(thread.ident) == []


def test_a_collection_that_the_user_has_switched_off_stays_off() -> None:
    gc.disable()
    try:
        frames_of(threading.get_ident())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_that_is_forked_meanwhile_can_collect_and_ask() -> None:
    stop = threading.Event()

    def ask() -> list[FrameType]:
        frames: list[FrameType] = []
        while not stop.is_set():
            frames = frames_of(threading.main_thread().ident or 0)
        return frames

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(50):
            child = os.fork()
            if child == 0:
                good = gc.isenabled() and frames_of(threading.get_ident())
                os._exit(0 if good else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()
