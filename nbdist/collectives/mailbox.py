"""Point-to-point messages. They have their own communicator."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from nbdist.collectives.flat import Flat
from nbdist.collectives.signature import Signature, signature
from nbdist.collectives.sync import timeout_clock
from nbdist.collectives.sync.cuda_aware import takes_device_memory
from nbdist.collectives.sync.cuda_events import settle
from nbdist.collectives.sync.mpi_buffers import moved
from nbdist.collectives.sync.wait import Check, wait_until
from nbdist.errors import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    NbdistError,
    UsageError,
)

__all__ = ["MailHooks", "Mailbox", "Message", "Traffic"]

_KIND_BITS = 11
_LARGEST_TAG = (2**31 - 1) >> _KIND_BITS
_LOOK_EVERY_S = 0.25
_PRIME = 2**61 - 1
_OFFSET = 0x9E3779B97F4A7C15 % _PRIME
_under_way: list[Message] = []


@dataclass(frozen=True)
class MailHooks:
    """Functions of the group to which a mailbox belongs."""

    check: Check
    """Raises when the wait must end."""
    on_wait: Callable[[Message | None], None]
    """Called with the message for which this thread waits, and with None at the end."""
    on_leave: Callable[[BaseException], None]
    """Called with the error that ended a wait before the message was complete."""
    on_start: Callable[[Signature], int] = lambda _: 0
    """Called with the signature of each message. Returns its ticket."""
    on_end: Callable[[int, bool], None] = lambda *_: None
    """Called with the ticket of a message that has ended, and whether it arrived."""


class Message(dist.Work):
    """A message: a `dist.Work`. It makes progress while a thread waits for it."""

    def __init__(
        self,
        request: MPI.Request,
        label: str,
        size: int | None,
        hooks: MailHooks,
        check_arrived: Check,
        kind: Signature,
        flat: Flat,
    ) -> None:
        super().__init__()
        self.kind = kind
        """The message's signature. Its root is the other rank, or None for any rank."""
        self._request = request
        self._label = label
        self._size = size
        self.hooks = hooks
        self._check_arrived = check_arrived
        self._flat = flat  # keeps the memory whose address MPI has
        self._ticket = hooks.on_start(kind)
        self._status = MPI.Status()
        self._arrived = False
        self.error: NbdistError | None = None
        """The error of the message, such as a wrong size or a dead rank."""
        self._source: int | None = None
        self._cancelled = ""

    def is_completed(self) -> bool:
        """Whether the message was sent or received, or has failed (see `error`)."""
        if not self._arrived and self._test():
            self._arrived = True
            self.hooks.on_end(self._ticket, self.error is None)
        return self._arrived

    def _test(self) -> bool:
        try:
            done = self._request.Test(self._status)
        except MPI.Exception as cause:  # the other rank has died, or comm is revoked
            why = self._cancelled or f"failed in MPI: {cause}"
            self.error = CollectiveAborted(f"{self._label} {why}")
            self.error.__cause__ = cause
            return True
        if done:
            self._finish()
        return done

    def cancel(self, why: str) -> None:
        """Have `wait` raise, from now on, unless the message has arrived.

        Args:
            why: As in "was cancelled, because ...".
        """
        self._cancelled = why

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the tensor may be used again.

        Args:
            timeout: seconds or a timedelta; None or zero sets no limit.

        Raises:
            CollectiveTimeout: `timeout` has passed. The message is still under way.
            CollectiveMismatch: The other rank's message has another size or dtype.
            CollectiveAborted: The message was released, or the other rank has died.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        end = timeout_clock.now() + seconds if seconds else math.inf
        next_look = time.monotonic() + _LOOK_EVERY_S

        def check() -> None:
            nonlocal next_look
            if self._cancelled:  # MPI may not know it, without fault tolerance
                raise CollectiveAborted(f"{self._label} {self._cancelled}")
            self.hooks.check()
            now = time.monotonic()
            if timeout_clock.now() > end:
                raise CollectiveTimeout(f"{self._label} is not done after {seconds} s")
            if now > next_look:
                next_look = now + _LOOK_EVERY_S
                self._check_arrived()

        self.hooks.on_wait(self)
        try:
            wait_until(self.is_completed, check)
        except KeyboardInterrupt as error:
            self.hooks.on_leave(error)  # MPI may still write to the tensor
            self.hooks.on_end(self._ticket, False)
            raise
        except (CollectiveAborted, CollectiveMismatch):
            self.hooks.on_end(self._ticket, False)
            raise
        finally:
            self.hooks.on_wait(None)
        if self.error is not None:
            raise self.error
        return True

    @property
    def source(self) -> int | None:
        """The sender's rank in the group, after the message has arrived."""
        return self._source

    @property
    def is_over(self) -> bool:
        """Whether MPI no longer uses the tensor, after success or an error."""
        try:
            return self.is_completed()
        except MPI.Exception:  # revoked, or the other rank died
            return True

    def _finish(self) -> None:
        if self._size is None:
            return
        self._source = self._status.Get_source()
        got = self._status.Get_count(MPI.BYTE)
        if got != self._size:
            self.error = CollectiveMismatch(
                f"{self._label}: expected {self._size} bytes, got {got}"
            )
            return
        self._flat.write_back()
        gpu = self._flat.gpu
        if gpu is not None:
            # The stream that uses the tensor next may be another one.
            torch.cuda.current_stream(gpu).synchronize()


class Arriving(Protocol):
    """A message that is to be received from any rank."""

    @property
    def source(self) -> int | None:
        """The sender's position in the group; None before the message has arrived."""

    def is_completed(self) -> bool:
        """Whether the message has arrived, or has failed."""


class Traffic:
    """The messages between this rank and the others of a group, counted by tag.

    A number has the count in its lowest 32 bits, and above them a sum over the tags. It
    is equal at both ends if each message was received, in any order.
    """

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        """By the receiver's position in the group."""
        self.received: dict[int, int] = {}
        """By the sender's position. Receives count when they begin."""
        self._from_any: list[tuple[Arriving, int]] = []

    def send(self, target: int, tag: int) -> None:
        self.sent[target] = self.sent.get(target, 0) + _mark(tag)

    def receive(self, source: int, tag: int) -> None:
        self.received[source] = self.received.get(source, 0) + _mark(tag)

    def receive_from_any(self, message: Arriving, tag: int) -> None:
        self._from_any.append((message, tag))

    def from_any(self) -> int:
        """The receives from any rank whose message has not arrived."""
        if not self._from_any:
            return 0
        waiting = []
        for message, tag in self._from_any:
            if message.source is None:
                waiting.append((message, tag))
            else:
                self.receive(message.source, tag)
        self._from_any = waiting
        return sum(_mark(tag) for _, tag in waiting)

    def test(self) -> None:
        """Find out what has arrived. Only the main thread may call."""
        for message, _ in self._from_any:
            message.is_completed()


def _mark(tag: int) -> int:
    """What one message adds to a number. Sums of different sets of tags differ."""
    x = tag + _OFFSET
    return (x * x * x % _PRIME) << 32 | 1


class Mailbox:
    """Sends and receives tensors on its own communicator.

    Dtype and number of elements are part of MPI's tag. A message with another dtype or
    number of elements is never received. The waiting receiver sees it and raises.
    """

    def __init__(self, comm: MPI.Comm, hooks: MailHooks) -> None:
        self._comm = comm
        self._hooks = hooks
        self.sequence = 0
        """The number of messages started so far."""
        self.traffic = Traffic()

    def send(self, tensor: Tensor, target: int, tag: int) -> Message:
        """Start to send a tensor to a rank of the group."""
        self.sequence += 1
        flat = self._flat(tensor, writes=False)
        full = _full_tag(tag, tensor)
        request = self._comm.Isend(moved(flat.tensor), target, full)
        self.traffic.send(target, full)
        label = f"send to rank {target}, tag {tag}"
        kind = _kind("send", target, tensor)
        return _kept(Message(request, label, None, self._hooks, _nothing, kind, flat))

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Message:
        """Start to receive into a tensor, from any rank if `source` is None."""
        self.sequence += 1
        peer = MPI.ANY_SOURCE if source is None else source
        full = _full_tag(tag, tensor)
        flat = self._flat(tensor, writes=True)
        request = self._comm.Irecv(moved(flat.tensor), peer, full)
        size = tensor.numel() * tensor.element_size()
        label = f"recv from rank {'any' if source is None else source}, tag {tag}"
        check_arrived = self._mismatch_check(peer, full, label, tensor)
        kind = _kind("recv", source, tensor)
        message = Message(request, label, size, self._hooks, check_arrived, kind, flat)
        if source is None:
            self.traffic.receive_from_any(message, full)
        else:
            self.traffic.receive(source, full)
        return _kept(message)

    def cancel(self, why: str) -> None:
        """Cancel the messages under way. See `Message.cancel`."""
        for message in _under_way:
            if message.hooks is self._hooks:
                message.cancel(why)

    def _flat(self, tensor: Tensor, writes: bool) -> Flat:
        """Memory that MPI may use at once: the tensor's own, or a copy on the host."""
        if not tensor.is_cuda:
            return Flat(tensor, writes=writes, on_host=True, filled=not writes)
        with torch.cuda.device(tensor.device):
            settle(self._hooks.check)  # MPI ignores streams
            on_host = not takes_device_memory()
            flat = Flat(tensor, writes=writes, on_host=on_host, filled=not writes)
            if flat.is_copy:
                settle(self._hooks.check)
        return flat

    def _mismatch_check(
        self, peer: int, full_tag: int, label: str, tensor: Tensor
    ) -> Callable[[], None]:
        expected = f"{tensor.numel()} elements of {tensor.dtype}"

        def check_arrived() -> None:
            status = MPI.Status()
            if not self._comm.Iprobe(peer, MPI.ANY_TAG, status):
                return
            got = status.Get_tag()
            if got != full_tag and got >> _KIND_BITS == full_tag >> _KIND_BITS:
                raise CollectiveMismatch(
                    f"{label}: expected {expected}, got a message of "
                    f"{status.Get_count(MPI.BYTE)} bytes from rank "
                    f"{status.Get_source()} with another shape or dtype"
                )

        return check_arrived


def _kept(message: Message) -> Message:
    """Keep a message and its tensor alive until MPI no longer uses them."""
    _under_way[:] = [each for each in _under_way if not each.is_over]
    _under_way.append(message)
    return message


def _kind(operation: str, peer: int | None, tensor: Tensor) -> Signature:
    device = tensor.device.type
    return signature(operation, None, peer, tensor.dtype, tensor.shape, device)


def _nothing() -> None:
    pass


def _full_tag(tag: int, tensor: Tensor) -> int:
    if not 0 <= tag <= _LARGEST_TAG:
        raise UsageError(f"tag {tag}: expected 0 to {_LARGEST_TAG}")
    kind = zlib.crc32(f"{tensor.dtype} {tensor.numel()}".encode())
    return tag << _KIND_BITS | kind & ((1 << _KIND_BITS) - 1)
