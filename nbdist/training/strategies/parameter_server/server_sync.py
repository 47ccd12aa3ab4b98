"""What servers tell each other when a training has ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nbdist.collectives import Post
from nbdist.errors import CollectiveAborted

from .messages import Head, Kind, Receiving, packed, send, unpacked
from .store import on_host
from .update_policy import Report

__all__ = ["share"]


def share(
    post: Post,
    servers: Sequence[int],
    shards: Sequence[Sequence[Tensor]],
    report: Report,
) -> list[Report]:
    """Give every server every shard, in place. Every server must call.

    Args:
        post: to the other servers.
        servers: their ranks, in the order of the shards.
        shards: the parameters of each, on this rank; its own are up to date.
        report: this server's own.

    Returns:
        Every server's report.
    """
    own = servers.index(post.rank)
    data = packed(report)
    mine = on_host(shards[own])
    mine.fill(shards[own])
    reports = {own: report}
    peers = [number for number in range(len(servers)) if number != own]
    receiving = {number: Receiving(post, servers[number]) for number in peers}
    rooms = {number: on_host(shards[number]) for number in peers}
    extras: dict[int, Tensor] = {}
    sent = [
        message
        for number in peers
        for message in send(
            post,
            servers[number],
            Head(Kind.DONE, size=len(data)),
            [*mine.buffers, data],
        )
    ]

    def look() -> bool:
        for number, each in list(receiving.items()):
            # Looked at once a turn: what arrives meanwhile is the next turn's.
            arrived = each.arrived
            why = post.lost.get(servers[number]) or (arrived and each.error)
            if why:
                raise CollectiveAborted(f"parameter server {servers[number]}: {why}")
            if arrived and number not in extras:
                extras[number] = torch.empty(
                    each.head.size, dtype=torch.uint8, device="cpu"
                )
                each.ask_for([*rooms[number].buffers, extras[number]])
            elif arrived:
                rooms[number].spill(shards[number])
                reports[number] = unpacked(extras[number])
                del receiving[number]
        return not receiving and all(message.is_completed() for message in sent)

    post.wait(
        look,
        what="parameter server",
        awaited=lambda: [servers[number] for number in receiving],
    )
    return [reports[number] for number in sorted(reports)]
