"""Where a rank's main thread spends its time, from looks at its Python stack.

Looks at random moments show the share of each activity, as in a sampling profiler. They
need no change of the user's code, and cost the main thread nothing between two looks.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from types import FrameType
from typing import NamedTuple

from nbdist.wire import TimeSplit

__all__ = ["RunningCode", "TimeSplitter"]

LOOKS = 100
"""The number of looks that a split covers. A share of a half is right to 10 %."""
FEWEST_LOOKS = 20


class RunningCode(NamedTuple):
    """What the main thread runs."""

    key: Hashable
    """Another request has another key."""
    frame: FrameType
    """The innermost frame."""


class TimeSplitter:
    """Counts what the main thread does.

    Args:
        running_code: What the main thread runs now; None while it is idle.
        line_of: A user's line in words, from its file name and number; "" for a line
            that is not the user's.
        folders: The activity, "communication", "data" or "backward", of the files in a
            folder or of one file. The innermost of these files counts. All other code
            computes.
        waits_in_backward: Whether the main thread, which is in a backward pass, waits
            for a collective there. C++ code waits, so that no frame shows it.
        end: A folder. Frames from its files outwards are not looked at.
    """

    def __init__(
        self,
        running_code: Callable[[], RunningCode | None],
        line_of: Callable[[str, int], str],
        folders: Mapping[str, str],
        waits_in_backward: Callable[[], bool],
        end: str,
    ) -> None:
        self._running_code = running_code
        self._line_of = line_of
        self._folders = {**folders, end: "end"}
        self._waits_in_backward = waits_in_backward
        self._kinds: dict[str, str] = {}
        self._key: Hashable = None
        self._looks: deque[tuple[str, str]] = deque(maxlen=LOOKS)

    def look(self) -> bool:
        """Look once. Returns whether the main thread runs code."""
        code = self._running_code()
        if code is None:
            return False
        if code.key != self._key:
            self._key = code.key
            self._looks.clear()
        self._looks.append(self._seen(code.frame))
        return True

    def split(self) -> TimeSplit | None:
        """The split of the last looks at the request that began last."""
        looks = list(self._looks)
        if len(looks) < FEWEST_LOOKS:
            return None
        kinds = Counter(kind for kind, _place in looks)
        places = Counter(p for kind, p in looks if p and kind != "communication")
        place, count = next(iter(places.most_common(1)), ("", 0))
        return TimeSplit(
            compute=kinds["compute"] / len(looks),
            communication=kinds["communication"] / len(looks),
            data=kinds["data"] / len(looks),
            place=place,
            place_share=count / len(looks),
        )

    def _seen(self, innermost: FrameType) -> tuple[str, str]:
        """The activity, and the innermost line of the user."""
        kind, place = "", ""
        frame: FrameType | None = innermost
        while frame is not None:
            name = frame.f_code.co_filename
            found = self._kind(name)
            if found == "end":
                break
            kind = kind or found
            place = place or self._line_of(name, frame.f_lineno)
            frame = frame.f_back
        if kind == "backward" and self._waits_in_backward():
            kind = "communication"
        return kind if kind in ("communication", "data") else "compute", place

    def _kind(self, filename: str) -> str:
        kind = self._kinds.get(filename)
        if kind is None:
            kind = next(
                (
                    kind
                    for path, kind in self._folders.items()
                    if filename == path or filename.startswith(path + os.sep)
                ),
                "",
            )
            self._kinds[filename] = kind
        return kind
