"""All-reduces made ready for one kind of tensor: a call has little to decide then."""

from __future__ import annotations

import math

import torch

from ._connect import Connection
from ._reduction import ReduceOp, parse_op
from ._signature import Signature, signature
from ._transport import Reduction

__all__ = ["Prepared"]

_KEPT = 512
_Found = tuple[Signature, Reduction] | None


class Prepared:
    """What "auto" does for tensors in host memory, found once for each kind of them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._found: dict[object, _Found] = {}

    def find(self, op: ReduceOp, dtype: torch.dtype, shape: tuple[int, ...]) -> _Found:
        """The signature of the call, and what reduces a dense tensor in place.

        None, on all ranks, where the transport must look at the tensor.

        Raises:
            UsageError, UnsupportedCollective: see `parse_op`.
        """
        key = (op, dtype, shape)
        try:
            return self._found[key]
        except KeyError:
            found = self._make(*key)
        if len(self._found) >= _KEPT:  # shapes that never repeat
            self._found.clear()
        self._found[key] = found
        return found

    def _make(self, op: ReduceOp, dtype: torch.dtype, shape: tuple[int, ...]) -> _Found:
        name = parse_op(op, dtype)
        kind = signature("all_reduce", name, None, dtype, shape, "cpu")
        word = kind.word if self._connection.config.check else 0
        transport = self._connection.transport("cpu", "auto")
        found = transport.prepare_all_reduce(name, dtype, math.prod(shape), word)
        return None if found is None else (kind, found)
