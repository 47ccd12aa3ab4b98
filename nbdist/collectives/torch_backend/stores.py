"""The store through which the members of torch's process groups find each other."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from nbdist.collectives.group import Group
from nbdist.collectives.ops.objects import broadcast_object
from nbdist.ipc.ports import addresses_of_hosts, limit_sources, own_address
from nbdist.ipc.private_files import rendezvous_folder, reopenable

__all__ = ["make_store"]


def make_store(group: Group, run_dir: Path, name: str) -> Store:
    """Make a store that all ranks of a group reach. Every rank must call.

    On one host it is a file. Ranks on several hosts connect to a port of rank 0, which
    accepts connections from the hosts of the ranks only, where the system lets it. What
    is stored is sent without encryption.

    Args:
        group: The ranks.
        run_dir: A folder that the ranks of one host share.
        name: The store's name, of which there is no file yet.
    """
    if len(set(group.hosts)) == 1:
        with reopenable():
            return FileStore(str(rendezvous_folder(run_dir) / name), group.size)
    listener = None
    place = None
    if group.rank == 0:
        listener = socket.create_server((own_address(), 0))
        limit_sources(listener, addresses_of_hosts())
        place = listener.getsockname()
    address, port = broadcast_object(place, group.ranks[0], group=group)
    if listener is not None:
        return _served(listener, group.size)
    return TCPStore(address, port, group.size, wait_for_workers=False)


def _served(listener: socket.socket, size: int) -> Store:
    """A store that other ranks connect to. Its server takes over the socket."""
    address, port = listener.getsockname()

    def serve(**options: Any) -> Store:
        return TCPStore(
            address,
            port,
            size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
            **options,
        )

    with listener:
        try:
            return serve()
        except NotImplementedError:  # libuv's server takes no socket in torch 2.7
            return serve(use_libuv=False)
