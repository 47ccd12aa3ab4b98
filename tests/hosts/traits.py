"""How the hosts of the tests differ, as those of a user do.

Nothing but the software is the same on two hosts: a user has another name and another
number on each of them, and the hosts differ in their shells, limits and networks.
"""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Traits", "drawn", "equal"]

NAMES = ("ada", "bob", "carol", "dan", "eve", "frank", "grace", "heidi")
FIRST_ID, IDS = 1500, 400
SHELLS = ("/bin/bash", "/bin/sh")
BANNERS = (
    "",
    "echo Welcome to $(hostname)",
    "echo noise >&2; alias python=false; cd /",
)
"""Lines of .bashrc, which bash reads for a command of ssh too."""


@dataclass(frozen=True)
class Traits:
    """What one host has that another one need not have."""

    user: str
    uid: int
    gid: int
    home: Path
    shell: str
    umask: str
    banner: str
    port: int
    """Of its sshd."""
    locale: str
    shared_memory: str
    """The size of /dev/shm, as `mount` takes it."""
    knows_itself_as: str
    """The address of its own name: Debian's installer writes 127.0.1.1."""
    has_bridge: bool
    """Whether it has docker0, with an address that is the same on all hosts."""
    networks: int
    """The number of networks that connect all hosts."""
    environment: str
    """Where the Python environment of this checkout is; "" for where it is here."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value!s:.40}" for name, value in asdict(self).items())


def drawn(seed: int | str, count: int, *, environments: bool = False) -> list[Traits]:
    """The traits of some hosts, drawn at random. No two users have one name or id.

    Args:
        seed: The seed of the draws.
        count: The number of hosts.
        environments: Whether the environments may have paths that no other host knows.
    """
    rng = random.Random(seed)
    names = rng.sample(NAMES, count)
    uids = rng.sample(range(FIRST_ID, FIRST_ID + IDS), count)
    gids = rng.sample(range(FIRST_ID, FIRST_ID + IDS), count)
    networks = rng.choice((1, 2))
    places = ["", "~/env", "/srv/{user}/env"][: 3 if environments else 2]
    place = rng.choice(places) if sys.prefix != sys.base_prefix else ""
    return [
        Traits(
            user=name,
            uid=uid,
            gid=gid,
            home=Path(rng.choice(("/home", "/home/people"))) / name,
            shell=rng.choice(SHELLS),
            umask=rng.choice(("022", "002", "077")),
            banner=rng.choice(BANNERS),
            port=rng.choice((22, 122, rng.randrange(300, 1000))),
            locale=rng.choice(("C", "C.UTF-8", "POSIX")),
            shared_memory=rng.choice(("64m", "256m", "50%")),
            knows_itself_as=rng.choice(("", "127.0.1.1")),
            has_bridge=rng.random() < 0.5,
            networks=networks,
            environment=place.format(user=name),
        )
        for name, uid, gid in zip(names, uids, gids, strict=True)
    ]


def equal(count: int) -> list[Traits]:
    """The traits of hosts that are alike, such as the nodes of one batch system."""
    return [
        Traits(
            user="ada",
            uid=FIRST_ID,
            gid=FIRST_ID,
            home=Path("/home/ada"),
            shell="/bin/bash",
            umask="022",
            banner="",
            port=22,
            locale="C.UTF-8",
            shared_memory="50%",
            knows_itself_as="",
            has_bridge=False,
            networks=1,
            environment="",
        )
    ] * count
