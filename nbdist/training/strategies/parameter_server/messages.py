"""What workers and servers say to each other.

A worker's message is a head of integers, and then what the head announces. A server
answers in the same way. Between two ranks MPI keeps the order of messages of one tag
and kind.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import Message, Post
from nbdist.errors import NbdistError

__all__ = ["Head", "Kind", "Receiving", "packed", "send", "unpacked"]

_HEAD, _BODY = 1, 2
_FIELDS = 4


class Kind(IntEnum):
    """What a worker wants, and what the answer to it is."""

    PUSH = 1
    """Gradients follow. Answered by parameters."""
    OPTIONS = 2
    """Learning rates and the like follow. Not answered."""
    REDUCE = 3
    """Numbers to be reduced over the workers follow. Answered by the result."""
    DONE = 4
    """The worker has finished; its result follows. Answered when all have."""
    LEFT = 5
    """The worker has failed. Not answered."""
    BYE = 6
    """The worker has got the answer to that. Not answered."""


@dataclass(frozen=True)
class Head:
    """The first part of each message."""

    kind: Kind
    version: int = 0
    """Of the parameters that a gradient was computed with, or that follow."""
    size: int = 0
    """Bytes or elements of a part whose length the other end does not know."""
    detail: int = 0
    """Which reduction."""

    def to_tensor(self) -> Tensor:
        """int64, of 4 elements."""
        return torch.tensor(
            [self.kind, self.version, self.size, self.detail], device="cpu"
        )

    @classmethod
    def of(cls, tensor: Tensor) -> Head:
        """The head in a tensor that was received."""
        kind, version, size, detail = tensor.tolist()
        return cls(Kind(kind), version, size, detail)


def send(post: Post, to: int, head: Head, bodies: Sequence[Tensor]) -> list[Message]:
    """Start to send a head and what it announces, and wake the receiver."""
    started = [post.send(head.to_tensor(), to, _HEAD)]
    started += [post.send(body, to, _BODY) for body in bodies if len(body)]
    post.ring(to)
    return started


class Receiving:
    """Messages from one rank: a head first, then the bodies that it announces."""

    def __init__(self, post: Post, source: int) -> None:
        self._post, self._source = post, source
        self.ask_for_head()

    @property
    def arrived(self) -> bool:
        """Whether what was asked for is there, or will never be (see `error`)."""
        return all([message.is_completed() for message in self._waiting])  # noqa: C419

    @property
    def error(self) -> NbdistError | None:
        """Why it will never be there."""
        return next((each.error for each in self._waiting if each.error), None)

    @property
    def head(self) -> Head:
        """The head that has arrived."""
        return Head.of(self._head)

    def ask_for(self, bodies: Sequence[Tensor]) -> None:
        """The bodies next, into these."""
        self._waiting = [
            self._post.receive(body, self._source, _BODY)
            for body in bodies
            if len(body)
        ]

    def ask_for_head(self) -> None:
        """The next message's head."""
        self._head = torch.zeros(_FIELDS, dtype=torch.int64, device="cpu")
        self._waiting = [self._post.receive(self._head, self._source, _HEAD)]


def packed(value: Any) -> Tensor:
    """Any picklable value as bytes, uint8."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """The value in `packed` bytes."""
    return pickle.loads(data.numpy().tobytes())
