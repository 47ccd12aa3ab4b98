"""The notes of a cluster on the hosts of the tests."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["unless_usual"]

USUAL = re.compile("CAP_NET_ADMIN|the clock of")
"""What a start says of each draw of such hosts."""


def unless_usual(notes: list[str]) -> Callable[[str], None]:
    """A function for `Cluster.on_note` that appends a note, unless it is usual."""
    return lambda note: None if USUAL.search(note) else notes.append(note)
