"""CUDA streams for asynchronous collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ._order import settle
from ._wait import Check

__all__ = ["on_side_stream"]


def on_side_stream(body: Callable[[], object], check: Check) -> Callable[[], None]:
    """A body for another thread, ordered as c10d orders an asynchronous collective.

    It comes after the work now queued on the caller's current stream. It returns when
    its own work is done on the device: so the tensors that it holds, which belong to
    the caller's stream, are not given back too soon, and whoever learns that the call
    has ended can use the result on any stream.

    Args:
        body: queues work on the stream that is current.
        check: called while waiting; ends the wait by raising.
    """
    caller = torch.cuda.current_stream()
    side = torch.cuda.Stream(caller.device)
    ready = caller.record_event()

    def run() -> None:
        with torch.cuda.stream(side):
            side.wait_event(ready)
            try:
                body()
                settle(check)
            except BaseException:
                # The tensors may be given back at once: what the caller's stream puts
                # in their place must come after what this one still does to them.
                caller.wait_stream(side)
                raise

    return run
