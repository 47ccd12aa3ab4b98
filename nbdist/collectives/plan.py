"""What a call of a reduction comes to, decided once for each kind of tensor."""

from __future__ import annotations

from typing import NamedTuple

from nbdist.collectives.signature import Signature
from nbdist.collectives.transports.base import Transport

__all__ = ["Plan"]


class Plan(NamedTuple):
    """A checked reduction of tensors of one dtype, shape and device."""

    kind: Signature
    """What all ranks must agree on."""
    op: str
    """The reduce-op, as transports know it."""
    transport: Transport
