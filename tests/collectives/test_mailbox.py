"""Messages of one rank with itself: their counts, their tickets and their errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nbdist.collectives.mailbox import MPI, Mailbox, MailHooks, Message, _full_tag
from nbdist.errors import CollectiveAborted, CollectiveMismatch


class Ends:
    """A mailbox, and what its hooks were told."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.begun: list[str] = []
        self.ended: list[tuple[int, bool]] = []
        self.left: list[BaseException] = []
        self.waits: list[Message | None] = []
        hooks = MailHooks(
            check=check,
            on_wait=self.waits.append,
            on_leave=self.left.append,
            on_start=self._begin,
            on_end=lambda ticket, ok: self.ended.append((ticket, ok)),
        )
        self.mailbox = Mailbox(MPI.COMM_SELF, hooks)

    def _begin(self, kind: object) -> int:
        self.begun.append(str(kind))
        return len(self.begun)


@pytest.mark.parametrize("source", [0, None])
def test_a_message_is_counted_at_both_ends(source: int | None) -> None:
    ends, sent, received = Ends(), torch.arange(3.0), torch.zeros(3)
    mailbox, traffic = ends.mailbox, ends.mailbox.traffic
    receive = mailbox.receive(received, source, 5)
    send = mailbox.send(sent, 0, 5)
    assert send.wait()
    assert receive.wait()
    assert received.equal(sent)
    assert receive.source == 0
    assert traffic.from_any() == 0
    assert traffic.sent == traffic.received
    assert traffic.sent[0] & 0xFFFFFFFF == 1
    assert sorted(ends.ended) == [(1, True), (2, True)]
    assert mailbox.sequence == 2


def test_a_short_message_is_an_error() -> None:
    tensor = torch.zeros(3)
    receive = Ends().mailbox.receive(tensor, 0, 6)
    MPI.COMM_SELF.Send(bytearray(4), 0, _full_tag(6, tensor))
    with pytest.raises(
        CollectiveMismatch, match=r"from rank 0, tag 6: .* 12 bytes, got 4"
    ):
        receive.wait()
    assert receive.is_completed()
    assert receive.error is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt, CollectiveAborted])
def test_a_wait_that_is_ended_closes_the_ticket(error: type[BaseException]) -> None:
    def check() -> None:
        raise error

    ends, tensor = Ends(check), torch.zeros(3)
    receive = ends.mailbox.receive(tensor, 0, 7)
    with pytest.raises(error):
        receive.wait()
    assert ends.ended == [(1, False)]
    assert ends.waits == [receive, None]
    assert [type(each) for each in ends.left] == [KeyboardInterrupt] * (
        error is KeyboardInterrupt
    )
    MPI.COMM_SELF.Send(bytearray(12), 0, _full_tag(7, tensor))
    assert receive.is_over
