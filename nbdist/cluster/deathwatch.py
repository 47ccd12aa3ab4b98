"""Watching the ranks' processes: a death is noticed when it happens."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable, Sequence

import psutil

from nbdist.wire import RankInfo

__all__ = ["Deathwatch"]

POLL_S = 0.5


class Deathwatch:
    """Calls `on_death(rank)` from a thread of its own, once for each rank that ends."""

    def __init__(
        self, infos: Sequence[RankInfo], on_death: Callable[[int], None]
    ) -> None:
        self._on_death = on_death
        self._wake_read, self._wake_write = os.pipe()
        self._closed = False
        self._thread = threading.Thread(
            target=self._watch_descriptors
            if hasattr(os, "pidfd_open")
            else self._watch_by_polling,
            args=(list(infos),),
            name="nbdist-deathwatch",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching. A second close is harmless."""
        if not self._closed:
            self._closed = True
            os.write(self._wake_write, b"x")
            self._thread.join()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _watch_descriptors(self, infos: list[RankInfo]) -> None:
        """Linux: a descriptor per process becomes readable when the process ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for info in infos:
                try:
                    descriptor = os.pidfd_open(info.pid)
                except ProcessLookupError:
                    self._on_death(info.rank)
                else:
                    selector.register(descriptor, selectors.EVENT_READ, info.rank)
            while not self._closed:
                for key, _ in selector.select():
                    if key.data is not None:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                        self._on_death(key.data)
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)

    def _watch_by_polling(self, infos: list[RankInfo]) -> None:
        """Elsewhere: look twice a second."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            living = infos
            while not self._closed and not selector.select(POLL_S):
                ended = [info for info in living if not psutil.pid_exists(info.pid)]
                living = [info for info in living if info not in ended]
                for info in ended:
                    self._on_death(info.rank)
