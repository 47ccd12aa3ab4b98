"""The cases of the fault matrix, and how each must end."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "FAULTS", "PLACES", "RANKS", "Case", "Fault"]

RANKS = {"first": 0, "middle": 1, "last": 2}
PLACES = (
    "in forward",
    "in an all-reduce",
    "in DDP backward",
    "in a commit",
    "between cells",
)


@dataclass(frozen=True)
class Fault:
    """A fault of one rank.

    `says` is a pattern for the error, with `{rank}` for the rank of the fault.
    """

    name: str
    says: str
    prints: int = 0
    """How many ranks print "here" before the user presses the interrupt button."""
    dies: bool = False
    idle: bool = True
    """Whether the fault can occur between cells."""


_DIED = r"rank {rank} \(pid \d+ on .*\) has died with "
_TABLE = r"(?s)different collectives.*\n{rank}  +#\d+ .*{odd}"

FAULTS = (
    Fault("raise", r"rank {rank} of 3.*ValueError: injected"),
    Fault("SIGKILL", _DIED + "SIGKILL", dies=True),
    Fault("segfault", _DIED + "SIGSEGV", dies=True),
    Fault("exit", _DIED + "exit code 3", dies=True),
    Fault("SIGSTOP", r"Rank {rank} did not react.*-r {rank}", prints=1),
    Fault("leave", r"the cell of rank {rank} has ended", idle=False),
    Fault("wrong shape", _TABLE.replace("{odd}", r"\(5,\)"), idle=False),
    Fault("wrong op", _TABLE.replace("{odd}", "max"), idle=False),
    Fault("wrong root", _TABLE.replace("{odd}", "  1  "), idle=False),
    Fault("loop", "interrupted; all ranks keep", prints=1),
    Fault("blocked", "interrupted; all ranks keep", prints=3),
)


@dataclass(frozen=True)
class Case:
    """One fault on one rank at one place."""

    fault: Fault
    place: str
    which: str
    """"first", "middle" or "last"."""

    @property
    def rank(self) -> int:
        return RANKS[self.which]

    @property
    def released(self) -> bool:
        """Whether the rank waits in a collective that no other rank will enter."""
        return self.fault.name == "blocked" and self.place == "between cells"

    @property
    def prints(self) -> int:
        """The number of ranks that print "here" before the user interrupts."""
        return 0 if self.released else self.fault.prints

    @property
    def says(self) -> str:
        """A pattern for the error."""
        says = "rank .* was not asked to run it" if self.released else self.fault.says
        return says.replace("{rank}", str(self.rank))

    def __str__(self) -> str:
        return f"{self.fault.name}-{self.place}-{self.which}"


CASES = [
    Case(fault, place, which)
    for place in PLACES
    for fault in FAULTS
    for which in RANKS
    if fault.idle or place != "between cells"
]
