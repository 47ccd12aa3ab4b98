"""The report of faulthandler about a rank's crash is read."""

from __future__ import annotations

import pytest

from nbdist.clusters.crash_report import find_crash

TEXT = """\
a warning of C

Fatal Python error: {title}

Thread 0x00007f0001 (most recent call first):
  File "/lib/python3.13/threading.py", line 359 in wait

{other} 0x00007f0002 [python] (most recent call first):
  File "/lib/python3.13/ctypes/__init__.py", line 519 in string_at
  File "<ipython-input-7-0123456789ab>", line 4 in load
  File "<ipython-input-7-0123456789ab>", line 6 in <module>
  File "/site-packages/IPython/core/interactiveshell.py", line 3699 in run_code
  File "/src/nbdist/engine/cells.py", line 45 in run_armed

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
STACK = """\
  In[7] line 6, in <module>
  In[7] line 4, in load
  /lib/python3.13/ctypes/__init__.py line 519, in string_at"""


@pytest.mark.parametrize(
    ("title", "ending"),
    [
        ("Segmentation fault", "SIGSEGV"),
        ("Floating-point exception", "SIGFPE"),
        ("Floating point exception", "SIGFPE"),
        ("Aborted", "SIGABRT"),
    ],
)
def test_the_users_line_and_its_calls_are_found(title: str, ending: str) -> None:
    crash = find_crash(TEXT.format(title=title, other="Current thread"), ending)
    assert crash is not None
    assert (crash.location, crash.stack) == ("In[7] line 4", STACK)


def test_a_crash_in_a_thread_of_c_shows_the_position_of_the_main_thread() -> None:
    text = TEXT.format(title="Segmentation fault", other="Thread")
    text += "\nCurrent thread 0x00007f0003 (most recent call first):\n"
    text += "  <no Python frame>\n"
    crash = find_crash(text, "SIGSEGV")
    assert crash is not None
    assert (crash.location, crash.stack) == ("In[7] line 4", STACK)


def test_only_a_crash_by_the_signal_that_ended_the_rank_is_shown() -> None:
    text = TEXT.format(title="Segmentation fault", other="Current thread")
    assert find_crash(text, "SIGKILL") is None
    assert find_crash(text, "SIGABRT") is None
    assert find_crash("", "SIGSEGV") is None


def test_a_crash_outside_of_user_code_shows_its_innermost_calls() -> None:
    text = (
        "Fatal Python error: Bus error\n\nCurrent thread 0x1 (most recent call first):"
    )
    text += "".join(f'\n  File "engine.py", line {n} in f' for n in range(1, 9))
    crash = find_crash(text, "SIGBUS")
    assert crash is not None
    assert crash.location == ""
    assert crash.stack.splitlines()[-1] == "  engine.py line 1, in f"
    assert len(crash.stack.splitlines()) == 5


def test_a_deep_stack_is_cut() -> None:
    deep = '  File "<ipython-input-2-0>", line 3 in f\n' * 90
    text = "Fatal Python error: Segmentation fault\n\n"
    text += f"Current thread 0x1 (most recent call first):\n{deep}  ..."
    crash = find_crash(text, "SIGSEGV")
    assert crash is not None
    assert crash.stack.splitlines()[0] == "  (70 calls are left out)"
    assert len(crash.stack.splitlines()) == 21
