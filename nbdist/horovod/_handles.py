"""Handles of asynchronous calls: numbers, as in Horovod."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from nbdist.errors import UsageError

from ._coordinator import Coordinator
from ._request import Request

__all__ = ["begin", "complete", "poll", "synchronize"]

Result = Callable[[], Any]
_numbers = itertools.count()
_open: dict[int, tuple[Coordinator, Request, Result]] = {}


def begin(coordinator: Coordinator, request: Request, result: Result) -> int:
    """Begin a call.

    Returns:
        Its handle, with which `synchronize` returns `result()`.
    """
    coordinator.submit(request)
    handle = next(_numbers)
    _open[handle] = coordinator, request, result
    return handle


def complete(coordinator: Coordinator, request: Request, result: Result) -> Any:
    """Make a call; `result()` when it is done."""
    coordinator.run(request)
    return result()


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous call.

    Returns:
        The tensor or tensors that the same call without "async" returns; None for a
        handle that was synchronized before.

    Raises:
        CollectiveError: What ended it.
    """
    found = _open.pop(handle, None)
    if found is None:
        return None
    coordinator, request, result = found
    coordinator.wait(request)
    return result()


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once. Does not wait.

    Raises:
        UsageError: It was synchronized before, or never made.
    """
    found = _open.get(handle)
    if found is None:
        raise UsageError(f"handle {handle!r} was not made, or was synchronized before")
    coordinator, request, _ = found
    return coordinator.poll(request)
