"""Checks of arguments."""

from __future__ import annotations

import operator

from nbdist.errors import UsageError

__all__ = ["whole_number"]


def whole_number(name: str, value: object, least: int, other: str = "") -> int:
    """Return an argument as an int. numpy's integers are whole numbers too.

    Args:
        name: name of the argument, for the error.
        value: the argument.
        least: the smallest value that is allowed.
        other: other values that the argument may have, for the error, such as
            ' or "auto"'.

    Raises:
        UsageError: the argument is not a whole number, or it is too small.
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
