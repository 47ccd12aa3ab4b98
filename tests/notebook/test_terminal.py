"""The magics in IPython in a terminal."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

START_S = 120
CELL_S = 60
ROW = re.compile("[01] +cpu ")
"""A rank's row in the monitor's table."""


def _environment() -> dict[str, str]:
    """This process's, without the size of its terminal: readline exports that."""
    return {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}


class Terminal:
    """IPython in a pseudo-terminal of 100 columns."""

    def __init__(self, folder: Path) -> None:
        self._number = 0
        self._process = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", "--simple-prompt", "--no-banner", "--quick"],
            cwd=str(folder),
            env=_environment(),
            dimensions=(40, 100),
            encoding="utf-8",
            echo=False,
        )
        self._prompt(START_S)

    def run(self, line: str, timeout_s: float = CELL_S) -> str:
        """Type a line. Returns what the terminal receives until the next prompt."""
        self._process.sendline(line)
        return self._prompt(timeout_s)

    def type(self, line: str, prompt: str) -> str:
        """Type a line. Returns what the terminal receives until this prompt."""
        self._process.sendline(line)
        self._process.expect_exact(prompt, timeout=CELL_S)
        return str(self._process.before)

    def await_prompt(self) -> str:
        """What the terminal receives until IPython's prompt, without a typed line."""
        return self._prompt(CELL_S)

    def _prompt(self, timeout_s: float) -> str:
        self._number += 1
        self._process.expect_exact(f"In [{self._number}]: ", timeout=timeout_s)
        return str(self._process.before)

    def close(self) -> None:
        self._process.close(force=True)


def screen(received: str) -> list[str]:
    """The lines that remain on the screen, without colours."""
    text = re.sub(r"\x1b\[[\d;]*m", "", received).replace("\r\n", "\n")
    lines = [re.split(r"\r|\x1b\[K", line) for line in text.split("\n")]
    return [parts[-1] for parts in lines if parts[-1]]


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path_factory.mktemp("terminal"))
    try:
        terminal.run("%load_ext nbdist")
        started = terminal.run("%dist_start -n 2 --device cpu", START_S)
        assert "ranks ready" in started
        shown = screen(started)
        assert shown[0].startswith("rank  host"), shown
        assert not [line for line in shown if "ranks ready" in line]
        yield terminal
        assert "stopped" in terminal.run("%dist_stop")
    finally:
        terminal.close()


def test_the_progress_is_one_line_that_is_redrawn(terminal: Terminal) -> None:
    cell = "import time; [(time.sleep(1.2), print(i))[1] for i in range(4)]"
    received = terminal.run(
        f"get_ipython().run_cell_magic('distributed', '', {cell!r})"
    )
    assert "● rank 0-1 running 3 s" in received
    shown = screen(received)
    assert [line for line in shown if line[:5] == "[0-1]"][:4] == [
        f"[0-1] {i}" for i in range(4)
    ]
    assert not [line for line in shown if "running" in line], received
    assert len([line for line in shown if "✓ rank 0-1 finished" in line]) == 1


def test_a_cell_in_the_background_prints_above_the_prompt(terminal: Terminal) -> None:
    cell = "import time; [(time.sleep(1), print(i))[1] for i in range(3)]; 1 / rank"
    started = terminal.run(
        f"get_ipython().run_cell_magic('distributed', '-b', {cell!r})"
    )
    assert "in the background: %dist_interrupt" in started
    received = terminal.run("%dist_wait")
    shown = screen(received)
    assert [line for line in shown if line.startswith("[0-1]")][-1] == "[0-1] 2"
    assert "running" not in received  # a line that is redrawn would hide the prompt
    assert len([line for line in shown if "✗ rank 0 failed" in line]) == 1
    assert "ZeroDivisionError: division by zero" in received


def test_a_debugger_asks_in_the_terminal(terminal: Terminal) -> None:
    cell = "x = rank + 5; import os\nprint('pid', os.getpid())\nbreakpoint()\nx"
    run = f"get_ipython().run_cell_magic('distributed', '-r 1', {cell!r})"
    shown = screen(terminal.type(run, "[1] (Pdb) "))
    assert [line for line in shown if line.startswith("debugger on rank 1 of 2 (")]
    assert screen(terminal.type("p x * 100", "[1] (Pdb) "))[-1] == "[1] 600"
    assert re.fullmatch(r"\[1\] Out\[\d+\]: 6", screen(terminal.run("c"))[0])
    shown = screen(terminal.type(run, "[1] (Pdb) "))
    (pid,) = (line.split()[-1] for line in shown if line.startswith("[1] pid"))
    os.kill(int(pid), signal.SIGKILL)
    assert "rank 1 of 2: RankDied" in terminal.await_prompt()


def test_plain_lines_run_on_the_ranks(terminal: Terminal) -> None:
    assert "on the ranks" in terminal.run("%dist_auto on")
    shown = screen(terminal.run("print('I am', rank)"))
    assert {"[0] I am 0", "[1] I am 1"} < set(shown)
    assert "(%dist_auto)" in shown[-1]
    assert "in the notebook" in terminal.run("%dist_auto off")
    assert screen(terminal.run("print('here')"))[0] == "here"


def test_the_next_cell_is_profiled(terminal: Terminal) -> None:
    cell = "torch.ones(64, 64) @ torch.ones(64, 64); dist.barrier()"
    run = f"get_ipython().run_cell_magic('distributed', '{{}}', {cell!r})"
    assert "next cell is profiled" in terminal.run("%dist_profile -n 2")
    assert "is not profiled: run it without -b" in terminal.run(run.format("-b"))
    received = terminal.run(run.format(""))
    assert "rank 0-1: 0 optimizer steps in" in received
    assert "aten::mm" in received
    assert "the trace is in profile-" in received
    assert "optimizer steps" not in terminal.run(run.format(""))
    assert "-n 0: expected a number" in terminal.run("%dist_profile -n 0")
    terminal.run("%dist_profile --save trace.json")
    terminal.run("%dist_profile --off")
    assert "optimizer steps" not in terminal.run(run.format(""))


def rows_of(received: str) -> list[list[str]]:
    """The words of each rank's row in the monitor's tables that were drawn."""
    text = re.sub(r"\x1b\[[\d;]*m", "", received)
    lines = re.split(r"[\r\n]+|\x1b\[\d*[KAJ]", text)
    return [line.split() for line in lines if ROW.match(line)]


def test_the_monitor_is_a_table_with_sparklines(terminal: Terminal) -> None:
    assert "nothing was logged" in terminal.run("%dist_monitor")
    log = """
import time
for step in range(40):
    nbdist.log(loss=rank + 1 / (step + 1), lr=0.1, total=100)
    if step == 10: print("in between")
    time.sleep(0.1)
"""
    received = terminal.run(f"get_ipython().run_cell_magic('distributed', '', {log!r})")
    # It is drawn again while the cell runs, below what the cell prints.
    drawn = rows_of(received)
    assert len(drawn) >= 6
    assert drawn[0] != drawn[-2]
    assert received.count("in between") == 1
    shown = screen(received)
    assert "[0-1] in between" in shown
    assert not list(filter(ROW.match, shown)), "it is gone at the end"

    received = terminal.run("%dist_monitor")
    assert "2 ranks · 40 of 100 steps" in received
    zero, one = rows_of(received)
    assert (zero[-1], one[-1]) == ("0.025", "1.025")
    assert set("".join(one)) & set("▁▂▃▄▅▆▇█")
    assert "other" in one, "it sleeps"
    head = re.sub(r"\x1b\[[\d;]*m", "", received)
    assert re.search(
        r"rank +device +utilisation +time +memory +step +behind +loss", head
    )
    both = terminal.run("%dist_monitor --metric 'lr, loss'")
    assert re.search(r"behind +lr +loss", re.sub(r"\x1b\[[\d;]*m", "", both))
    assert [row[-1] for row in rows_of(both)] == ["0.025", "1.025"]
    terminal.run("%dist_monitor --off")
    received = terminal.run(
        "get_ipython().run_cell_magic('distributed', '', 'import time; time.sleep(2)')"
    )
    assert rows_of(received) == []
    assert "unrecognized arguments: loss" in terminal.run("%dist_monitor loss")
    assert "80 rows in" in terminal.run("%dist_monitor --metric loss --save values.csv")
    assert "tensorboard --logdir" in terminal.run("%dist_monitor --logdir runs")
    terminal.run("import nbdist")
    received = terminal.run("nbdist.metrics('loss').groupby('rank').value.min()[1]")
    assert "1.025" in received
