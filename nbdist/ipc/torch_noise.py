"""Lines that torch prints, and that say nothing to the user of a cluster."""

from __future__ import annotations

import re

__all__ = ["without_noise"]

NAMELESS = "The hostname of the client socket cannot be retrieved."
"""What each connection to a TCPStore warns of on hosts without reverse name resolution.
torch has no switch for this line alone."""
_LINE = re.compile(rf"^\[W[^\]\n]*\] \[c10d\] {re.escape(NAMELESS)}[^\n]*\n?", re.M)


def without_noise(text: str) -> str:
    """A text without these lines."""
    return _LINE.sub("", text) if NAMELESS in text else text
