"""What follows a rank's death, and changes of size that a user asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from nbdist.cluster.inventory import this_host
from nbdist.cluster.link import Answer
from nbdist.cluster.membership import Ask, Membership
from nbdist.cluster.newcomers import Newcomers
from nbdist.cluster.placement import Place, place
from nbdist.cluster.roster import Roster
from nbdist.config import ClusterConfig
from nbdist.errors import CellInterrupted, UsageError
from nbdist.wire import RankInfo, format_ranks

__all__ = ["Recovery"]

DESCRIBE_TIMEOUT_S = 10.0


class Recovery:
    """Brings the ranks back to a whole world, and newcomers up to date.

    Args:
        roster: The ranks.
        places: Where each rank runs, by rank; kept up to date.
        config: As the cluster was started.
        on_change: Called when the roster has changed.
    """

    def __init__(
        self,
        roster: Roster,
        places: list[Place],
        config: ClusterConfig,
        on_change: Callable[[], None],
    ) -> None:
        self._roster = roster
        self._places = places
        self._config = config
        self._on_change = on_change
        self._newcomers = Newcomers(roster)
        self._membership = Membership(roster, places, config.timeout_s)
        self.setup: list[tuple[str, int]] = []
        """The cells that each new rank runs first, with their In[] numbers."""

    @property
    def size(self) -> int:
        """The world size."""
        return len(self._places)

    def recover(self, ask: Ask | None = None) -> str:
        """After deaths, do what the configuration says; what was done, in words.

        Args:
            ask: How to reach the main threads of ranks that are not idle but paused.

        Raises:
            StartError: The ranks could not meet anew.
            CellInterrupted: They have, but the user has interrupted what newcomers get.
        """
        ask = ask or self._send
        dead = format_ranks(self._roster.died)
        if self._config.on_failure == "shrink" or not dead:
            self.drop(ask)
            gone = f"rank {dead} was dropped: " if dead else "the ranks have met anew: "
            return f"{gone}the world is {self.size} ranks now"
        newcomers = self._membership.replace_dead(ask)
        self._on_change()
        pids = ", ".join(str(info.pid) for info in newcomers)
        return self._prepare(f"rank {dead} was replaced (pid {pids})", newcomers, ask)

    def drop(self, ask: Ask | None = None) -> None:
        """Go on with the living ranks alone."""
        self._membership.drop_dead(ask or self._send)
        self._on_change()

    def check(self, size: int, drop: bool) -> None:
        """Whether the world may take this size.

        Args:
            drop: Let ranks go that hold variables which no other rank has.

        Raises:
            UsageError: The size cannot be had, or variables would be lost.
        """
        if size >= self.size:
            self._wider(size)
        elif not drop:
            self._refuse_loss(size)

    def scale(self, size: int, ask: Ask | None = None) -> str:
        """Grow or shrink the world to so many ranks; what was done, in words."""
        ask = ask or self._send
        if size <= self.size:
            self._membership.cut(size, ask)
            self._on_change()
            return f"the world is {size} ranks now"
        newcomers = self._membership.grow(self._wider(size), ask)
        self._on_change()
        return self._prepare(f"the world is {size} ranks now", newcomers, ask)

    def _wider(self, size: int) -> list[Place]:
        """The places of the ranks that a wider world has more."""
        config = replace(self._config, n=size)
        return place(config, this_host(), running=self.size)[self.size :]

    def _refuse_loss(self, size: int) -> None:
        described = self._roster.ask(
            "nbdist.engine.inspection:variables", timeout_s=DESCRIBE_TIMEOUT_S
        )
        kept: set[str] = set()
        lost: set[str] = set()
        for rank, variables in described.items():
            if variables is None:
                raise UsageError(
                    f"rank {rank} does not say which variables it holds: add --yes to "
                    f"let ranks {size} and up go all the same"
                )
            names = {variable.name for variable in variables}
            (kept if rank < size else lost).update(names)
        if lost - kept:
            raise UsageError(
                f"ranks {size} and up hold variables that no other rank has "
                f"({', '.join(sorted(lost - kept))}): add --yes to let them go"
            )

    def _prepare(self, done: str, newcomers: Sequence[RankInfo], ask: Ask) -> str:
        """Bring newcomers up to date; what was `done`, and this, in words.

        Raises:
            CellInterrupted: The user has interrupted it; the message says the same.
        """
        try:
            return f"{done}; {self._newcomers.prepare(newcomers, self.setup, ask)}"
        except CellInterrupted as stopped:
            raise CellInterrupted(f"{done}; {stopped}") from stopped

    def _send(self, info: RankInfo, target: str, *args: object) -> Future[Answer]:
        return self._roster.link.send(info.engine_uuid, target, *args).reply
