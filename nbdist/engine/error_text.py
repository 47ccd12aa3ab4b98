"""The text of an error, with bounds of time and size.

An error's `__str__` is the user's code: it may block, or catch the interrupt that
should end it. A traceback may have a million frames.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from nbdist.engine.user_code import step
from nbdist.errors import TransferError, encodable

__all__ = ["ErrorText", "shortened", "text_within_bounds"]

MESSAGE_S = 3.0
"""The most seconds that an error's `__str__` may take."""
FORMAT_S = 10.0
"""The most seconds that the formatting of a traceback may take."""
MOST_LETTERS = 100_000
END_FRAMES = 50
"""The frames that are shown of the begin and of the end of a long traceback."""


class ErrorText(NamedTuple):
    """An error in words."""

    name: str
    message: str
    lines: list[str]
    """The traceback."""


def text_within_bounds(
    error: BaseException,
    trace: TracebackType | None,
    form: Callable[[TracebackType | None], list[str]],
) -> ErrorText:
    """The text of an error. It never raises.

    An interrupt meanwhile becomes a KeyboardInterrupt whose message says what ran.

    Args:
        error: The error.
        trace: The frames to show.
        form: Formats the error with these frames. Plain lines are used where it raises
            or takes too long.
    """
    name = type(error).__name__
    trace = shortened(trace)
    message = None
    try:
        message = _message(error)
        if message is not None:
            with step(f"formatting {name}", FORMAT_S):
                return ErrorText(name, message, _cut(form(trace)))
    except TransferError:
        pass
    except KeyboardInterrupt as interrupt:
        return ErrorText("KeyboardInterrupt", str(interrupt), [])
    except BaseException:  # noqa: BLE001, S110 - of a user's `_render_traceback_`
        pass
    if message is None:
        message = f"<its __str__ took longer than {MESSAGE_S:g} s>"
    frames = traceback.format_list(traceback.extract_tb(trace))
    lines = "".join(["Traceback (most recent call last):\n", *frames]).splitlines()
    return ErrorText(name, message, [*map(encodable, lines), f"{name}: {message}"])


def _cut(lines: list[str]) -> list[str]:
    """The lines; of a long text the beginning and the end."""
    text = "\n".join(lines)
    if len(text) <= 2 * MOST_LETTERS:
        return [*map(encodable, lines)]
    left_out = f"… ({len(text) - 2 * MOST_LETTERS:,} characters are left out)"
    ends = text[:MOST_LETTERS], left_out, text[-MOST_LETTERS:]
    return [*map(encodable, ends)]


def _message(error: BaseException) -> str | None:
    """`str(error)`; None if it takes too long.

    Raises:
        KeyboardInterrupt: It was interrupted.
    """
    try:
        with step(f"calling {type(error).__name__}.__str__", MESSAGE_S):
            try:
                text = str(error)
            except KeyboardInterrupt:  # also Overdue
                raise
            except BaseException as second:  # noqa: BLE001 - the user's own
                return f"<its __str__ raised {type(second).__name__}>"
    except TransferError:
        return None
    if len(text) > MOST_LETTERS:
        text = f"{text[:MOST_LETTERS]}… (cut after {MOST_LETTERS:,} characters)"
    return encodable(text)


def shortened(trace: TracebackType | None) -> TracebackType | None:
    """A traceback with the first and the last frames of a long one."""
    parts: list[TracebackType] = []
    while trace is not None:
        parts.append(trace)
        trace = trace.tb_next
    if len(parts) <= 2 * END_FRAMES:
        return parts[0] if parts else None
    kept: TracebackType | None = parts[-END_FRAMES]
    for each in reversed(parts[:END_FRAMES]):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept
