"""Values to the ranks and back, and what to say when they cannot travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbdist.engine import codec, shipping
from nbdist.errors import TransferError
from nbdist.wire import Failure

__all__ = ["encode", "incoming", "outgoing", "refuse", "translate"]


def encode(value: object, what: str) -> list[bytes]:
    """Pickled frames.

    Raises:
        TransferError: It cannot be pickled.
    """
    try:
        return [bytes(frame) for frame in codec.dumps(value)]
    except Exception as error:
        raise TransferError(f"{what} cannot be pickled: {error}") from error


@contextmanager
def outgoing(values: Mapping[str, Any], run_dir: Path) -> Iterator[shipping.Shipment]:
    """A shipment of named values; its file is removed at the end.

    Raises:
        TransferError: A value cannot be pickled; the message says which.
    """
    try:
        frames = codec.dumps(dict(values))
    except Exception as error:
        raise TransferError(_which_fails(values)) from error
    shipment = shipping.load(frames, run_dir)
    try:
        yield shipment
    finally:
        shipping.discard(shipment)


def incoming(shipments: Sequence[shipping.Shipment]) -> list[Any]:
    """The values that ranks packed for us.

    Raises:
        TransferError: A value cannot be unpickled here.
    """
    try:
        return [shipping.unload(shipment) for shipment in shipments]
    except Exception as error:
        raise TransferError(
            f"the value cannot be unpickled in this process ({type(error).__name__}: "
            f"{error}): fetch plain values, arrays or tensors"
        ) from error
    finally:
        refuse(shipments)


def refuse(values: Iterable[Any]) -> None:
    """Discard the shipments among these."""
    for value in values:
        if isinstance(value, shipping.Shipment):
            shipping.discard(value)


def translate(failures: Sequence[Failure]) -> TransferError | None:
    """The error of a transfer that failed on ranks; None when it was something else."""
    lost = [failure for failure in failures if failure.ename == "TransferError"]
    if len(lost) < len(failures):
        return None
    return TransferError("\n".join(failure.evalue for failure in lost))


def _which_fails(values: Mapping[str, Any]) -> str:
    for name, value in values.items():
        try:
            codec.dumps(value)
        except Exception as error:  # noqa: BLE001 - any pickling error is the answer
            kind = type(value)
            return (
                f"{name!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be "
                f"pickled: {error}"
            )
    return "the values cannot be pickled together"
