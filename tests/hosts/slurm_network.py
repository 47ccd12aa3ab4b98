"""A real Slurm on the hosts of a `HostNetwork`: its controller on one, nodes on others.

Needs Debian's packages munge, slurmctld, slurmd and slurm-client.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence

from tests.hosts.console import Console
from tests.hosts.network import HostNetwork, TestHost
from tests.processes import wait_until

__all__ = ["Slurm", "why_no_slurm"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
FOLDER = "/run/slurm"
SOCKET = "/run/munge/socket"
UP_WITHIN_S = 30.0


@functools.cache
def why_no_slurm() -> str:
    """Why there is no Slurm here; "" if there is."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(missing)}: apt install slurm-wlm" if missing else ""


class Slurm:
    """Slurm, as long as its hosts live.

    Args:
        network: The hosts.
        controller: The host of slurmctld, from which jobs are submitted.
        nodes: The hosts on which jobs run.
    """

    def __init__(
        self, network: HostNetwork, controller: str, nodes: Sequence[str]
    ) -> None:
        self._controller = network[controller]
        self._nodes = [network[name] for name in nodes]
        self._hosts = [network[name] for name in dict.fromkeys([controller, *nodes])]
        config = CONFIG.format(controller=controller, nodes=",".join(nodes))
        try:
            self._start(config)
        except AssertionError:
            self.close()
            raise

    def _start(self, config: str) -> None:
        for host in self._hosts:
            host.write(f"{FOLDER}/slurm.conf", config, mode="644", as_root=True)
            host.write("/run/munge/key", "k" * 64, as_root=True)
            host.run("chmod", "711", "/run/munge", FOLDER, as_root=True)
            host.run(
                *(
                    "munged",
                    "--force",
                    f"--socket={SOCKET}",
                    "--key-file=/run/munge/key",
                ),
                *("--pid-file=/run/munge/pid", "--log-file=/run/munge/log"),
                "--seed-file=/run/munge/seed",
                as_root=True,
            )
            host.run("mkdir", f"{FOLDER}/state", f"{FOLDER}/spool", as_root=True)
        self._daemon(self._controller, "slurmctld")
        for node in self._nodes:
            self._daemon(node, "slurmd", "-N", node.name)
        count = str(len(self._nodes))
        wait_until(
            lambda: (
                self.run("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D")
                == count
            ),
            UP_WITHIN_S,
            lambda: self._controller.run("cat", f"{FOLDER}/slurmctld.log").stdout,
        )

    def _daemon(self, host: TestHost, *argv: str) -> None:
        host.run("env", f"SLURM_CONF={FOLDER}/slurm.conf", *argv, as_root=True)

    def run(self, *argv: str, as_root: bool = True) -> str:
        """The output of one of Slurm's commands, without the last newline."""
        command = ["env", f"SLURM_CONF={FOLDER}/slurm.conf", *argv]
        return self._controller.run(*command, as_root=as_root).stdout.strip()

    def console(self, *wrapper: str, **variables: str) -> Console:
        """A Python interpreter on the host from which jobs are submitted.

        Args:
            wrapper: The command line that runs it; see `TestHost.console`.
            variables: Additional environment variables.
        """
        where = {"SLURM_CONF": f"{FOLDER}/slurm.conf", **variables}
        return self._controller.console(*wrapper, **where)

    def submit(self, partition: str) -> str:
        """Submit a job that uses all cores. Returns its number."""
        options = ("--parsable", "-n4", "-N2", f"--partition={partition}")
        line = ("--output=/dev/null", "--wrap=sleep 300")
        return self.run("sbatch", *options, *line, as_root=False)

    def block(self) -> str:
        """Run a job that uses all cores. Returns its number."""
        job = self.submit("debug")
        state = ("squeue", "-h", "-j", job, "-o", "%T")
        wait_until(lambda: self.run(*state) == "RUNNING", UP_WITHIN_S, str)
        return job

    def empty(self) -> None:
        """Cancel all jobs, have all nodes up, and wait until they are free."""
        self.run("scancel", f"--user={self._controller.traits.user}")
        down = self.run("sinfo", "-h", "-t", "down,drain", "-o", "%n").splitlines()
        for name in set(down):
            self.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
        count = str(len(self._nodes))
        idle = ("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D")
        wait_until(lambda: self.run(*idle) == count, UP_WITHIN_S, str)

    def close(self) -> None:
        """End all jobs and daemons, so that the next Slurm does not know them."""
        for host in self._hosts:
            host.run(
                *("pkill", "-KILL", "slurmd|slurmctld|slurmstepd|munged"),
                as_root=True,
                check=False,
            )
            host.run("rm", "-rf", FOLDER, as_root=True)


CONFIG = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
ReturnToService=2
KillWait=5
MpiDefault=none
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=debug Nodes={nodes} Default=YES PriorityTier=1 State=UP GraceTime=20
PartitionName=urgent Nodes={nodes} PriorityTier=2 State=UP
"""
