"""Everything a rank prints, on its way to the notebook.

Python's own prints, and what C code and child processes write to descriptors 1 and 2,
become one ordered list of chunks. A publisher thread sends them in batches, so a print
costs a list append. The descriptors are files, not pipes: a writer never blocks, not
even C code that holds the interpreter lock, and at the end of a cell the files are read
to their end, so nothing is lost and nothing is late. What threads print after their
cell has ended waits for the next one: only then does the notebook listen.
"""

from __future__ import annotations

import codecs
import ctypes
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nbdist.config import environment

__all__ = ["Output"]

COALESCE_S = 0.02
ACTIVE_POLL_S = 0.1
SPILL_LIMIT_BYTES = 1 << 30

Publish = Callable[[str, str], None]
"""Called with "stdout" or "stderr", and text."""


class Output:
    """Collects a rank's text and hands it to `publish`, capped for each cell."""

    def __init__(self, publish: Publish, captured: dict[str, Path], spill: Path):
        self._publish = publish
        self._spill_dir = spill
        self._cap = int(float(environment("OUTPUT_CAP_MB", "1")) * 1e6)
        # Reentrant: the garbage collector may run a __del__ that prints anywhere.
        self._lock = threading.RLock()
        self._sending = threading.RLock()
        self._chunks: list[tuple[str, str]] = []
        self._wake = threading.Event()
        self._closed = False
        self._spill: Spill | None = None
        self._what = ""
        self._size = 0
        self._shown: list[str] = []
        self._busy = False
        self._tails = [Tail(name, path) for name, path in captured.items()]
        self.stdout = RankStream("stdout", 1, self)
        self.stderr = RankStream("stderr", 2, self)
        self._thread = threading.Thread(
            target=self._run, name="nbdist-output", daemon=True
        )
        self._thread.start()

    def write(self, name: str, text: str) -> None:
        """Queue text; any thread may call."""
        with self._lock:
            self._read_tails()  # what a child process printed before comes before
            self._add(name, text)
        if not self._wake.is_set():
            self._wake.set()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """A cell runs, or a function: it has a cap of its own.

        At the end all that it printed is sent.
        """
        with self._lock:
            self._end_spill()
            self._what = what
            self._size = 0
            self._shown = [text for _name, text in self._chunks]
            self._busy = True
        self._wake.set()
        try:
            yield
        finally:
            self.drain()
            with self._lock:
                self._busy = False
                if self._spill is not None:
                    self._spill.flush()

    def drain(self) -> None:
        """Send all that was printed so far, by Python or by C."""
        ctypes.CDLL(None).fflush(None)
        self.flush()

    def flush(self) -> None:
        """Send what is queued; what is displayed next then comes after it."""
        with self._sending:
            self._wake.clear()
            if not self._busy:
                return
            with self._lock:
                self._read_tails()
                chunks, self._chunks = self._chunks, []
            for name, text in _joined(chunks):
                self._publish(name, text)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=2)
        self.drain()

    def _run(self) -> None:
        pause = threading.Event()
        while not self._closed:
            if self._wake.wait(ACTIVE_POLL_S if self._busy else None):
                pause.wait(COALESCE_S)  # let a burst of prints travel together
            self.flush()

    def _read_tails(self) -> None:
        for tail in self._tails:
            if text := tail.read():
                self._add(tail.name, text)

    def _add(self, name: str, text: str) -> None:
        self._size += len(text)
        if self._spill is None and self._size > self._cap:
            self._begin_spill()
        if self._spill is not None:
            self._spill.write(text)
            return
        self._shown.append(text)
        self._chunks.append((name, text))

    def _begin_spill(self) -> None:
        name = f"rank{os.environ.get('RANK', '')}-{self._what}.txt"
        self._spill = Spill(self._spill_dir / name)
        for text in self._shown:
            self._spill.write(text)
        self._chunks.append(
            (
                "stderr",
                f"\n[nbdist] this cell printed more than {self._cap / 1e6:g} MB here: "
                f"the notebook shows no more of it, the full text is in "
                f"{self._spill.path} until the cluster stops\n",
            )
        )

    def _end_spill(self) -> None:
        if self._spill is not None:
            self._spill.close()
            self._spill = None


def _joined(chunks: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbouring chunks of one stream, as one."""
    joined: list[tuple[str, list[str]]] = []
    for name, text in chunks:
        if joined and joined[-1][0] == name:
            joined[-1][1].append(text)
        else:
            joined.append((name, [text]))
    return [(name, "".join(texts)) for name, texts in joined]


class RankStream(io.TextIOBase):
    """sys.stdout or sys.stderr of a rank."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, name: str, descriptor: int, output: Output) -> None:
        super().__init__()
        self.name = name
        self._descriptor = descriptor
        self._output = output
        self._pid = os.getpid()

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if os.getpid() == self._pid:
            self._output.write(self.name, text)
        else:
            # A forked child, such as a DataLoader worker, has no publisher thread.
            os.write(self._descriptor, text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        if os.getpid() == self._pid:
            self._output.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._descriptor


class Tail:
    """Reads what is appended to a file, one whole UTF-8 character at a time."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - kept open
        # What was printed before is not for a cell.
        self._position = self._file.seek(0, os.SEEK_END)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """What was appended up to now; a writer that never stops does not hold us."""
        unread = os.fstat(self._file.fileno()).st_size - self._position
        if unread <= 0:
            return ""
        data = self._file.read(unread)
        self._position += len(data)
        return self._decoder.decode(data)


class Spill:
    """The file that takes what a notebook cannot; itself bounded."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8", errors="replace")
        self._size = 0

    def write(self, text: str) -> None:
        if self._size > SPILL_LIMIT_BYTES:
            return
        self._size += len(text)
        if self._size > SPILL_LIMIT_BYTES:
            text = "\n[nbdist] 1 GiB is kept of a cell's output; the rest is dropped\n"
        self._file.write(text)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
