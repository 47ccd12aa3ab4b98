"""Collects the text that a rank prints, and sends it to the notebook.

The output of Python, of C code and of child processes becomes one ordered list of
chunks. A publisher thread sends the chunks in batches, so that a print costs one list
append. Descriptors 1 and 2 are files, so that a writer never blocks, even C code that
holds the GIL. At the end of a cell the files are read to their end. Text that threads
print after the end of their cell is sent with the next cell, because the notebook does
not listen between cells.

The notebook shows the first part of a cell's text, up to a cap. A longer text goes to a
file as a whole. If the disk has no room for the file, the rest of the text is dropped,
and a note gives its size. A print never fails because the disk is full.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import io
import itertools
import mmap
import os
import queue
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.config import OutputConfig
from nbdist.ipc.host_sockets import HOST
from nbdist.ipc.interrupts import defer_interrupts
from nbdist.ipc.locks import Event
from nbdist.ipc.torch_noise import without_noise

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Output"]

COALESCE_S = 0.02
ACTIVE_POLL_S = 0.1
AWAKE_S = 1.0
"""Seconds that the publisher thread still polls after a cell has ended. A cell that
begins meanwhile needs not wake it."""
SAME_PRINT_S = 2e-5
"""Seconds within which a further write to an unfinished line belongs to the same print.
`print(rank, step)` writes four times, and no child process can write in between."""
MOST_UNCOUNTED = 1 << 13
"""The most writes, and the most characters of one, that wait to be counted."""
SPILL_LIMIT_BYTES = 1 << 30
SPILL_BUFFER_BYTES = 1 << 16
KEPT_FREE_BYTES = 16 << 20
"""Bytes that stay free on the disk of the file, for what a recovery writes there."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_COUNT = struct.Struct("Q")
_libc = ctypes.CDLL(None)
_now = time.perf_counter

Publish = Callable[[str, str], None]
"""Called with "stdout" or "stderr", and the text."""


class Output:
    """Collects a rank's text and passes it to `publish`, up to a cap for each cell."""

    def __init__(self, publish: Publish, captured: dict[str, Path], spill: Path):
        self._publish = publish
        self._spill_dir = spill
        self._cap = int(OutputConfig.from_environment().cap_mb * 1e6)
        # Reentrant: the garbage collector may run a __del__ that prints anywhere.
        self._lock = threading.RLock()
        self._sending = threading.RLock()
        self._is_sending = False
        self._written: deque[tuple[str, str]] = deque()
        """The newest text, which does not count towards the cap yet. It is appended to
        without a lock, so it stays the same object."""
        self._counting = False
        self._chunks: list[tuple[str, str]] = []
        # An interrupt within `Event.set` would leave the event's lock locked.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._woken = False
        """Whether the text written so far has woken the publisher thread."""
        self._closed = False
        self._spill: Spill | None = None
        self._what = ""
        self._size = 0
        self._shown: list[str] = []
        self._busy = False
        self._ended_at = 0.0
        self._in_line = False
        """Whether the last write has not ended its line."""
        self._written_at = 0.0
        self._sleeps = False
        """Whether the publisher thread waits without a limit."""
        self._tails = [Tail(name, path) for name, path in captured.items()]
        begun = captured["stderr"].with_suffix(".begun")
        self._begun = os.open(begun, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._mark()
        self._raws = [RankRaw("stdout", 1, self), RankRaw("stderr", 2, self)]
        self.stdout, self.stderr = self.new_streams()
        self._thread = threading.Thread(
            target=self._run, name="nbdist-output", daemon=True
        )
        self._thread.start()

    def new_streams(self) -> tuple[RankStream, RankStream]:
        """A `sys.stdout` and a `sys.stderr`, whose settings are Python's."""
        stdout, stderr = map(RankStream, self._raws)
        return stdout, stderr

    def write(self, name: str, text: str) -> None:
        """Queue text; any thread may call."""
        now = _now()
        if not (self._in_line and now < self._written_at + SAME_PRINT_S):
            self._begin_print()
        self._in_line = text[-1:] != "\n"
        self._written_at = now
        self._written.append((name, text))
        if len(text) > MOST_UNCOUNTED:
            with self._locked():
                self._count()
        if not self._woken:
            self._woken = True
            self._wake.put(None)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Collect the text of one cell or function, with its own cap.

        All of the text is sent before the block ends.

        Args:
            what: The name of the cell or function, such as "In[7]". The file's name
                contains it.
        """
        # Code may have set them to None. IPython then runs no cell.
        sys.stdout = self.stdout if sys.stdout is None else sys.stdout
        sys.stderr = self.stderr if sys.stderr is None else sys.stderr
        with self._lock:
            self._count()
            self._end_spill()
            self._what = what
            self._size = 0
            self._shown = [text for _name, text in self._chunks]
            self._busy = True
            if self._sleeps:
                self._wake.put(None)
        self._mark()
        try:
            yield
        finally:
            _flush_c()
            self.flush(ends_cell=True)
            self._mark()

    def _mark(self) -> None:
        """Note where the output to descriptor 2 is. A death later shows the rest."""
        with suppress(OSError):  # the disk is full
            os.pwrite(self._begun, b"%20d" % self._tails[1].end(), 0)

    def drain(self) -> None:
        """Send all text that was printed so far, by Python and by C."""
        _flush_c()
        self.flush()

    def flush(self, *, ends_cell: bool = False) -> None:
        """Send the queued text, so that a following display comes after it.

        Args:
            ends_cell: Whether no more text of this cell follows.
        """
        # An interrupt would lose what is on its way, and break a message in two.
        with defer_interrupts(), self._sending:
            if self._is_sending:  # a __del__ flushes within this block
                return
            while not self._wake.empty():
                with suppress(queue.Empty):  # the publisher thread was faster
                    self._wake.get_nowait()
            self._woken = False
            if not self._busy:
                return
            with self._lock:
                self._count()
                self._read_tails()
                if ends_cell:
                    self._report_lost()
                chunks, self._chunks = self._chunks, []
            self._is_sending = True
            try:
                for name, text in _joined(chunks):
                    self._publish(name, text)
            finally:
                self._is_sending = False
            if ends_cell:
                with self._lock:
                    self._busy = False
                    self._ended_at = time.monotonic()

    def close(self) -> None:
        self._closed = True
        self._wake.put(None)
        self._thread.join(timeout=2)
        self.drain()

    def _run(self) -> None:
        pause = Event()
        while not self._closed:
            with suppress(queue.Empty):
                self._wake.get(timeout=self._patience_s())
                pause.wait(COALESCE_S)  # let a burst of prints travel together
            self.flush()

    def _patience_s(self) -> float | None:
        """Seconds until the publisher thread looks again; None until it is woken."""
        with self._lock:
            awake = self._busy or time.monotonic() < self._ended_at + AWAKE_S
            self._sleeps = not awake
        return ACTIVE_POLL_S if awake else None

    def _begin_print(self) -> None:
        """Queue the earlier text of child processes, which comes before a print."""
        for tail in self._tails:
            if tail.has_more():
                with self._locked():
                    self._count()
                    self._read_tails()
                return
        if len(self._written) > MOST_UNCOUNTED:
            with self._locked():
                self._count()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock in a thread of the user's, without an interrupt."""
        with defer_interrupts(), self._lock:
            yield

    def _count(self) -> None:
        """Move the newest text to the chunks, up to the cap. Callers hold the lock."""
        if self._counting or not self._written:  # a __del__ prints within this method
            return
        self._counting = True
        try:
            # Other threads may append meanwhile. Without bytecode between the steps, no
            # error of a signal's handler can leave a text in both lists.
            number, newest = len(self._written), list[tuple[str, str]]()
            newest.extend(
                itertools.starmap(self._written.popleft, itertools.repeat((), number))
            )
            for name, text in _joined(newest):
                self._add(name, text)
        finally:
            self._counting = False

    def _read_tails(self) -> None:
        for tail in self._tails:
            if text := without_noise(tail.read()):
                self._add(tail.name, text)

    def _add(self, name: str, text: str) -> None:
        size = len(text)
        room = max(0, self._cap - self._size)
        self._size += size
        if 0 < size <= room:
            self._shown.append(text)
            self._chunks.append((name, text))
            return
        shown, rest = text[:room], text[room:]
        if shown:
            self._shown.append(shown)
            self._chunks.append((name, shown))
        if rest:
            if self._spill is None:
                self._spill = self._begin_spill()
            self._spill.write(rest)

    def _begin_spill(self) -> Spill:
        name = f"rank{os.environ.get('RANK', '')}-{self._what}.txt"
        spill = Spill(self._spill_dir / name)
        for text in self._shown if not spill.problem else ():
            spill.write(text)
        host = os.environ.get(HOST)
        place = f"{spill.path} on {host}" if host else spill.path
        where = (
            f"the rest is lost: {spill.problem}"
            if spill.problem
            else f"the full text is in {place} until the cluster stops"
        )
        self._note(
            f"this cell printed more than {self._cap / 1e6:g} MB here: the notebook "
            f"shows no more of it, and {where}"
        )
        return spill

    def _report_lost(self) -> None:
        """Add a note of the text of the cell that could not be kept.

        Callers hold the lock.
        """
        if self._spill is not None:
            self._spill.flush()
            if self._spill.problem:
                self._note(
                    f"the last {self._spill.lost_bytes / 1e6:.1f} MB that this cell "
                    f"printed here are lost: {self._spill.problem}"
                )
        lost = sum(raw.take_lost() for raw in self._raws)
        if lost:
            self._note(
                f"{lost} bytes that processes of this cell printed here are lost: no "
                "space is left for them on the disk"
            )

    def _note(self, text: str) -> None:
        self._chunks.append(("stderr", f"\n[nbdist] {text}\n"))

    def _end_spill(self) -> None:
        if self._spill is not None:
            self._spill.close()
            self._spill = None


def _flush_c() -> None:
    """Flush the standard streams of C."""
    _libc.fflush(None)


def _joined(chunks: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The chunks, with neighbours of the same stream joined."""
    joined: list[tuple[str, list[str]]] = []
    for name, text in chunks:
        if joined and joined[-1][0] == name:
            joined[-1][1].append(text)
        else:
            joined.append((name, [text]))
    return [(name, "".join(texts)) for name, texts in joined]


_forks = 0
"""The number of forks between the first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class RankRaw(io.RawIOBase):
    """The bytes of a rank's standard stream: what is below `sys.stdout`.

    It stays open. A cell's `io.TextIOWrapper(sys.stdout.buffer)` closes it when it is
    collected.

    Args:
        stream: "stdout" or "stderr".
        descriptor: The descriptor of the file for other writers.
        output: Takes the text.
    """

    mode = "wb"

    def __init__(self, stream: str, descriptor: int, output: Output) -> None:
        super().__init__()
        self.name = f"<{stream}>"
        self._stream = stream
        self._descriptor = descriptor
        self._output = output
        self._forks = _forks
        self._rest = b""
        """The beginning of a character; in a forked child, an unfinished line."""
        self._lost = mmap.mmap(-1, _COUNT.size)  # shared with forked children

    def write(self, octets: ReadableBuffer, /) -> int:
        data = self._rest + octets if self._rest else octets
        if _forks == self._forks:
            text, used = codecs.utf_8_decode(data, "replace", False)
            self._rest = bytes(memoryview(data)[used:])
            self._output.write(self._stream, text)
        else:
            # A forked child, such as a DataLoader worker, has no publisher thread. It
            # writes whole lines, so that lines of several children do not mix.
            whole, end, self._rest = bytes(data).rpartition(b"\n")
            self._write_in_child(whole + end)
        return memoryview(octets).nbytes

    def write_text(self, text: str) -> int:
        """Write text as UTF-8. Faster than `write` on a rank."""
        if _forks == self._forks and not self._rest:
            self._output.write(self._stream, text)
        else:
            self.write(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def _write_in_child(self, octets: bytes) -> None:
        """Write to the descriptor as much as the disk has room for; count the rest.

        Children that lose text at the same moment may count too little.
        """
        left = memoryview(octets)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            (lost,) = _COUNT.unpack_from(self._lost)
            _COUNT.pack_into(self._lost, 0, lost + len(left))

    def take_lost(self) -> int:
        """Bytes that forked children have lost since the last call."""
        (lost,) = _COUNT.unpack_from(self._lost)
        if lost:
            _COUNT.pack_into(self._lost, 0, 0)
        return int(lost)

    def flush(self) -> None:
        if _forks == self._forks:
            self._output.flush()
        else:
            octets, self._rest = self._rest, b""
            self._write_in_child(octets)

    def close(self) -> None:
        if _forks != self._forks:
            self.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor


class RankStream(io.TextIOWrapper):
    """sys.stdout or sys.stderr of a rank."""

    mode = "w"

    def __init__(self, raw: RankRaw) -> None:
        super().__init__(
            raw,  # as with `python -u`, nothing buffers between
            encoding="utf-8",
            errors="backslashreplace",
            newline="\n",
            write_through=True,
        )
        self._write: Callable[[str], int] | None = raw.write_text
        """Writes text as it is; None once other settings apply."""

    def write(self, text: str, /) -> int:
        if self._write is None or type(text) is not str:
            return super().write(text)
        return self._write(text)

    def reconfigure(self, **settings: Any) -> None:
        self._write = None
        super().reconfigure(**settings)

    def detach(self) -> RankRaw:  # type: ignore[override]
        """The stream of bytes. This stream stays usable, for the cells that follow."""
        self.flush()
        return self.buffer  # type: ignore[return-value]


class Tail:
    """Reads what is appended to a file, one whole UTF-8 character at a time."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - kept open
        self._descriptor = self._file.fileno()
        # Earlier text belongs to no cell.
        self._position = self._file.seek(0, os.SEEK_END)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def has_more(self) -> bool:
        """Whether text was appended since the last call of `read`."""
        return self.end() > self._position

    def end(self) -> int:
        """The size of the file."""
        return os.lseek(self._descriptor, 0, os.SEEK_END)

    def read(self) -> str:
        """The text appended since the last call. Writers may append meanwhile."""
        unread = self.end() - self._position
        if unread <= 0:
            return ""
        data = os.pread(self._descriptor, unread, self._position)
        self._position += len(data)
        return self._decoder.decode(data)


class Spill:
    """The file that takes a cell's text beyond the cap, up to `SPILL_LIMIT_BYTES`.

    It never raises. Once the file cannot be written, the bytes that follow are counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """Why the file cannot be written; "" while it can."""
        self.lost_bytes = 0
        """Bytes that were not written because of the problem."""
        self._size = 0
        self._pending = bytearray()
        self._file: io.FileIO | None = None
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = io.FileIO(path, "w")
            self._check_room(self._file)
        except OSError as error:
            self._fail(error)

    def write(self, text: str) -> None:
        """Add text; it is in the file after the next `flush`."""
        if self._size > SPILL_LIMIT_BYTES:
            return
        octets = text.encode("utf-8", "backslashreplace")
        self._size += len(octets)
        if self._size > SPILL_LIMIT_BYTES:
            octets = (
                b"\n[nbdist] 1 GiB is kept of a cell's output; the rest is dropped\n"
            )
        self._pending += octets
        if len(self._pending) >= SPILL_BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was added so far."""
        pending, self._pending = memoryview(self._pending), bytearray()
        try:
            while pending and self._file is not None:
                self._check_room(self._file)
                pending = pending[self._file.write(pending[:SPILL_BUFFER_BYTES]) :]
        except OSError as error:
            self._fail(error)
        self.lost_bytes += len(pending)

    def close(self) -> None:
        """Write what was added, and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()

    def _check_room(self, file: io.FileIO) -> None:
        disk = os.fstatvfs(file.fileno())
        if disk.f_bavail * disk.f_frsize < KEPT_FREE_BYTES:
            raise OSError(
                errno.ENOSPC,
                f"less than {KEPT_FREE_BYTES / 1e6:.0f} MB are free on the disk of "
                f"{self.path.parent}",
            )

    def _fail(self, error: OSError) -> None:
        self.problem = error.strerror or str(error)
        if self._file is not None:
            self._file.close()
            self._file = None
