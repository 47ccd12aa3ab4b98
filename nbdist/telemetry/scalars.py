"""Converts logged values to floats, without waiting for a device."""

from __future__ import annotations

import sys
from typing import Any

from nbdist.errors import UsageError
from nbdist.ipc.gpu_threads import use_gpu

__all__ = ["Deferred", "capture"]


class Deferred:
    """A scalar that is being copied from a CUDA device.

    It is copied to pinned memory on the caller's stream, so that later changes of the
    tensor and work on other threads' streams do not affect the value.
    """

    __slots__ = ("_copy", "_ready")

    def __init__(self, tensor: Any) -> None:
        cuda = sys.modules["torch"].cuda
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._ready = cuda.Event()
        self._ready.record(cuda.current_stream(tensor.device))

    def value(self) -> float:
        """Wait for the copy. Returns NaN if the device has failed.

        Only a thread of nbdist's own may call: see `use_gpu`.
        """
        try:
            use_gpu(self._ready.device)
            self._ready.synchronize()
        except RuntimeError:  # the user's thread gets the same CUDA error
            return float("nan")
        return float(self._copy.item())


def capture(name: str, value: object) -> float | Deferred:
    """The value as a float, or as a `Deferred` if it is on a CUDA device.

    Args:
        name: The metric's name, for an error's message.
        value: A number, a numpy scalar, or a tensor or array of one element.

    Raises:
        UsageError: The value is none of these.
    """
    if isinstance(value, (float, int)):
        return _as_float(name, value)
    if hasattr(value, "detach"):
        return _from_tensor(name, value)
    if getattr(value, "size", 1) != 1:
        raise _refusal(name, value, "reduce it to one number first, as with .mean()")
    return _as_float(name, value.item() if hasattr(value, "item") else value)


def _from_tensor(name: str, tensor: Any) -> float | Deferred:
    if tensor.numel() != 1:
        raise _refusal(name, tensor, "reduce it to one number first, as with .mean()")
    if hasattr(type(tensor), "full_tensor"):
        raise _refusal(name, tensor, "log its .full_tensor(), taken on every rank")
    if tensor.is_cuda and not tensor.is_complex():
        if sys.modules["torch"].cuda.is_current_stream_capturing():
            raise UsageError(
                f"log({name}=...) in the capture of a CUDA graph, which has no value "
                "yet: log after graph.replay()."
            )
        return Deferred(tensor)
    number = None if tensor.is_meta else tensor.item()
    if isinstance(number, (float, int)):
        return float(number)
    raise _refusal(name, tensor, "log a real number")


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise _refusal(name, value, "log a real number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _refusal(name, value, "log a real number") from error


def _refusal(name: str, value: Any, advice: str) -> UsageError:
    shape = getattr(value, "shape", None)
    what = type(value).__name__ + (f" of shape {tuple(shape)}" if shape else "")
    return UsageError(f"log({name}=...) takes one number, not a {what}: {advice}.")
