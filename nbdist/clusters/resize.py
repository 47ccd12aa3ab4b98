"""A change of the number of ranks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Resize"]


class Resize(NamedTuple):
    """A change of the world's size."""

    size: int
    """The new number of ranks."""
    leaving: tuple[int, ...] = ()
    """The ranks that are removed."""

    @classmethod
    def to(cls, size: int, before: int) -> Resize:
        """The change to a size. If it is smaller, the last ranks are removed."""
        return cls(size, tuple(range(size, before)))

    def more(self, before: int) -> int:
        """The number of ranks that are added to `before` ranks."""
        return self.size + len(self.leaving) - before
