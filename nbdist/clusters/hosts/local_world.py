"""What a cluster has on a host other than the notebook's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nbdist.clusters import fork_server_client
from nbdist.clusters.launchers.mpiexec import SEVERAL_HOSTS, Mpiexec
from nbdist.clusters.supervisor_client import SupervisorClient
from nbdist.config import ForkConfig
from nbdist.errors import ClusterError
from nbdist.ipc import folders, private_files, rank_parent
from nbdist.ipc.atomic_files import write_atomically
from nbdist.ipc.device_assignment import write_text
from nbdist.ipc.fork_messages import FORKED, SOCKET, STARTED, socket_address
from nbdist.ipc.host_sockets import HOST, RANK_PROXY
from nbdist.ipc.process_files import Process

__all__ = ["LocalWorld"]

OF_THE_NOTEBOOK = (
    "OMPI_FILE_LOCATION", "OMPI_LIBDIR_LOC", "OMPI_MCA_initial_wdir",
    "PMIX_SYSTEM_TMPDIR",
)  # fmt: skip
"""Variables of MPI's launcher with paths of the notebook's host, which ranks can do
without."""
PREFIXES = ("OPAL_PREFIX", "PMIX_PREFIX")
"""Variables with the folder in which Open MPI is installed."""
LAUNCHER_PORT = re.compile(r"(?<=tcp4://127\.0\.0\.1:)\d+")
SECURITY = "security"
CONNECTION = "ipcontroller-engine.json"
CONTROLLER_URL = re.compile(r"^ipc://.*/(?=zmq$)")


class LocalWorld:
    """The part of a cluster that is on this host.

    Args:
        host: The name of this host in the cluster's list.
        relay: Joins the connections of a listening socket with a channel to the
            notebook's host, by the channel's name.
        on_loss: Called on a thread when the process supervisor has ended by itself.
    """

    def __init__(
        self,
        host: str,
        relay: Callable[[socket.socket, str], None],
        on_loss: Callable[[], None],
    ) -> None:
        self.host = host
        self._relay, self._on_loss = relay, on_loss
        self._supervisor: SupervisorClient | None = None
        self._environment: dict[str, str] = {}
        self._ports: dict[int, int] = {}
        """The port of this host that leads to a port of the notebook's host."""
        self._lock = threading.Lock()

    @property
    def supervisor(self) -> SupervisorClient:
        """The process supervisor of this host's processes.

        Raises:
            ClusterError: `begin` was not called.
        """
        if self._supervisor is None:
            raise ClusterError(f"the cluster has not begun on {self.host}")
        return self._supervisor

    @property
    def run_dir(self) -> Path:
        """The run folder on this host."""
        return self.supervisor.run_dir

    def begin(
        self,
        *,
        n: int,
        interface: str,
        variables: Mapping[str, str],
        mpiexec: str | None,
        keeps_commits: bool,
    ) -> None:
        """Make the folders, and start what ranks are started by.

        Args:
            n: The number of ranks on this host.
            interface: This host's interface in the network of the ranks.
            variables: Environment variables for the ranks.
            mpiexec: The path of the MPI launcher; None for the default.
            keeps_commits: Whether the commits of elastic runs are kept in files.

        Raises:
            OSError: There is no room for the files.
            UsageError: There is no MPI launcher, or it does not work.
        """
        os.environ.update(variables)
        os.environ.update(
            _existing(variables["NBDIST_WORK_DIR"], variables["NBDIST_PATH"])
        )
        supervisor = SupervisorClient(private_files.make_run_folder(), together=False)
        self._supervisor = supervisor
        threading.Thread(
            target=self._await_loss, args=(supervisor,), daemon=True
        ).start()
        run_dir = supervisor.run_dir
        memory = private_files.new_memory_folder()
        supervisor.remove_at_end(memory)
        private_files.make_memory_folder(run_dir, memory)
        private_files.make_rendezvous_folder(run_dir, n)
        (run_dir / SECURITY).mkdir(mode=0o700)
        if keeps_commits:
            private_files.make_commit_folders(run_dir)
        launcher = Mpiexec(mpiexec)
        added = {
            **launcher.environment(n, run_dir, interface),
            **SEVERAL_HOSTS,
            "NBDIST_RUN_DIR": str(run_dir),
            "PMIX_SERVER_TMPDIR": str(private_files.rendezvous_folder(run_dir)),
            HOST: self.host,
            **dict.fromkeys(PREFIXES, str(launcher.prefix)),
        }
        try:
            server = fork_server_client.serve(
                run_dir, {**os.environ, **added}, ForkConfig.from_environment()
            )
        except fork_server_client.CannotFork as error:
            added[STARTED] = str(error)
        else:
            added[STARTED] = FORKED
            supervisor.attend_rank_host(run_dir / SOCKET, server)
        self._environment = added

    def _await_loss(self, supervisor: SupervisorClient) -> None:
        supervisor.wait(lambda: False, None)  # until it has ended
        self._on_loss()

    def connect_controller(self, connection: dict[str, Any]) -> None:
        """Let the ranks reach the controller.

        Args:
            connection: The content of the controller's file for engines.

        Raises:
            OSError: There can be no socket in the run folder.
        """
        for number in sorted(set(_numbers(connection))):
            listener = socket.socket(socket.AF_UNIX)
            with socket_address(self.run_dir / f"zmq:{number}") as address:
                listener.bind(address)
            listener.listen(socket.SOMAXCONN)
            self._relay(listener, f"zmq:{number}")
        here = {**connection, "interface": f"ipc://{self.run_dir / 'zmq'}"}
        write_atomically(
            self.run_dir / SECURITY / CONNECTION,
            lambda file: file.write(json.dumps(here).encode()),
            mode=0o600,
            durable=False,
        )

    def start_rank(
        self,
        arguments: list[str],
        variables: Mapping[str, str],
        assignments: str,
        proxy: int,
    ) -> Process:
        """Start a rank parent, which starts the rank.

        Args:
            arguments: Those of the rank parent.
            variables: The environment variables of the rank parent on the notebook's
                host that concern the rank.
            assignments: The content of the file with all device assignments.
            proxy: The pid of the rank parent on the notebook's host.

        Returns:
            The rank's process.
        """
        write_text(self.run_dir, assignments)
        environment = {
            **os.environ,
            **self._translated(variables),
            **self._environment,
            RANK_PROXY: str(proxy),
        }
        process = Process.of_arguments(arguments, environment)
        self.supervisor.start(
            process.name, rank_parent.command(*arguments), environment
        )
        return process

    def _translated(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The variables of the notebook's host, as they are valid on this host."""
        return {
            name: LAUNCHER_PORT.sub(lambda port: str(self._leading_to(port[0])), value)
            for name, value in variables.items()
            if name not in OF_THE_NOTEBOOK
        }

    def _leading_to(self, port: str) -> int:
        """The port of this host's loopback interface that leads to the launcher's."""
        with self._lock:
            wanted = int(port)
            if wanted not in self._ports:
                listener = socket.create_server(("127.0.0.1", 0))
                self._ports[wanted] = listener.getsockname()[1]
                self._relay(listener, f"port:{wanted}")
            return self._ports[wanted]

    def close(self) -> None:
        """End all processes of the cluster on this host, and remove its files."""
        if self._supervisor is not None:
            with contextlib.suppress(ClusterError):  # its process goes on with it
                self._supervisor.close()
        fork_server_client.close()


def _existing(work_dir: str, path: str) -> dict[str, str]:
    """The working folder and the path of the notebook, as far as this host has them.

    Args:
        work_dir: The notebook's working folder; the user's home folder takes its place.
        path: The notebook's `sys.path`. What this process has is added.
    """
    # An empty entry is the working folder.
    there = [p for p in path.split(os.pathsep) if not p or os.path.exists(p)]
    own = [each for each in sys.path if each and each not in there]
    return {
        # A login shell may have left the home folder.
        "NBDIST_WORK_DIR": next(
            filter(os.path.isdir, (work_dir, os.path.expanduser("~"))),
            folders.current(),
        ),
        "NBDIST_PATH": os.pathsep.join([*there, *own]),
    }


def _numbers(connection: Mapping[str, Any]) -> Iterable[int]:
    """The numbers of the controller's sockets in a connection file."""
    for value in connection.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and not isinstance(each, bool):
                yield each
