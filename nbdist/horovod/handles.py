"""Handles of asynchronous calls, which are numbers in Horovod."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from nbdist.errors import UsageError
from nbdist.horovod.coordinator import Coordinator
from nbdist.horovod.negotiation import Request

__all__ = ["begin", "complete", "poll", "synchronize"]

Result = Callable[[], Any]
_numbers = itertools.count()
_open: dict[int, tuple[Coordinator, Request, Result]] = {}


def begin(coordinator: Coordinator, request: Request, result: Result) -> int:
    """Start a call.

    Returns:
        The call's handle. `synchronize` returns `result()` for it.
    """
    coordinator.submit(request)
    handle = next(_numbers)
    _open[handle] = coordinator, request, result
    return handle


def complete(coordinator: Coordinator, request: Request, result: Result) -> Any:
    """Make a call, wait for its end and return `result()`."""
    coordinator.run(request)
    return result()


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous call.

    Returns:
        The result of the same call without "async" in its name; None for a handle that
        was synchronized before.

    Raises:
        CollectiveError: The call has failed.
    """
    found = _open.pop(handle, None)
    if found is None:
        return None
    coordinator, request, result = found
    coordinator.wait(request)
    return result()


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return without a wait.

    Raises:
        UsageError: The handle does not exist, or it was synchronized before.
    """
    found = _open.get(handle)
    if found is None:
        raise UsageError(
            f"handle {handle!r} does not exist, or was synchronized before: pass the "
            "result of an asynchronous call such as hvd.allreduce_async()"
        )
    coordinator, request, _ = found
    return coordinator.poll(request)
