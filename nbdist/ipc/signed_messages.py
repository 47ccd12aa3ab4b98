"""Signed messages between the notebook, the controller and the ranks.

Jupyter's signature covers the first four frames of a message. `SignedSession` puts into
the signed metadata a digest of the other frames, the sender, and the message's number.
Each receiving socket has a `Gate`, which admits a message only if it is signed,
complete, addressed to this socket, and new. Nothing is unpickled before that.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hmac import compare_digest
from pickle import PickleBuffer
from typing import Any, NamedTuple

import zmq
from jupyter_client.session import DELIM, Session

from nbdist.errors import encodable
from nbdist.ipc.direct_socket import DirectSocket

__all__ = ["Gate", "Opened", "SignedSession", "addressed", "carefully", "refusals"]

SEAL = "nbdist"
"""The entry of a message's metadata that `SignedSession` writes and a `Gate` reads."""
ADDRESS = "nbdist_to"
SIGNED_FRAMES = 4
WINDOW = 4096
"""The most by which a message's number may be behind the newest of its sender.

Threads of one process first number their messages and then pass them to the socket, so
the two orders differ a little.
"""


class SignedSession(Session):
    """Jupyter's session, with a signature over all frames."""

    def __init__(self, **settings: Any) -> None:
        # Gates refuse repeated messages. Jupyter's own history of messages records a
        # message before its check, and removes messages at random.
        super().__init__(digest_history_size=0, **settings)
        self.pack = _total(self.pack)
        self._numbers = itertools.count(1)

    @classmethod
    def like(cls, other: Session) -> SignedSession:
        """Make a session with the key and the format of another session."""
        return cls(
            key=other.key,
            signature_scheme=other.signature_scheme,
            packer=other.packer,
            unpacker=other.unpacker,
        )

    def send(
        self,
        stream: Any,
        msg_or_type: Mapping[str, Any] | str,
        content: dict[str, Any] | None = None,
        parent: Any = None,
        ident: Any = None,
        buffers: Sequence[Any] | None = None,
        track: bool = False,
        header: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Build, sign and send a message. Arguments as for jupyter_client's Session."""
        if isinstance(msg_or_type, str):
            message = self.msg(msg_or_type, content, parent, header, metadata)
        else:
            message = dict(msg_or_type)
            buffers = buffers or message.get("buffers")
        buffers = list(buffers or ())
        message["metadata"] = {**message["metadata"], SEAL: self._seal(buffers)}
        return super().send(stream, message, ident=ident, buffers=buffers, track=track)

    def serialize(
        self, msg: dict[str, Any], ident: list[bytes] | bytes | None = None
    ) -> list[bytes]:
        """Build and sign the frames of a message before its buffers.

        ipykernel sends each new subscriber a message without a call of `send`.
        """
        if SEAL not in msg["metadata"]:
            seal = self._seal(msg.get("buffers") or ())
            msg = {**msg, "metadata": {**msg["metadata"], SEAL: seal}}
        return super().serialize(msg, ident)

    def frames(self, message: dict[str, Any], buffers: Sequence[Any]) -> list[Any]:
        """Sign a message. Returns its frames, which can be sent to several receivers.

        The frames do not have the receiver's identity, with which a ROUTER begins.
        """
        return [*self.serialize({**message, "buffers": buffers}), *buffers]

    def _seal(self, buffers: Sequence[Any]) -> dict[str, Any]:
        return {
            "from": self.session,
            "number": next(self._numbers),
            "buffers": _digest(PickleBuffer(buffer).raw() for buffer in buffers),
        }


def addressed(*addresses: str) -> dict[str, Any]:
    """Metadata of a message that only the gates with these addresses admit."""
    return {ADDRESS: addresses}


class Opened(NamedTuple):
    """A message that has been admitted."""

    identities: list[bytes]
    """The frames before the message, which are the address of a reply."""
    message: dict[str, Any]
    """The message, as Jupyter's `Session.deserialize` returns it; dates are text."""
    direct: DirectSocket | None = None
    """The socket by which a request has bypassed the controller."""
    is_brief: bool = False
    """Whether it is a brief message of a direct socket, which no gate has checked."""


class Gate:
    """Decides which messages a receiving socket admits. One thread uses it.

    Args:
        session: The session with the key.
        address: The address that messages must have, see `addressed`. "" admits only
            messages without an address.
        types: The message types that the gate admits; None for all.
        on_broken: Called with the error if this process can no longer read a message
            that it has admitted: user code may have replaced what the gate needs.
    """

    def __init__(
        self,
        session: Session,
        address: str = "",
        types: Collection[str] | None = None,
        on_broken: Callable[[Exception], object] | None = None,
    ) -> None:
        self.refused = 0
        """The number of messages refused so far; any thread may read it."""
        self._session = session
        self._address = address
        self._types = types
        self._senders: dict[str, _Numbers] = {}
        self._on_broken = on_broken
        self._admitted: list[bytes] = []
        """The frames of the first message that was admitted, without its buffers."""

    def admits(self, frames: Sequence[bytes | zmq.Frame]) -> bool:
        """Whether a message is authentic and new. Counts the message if it is not."""
        return self.opened(frames) is not None

    def opened(self, frames: Sequence[bytes | memoryview | zmq.Frame]) -> Opened | None:
        """The message in these frames; None if it is refused, which is counted.

        The frames are unpacked and their signature is checked once.
        """
        try:
            opened = self._opened([_view(frame) for frame in frames])
        except Exception:  # noqa: BLE001 - a holder of the key can sign anything
            opened = None
        if opened is None:
            self.refused += 1
            self._test()
        return opened

    def _test(self) -> None:
        """Tell a bad message from a process that can read none."""
        if self._on_broken is None or not self._admitted:
            return
        try:
            readable = self._unpacked([_view(frame) for frame in self._admitted])
            if readable is None:
                raise ValueError("a message that was read before is refused")
        except Exception as error:  # noqa: BLE001 - any error means that it is broken
            self._on_broken(error)

    def before(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a ZMQStream's callback, so that it gets only admitted messages.

        An error of the callback is logged. It would otherwise stop the stream, which
        asks for the next event only after the callback has returned.
        """

        def on_message(frames: Any) -> Any:
            return carefully(callback, frames) if self.admits(frames) else None

        return on_message

    def opening(self, callback: Callable[[Opened], Any]) -> Callable[[Any], Any]:
        """The same as `before`, for a callback that takes the opened message."""

        def on_message(frames: Any) -> Any:
            opened = self.opened(frames)
            return None if opened is None else carefully(callback, opened)

        return on_message

    def _opened(self, views: list[memoryview]) -> Opened | None:
        starts = (number for number, view in enumerate(views) if view == DELIM)
        start = next(starts, len(views)) + 1
        unpacked = self._unpacked(views[start:])
        if unpacked is None:
            return None
        header, parent, metadata, content = unpacked
        buffers = views[start + 1 + SIGNED_FRAMES :]
        seal = metadata[SEAL]
        admitted = (
            self._address in metadata.get(ADDRESS, [""])
            and (self._types is None or header["msg_type"] in self._types)
            and compare_digest(seal["buffers"], _digest(buffers))
            and self._senders.setdefault(seal["from"], _Numbers()).take(seal["number"])
        )
        if not admitted:
            return None
        if not self._admitted:
            signed = views[start : start + 1 + SIGNED_FRAMES]
            self._admitted = [bytes(view) for view in signed]
        message = {
            "header": header,
            "msg_id": header["msg_id"],
            "msg_type": header["msg_type"],
            "parent_header": parent,
            "metadata": metadata,
            "content": content,
            "buffers": buffers,
        }
        return Opened([bytes(view) for view in views[: start - 1]], message)

    def _unpacked(self, views: list[memoryview]) -> list[Any] | None:
        """The parts of a message, which begins with its signature; None if it is not
        signed with the key."""
        if len(views) < 1 + SIGNED_FRAMES:
            return None
        signature, *signed = views[: 1 + SIGNED_FRAMES]
        if not compare_digest(bytes(signature), self._session.sign(signed)):
            return None
        return [self._session.unpack(bytes(view)) for view in signed]


def carefully(callback: Callable[..., Any], *arguments: Any) -> Any:
    """Call a callback. An error is logged and has no other effect."""
    try:
        return callback(*arguments)
    except Exception:
        logging.getLogger("nbdist").exception("a message could not be handled")
        return None


def refusals(gates: Sequence[Gate]) -> int:
    """The number of messages that these gates have refused."""
    return sum(gate.refused for gate in gates)


class _Numbers:
    """The numbers of one sender's last `WINDOW` messages, as bits."""

    def __init__(self) -> None:
        self._newest = 0
        self._taken = 0

    def take(self, number: int) -> bool:
        """Record a number. Returns whether it is new and not older than the window."""
        ahead = number - self._newest
        if ahead > 0:
            self._newest = number
            kept = self._taken << ahead if ahead < WINDOW else 0
            self._taken = (kept | 1) & ((1 << WINDOW) - 1)
            return True
        if -ahead >= WINDOW or self._taken >> -ahead & 1:
            return False
        self._taken |= 1 << -ahead
        return True


def _total(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A packer that escapes lone surrogates, which UTF-8 cannot encode."""

    def pack_any(value: Any) -> bytes:
        try:
            return pack(value)
        except UnicodeEncodeError:
            return pack(_encodable(value))

    return pack_any


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(each) for each in value]
    return value


def _view(frame: bytes | memoryview | zmq.Frame) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def _digest(views: Iterable[memoryview]) -> str:
    """A digest of the frames' bytes and lengths."""
    digest = hashlib.sha256()
    for view in views:
        digest.update(view.nbytes.to_bytes(8, "big"))
        digest.update(view)
    return digest.hexdigest()
