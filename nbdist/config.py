"""What can be set, and the environment variables that set it.

Every NBDIST_* variable is read here, once, when `from_environment` is called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["CollectiveConfig", "environment"]


def environment(name: str, default: str) -> str:
    """The value of NBDIST_<name>, or the default where it is unset or empty."""
    return os.environ.get(f"NBDIST_{name}") or default


@dataclass(frozen=True)
class CollectiveConfig:
    """How collectives choose and pace their transports."""

    transport: str = "auto"
    """Force one transport for every collective (NBDIST_TRANSPORT)."""
    timeout_s: float | None = None
    """Seconds a collective waits for its peers; None waits until it is released."""

    @classmethod
    def from_environment(cls) -> CollectiveConfig:
        timeout = environment("COLLECTIVE_TIMEOUT", "")
        return cls(
            transport=environment("TRANSPORT", "auto"),
            timeout_s=float(timeout) if timeout else None,
        )
