"""How the hosts of the tests differ, as those of a user do.

Nothing but the software is the same on two hosts: a user has another name and another
number on each of them, and the hosts differ in their shells, limits and networks.
"""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.clusters import fake_clock

__all__ = ["Traits", "drawn", "equal", "of_one_user"]

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
    clock_s: float
    """How far its wall clock is ahead, in seconds."""
    delay_s: float
    """The time that a packet takes to it, and from it, in seconds."""
    loss: float
    """The share of packets that its links lose in each direction."""
    environment: str
    """Where the Python environment of this checkout is; "" for where it is here."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value!s:.40}" for name, value in asdict(self).items())


def drawn(
    seed: int | str,
    count: int,
    *,
    environments: bool = False,
    delay_s: float = 0.0,
    loss: float = 0.0,
) -> list[Traits]:
    """The traits of some hosts, drawn at random. No two users have one name or id.

    Args:
        seed: The seed of the draws.
        count: The number of hosts.
        environments: Whether the environments may have paths that no other host knows.
        delay_s: The longest time that packets may take in each direction, in seconds.
        loss: The largest share of packets that may be lost.
    """
    rng = random.Random(seed)
    names = rng.sample(NAMES, count)
    uids = rng.sample(range(FIRST_ID, FIRST_ID + IDS), count)
    gids = rng.sample(range(FIRST_ID, FIRST_ID + IDS), count)
    networks = rng.choice((1, 2))
    places = ["", "~/env", "/srv/{user}/env"][: 3 if environments else 2]
    clocks = (0.0,) if fake_clock.why_not() else (0.0, 0.0, 0.3, -3600.0, 86400.0)
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
            clock_s=rng.choice(clocks),
            delay_s=rng.choice((0.0, 0.0, delay_s / 10, delay_s)),
            loss=rng.choice((0.0, 0.0, loss / 5, loss)),
            environment=place.format(user=name),
        )
        for name, uid, gid in zip(names, uids, gids, strict=True)
    ]


def of_one_user(seed: int | str, count: int) -> list[Traits]:
    """As `drawn`, but with one user and the right time, as a batch system requires."""
    hosts = drawn(seed, count)
    shared = ("user", "uid", "gid", "home", "shell", "umask", "locale")
    same = {name: getattr(hosts[0], name) for name in shared}
    return [
        replace(each, **same, clock_s=0.0, environment="", port=22) for each in hosts
    ]


def equal(count: int) -> list[Traits]:
    """The traits of hosts that are alike."""
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
            clock_s=0.0,
            delay_s=0.0,
            loss=0.0,
            environment="",
        )
    ] * count
