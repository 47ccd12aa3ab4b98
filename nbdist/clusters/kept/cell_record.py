"""A cell of a kept cluster: what it has shown, for a notebook that attaches later."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nbdist.clusters.futures import CallFuture
from nbdist.clusters.kept.messages import Cell, Item, Reply, Shown
from nbdist.clusters.kept.peer import Peer

__all__ = ["CellRecord"]


class CellRecord:
    """Keeps what a cell shows in a file, and passes it on to a notebook.

    Args:
        cell: The cell.
        path: The file, in the server's folder.
    """

    def __init__(self, cell: Cell, path: Path) -> None:
        self._cell = cell
        self._file = path.open("w+b")
        self._path = path
        self._size = 0
        self._lock = threading.Lock()
        self._sink: tuple[Peer, int] | None = None
        """The notebook that follows the cell, and its number of the call."""
        self._reply: Reply | None = None
        self.future: CallFuture[None] | None = None
        """The call that runs the cell."""
        self._failure = ""
        """Why not everything could be kept."""

    @property
    def cell(self) -> Cell:
        return replace(self._cell, is_done=self._reply is not None)

    def append(self, item: Item) -> None:
        """Keep an item, and pass it on. It does not wait for the notebook."""
        with self._lock:
            if not self._failure:
                self._keep(item)
            if self._sink is not None:
                peer, number = self._sink
                peer.send(Shown(number, item))

    def ask(self, item: Item) -> Peer | None:
        """Pass an item on without keeping it.

        Returns:
            The notebook that follows the cell; None if there is none.
        """
        with self._lock:
            if self._sink is None:
                return None
            peer, number = self._sink
            peer.send(Shown(number, item))
            return peer

    def conclude(self, reply: Reply) -> None:
        """Keep the end of the cell, and pass it on."""
        with self._lock:
            self._reply = reply
            if self._sink is not None:
                peer, number = self._sink
                peer.send(replace(reply, number=number))

    def follow(self, peer: Peer, number: int) -> None:
        """Pass everything on to a notebook, from the first item on.

        It waits for the notebook, without delaying the cell.

        Args:
            peer: The notebook.
            number: The notebook's number of the call.

        Raises:
            OSError: The notebook has ended.
        """
        begin = 0
        while True:
            with self._lock:
                end = self._size
                if begin == end:
                    if self._failure:
                        peer.send(Shown(number, Item("notice", self._failure)))
                    if self._reply is not None:
                        peer.send(replace(self._reply, number=number))
                    self._sink = peer, number
                    return
            for item in self._items(begin, end):
                peer.send_in_turn(Shown(number, item))
            begin = end

    def leave(self, peer: Peer) -> None:
        """Pass nothing more on to this notebook."""
        with self._lock:
            if self._sink is not None and self._sink[0] is peer:
                self._sink = None

    def remove(self) -> None:
        """Remove the file. Call it when the cell's end was seen."""
        with self._lock:
            self._failure = "it was removed"
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _keep(self, item: Item) -> None:
        try:
            self._file.seek(self._size)
            pickle.dump(item, self._file, pickle.HIGHEST_PROTOCOL)
            self._file.flush()
        except OSError as error:
            self._failure = f"the output after this was not kept: {error.strerror}"
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
        else:
            self._size = self._file.tell()

    def _items(self, begin: int, end: int) -> Iterator[Item]:
        with self._path.open("rb") as file:
            file.seek(begin)
            while file.tell() < end:
                yield pickle.load(file)
