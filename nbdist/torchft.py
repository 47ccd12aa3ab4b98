"""A process group for torchft's `Manager`, which changes its members in each quorum.

Each rank is a replica of its own, and torchft decides which of them train together.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from nbdist.collectives.torch_backend import process_group
from nbdist.collectives.torch_backend.reconfigure import handle

__all__ = ["ProcessGroup"]

_UUID_BITS = 63


@dataclass(frozen=True, slots=True)
class _Options:
    """c10d's `ReconfigureOptions`, which torch has since 2.14."""

    uuid: int
    handles: list[str]
    timeout: timedelta


class ProcessGroup(process_group.ProcessGroup):
    """A process group whose members are those of torchft's last quorum.

    Pass it to `torchft.Manager` as `pg`, in the place of torchft's `ProcessGroupGloo`.

    Args:
        timeout: for a quorum's ranks to meet, and for each operation.
    """

    _nccl = None  # nbdist's own transports also serve CUDA tensors

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(HashStore(), (0, 1), timeout)

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Take the members of a quorum. Each of them must call; torchft does.

        Args:
            store_addr: the store of this quorum, as "host:port/prefix".
            rank: this rank's number in the quorum.
            world_size: the number of its members.
            replica_id, quorum_id, group_rank, group_world_size, global_ranks: torchft
                passes them too. They are not used.

        Raises:
            CollectiveTimeout, CollectiveAborted: as `reconfigure`.
        """
        store = _store_at(store_addr, self._timeout)
        store.set(f"handle/{rank}", handle())
        if rank == 0:
            store.set("uuid", str(secrets.randbits(_UUID_BITS)))
        uuid = int(store.get("uuid"))
        handles = [store.get(f"handle/{n}").decode() for n in range(world_size)]
        self.reconfigure(_Options(uuid, handles, self._timeout))

    def errored(self) -> Exception | None:
        """The error that makes another quorum necessary; None if there is none."""
        if self._members is None:
            return None
        try:
            self._members.raise_if_aborted()
        except Exception as error:  # noqa: BLE001 - it is what was asked for
            return error
        return None


def _store_at(address: str, timeout: timedelta) -> Store:
    """A client of the TCPStore at "host:port/prefix"."""
    place, _, prefix = address.partition("/")
    host, _, port = place.rpartition(":")
    store = TCPStore(
        host.strip("[]"),
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=timeout,
    )
    return PrefixStore(f"{prefix}/nbdist", store)
