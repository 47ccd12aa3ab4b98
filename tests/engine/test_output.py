"""The text that a rank prints is shown up to a cap and kept in a file."""

from __future__ import annotations

import gc
import io
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import pytest

from nbdist.engine import output as output_module
from nbdist.engine.output import Output
from tests.seed import SEED

CAP_BYTES = 1_000_000


class Shown:
    """The messages that an `Output` sends to the notebook."""

    def __init__(self, folder: Path) -> None:
        self.captured = {name: folder / name for name in ("stdout", "stderr")}
        for path in self.captured.values():
            path.touch()
        self.stdout = self.stderr = ""
        self.output = Output(self._add, self.captured, folder / "spilled")

    def _add(self, name: str, text: str) -> None:
        setattr(self, name, getattr(self, name) + text)


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    one = Shown(tmp_path)
    yield one
    one.output.close()
    one.output._end_spill()
    for tail in one.output._tails:  # a rank keeps them open until its end
        tail._file.close()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make writes beyond a size of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_print_looks_once_for_text_of_other_writers(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, me = shown.output, threading.get_ident()
    looks: list[int] = []
    look = output._begin_print

    def counted() -> None:
        looks.append(threading.get_ident())
        look()

    with output.during("In[1]"):
        monkeypatch.setattr(output, "_begin_print", counted)
        monkeypatch.setattr("nbdist.engine.output._now", lambda: 1.0)
        for step in range(3):
            print("loss", step, 0.5, file=output.stdout)
        assert looks.count(me) == 3
    assert shown.stdout == "loss 0 0.5\nloss 1 0.5\nloss 2 0.5\n"


class PrintsAtItsEnd:
    """An object that prints when it is collected, at any moment."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._itself = self

    def __del__(self) -> None:
        self._file.write("collected\n")  # print() writes the line's end by itself


def test_the_text_of_threads_and_finalizers_is_complete_and_in_order(
    shown: Shown,
) -> None:
    def print_steps(name: str) -> None:
        for step in range(3000):
            shown.output.stdout.write(f"{name} {step}\n")
            if step % 100 == 0:
                PrintsAtItsEnd(shown.output.stdout)

    with shown.output.during("In[1]"):
        threads = [threading.Thread(target=print_steps, args=(n,)) for n in "xyz"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
    lines = shown.stdout.splitlines()
    for name in "xyz":
        steps = [line for line in lines if line[0] == name]
        assert steps == [f"{name} {step}" for step in range(3000)]
    assert lines.count("collected") == 90


def test_text_of_other_writers_is_found_within_a_line(shown: Shown) -> None:
    output = shown.output
    with output.during("In[1]"):
        output.stdout.write("first ")
        with shown.captured["stdout"].open("a") as other:
            other.write("second ")
        time.sleep(1e-3)  # longer than between the pieces of one print
        output.stdout.write("third\n")
    assert shown.stdout == "first second third\n"


def test_the_first_part_of_a_long_print_is_shown_and_all_is_kept(shown: Shown) -> None:
    text = "0123456789" * 1_000_000
    with shown.output.during("In[1]"):
        shown.output.stdout.write(text)
    assert shown.stdout == text[:CAP_BYTES]
    kept = re.search(r"the full text is in (\S+) until", shown.stderr)
    assert kept is not None
    assert Path(kept[1]).read_text() == text
    assert "lost" not in shown.stderr


def test_on_a_full_disk_the_text_is_cut_with_a_note(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = os.statvfs("/")
    full = os.statvfs_result((*roomy[:3], 0, 0, *roomy[5:]))
    monkeypatch.setattr(os, "fstatvfs", lambda _descriptor: full)
    with shown.output.during("In[1]"):
        shown.output.stdout.write("é" * 10_000_000)
        shown.output.stdout.write("more")
    assert shown.stdout == "é" * CAP_BYTES
    assert "the rest is lost: less than 17 MB are free" in shown.stderr
    assert "the last 18.0 MB that this cell printed here are lost" in shown.stderr
    with shown.output.during("In[2]"):
        shown.output.stdout.write("next")
    assert shown.stdout.endswith("énext")


def test_text_is_cut_where_the_disk_becomes_full(shown: Shown) -> None:
    with files_of_at_most(3_000_000), shown.output.during("In[1]"):
        for _ in range(100):
            shown.output.stdout.write("x" * 100_000)
    kept = re.search(r"the full text is in (\S+) until", shown.stderr)
    assert kept is not None
    assert Path(kept[1]).stat().st_size == 3_000_000
    assert "the last 7.0 MB that this cell printed here are lost: File too large" in (
        shown.stderr
    )


def test_text_that_a_forked_child_cannot_write_is_counted(
    shown: Shown, tmp_path: Path
) -> None:
    with open(tmp_path / "full", "wb") as full, files_of_at_most(1000):
        shown.output._raws[0]._descriptor = full.fileno()
        with shown.output.during("In[1]"):
            child = os.fork()
            if child == 0:
                failed = 1
                try:
                    failed = shown.output.stdout.write("x" * 1499 + "\n") != 1500
                finally:
                    os._exit(failed)
            assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "full").stat().st_size == 1000
    assert "500 bytes that processes of this cell printed here are lost" in shown.stderr


def test_text_that_utf8_cannot_encode_is_kept_escaped(shown: Shown) -> None:
    with shown.output.during("In[1]"):
        shown.output.stdout.write("x" * CAP_BYTES + "\ud800 é")
    kept = re.search(r"the full text is in (\S+) until", shown.stderr)
    assert kept is not None
    text = Path(kept[1]).read_text(encoding="utf-8")
    assert text == "x" * CAP_BYTES + r"\ud800 é"


@contextmanager
def interrupted_at(step: int) -> Iterator[list[bool]]:
    """Interrupt the main thread before this bytecode of the output's module.

    Yields a list that is not empty once the interrupt was sent.
    """
    sent: list[bool] = []
    left = step

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != output_module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                sent.append(True)
                signal.raise_signal(signal.SIGINT)
        return trace

    tracing, handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        yield sent
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGINT, handler)


def test_an_interrupt_at_any_bytecode_neither_loses_nor_repeats_a_line(
    shown: Shown,
) -> None:
    output, whole, cut = shown.output, list[str](), list[str]()
    number = 0
    writers: list[Callable[[str], object]] = [
        output.stdout.write,
        output.stderr.write,
        lambda text: output.stdout.buffer.write(text.encode()),
        lambda text: output.stderr.write(text.rstrip().ljust(10_000, ".") + "\n"),
        lambda _text: output.stdout.flush(),
    ]
    for write in writers:
        step, went_on = 0, True
        while went_on:
            step, number = step + 1, number + 1
            before = [f"<{number} before>", f"<{number} err>"]
            line = f"<{number} at {step}>"
            with output.during("In[1]"):
                output.stdout.write(f"{before[0]}\n")
                output.stderr.write(f"{before[1]}\n")
                with shown.captured["stdout"].open("a") as other:
                    other.write(f"<{number} other>\n")
                try:
                    with interrupted_at(step) as sent:
                        write(f"{line}\n")
                except KeyboardInterrupt:
                    cut.append(line)  # it may be lost, as that of any print
                else:
                    whole += [line] if write is not writers[-1] else []
                went_on = bool(sent)
            whole += [*before, f"<{number} other>"]
    seen = re.findall(r"<.*?>", shown.stdout + shown.stderr)
    assert len(cut) > 50
    assert sorted(line for line in seen if line not in cut) == sorted(whole)
    assert len({*seen}) == len(seen)


def test_a_script_finds_the_whole_of_a_text_stream(shown: Shown) -> None:
    stdout, stderr = shown.output.stdout, shown.output.stderr
    with shown.output.during("In[1]"):
        assert isinstance(stdout, io.TextIOWrapper)
        assert (stdout.mode, stdout.name, stderr.name) == ("w", "<stdout>", "<stderr>")
        assert (stdout.encoding, stdout.newlines, stdout.closed) == (
            "utf-8",
            None,
            False,
        )
        assert [stdout.writable(), stdout.readable()] == [True, False]
        flags = [stdout.seekable(), stdout.isatty(), stdout.line_buffering]
        assert flags == [False] * 3
        assert (stdout.fileno(), stderr.buffer.fileno()) == (1, 2)
        assert getattr(stdout.buffer, "mode", "") == "wb"
        assert stdout.write("é\n") == 2
        assert stdout.buffer.write("ü\n".encode()) == 3
        stdout.writelines(["a\n", "b\n"])
        with pytest.raises(TypeError):
            stdout.write(b"c")  # type: ignore[arg-type]
        with pytest.raises(io.UnsupportedOperation):
            stdout.read()
        with redirect_stdout(stdout):
            print("redirected")
        handler = logging.StreamHandler(stderr)
        handler.emit(logging.LogRecord("x", 20, "", 0, "logged", None, None))
        wrapper = io.TextIOWrapper(stdout.buffer, encoding="utf-8", write_through=True)
        wrapper.write("wrapped\n")
        del wrapper, handler
        gc.collect()
        print("after", file=stdout)
        io.TextIOWrapper(stdout.detach(), write_through=True).write("detached\n")
        stdout.close()
        print("closed", file=stdout)
    assert shown.stdout == (
        "é\nü\na\nb\nredirected\nwrapped\nafter\ndetached\nclosed\n"
    )
    assert shown.stderr == "logged\n"


def test_the_settings_of_a_stream_hold_until_it_is_replaced(shown: Shown) -> None:
    with shown.output.during("In[1]"):
        stdout = shown.output.stdout
        stdout.reconfigure(line_buffering=True, newline="\r\n")
        assert stdout.line_buffering
        stdout.write("1\n")
        assert shown.stdout == "1\r\n"  # a line is sent at once
        stdout.reconfigure(encoding="ascii", errors="strict")
        with pytest.raises(UnicodeEncodeError):
            stdout.write("é")
        stdout.reconfigure(errors="namereplace", newline="\n")
        stdout.write("é\n")
        fresh, _ = shown.output.new_streams()
        fresh.write("é\n")
    assert shown.stdout == "1\r\n\\N{LATIN SMALL LETTER E WITH ACUTE}\né\n"


def test_bytes_text_and_other_writers_keep_their_order(shown: Shown) -> None:
    draw, expected = random.Random(SEED), ""
    stdout = shown.output.stdout
    with shown.output.during("In[1]"):
        for number in range(200):
            text = "".join(draw.choices("aé€𝄞 ", k=draw.randint(0, 9))) + f"{number}\n"
            octets, way = text.encode(), draw.randrange(4)
            if way == 0:
                stdout.write(text)
            elif way == 1:
                cut = draw.randint(0, len(octets))
                stdout.buffer.write(octets[:cut])  # within a character
                stdout.buffer.write(octets[cut:])
            elif way == 2:
                print(text, end="", file=stdout, flush=draw.random() < 0.5)
            else:
                with shown.captured["stdout"].open("ab") as other:
                    subprocess.run(["printf", "%s", text], stdout=other, check=True)
                time.sleep(1e-4)  # longer than between the pieces of one print
            expected += text
    assert shown.stdout == expected
