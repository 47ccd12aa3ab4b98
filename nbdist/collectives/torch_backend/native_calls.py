"""The collectives that a process group has given to NCCL, for comparisons of ranks.

NCCL compares no calls. Ranks whose calls differ wait forever or get wrong results.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nbdist.collectives.reduction import c10d_name

__all__ = ["NativeCalls"]

_KEPT = 2_000
"""torch's record of NCCL's calls has as many by default."""
_OPS = dist.ReduceOp, dist.ReduceOp.RedOpType
_EQUAL = frozenset({
    "allreduce", "broadcast", "reduce", "_allgather_base", "_reduce_scatter_base",
    "all_gather_single", "reduce_scatter_single",
})  # fmt: skip
"""The collectives whose tensors have the same size and dtype on all ranks."""


class NativeCalls:
    """The collectives of one process group, on this rank."""

    def __init__(self) -> None:
        self.digest = 0
        """Of all calls so far. It is equal on ranks that have made the same calls."""
        self._details: deque[tuple[int, str]] = deque(maxlen=_KEPT)

    def note(
        self, sequence: int, name: str, tensor: Tensor | None, options: Iterable[object]
    ) -> None:
        """Note a call.

        Args:
            sequence: NCCL's number of the call in its group. Calls that are coalesced
                have one number.
            name: The method of the process group.
            tensor: The call's first tensor; None if it has none.
            options: The method's other arguments, among which are c10d's options.
        """
        details = ", ".join(_details(options))
        self._details.append((sequence, details))
        size = ""
        if tensor is not None and name in _EQUAL:
            size = f"{tensor.dtype} {tensor.numel()}"
        self.digest = zlib.crc32(f"{name} {details} {size};".encode(), self.digest)

    @property
    def details(self) -> dict[int, str]:
        """The reduce-op and the root of the last calls, as text, by their numbers."""
        return dict(self._details)


def _details(options: Iterable[Any]) -> Iterator[str]:
    """The reduce-op and the root in the arguments of a call."""
    for each in options:
        op, root = getattr(each, "reduceOp", None), getattr(each, "rootRank", None)
        if isinstance(each, _OPS):
            op = each
        elif isinstance(each, int):
            root = each
        if op is not None:
            yield c10d_name(op) or "premul_sum"
        if root is not None:
            yield f"root {root}"
