"""How a thread of nbdist's own uses CUDA beside the user's threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from typing import Any

__all__ = ["own_stream", "relax_captures", "use_gpu"]

_RELAXED = 2
"""`cudaStreamCaptureModeRelaxed`, and HIP's."""


def use_gpu(device: Any) -> None:
    """Make a GPU this thread's, before its first call of CUDA.

    CUDA begins a thread with GPU 0, on which its first call, such as the query of an
    event, would make a context. It takes hundreds of MB of another rank's GPU.
    """
    torch = sys.modules["torch"]
    torch.cuda.set_device(device)
    relax_captures()


def relax_captures() -> None:
    """Let this thread call CUDA while another one captures a CUDA graph.

    Otherwise most calls that wait, such as the query of an event, are an error then,
    and invalidate the user's graph. The thread's GPU must be set. The main thread,
    which is the user's, stays as it is.
    """
    exchange = _exchange_mode()
    if (
        exchange is not None
        and threading.current_thread() is not threading.main_thread()
    ):
        exchange(ctypes.byref(ctypes.c_int(_RELAXED)))


def own_stream(device: Any) -> Any:
    """A stream of torch's that the user does not capture.

    torch has 32 streams of each priority, and gives them out again and again. One of
    the usual priority may be the stream of a capture, whose graph would get nbdist's
    work.
    """
    return sys.modules["torch"].cuda.Stream(device, priority=-1)


@functools.cache
def _exchange_mode() -> Any:
    """CUDA's function that sets a thread's mode; None if it cannot be found."""
    torch = sys.modules["torch"]
    vendor = "hip" if torch.version.hip else "cuda"
    # torch loads CUDA's runtime for all libraries. HIP's is one that torch's depend on.
    for library in (None, torch._C.__file__):
        with contextlib.suppress(AttributeError, OSError):
            return getattr(
                ctypes.CDLL(library), f"{vendor}ThreadExchangeStreamCaptureMode"
            )
    return None
