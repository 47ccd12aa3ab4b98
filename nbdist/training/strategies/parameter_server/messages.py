"""Messages between workers and servers.

A message is a head of integers, followed by the bodies that the head announces. Workers
send requests and servers send answers in this form. MPI keeps the order of messages of
one tag between two ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import Message, TolerantMessages
from nbdist.errors import NbdistError
from nbdist.training.strategies.flat_buffers import FlatBuffers

__all__ = [
    "Head",
    "Kind",
    "Receiver",
    "host_buffers",
    "packed",
    "send",
    "unpacked",
]

_HEAD, _BODY = 1, 2
_FIELDS = 5


class Kind(IntEnum):
    """The kind of a worker's request, and of the answer to it."""

    PUSH = 1
    """Gradients follow. The answer is parameters."""
    OPTIONS = 2
    """Options such as learning rates follow. There is no answer."""
    REDUCE = 3
    """Numbers to reduce over the workers follow. The answer is the result."""
    DONE = 4
    """The worker has finished, and its result follows. The server answers when all
    workers have finished, failed or died."""
    LEFT = 5
    """The worker has failed. There is no answer."""
    BYE = 6
    """The worker has received the answer to DONE. There is no answer."""


@dataclass(frozen=True)
class Head:
    """The first part of each message."""

    kind: Kind
    version: int = 0
    """In a request, the version of the parameters that the gradient was computed with.
    In an answer, the version of the parameters that follow."""
    size: int = 0
    """Bytes or elements of the body whose length the receiver does not know."""
    detail: int = 0
    """In REDUCE, the index of the reduction. In an answer with parameters, their slot
    (see `MessageBodies`)."""
    staleness: int = 0
    """In an answer to PUSH, the staleness of the gradient."""

    def to_tensor(self) -> Tensor:
        """The head as an int64 tensor with an element for each field."""
        return torch.tensor(astuple(self), device="cpu")

    @classmethod
    def of(cls, tensor: Tensor) -> Head:
        """The head in a received tensor."""
        kind, *others = tensor.tolist()
        return cls(Kind(kind), *others)


def send(
    messages: TolerantMessages, to: int, head: Head, bodies: Sequence[Tensor]
) -> list[Message]:
    """Start to send a head and the bodies that it announces, and wake the receiver."""
    started = [messages.send(head.to_tensor(), to, _HEAD)]
    started += [messages.send(body, to, _BODY) for body in bodies if len(body)]
    messages.ring(to)
    return started


class Receiver:
    """Receives messages from one rank: a head, then the bodies that it announces."""

    def __init__(self, messages: TolerantMessages, source: int) -> None:
        self._messages, self._source = messages, source
        self.receive_head()

    @property
    def arrived(self) -> bool:
        """Whether each awaited part has arrived or failed. `error` has the failure."""
        return all([message.is_completed() for message in self._waiting])  # noqa: C419

    @property
    def is_empty(self) -> bool:
        """Whether nothing is awaited, because all bodies were empty."""
        return not self._waiting

    @property
    def error(self) -> NbdistError | None:
        """The error of an awaited part that has failed; None if none has."""
        return next((each.error for each in self._waiting if each.error), None)

    @property
    def head(self) -> Head:
        """The last head that has arrived."""
        return Head.of(self._head)

    def receive(self, bodies: Sequence[Tensor]) -> None:
        """Start to receive the bodies of a message into these tensors."""
        self._waiting = [
            self._messages.receive(body, self._source, _BODY)
            for body in bodies
            if len(body)
        ]

    def receive_head(self) -> None:
        """Start to receive the head of the next message."""
        self._head = torch.zeros(_FIELDS, dtype=torch.int64, device="cpu")
        self._waiting = [self._messages.receive(self._head, self._source, _HEAD)]


def packed(value: Any) -> Tensor:
    """A picklable value as a uint8 tensor."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """The value in a tensor that `packed` has made."""
    return pickle.loads(data.numpy().tobytes())


def host_buffers(parameters: Sequence[Tensor]) -> FlatBuffers:
    """Flat buffers for a shard in host memory, from which messages are sent."""
    return FlatBuffers([torch.empty_like(each, device="cpu") for each in parameters])
