"""What a step costs on N ranks, out of three costs of a machine: pure arithmetic.

The costs are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005). The
model knows no contention: each rank has a core and a full-duplex link of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Costs", "efficiency", "fit_messages", "ring_seconds", "server_seconds"]


@dataclass(frozen=True)
class Costs:
    """What communication is made of."""

    alpha: float
    """Seconds of latency per message."""
    beta: float
    """Seconds per byte that is sent."""
    gamma: float
    """Seconds per byte that is added to another one."""


def fit_messages(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Alpha and beta that fit the times of messages, with the least relative error.

    Args:
        sizes: bytes of each message, at least two different ones.
        seconds: how long each took.

    Returns:
        Alpha in seconds and beta in seconds per byte, which minimise the sum of
        ((alpha + beta size) / seconds - 1)^2. Relative errors, for a large message
        takes ten thousand times as long as a small one.
    """
    ones = [1 / each for each in seconds]
    bytes_ = [size / each for size, each in zip(sizes, seconds, strict=True)]
    aa, ab, bb = _dot(ones, ones), _dot(ones, bytes_), _dot(bytes_, bytes_)
    a, b = sum(ones), sum(bytes_)
    determinant = aa * bb - ab * ab
    return (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))


def ring_seconds(costs: Costs, ranks: int, nbytes: int) -> float:
    """A ring all-reduce of `nbytes` on each rank.

    Patarasuk and Yuan (2009): 2(N-1) messages one after the other, each of an N-th of
    the bytes; what came in the first N-1 of them is added.
    """
    chunk = nbytes / ranks
    message = costs.alpha + costs.beta * chunk
    return (ranks - 1) * (2 * message + costs.gamma * chunk)


def server_seconds(costs: Costs, workers: int, nbytes: int, servers: int = 1) -> float:
    """A synchronous step of a parameter server: gradients in, parameters out.

    Each server has an equal shard. Its link carries one message at a time: a gradient
    from each worker, which it adds, then the parameters to each. Servers work side by
    side.
    """
    shard = nbytes / servers
    message = costs.alpha + costs.beta * shard
    return workers * (2 * message + costs.gamma * shard)


def efficiency(compute: float, communication: float, hidden: float = 0.0) -> float:
    """The part of a step that is computation.

    Args:
        compute: seconds of a step on one rank alone.
        communication: seconds.
        hidden: seconds of communication that fit beside the computation, at most.
    """
    return compute / (compute + max(0.0, communication - hidden))
