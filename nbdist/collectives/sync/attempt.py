"""An attempt of several ranks that waits in C++, where nothing releases a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from mpi4py import MPI

from nbdist.collectives.sync.wait import Check, abandon, complete, wait_until

__all__ = ["attempt"]

_WORD_BYTES = 256
_RELEASED = b"released, because another rank has failed"


def attempt(
    work: Callable[[], object],
    comm: MPI.Comm,
    ranks: Sequence[int],
    tag: int,
    check: Check,
) -> dict[int, str]:
    """Call `work`, which waits for the other ranks. Each of these ranks must call.

    It runs in a thread. If a rank fails, or `check` raises, the others leave their
    threads behind: what they wait for never comes.

    Args:
        work: The attempt.
        comm: A communicator, on which no other message has the tag.
        ranks: Ranks of the communicator, this rank among them.
        tag: The tag of the messages that tell how the attempts have ended.
        check: As for `wait_until`.

    Returns:
        The errors of other ranks; {} if the attempt has succeeded on all ranks.

    Raises:
        Exception: The error of `work` on this rank.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            failed.append(error)

    peers = [rank for rank in ranks if rank != comm.rank]
    words = {peer: bytearray(_WORD_BYTES) for peer in peers}
    heard = [comm.Irecv(words[peer], peer, tag) for peer in peers]
    running = threading.Thread(target=run, name="nbdist-attempt", daemon=True)
    running.start()

    def is_over() -> bool:
        MPI.Request.Testsome(heard)
        return not running.is_alive() or any(map(any, words.values()))

    try:
        wait_until(is_over, check)
    except BaseException:
        abandon(heard, words)
        raise
    word = _RELEASED if running.is_alive() else b""
    if failed:
        word = f"{type(failed[0]).__name__}: {failed[0]}".encode()[:_WORD_BYTES]
    own = word.ljust(_WORD_BYTES, b"\0")
    heard += [comm.Isend(own, peer, tag) for peer in peers]
    complete(heard, check, own, words)
    if failed:
        raise failed[0]
    said = {peer: bytes(words[peer].rstrip(b"\0")) for peer in peers}
    return {
        peer: text.decode(errors="replace")
        for peer, text in said.items()
        if text not in (b"", _RELEASED)
    }
