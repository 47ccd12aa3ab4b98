"""CUDA streams for asynchronous collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ._handle import Handle

__all__ = ["on_side_stream"]


def on_side_stream(body: Callable[[], object], handle: Handle) -> Callable[[], None]:
    """A body for another thread, ordered as c10d orders an asynchronous collective.

    It comes after the work now queued on the caller's current stream; work that is
    queued after `handle.wait()` comes after it.
    """
    caller = torch.cuda.current_stream()
    side = torch.cuda.Stream(caller.device)
    ready = caller.record_event()
    done = torch.cuda.Event()
    handle.after = lambda: torch.cuda.current_stream().wait_event(done)

    def run() -> None:
        with torch.cuda.stream(side):
            side.wait_event(ready)
            body()
            done.record(side)

    return run
