"""The store through which the members of torch's process groups find each other."""

from __future__ import annotations

import socket
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from nbdist.collectives.group import Group
from nbdist.collectives.ops.objects import broadcast_object
from nbdist.ipc.ports import addresses_of_hosts, limit_sources, own_address
from nbdist.ipc.private_files import rendezvous_folder

__all__ = ["make_store"]


def make_store(group: Group, run_dir: Path, name: str) -> Store:
    """Make a store that all ranks of a group reach. Every rank must call.

    On one host it is a file. Ranks on several hosts connect to a port of rank 0, which
    accepts connections from the hosts of the ranks only. What is stored is sent
    without encryption.

    Args:
        group: The ranks.
        run_dir: A folder that the ranks of one host share.
        name: The store's name, of which there is no file yet.
    """
    if len(set(group.hosts)) == 1:
        return FileStore(str(rendezvous_folder(run_dir) / name), group.size)
    listener = None
    place = None
    if group.rank == 0:
        listener = socket.create_server((own_address(), 0))
        limit_sources(listener, addresses_of_hosts())
        place = listener.getsockname()
    address, port = broadcast_object(place, group.ranks[0], group=group)
    return TCPStore(
        address,
        port,
        group.size,
        is_master=listener is not None,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
