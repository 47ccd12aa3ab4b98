"""Another host of a cluster, as the notebook's host reaches it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nbdist.clusters.hosts.remote_python import RemotePython
from nbdist.clusters.hosts.remote_shell import Problem, RemoteShell
from nbdist.clusters.hosts.requests import answer_of, send_request
from nbdist.clusters.startup_status import tail_of
from nbdist.clusters.supervisor_client import SupervisorClient
from nbdist.errors import ClusterError
from nbdist.ipc.host_sockets import ANSWERED, connect, link_socket, lost_file

__all__ = ["RemoteHost"]

ANSWER_TIMEOUT_S = 10.0


class RemoteHost:
    """A host to which the process supervisor holds a link.

    Args:
        name: The host's name in the cluster's list.
        shell: Runs programs on the host.
    """

    def __init__(self, name: str, shell: RemoteShell) -> None:
        self.name = name
        self._shell = shell
        self.python = RemotePython.of(None)
        """The host's Python, from its next connection on."""
        self._supervisor: SupervisorClient | None = None
        self._count = 0
        """The number of links that were started."""
        self._why_left = ""
        """Why this side has ended the link; "" if it has not, or without a reason."""

    @property
    def _program(self) -> str:
        """The name of the link's process."""
        again = f" ({self._count})" if self._count > 1 else ""
        return f"the link to {self.name}{again}"

    def connect(self, supervisor: SupervisorClient, silence_s: float) -> None:
        """Start the link, without a wait.

        Args:
            supervisor: Holds the link's process.
            silence_s: Seconds of silence after which the host is lost.
        """
        if supervisor is not self._supervisor:
            self._supervisor, self._count = supervisor, 0
        self._count += 1
        self._why_left = ""
        for path in (link_socket, lost_file):
            path(supervisor.run_dir, self.name).unlink(missing_ok=True)
        agent = ["nbdist.clusters.hosts.agent", self.name, f"{silence_s:g}"]
        command = self._shell.argv(self.name, self.python.command(["-m", *agent]))
        link = [
            *(sys.executable, "-m", "nbdist.clusters.hosts.link"),
            *(str(supervisor.run_dir), self.name, f"{silence_s:g}"),
        ]
        supervisor.start_apart(self._program, [*link, *command])

    def disconnect(self, why: str = "") -> None:
        """End the link, without a wait. The agent ends what it has started.

        Args:
            why: What `why_lost` is to say; "" for what the link says.
        """
        self._why_left = why
        if self._supervisor is not None:
            self._supervisor.stop([self._program])
            with contextlib.suppress(OSError):  # the cluster has ended
                link_socket(self._run_dir, self.name).unlink(missing_ok=True)

    @property
    def _run_dir(self) -> Path:
        assert self._supervisor is not None
        return self._supervisor.run_dir

    @property
    def is_connected(self) -> bool:
        """Whether its agent has answered, and it is not lost."""
        supervisor = self._supervisor
        return (
            supervisor is not None
            and link_socket(supervisor.run_dir, self.name).exists()
        )

    @property
    def has_failed(self) -> bool:
        """Whether the link has ended."""
        assert self._supervisor is not None
        return self._supervisor.exit_code(self._program) is not None

    @property
    def problem(self) -> Problem:
        """Why the host is not connected."""
        assert self._supervisor is not None
        code = self._supervisor.exit_code(self._program)
        return self._shell.problem(self.name, code, self._log(), self.python)

    @property
    def why_lost(self) -> str:
        """Why the host was lost after it was connected; "" if it was not."""
        if self._why_left:
            return self._why_left
        try:
            why = lost_file(self._run_dir, self.name).read_text()
        except OSError:
            return ""
        # What its shell printed before, such as a banner, is not about the end.
        _, _, since = self._log().rpartition(ANSWERED)
        last = since.strip().splitlines()[-1:]
        return "; ".join([f"the connection with it has ended: {why}", *last])

    def _log(self) -> str:
        assert self._supervisor is not None
        try:
            return tail_of(
                self._supervisor.log(self._program).read_text(errors="replace")
            )
        except OSError:
            return ""

    def ask(
        self,
        what: str,
        /,
        *,
        body: Path | bytes | None = None,
        into: BinaryIO | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        **arguments: Any,
    ) -> Any:
        """Make a request to its agent, and wait for its answer.

        Args:
            what: The request.
            arguments: Its arguments, which JSON can hold.
            body: Bytes, or a file with bytes, that belong to the request.
            into: Where the bytes of the answer are written.
            timeout_s: Seconds in which something must be received or sent.

        Returns:
            The answer.

        Raises:
            ClusterError: The host does not answer, or answers with an error. The
                message names it.
        """
        return self.send(what, body=body, timeout_s=timeout_s, **arguments)(into)

    def send(
        self,
        what: str,
        /,
        *,
        body: Path | bytes | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        **arguments: Any,
    ) -> Callable[..., Any]:
        """Make a request, without a wait.

        Returns:
            A function that waits for the answer, and takes `into` of `ask`.

        Raises:
            ClusterError: As for `ask`; the function raises it too.
        """
        with self._named_errors():
            channel = connect(self._run_dir, self.name, "ask")
            send_request(channel, what, arguments, body, timeout_s)

        def answer(into: BinaryIO | None = None) -> Any:
            with self._named_errors():
                return answer_of(channel, into)

        return answer

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = self.why_lost or f"it does not answer: {error}"
            raise ClusterError(f"host {self.name}: {why}") from error
        except ClusterError as error:
            raise ClusterError(f"host {self.name}: {error}") from error
