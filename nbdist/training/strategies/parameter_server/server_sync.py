"""Exchanges the shards between the servers when a training has ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nbdist.collectives import TolerantMessages
from nbdist.errors import CollectiveAborted
from nbdist.training.strategies.parameter_server.messages import (
    Head,
    Kind,
    Receiver,
    host_buffers,
    packed,
    send,
    unpacked,
)
from nbdist.training.strategies.parameter_server.update_policy import Report

__all__ = ["exchange_shards"]


def exchange_shards(
    messages: TolerantMessages,
    servers: Sequence[int],
    shards: Sequence[Sequence[Tensor]],
    report: Report,
) -> list[Report]:
    """Give every server every shard, in place. Every server must call.

    Args:
        messages: messages to the other servers.
        servers: ranks of the servers, in the order of the shards.
        shards: the parameters of each shard, on this rank. This server's own shard is
            current; the others are overwritten.
        report: the counts of this server.

    Returns:
        The report of each server, in the order of the shards.

    Raises:
        CollectiveAborted: another server has died.
    """
    own = servers.index(messages.rank)
    data = packed(report)
    mine = host_buffers(shards[own])
    mine.fill(shards[own])
    reports = {own: report}
    peers = [number for number in range(len(servers)) if number != own]
    receiving = {number: Receiver(messages, servers[number]) for number in peers}
    buffers_of = {number: host_buffers(shards[number]) for number in peers}
    extras: dict[int, Tensor] = {}
    sent = [
        message
        for number in peers
        for message in send(
            messages,
            servers[number],
            Head(Kind.DONE, size=len(data)),
            [*mine.buffers, data],
        )
    ]

    def look() -> bool:
        for number, each in list(receiving.items()):
            # Read once in each call: a later arrival is handled in the next call.
            arrived = each.arrived
            why = messages.lost.get(servers[number]) or (arrived and each.error)
            if why:
                raise CollectiveAborted(f"parameter server {servers[number]}: {why}")
            if arrived and number not in extras:
                extras[number] = torch.empty(
                    each.head.size, dtype=torch.uint8, device="cpu"
                )
                each.receive([*buffers_of[number].buffers, extras[number]])
            elif arrived:
                buffers_of[number].copy_to(shards[number])
                reports[number] = unpacked(extras[number])
                del receiving[number]
        return not receiving and all(message.is_completed() for message in sent)

    messages.wait(
        look,
        what="parameter server",
        awaited=lambda: [servers[number] for number in receiving],
    )
    return [reports[number] for number in sorted(reports)]
