"""A text that changes, in a terminal and in other output."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

import pytest

from nbdist.widgets import live_text
from nbdist.widgets.live_text import DisplayText, TerminalText, print_note


def test_a_terminal_redraws_its_last_line(capsys: pytest.CaptureFixture[str]):
    text = TerminalText(redraws=True)
    text.show("rank 0 running\n[0] 20%")
    assert capsys.readouterr().out == "\rrank 0 running   [0] 20%\x1b[K"
    text.show("rank 0 running\n[0] 20%")
    assert capsys.readouterr().out == ""
    assert text.make_room()
    assert not text.make_room()
    assert capsys.readouterr().out == "\r\x1b[K"
    text.show("rank 0 running")
    print_note("rank 1 was replaced")
    assert capsys.readouterr().out.endswith("\r\x1b[Krank 1 was replaced\n")
    text.show("x" * 500)
    assert len(capsys.readouterr().out.strip("\r\x1b[K")) < 500
    text.close({"text/plain": "done"})
    assert capsys.readouterr().out == "\r\x1b[Kdone\n"


@pytest.mark.parametrize("redraws", [True, False])
def test_a_notice_is_printed_once(redraws: bool, capsys: pytest.CaptureFixture[str]):
    text = TerminalText(redraws=redraws)
    for seconds in range(3):
        text.show(f"{seconds} s", f"the others wait\nrank 0 for {seconds} s")
    text.show("3 s")
    text.show("4 s", "the others wait\nrank 0 for 1 s")
    text.close()
    shown = capsys.readouterr().out
    assert shown.count("the others wait") == 2, "it came a second time"
    assert ("\x1b[K" in shown) == redraws


def test_what_remains_is_a_display_and_no_update(monkeypatch: pytest.MonkeyPatch):
    shown: list[tuple[str, str]] = []

    def take(kind: str) -> Any:
        return lambda data, **_: shown.append((kind, data["text/plain"]))

    monkeypatch.setattr(live_text, "display", take("display"))
    monkeypatch.setattr(live_text, "update_display", take("update"))
    text = DisplayText("progress")
    text.show("0/2 ranks ready")
    text.show("1/2 ranks ready")
    text.close({"text/plain": "the ranks"})
    # A front end that shows no updates, such as jupyter console, shows the last one.
    assert shown == [
        ("display", "0/2 ranks ready"),
        ("update", "1/2 ranks ready"),
        ("update", ""),
        ("display", "the ranks"),
    ]


@pytest.mark.parametrize("columns", [20, 80])
def test_a_line_leaves_the_last_column_of_the_terminal_free(
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COLUMNS", str(columns))
    TerminalText(redraws=True).show("x" * 500)
    assert capsys.readouterr().out == "\r" + "x" * (columns - 1) + "\x1b[K"


def test_an_interrupt_comes_after_a_flush(monkeypatch: pytest.MonkeyPatch):
    # ipykernel's flush waits for the thread that sends the kernel's output.
    class Stream(io.StringIO):
        flushed = False

        def flush(self) -> None:
            signal.raise_signal(signal.SIGINT)
            self.flushed = True

    stream = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(TerminalText, "drawn", None)
    with pytest.raises(KeyboardInterrupt):
        print_note("rank 1 was replaced")
    assert stream.flushed
    assert stream.getvalue() == "rank 1 was replaced\n"
