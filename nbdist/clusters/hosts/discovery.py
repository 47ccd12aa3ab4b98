"""Follows a script that prints the hosts, as horovodrun's --host-discovery-script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from nbdist.clusters.hosts.host_list import HostSlots, discover_hosts
from nbdist.errors import NbdistError, UsageError
from nbdist.ipc.locks import Event

__all__ = ["HostDiscovery"]

PERIOD_S = 2.0
"""Seconds between two runs of the script."""


class HostDiscovery:
    """Runs the script again and again, on a thread.

    Args:
        script: The path of the script.
        hosts: What it has printed last.
        adopt: Called with the hosts when they have changed.
        again: Called with the same hosts: whether to call `adopt` again with them.
        on_note: Called when the script fails for the first time in a row.
    """

    def __init__(
        self,
        script: str,
        hosts: Sequence[HostSlots],
        adopt: Callable[[Sequence[HostSlots]], None],
        again: Callable[[Sequence[HostSlots]], bool],
        on_note: Callable[[str], None],
    ) -> None:
        self._script, self._hosts = script, list(hosts)
        self._adopt, self._again, self._on_note = adopt, again, on_note
        self._ended = Event()
        self._thread = threading.Thread(
            target=self._run, name="nbdist-host-discovery", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Run the script no more. A second close does nothing."""
        self._ended.set()

    def _run(self) -> None:
        failed = False
        while not self._ended.wait(PERIOD_S):
            try:
                found = discover_hosts(self._script)
            except UsageError as error:
                if not failed:
                    self._on_note(f"{error}; the ranks stay where they are")
                failed = True
                continue
            failed = False
            is_new = found != self._hosts or self._again(found)
            if is_new and not self._ended.is_set():
                self._hosts = found
                try:
                    self._adopt(found)
                except NbdistError as error:  # a rank died, or a setup cell failed
                    self._on_note(f"the discovered hosts were not adopted: {error}")
