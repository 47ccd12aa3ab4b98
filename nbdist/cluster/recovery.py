"""What follows a rank's death, and changes of size that a user asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nbdist.cluster.inventory import this_host
from nbdist.cluster.membership import Membership
from nbdist.cluster.placement import Place, place
from nbdist.cluster.roster import Roster
from nbdist.config import ClusterConfig
from nbdist.errors import UsageError
from nbdist.wire import RankInfo, format_ranks

__all__ = ["Recovery"]

DESCRIBE_TIMEOUT_S = 10.0
PREPARE_TIMEOUT_S = 600.0


class Recovery:
    """Brings the ranks back to a whole world, and newcomers up to date.

    Args:
        roster: The ranks.
        places: Where each rank runs, by rank; kept up to date.
        config: As the cluster was started.
    """

    def __init__(
        self, roster: Roster, places: list[Place], config: ClusterConfig
    ) -> None:
        self._roster = roster
        self._places = places
        self._config = config
        self._membership = Membership(roster, places, config.timeout_s)
        self.setup: list[tuple[str, int]] = []
        """The cells that each new rank runs first, with their In[] numbers."""

    @property
    def size(self) -> int:
        """The world size."""
        return len(self._places)

    def recover(self) -> str:
        """After deaths, do what the configuration says; what was done, in words.

        Every living rank must be idle.

        Raises:
            StartError: The ranks could not meet anew.
        """
        dead = format_ranks(self._roster.died)
        if self._config.on_failure == "shrink":
            self._membership.drop_dead()
            return f"rank {dead} was dropped: the world is {self.size} ranks now"
        newcomers = self._membership.replace_dead()
        pids = ", ".join(str(info.pid) for info in newcomers)
        return f"rank {dead} was replaced (pid {pids}); {self._prepare(newcomers)}"

    def scale(self, size: int, drop: bool) -> str:
        """Grow or shrink the world to so many ranks; what was done, in words.

        Args:
            drop: Let ranks go that hold variables which no other rank has.

        Raises:
            UsageError: The size cannot be had, or variables would be lost. Nothing was
                changed.
        """
        if size < self.size:
            if not drop:
                self._refuse_loss(size)
            self._membership.cut(size)
            return f"the world is {size} ranks now"
        wider = place(replace(self._config, n=size), this_host())
        newcomers = self._membership.grow(wider[self.size :])
        return f"the world is {size} ranks now; {self._prepare(newcomers)}"

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

    def _prepare(self, newcomers: Sequence[RankInfo]) -> str:
        """Run the setup cells, then copy the lowest old rank's variables."""
        failed = [
            f"setup cell In[{number}] failed on it: {failure.ename}: {failure.evalue}"
            for code, number in self.setup
            for failure, _seconds in self._ask(
                newcomers, "nbdist.engine.cells:run_cell", code, number
            )
            if failure is not None
        ]
        new = {info.rank for info in newcomers}
        oldest = next(info for info in self._roster.living if info.rank not in new)
        ((shipment, lost),) = self._ask([oldest], "nbdist.engine.namespace:export")
        self._ask(newcomers, "nbdist.engine.calls:store", shipment)
        told = [f"it has the variables of rank {oldest.rank}"]
        if lost:
            told.append(f"but these cannot be copied: {'; '.join(lost)}")
        return ", ".join([*told, *failed])

    def _ask(self, ranks: Sequence[RankInfo], target: str, *args: object) -> list[Any]:
        link = self._roster.link
        asked = [link.send(info.engine_uuid, target, *args) for info in ranks]
        return [exchange.reply.result(PREPARE_TIMEOUT_S).value for exchange in asked]
