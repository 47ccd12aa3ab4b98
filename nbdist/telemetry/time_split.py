"""Where a rank's main thread spends its time, from looks at its Python stack.

Looks at random moments show the share of each activity, as in a sampling profiler. They
need no change of the user's code, and cost the main thread nothing between two looks.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from types import FrameType
from typing import NamedTuple

from nbdist.wire import TimeSplit

__all__ = ["RunningCode", "TimeSplitter"]

LOOKS = 100
"""The number of looks that a split covers. A share of a half is right to 10 %."""
FEWEST_LOOKS = 20
REASONS = {
    "files": "it reads or writes files",
    "sleep": "it sleeps",
    "outside": "it waits for a program or a connection",
    "debugger": "it is in the debugger",
    "input": "it waits for input",
}
"""The kinds of time that is neither compute, communication nor data."""


class RunningCode(NamedTuple):
    """What the main thread runs."""

    key: Hashable
    """Another request has another key."""
    frames: Sequence[FrameType]
    """Innermost first."""


class _Look(NamedTuple):
    kind: str
    """"compute", "communication", "data", or one of `REASONS`."""
    place: str
    """The innermost line of the user; "" if there is none."""


class TimeSplitter:
    """Counts what the main thread does.

    Args:
        running_code: What the main thread runs now; None while it is idle.
        line_of: A user's line in words, from its file name and number; "" for a line
            that is not the user's.
        folders: The activity, "communication", "data", "backward" or one of `REASONS`,
            of the files in a folder or of one file. The innermost of these files
            counts, and the first of the folders that has a file.
        blocked_in: What keeps the main thread from running, one of `REASONS`; "" if it
            runs. Asked if none of the files is on the stack.
        waits_in_backward: Whether the main thread, which is in a backward pass, waits
            for a collective there. C++ code waits, so that no frame shows it.
        device_share: The share of the last seconds in which the GPU was in a
            collective. The host may run ahead of it. 0.0 without a GPU.
        end: A folder. Frames from its files outwards are not looked at.
    """

    def __init__(
        self,
        running_code: Callable[[], RunningCode | None],
        line_of: Callable[[str, int], str],
        folders: Mapping[str, str],
        *,
        blocked_in: Callable[[], str],
        waits_in_backward: Callable[[], bool],
        device_share: Callable[[], float],
        end: str,
    ) -> None:
        self._running_code = running_code
        self._line_of = line_of
        self._folders = {**folders, end: "end"}
        self._blocked_in = blocked_in
        self._waits_in_backward = waits_in_backward
        self._device_share = device_share
        self._kinds: dict[str, str] = {}
        self._key: Hashable = None
        self._looks: deque[_Look] = deque(maxlen=LOOKS)
        self._fresh = 0
        """The number of looks since `latest`."""

    def look(self) -> bool:
        """Look once. Returns whether the main thread runs code."""
        code = self._running_code()
        if code is None:
            return False
        if code.key != self._key:
            self._key = code.key
            self._looks.clear()
            self._fresh = 0
        self._looks.append(self._seen(code.frames))
        self._fresh += 1
        return True

    def split(self) -> TimeSplit | None:
        """The split of the last looks at the request that began last."""
        looks = list(self._looks)
        return self._split(looks) if len(looks) >= FEWEST_LOOKS else None

    def latest(self) -> TimeSplit | None:
        """The split of the looks since the last call; None if there was none."""
        looks = list(self._looks)[-self._fresh :] if self._fresh else []
        self._fresh = 0
        return self._split(looks) if looks else None

    def _split(self, looks: Sequence[_Look]) -> TimeSplit:
        counts = Counter(looks)  # with few different ones
        kinds: Counter[str] = Counter()
        places: Counter[str] = Counter()
        call_places: Counter[str] = Counter()
        for look, count in counts.items():
            kinds[look.kind] += count
            if look.place:
                calls = look.kind == "communication"
                (call_places if calls else places)[look.place] += count
        compute, communication, data = (
            kinds[kind] / len(looks) for kind in ("compute", "communication", "data")
        )
        # The host computes, or waits for a GPU that is in a collective.
        hidden = min(compute, max(0.0, self._device_share() - communication))
        others = Counter({kind: kinds[kind] for kind in REASONS if kinds[kind]})
        reason, _ = _most_frequent(others)
        place, count = _most_frequent(places)
        return TimeSplit(
            compute=compute - hidden,
            communication=communication + hidden,
            data=data,
            other=others.total() / len(looks),
            reason=REASONS.get(reason, ""),
            place=place,
            place_share=count / len(looks),
            call_place=_most_frequent(call_places)[0],
        )

    def _seen(self, frames: Sequence[FrameType]) -> _Look:
        kind, place = "", ""
        for frame in frames:
            name = frame.f_code.co_filename
            found = self._kind(name)
            if found == "end":
                break
            if not kind or (kind, found) == ("input", "debugger"):
                kind = found
            place = place or self._line_of(name, frame.f_lineno)
        if kind == "backward":
            kind = "communication" if self._waits_in_backward() else "compute"
        return _Look(kind or self._blocked_in() or "compute", place)

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


def _most_frequent(counts: Counter[str]) -> tuple[str, int]:
    return max(counts.items(), key=itemgetter(1), default=("", 0))
