"""Arguments that must be whole numbers."""

from __future__ import annotations

import operator

from nbdist.errors import UsageError

__all__ = ["whole"]


def whole(name: str, value: object, least: int, other: str = "") -> int:
    """The argument as an int; numpy's integers are whole numbers too.

    Args:
        name: of the argument, for the error.
        least: the smallest that makes sense.
        other: what else may stand there, such as ' or "auto"'.

    Raises:
        UsageError: it is none, or too small.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UsageError(
            f"{name}={value!r}: expected a whole number, {least} or more{other}"
        )
    return number
