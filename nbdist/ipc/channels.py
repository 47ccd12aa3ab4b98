"""Many connections over one stream between two hosts.

A stream is a pair of descriptors, such as those of an `ssh` process. At each end, a
*channel* joins a socket of this host with a socket of the other one: what one end
writes, the other one receives. Either end opens channels, by a name that the other end
resolves to a socket.

Frames begin with their kind, the number of the channel, and the length of what follows:

    OPEN    the channel's name
    DATA    bytes of the channel
    CREDIT  the number of further bytes that the receiver has room for
    EOF     no more data in this direction
    CLOSE   the channel has ended in both directions
    BEAT    sent every second, so that a stream that is silent has been cut

A receiver that does not read stops its own channel only, because the sender waits for
credit. One thread runs the loop. Imports only the standard library.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from nbdist.ipc.listening import Acceptor

__all__ = ["BEAT_S", "Channels"]

OPEN, DATA, CREDIT, EOF, CLOSE, BEAT = range(6)
_HEAD = struct.Struct("!BII")
_COUNT = struct.Struct("!I")
BEAT_S = 1.0
WINDOW_BYTES = 4 << 20
"""Bytes of one channel that may be under way in one direction."""
CREDIT_FROM_BYTES = WINDOW_BYTES // 4
"""Bytes that a receiver has written before it returns them as credit."""
PART_BYTES = 1 << 18
"""The most bytes of a DATA frame, so that channels take turns."""
MOST_QUEUED_BYTES = 4 << 20
"""Bytes that wait for the stream before no more is read from the sockets."""
MOST_FRAME_BYTES = 1 << 20
PAUSE_S = 2 * BEAT_S
"""A loop that has run for longer than this was stopped itself, as in a laptop that has
slept. That time does not count as silence."""


class _Channel:
    """One channel, and this host's socket of it."""

    def __init__(
        self, number: int, end: socket.socket, ready: Callable[[_Channel, int], None]
    ) -> None:
        self.number, self.end = number, end
        self.ready = functools.partial(ready, self)
        """Called when something can be done with the socket."""
        self.credit = WINDOW_BYTES
        self.waiting: collections.deque[memoryview] = collections.deque()
        """What has arrived and was not written to the socket yet."""
        self.written = 0
        """Bytes that were written, and not returned as credit yet."""
        self.sends = True
        """Whether the socket may still have data for the other end."""
        self.receives = True
        """Whether the other end may still have data for the socket."""


class Channels:
    """The channels over one stream.

    Args:
        source, sink: The descriptors that are read and written, which may be one.
            `close` closes them.
        accept: Returns the socket of a channel that the other end opens, by the
            channel's name. It raises OSError for one that there is not.
        is_first: True at one end of the stream, False at the other.
        timeout_s: Seconds of silence after which the stream has been cut.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        accept: Callable[[str], socket.socket],
        *,
        is_first: bool,
        timeout_s: float,
    ) -> None:
        self._source, self._sink = source, sink
        self._accept = accept
        self._next_number = 1 if is_first else 2
        self._timeout_s = timeout_s
        self._channels: dict[int, _Channel] = {}
        self._incoming = bytearray()
        self._outgoing: collections.deque[memoryview] = collections.deque()
        self._queued = 0
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wakeup, self._waker = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._acceptors: list[Acceptor] = []
        self._ending = ""
        self._lock = threading.Lock()
        """Held while the waker is used, so that it is not closed meanwhile."""
        for descriptor in {source, sink, self._wakeup, self._waker}:
            os.set_blocking(descriptor, False)
        self._watch(source, selectors.EVENT_READ, self._on_stream)
        self._watch(self._wakeup, selectors.EVENT_READ, self._run_calls)

    # -- from outside ----------------------------------------------------------------

    def open(self, name: str, end: socket.socket) -> None:
        """Open a channel for a connected socket, which the loop takes over."""
        number, self._next_number = self._next_number, self._next_number + 2
        self._send(OPEN, number, name.encode())
        self._add(number, end)

    def listen(
        self, listener: socket.socket, take: Callable[[socket.socket], None]
    ) -> None:
        """Call a function with each connection that a listening socket accepts.

        The loop takes the listener over.
        """

        acceptor = Acceptor(listener)
        self._acceptors.append(acceptor)

        def accept(_events: int) -> None:
            if (connection := acceptor.accept()) is not None:
                take(connection)

        listener.setblocking(False)
        self._watch(listener, selectors.EVENT_READ, accept)

    def watch(self, file: Any, callback: Callable[[], None]) -> None:
        """Call a function on the loop's thread when a file can be read."""
        self._watch(file, selectors.EVENT_READ, lambda _events: callback())

    def unwatch(self, file: Any) -> None:
        """Undo `watch`."""
        self._selector.unregister(file)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call a function on the loop's thread. Any thread may call this."""
        self._calls.append(call)
        with self._lock, contextlib.suppress(BlockingIOError):  # it is full
            if self._waker >= 0:
                os.write(self._waker, b"x")

    def end(self, why: str) -> None:
        """Have `run` return."""
        self._ending = self._ending or why

    def run(self) -> str:
        """Carry data until the stream ends. Returns why it has ended.

        Call `close` next.
        """
        silent_s, beat_at, before = 0.0, 0.0, time.monotonic()
        while not self._ending:
            now = time.monotonic()
            silent_s += min(now - before, PAUSE_S)
            before = now
            if now >= beat_at:
                beat_at = now + BEAT_S
                self._send(BEAT, 0)
            events = self._selector.select(beat_at - now)
            for key, mask in events:
                if key.fd == self._source:
                    silent_s = 0.0
                # An earlier callback of this round may have closed the file, whose
                # descriptor may since be another file's.
                current = self._selector.get_map().get(key.fd)
                if current is not None and current.fileobj == key.fileobj:
                    current.data(mask)
            if silent_s > self._timeout_s:
                self.end(f"nothing was heard for {self._timeout_s:g} s")
        return self._ending

    # -- the stream ------------------------------------------------------------------

    def _read_stream(self) -> None:
        try:
            received = os.read(self._source, MOST_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(f"it broke: {error.strerror}")
            return
        if not received:
            self.end("it was closed")
            return
        self._incoming += received
        begin = 0
        while len(self._incoming) - begin >= _HEAD.size:
            kind, number, length = _HEAD.unpack_from(self._incoming, begin)
            if kind > BEAT or length > MOST_FRAME_BYTES:
                self.end("it has carried what is no frame")
                return
            end = begin + _HEAD.size + length
            if end > len(self._incoming):
                break
            body = bytes(memoryview(self._incoming)[begin + _HEAD.size : end])
            begin = end
            self._take(kind, number, body)
        del self._incoming[:begin]

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == OPEN:
            try:
                end = self._accept(body.decode())
            except OSError:
                self._send(CLOSE, number)
            else:
                self._add(number, end)
            return
        channel = self._channels.get(number)
        if channel is None:  # a beat, or it was closed here meanwhile
            return
        if kind == DATA:
            channel.waiting.append(memoryview(body))
            self._write_end(channel)
        elif kind == CREDIT:
            channel.credit += _COUNT.unpack(body)[0]
            self._update(channel)
        elif kind == EOF:
            channel.receives = False
            self._write_end(channel)
        elif kind == CLOSE:
            self._drop(channel)

    def _send(self, kind: int, number: int, body: bytes | memoryview = b"") -> None:
        self._outgoing.append(memoryview(_HEAD.pack(kind, number, len(body))))
        if body:
            self._outgoing.append(memoryview(body))
        self._queued += _HEAD.size + len(body)
        self._write_stream()

    def _write_stream(self) -> None:
        was_full = self._queued > MOST_QUEUED_BYTES
        try:
            while self._outgoing:
                parts = [self._outgoing[n] for n in range(min(64, len(self._outgoing)))]
                self._sent(os.writev(self._sink, parts))
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(f"it broke: {error.strerror}")
            self._outgoing.clear()
        self._watch_stream()
        if was_full != (self._queued > MOST_QUEUED_BYTES):
            for channel in list(self._channels.values()):
                self._update(channel)

    def _sent(self, count: int) -> None:
        self._queued -= count
        while count:
            part = self._outgoing.popleft()
            if count < len(part):
                self._outgoing.appendleft(part[count:])
                return
            count -= len(part)

    def _watch_stream(self) -> None:
        """Watch the sink while something waits for it."""
        events = selectors.EVENT_READ if self._source == self._sink else 0
        if self._outgoing:
            events |= selectors.EVENT_WRITE
        self._watch(self._sink, events, self._on_stream)

    def _on_stream(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write_stream()
        if events & selectors.EVENT_READ:
            self._read_stream()

    # -- channels --------------------------------------------------------------------

    def _add(self, number: int, end: socket.socket) -> None:
        end.setblocking(False)
        self._channels[number] = channel = _Channel(number, end, self._on_end)
        self._update(channel)

    def _update(self, channel: _Channel) -> None:
        """Watch a channel's socket for what can be done with it."""
        events = 0
        has_room = channel.credit > 0 and self._queued <= MOST_QUEUED_BYTES
        if channel.sends and has_room:
            events |= selectors.EVENT_READ
        if channel.waiting:
            events |= selectors.EVENT_WRITE
        self._watch(channel.end, events, channel.ready)

    def _on_end(self, channel: _Channel, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write_end(channel)
        if events & selectors.EVENT_READ and channel.number in self._channels:
            self._read_end(channel)

    def _read_end(self, channel: _Channel) -> None:
        try:
            data = channel.end.recv(min(PART_BYTES, channel.credit))
        except BlockingIOError:
            return
        except OSError:
            self._end_channel(channel)
            return
        if data:
            channel.credit -= len(data)
            self._send(DATA, channel.number, data)
        else:
            channel.sends = False
            self._send(EOF, channel.number)
        self._update(channel)
        self._end_if_done(channel)

    def _write_end(self, channel: _Channel) -> None:
        try:
            while channel.waiting:
                part = channel.waiting[0]
                count = channel.end.send(part)
                channel.written += count
                if count < len(part):
                    channel.waiting[0] = part[count:]
                else:
                    channel.waiting.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._end_channel(channel)
            return
        if channel.written >= CREDIT_FROM_BYTES:
            self._send(CREDIT, channel.number, _COUNT.pack(channel.written))
            channel.written = 0
        if not channel.receives and not channel.waiting:
            with contextlib.suppress(OSError):
                channel.end.shutdown(socket.SHUT_WR)
        self._update(channel)
        self._end_if_done(channel)

    def _end_if_done(self, channel: _Channel) -> None:
        """Forget a channel whose two directions have ended."""
        if not (channel.sends or channel.receives or channel.waiting):
            self._drop(channel)

    def _end_channel(self, channel: _Channel) -> None:
        """End a channel whose socket has failed."""
        self._send(CLOSE, channel.number)
        self._drop(channel)

    def _drop(self, channel: _Channel) -> None:
        if self._channels.pop(channel.number, None) is not None:
            self._watch(channel.end, 0, None)
            channel.end.close()

    # -- the loop --------------------------------------------------------------------

    def _watch(self, file: Any, events: int, callback: Any) -> None:
        """Set what is waited for; 0 for nothing."""
        key = self._selector.get_map().get(file)
        if key is None:
            if events:
                self._selector.register(file, events, callback)
        elif not events:
            self._selector.unregister(file)
        elif key.events != events:
            self._selector.modify(file, events, callback)

    def _run_calls(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        """Close all channels, listeners and descriptors, once `run` has returned."""
        for channel in list(self._channels.values()):
            self._drop(channel)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        for acceptor in self._acceptors:
            acceptor.close()
        with self._lock:
            os.close(self._waker)
            self._waker = -1
        for descriptor in {self._source, self._sink, self._wakeup}:
            os.close(descriptor)
