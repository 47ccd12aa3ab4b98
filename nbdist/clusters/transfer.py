"""Sends values to the ranks and back, and names those that cannot be pickled."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbdist.errors import (
    CellInterrupted,
    CellTimeout,
    TransferError,
    UsageError,
    message_of,
    text_of,
)
from nbdist.ipc import serialization, shm_payload
from nbdist.ipc.interrupts import defer_interrupts, interrupt
from nbdist.ipc.locks import Event
from nbdist.wire import Failure, format_ranks

__all__ = ["Allowance", "encode", "incoming", "outgoing", "refuse", "translate"]

INSIST_S = 0.1


class Allowance:
    """The time limit of one transfer, in this process and on the ranks.

    Args:
        what: The name of the transfer in errors, such as "push".
        timeout_s: Seconds from now; None sets no limit.

    Raises:
        UsageError: The time is not above 0.
    """

    def __init__(self, what: str, timeout_s: float | None) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise UsageError(f"--timeout {timeout_s:g}: expected seconds above 0")
        self.what = what
        self._timeout_s = timeout_s
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, at least 0.001; None for no limit."""
        return None if self._end is None else max(0.001, self._end - time.monotonic())

    def extend(self, seconds: float) -> None:
        """Leave out time that the user took to answer a rank."""
        if self._end is not None:
            self._end += seconds

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """Run user code in this process, such as a value's `__reduce__`.

        In the main thread the time-out interrupts the code. In another thread it is
        noticed at the end of the block.

        Args:
            doing: The name of the step in errors, such as "pickling 'x'".

        Raises:
            CellInterrupted: The user has interrupted it.
            CellTimeout: The time was up.
        """
        timer = _Timer(self.left_s)
        try:
            timer.start()
            try:
                yield
            finally:
                timer.stop()
        except KeyboardInterrupt as interrupt:
            timer.stop()  # the timer's signal may have come before the first stop
            if not timer.rang:
                raise CellInterrupted(
                    f"{self.what} was interrupted while {doing} in this process"
                ) from interrupt
        if timer.rang:
            raise CellTimeout(
                f"{self.what} was not finished after {self._timeout_s:g} s: {doing} in "
                "this process"
            )


class _Timer:
    """Raises KeyboardInterrupt in the main thread when the time is up."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._over = Event()
        self._clock: threading.Thread | None = None
        self.rang = False
        """Whether the time was up before the end."""

    def start(self) -> None:
        if self._end is not None and _can_interrupt():
            self._clock = threading.Thread(
                target=self._tick, args=(self._end,), name="nbdist-timer", daemon=True
            )
            self._clock.start()

    def stop(self) -> None:
        """Send no more signals. A second stop does nothing."""
        with defer_interrupts():  # one of the clock's is raised at the end
            self._over.set()
            if self._clock is not None:
                self._clock.join()
            self.rang = self._end is not None and time.monotonic() >= self._end

    def _tick(self, end: float) -> None:
        pause_s = end - time.monotonic()
        while not self._over.wait(pause_s):
            # Sent to that thread, so that a system call in which it is blocked returns.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            pause_s = INSIST_S


def _can_interrupt() -> bool:
    """Whether SIGINT raises KeyboardInterrupt in this thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    raises = handler in (signal.default_int_handler, interrupt)
    return raises and hasattr(signal, "pthread_kill")


def encode(value: object, what: str, allowance: Allowance) -> tuple[bytes, ...]:
    """Pickle a value into frames.

    Raises:
        TransferError: The value cannot be pickled.
        CellInterrupted, CellTimeout: As `Allowance.step` does.
    """
    with allowance.step(f"pickling {what}"), _named(f"{what} cannot be pickled"):
        return tuple(bytes(frame) for frame in serialization.dumps(value))


@contextmanager
def outgoing(
    values: Mapping[str, Any], run_dir: Path, allowance: Allowance
) -> Iterator[shm_payload.Shipment]:
    """Pack named values into a shipment, whose file is removed at the end.

    Raises:
        TransferError: A value cannot be pickled; the message says which.
        CellInterrupted, CellTimeout: As `Allowance.step` does.
    """

    @contextmanager
    def each(name: str) -> Iterator[None]:
        kind = type(values[name])
        refusal = (
            f"{name!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be "
            "pickled"
        )
        with allowance.step(f"pickling {name!r}"), _named(refusal):
            yield

    frames = serialization.dumps_named(values, each=each)
    shipment = shm_payload.load(frames, run_dir)
    try:
        yield shipment
    finally:
        shm_payload.discard(shipment)


def incoming(
    shipments: Sequence[shm_payload.Shipment], what: str, allowance: Allowance
) -> list[Any]:
    """Unpack the values that ranks have sent.

    Raises:
        TransferError: A value cannot be unpickled here.
        CellInterrupted, CellTimeout: As `Allowance.step` does.
    """
    try:
        with allowance.step(f"unpickling {what}"):
            return [_unpacked(shipment) for shipment in shipments]
    finally:
        refuse(shipments)


def _unpacked(shipment: shm_payload.Shipment) -> Any:
    try:
        return shm_payload.unload(shipment)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # User code may raise anything, also SystemExit.
        raise TransferError(
            f"the value cannot be unpickled in this process ({text_of(error)}): fetch "
            "plain values, arrays or tensors"
        ) from error


def refuse(values: Iterable[Any]) -> None:
    """Discard those of the values that are shipments."""
    for value in values:
        if isinstance(value, shm_payload.Shipment):
            shm_payload.discard(value)


def translate(failures: Sequence[Failure]) -> TransferError | None:
    """The TransferError of these failures; None if one is another error."""
    if any(failure.ename != "TransferError" for failure in failures):
        return None
    alike: dict[str, list[int]] = {}
    for failure in failures:
        alike.setdefault(failure.evalue, []).append(failure.rank)
    return TransferError(
        "\n".join(
            f"on rank {format_ranks(ranks)}: {text}" for text, ranks in alike.items()
        )
    )


@contextmanager
def _named(refusal: str) -> Iterator[None]:
    """Turn any error of a value's own code into a TransferError."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # User code may raise anything, also SystemExit.
        raise TransferError(f"{refusal}: {message_of(error)}") from error
