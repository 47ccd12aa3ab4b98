"""Asks all hosts of a cluster at once whether they can take part.

No rank is started before all have answered. The table has a line for each host, with
the problem and what to do.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nbdist.clusters.hosts.answers import COMPARED, Answers, facts
from nbdist.clusters.hosts.reach import Address
from nbdist.clusters.hosts.remote_host import RemoteHost
from nbdist.clusters.hosts.remote_shell import Problem
from nbdist.errors import ClusterError

__all__ = ["CONNECT_TIMEOUT_S", "Preflight", "problem_table"]

CONNECT_TIMEOUT_S = 15.0
"""Seconds in which all hosts are connected."""
POLL_S = 0.02
AT_ONCE = 32
SPOKEN = ("nbdist", "ipyparallel")
"""The packages through which the ranks speak with the notebook."""
CLOCK_S = 5.0
"""The most by which the clocks of two hosts may differ without a note."""

NO_ADDRESSES: Mapping[str, Address] = {}


class Preflight:
    """The checks before ranks are started on hosts.

    Args:
        others: The other hosts, whose links were started.
        here: The name of this host in the list; None if no rank runs on it.
        order: The names of all hosts in the list, in its order.
        interface: The name of the interface, or the network, through which the ranks
            are to reach each other; None to choose one.
        addresses: The addresses of hosts that have ranks.
    """

    def __init__(
        self,
        others: Sequence[RemoteHost],
        here: str | None,
        order: Sequence[str],
        interface: str | None,
        addresses: Mapping[str, Address] = NO_ADDRESSES,
    ) -> None:
        self._others = {host.name: host for host in others}
        self._here, self._order, self._interface = here, order, interface
        self._fixed = addresses
        self._own = Answers()
        self.problems: dict[str, Problem] = {}
        """Why a host cannot take part, by its name."""
        self.facts: dict[str, dict[str, Any]] = {}
        """What each host has told."""
        self.addresses: dict[str, Address] = {}
        """The address by which the other hosts reach each host."""
        self.notes: list[str] = []

    def run(self, deadline: float, on_progress: Callable[[], None]) -> None:
        """Make all checks. A host that fails one is left out of the next.

        Args:
            deadline: On the monotonic clock.
            on_progress: Called often while hosts are being connected.
        """
        self._await_links(deadline, on_progress)
        self.facts = self._answers("facts", lambda _: {})
        self._compare()
        self._choose_addresses()
        self._note_open_ports()
        self._note_other_users()

    @property
    def _good(self) -> list[str]:
        """The hosts that have passed all checks so far, in order."""
        return [name for name in self._order if name not in self.problems]

    def _await_links(self, deadline: float, on_progress: Callable[[], None]) -> None:
        waiting = dict(self._others)
        deadline = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
        while waiting:
            for name, host in list(waiting.items()):
                if host.is_connected:
                    del waiting[name]
                elif host.has_failed or time.monotonic() > deadline:
                    self.problems[name] = host.problem
                    del waiting[name]
            on_progress()
            time.sleep(POLL_S)  # a file of another process raises no event

    def _answers(
        self, request: str, arguments: Callable[[str], dict[str, Any]]
    ) -> dict[str, Any]:
        """The answers of all good hosts, this one among them, to a request.

        One that fails is a problem.

        Args:
            request: The request, a method of `Answers`.
            arguments: The arguments for each host.
        """

        def ask(name: str) -> Any:
            if name == self._here:
                return getattr(self._own, request)(**arguments(name))
            try:
                return self._others[name].ask(request, **arguments(name))
            except ClusterError as error:
                self.problems[name] = Problem(str(error), "look at its system's log")
                return None

        names = self._good
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(ask, names))
        found = dict(zip(names, answers, strict=True))
        return {name: found[name] for name in self._good}

    # -- versions --------------------------------------------------------------------

    def _compare(self) -> None:
        """Compare all hosts with the first in the list, and with this one."""
        mine = facts()
        names = self._good
        for name in names:
            first, there = self.facts[names[0]], self.facts[name]
            problem = _difference(name, there, mine, SPOKEN) or _difference(
                name, there, first, COMPARED
            )
            if problem is not None:
                self.problems[name] = problem
            ahead_s = there["time"] - mine["time"]
            if abs(ahead_s) > CLOCK_S:
                self.notes.append(
                    f"the clock of {name} differs by {abs(ahead_s):.0f} s: the times "
                    "in charts and histories do too"
                )

    def _note_other_users(self) -> None:
        mine = os.geteuid()
        hosts = [
            name
            for name in self._good
            if self.facts[name]["user"] != mine
            and not self.facts[name]["has_compiled_parts"]
        ]
        if hosts:
            self.notes.append(
                f"{', '.join(hosts)}: ranks there cannot be replaced or added, because "
                f"the user's id is not {mine} as here, and nbdist was installed there "
                "without a C compiler"
            )

    def _note_open_ports(self) -> None:
        if self._interface is not None:  # the user has named a network
            return
        hosts = [n for n in self._good if not self.facts[n]["may_limit_sources"]]
        if hosts and len(self._good) > 1:
            self.notes.append(
                f"{', '.join(hosts)}: any host of the ranks' network can connect to "
                "the ports of MPI and torch, because the system wants CAP_NET_ADMIN of "
                "who limits that: name a network that you trust with --interface"
            )

    # -- addresses -------------------------------------------------------------------

    def _choose_addresses(self) -> None:
        """Choose the address of each host that all others can connect to."""
        candidates = {name: self._candidates(name) for name in self._good}
        if len(candidates) == 1 and self._interface is None:
            ((name, found),) = candidates.items()
            self.addresses[name] = (*found, Address("lo", "127.0.0.1", 8))[0]
            return
        for name, found in candidates.items():
            if not found:
                self.problems[name] = Problem(
                    f"has no address of {self._interface or 'a network'}",
                    "name another interface or network with --interface",
                )
        texts = {n: [each.address for each in found] for n, found in candidates.items()}
        ports = self._answers("listen", lambda name: {"addresses": texts[name]})
        targets = {
            name: [
                (address, port)
                for other in ports
                if other != name
                for address, port in zip(texts[other], ports[other], strict=True)
            ]
            for name in ports
        }
        errors = self._answers("reach", lambda name: {"targets": targets[name]})
        self._own.close()
        refused: dict[str, dict[str, str]] = {}
        """For each address, the hosts that cannot connect to it, and why."""
        for name, of_host in errors.items():
            for (address, _), error in zip(targets[name], of_host, strict=True):
                if error:
                    refused.setdefault(address, {})[name] = error
        for name in errors:
            good = [each for each in candidates[name] if each.address not in refused]
            if good:
                self.addresses[name] = good[0]
                continue
            tried = candidates[name][0].address
            who, why = next(iter(refused[tried].items()))
            self.problems[name] = Problem(
                f"{who} cannot connect to it at {tried}: {why}",
                "let the hosts connect to each other's TCP ports from 1024 on, or name "
                "another interface or network with --interface",
            )

    def _candidates(self, name: str) -> list[Address]:
        """The addresses of a host that may be chosen, the likeliest first."""
        if name in self._fixed:
            return [self._fixed[name]]
        found = [Address(*each) for each in self.facts[name]["addresses"]]
        if self._interface is not None:
            return [each for each in found if _is_of(each, self._interface)]
        # Bridges of containers and virtual machines have addresses that no other host
        # reaches, often the same on all hosts.
        return sorted(found, key=lambda each: each.interface.startswith(VIRTUAL))


def problem_table(names: Sequence[str], problems: Mapping[str, Problem]) -> str:
    """The problem of each host, and what to do about it."""
    rows = [("host", "problem", "what to do")]
    for name in names:
        what, remedy = problems.get(name, ("none", ""))
        rows.append((name, what, remedy))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip()
        for row in rows
    ]
    count = f"{len(problems)} of {len(names)} hosts cannot take part"
    return "\n".join([f"{count}, and nothing was started:", *lines])


VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxc")


def _is_of(address: Address, interface: str) -> bool:
    """Whether an address is of an interface, or in a network such as 10.0.0.0/8."""
    if "/" not in interface:
        return address.interface == interface
    network = ipaddress.ip_network(interface, strict=False)
    return ipaddress.ip_address(address.address) in network


def _difference(
    name: str,
    there: Mapping[str, Any],
    wanted: Mapping[str, Any],
    packages: Sequence[str],
) -> Problem | None:
    """What a host must change to agree with another one; None if nothing."""
    if _minor(there["python"]) != _minor(wanted["python"]):
        return Problem(
            f"has Python {there['python']}, and another host {wanted['python']}",
            f"name one of that version by {name}:SLOTS:python=PATH",
        )
    if there["system"] != wanted["system"]:
        return Problem(
            f"is {there['system']}, and another host {wanted['system']}",
            "leave it out: all hosts must have one kind of processor",
        )
    python = there.get("executable", "python")
    for package in packages:
        has, wants = (
            (each["versions"][package] or "").partition("+")[0]  # without the build
            for each in (there, wanted)
        )
        if has != wants:
            shown = f"{package} {has}" if has else f"no {package}"
            return Problem(
                f"has {shown}, and another host {wants}",
                f"run `{python} -m pip install {package}=={wants}` there",
            )
    if "nbdist" in packages and there.get("modules") != wanted.get("modules"):
        return Problem(
            "has an nbdist of the same version, and other modules",
            f"install the same commit, or the same wheel, for {python} there",
        )
    return None


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
