"""A job of LSF for the ranks of a cluster."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from nbdist.clusters.hosts.batch_job import WAITING, BatchJob, JobState, output_of
from nbdist.clusters.hosts.host_list import gpus_of, nodes_of

__all__ = ["LsfJob"]

FIELDS = "stat:20 exec_host:65535 time_left:20 pend_reason:200 delimiter='|'"


class LsfJob(BatchJob):
    """A job of LSF."""

    system = "LSF"
    command = "bsub"

    @staticmethod
    def current() -> str | None:
        return os.environ.get("LSB_JOBID")

    def submit(self) -> str:
        # Slow to import, and not needed without LSF.
        from ipyparallel.cluster.launcher import LSFLauncher

        class Launcher(LSFLauncher):  # type: ignore[misc]
            def start(self, n: int = 1) -> Any:
                # bsub reads the options of a script on standard input only.
                self.write_batch_script(n)
                text = Path(self.batch_file).read_bytes()
                done = subprocess.run(
                    self.submit_command, input=text, capture_output=True, check=True
                )
                return self.parse_job_id(done.stdout.decode(errors="replace"))

        config = self._config
        n, hosts = config.n or 1, nodes_of(config.nnodes)[0]
        lines = ["#!/bin/sh", "#BSUB -J nbdist", f"#BSUB -n {n}"]
        if hosts:
            lines.append(f'#BSUB -R "span[ptile={-(-n // hosts)}]"')
        if config.time:
            lines.append(f"#BSUB -W {config.time}")
        if config.account:
            lines.append(f"#BSUB -P {config.account}")
        if gpus := gpus_of(config.gres):
            lines.append(f'#BSUB -gpu "num={gpus}"')
        if config.job_args:
            lines.append(f"#BSUB {config.job_args}")
        return self.submit_script(Launcher, "\n".join([*lines, WAITING, ""]))

    def look(self) -> JobState:
        text, _, left, reason = self._ask()
        if text in ("PEND", "PSUSP", "WAIT"):
            return JobState("waits", reason if reason.strip("-") else text)
        if text in ("RUN", "USUSP", "SSUSP"):
            # Hours and minutes, such as "1:30 L".
            found = re.match(r"(\d+):(\d+)", left)
            minutes = int(found[1]) * 60 + int(found[2]) if found else None
            return JobState("runs", text, None if minutes is None else minutes * 60)
        return JobState("ended", text)

    def delete(self) -> None:
        output_of("bkill", self.id)

    def cores(self) -> dict[str, int]:
        if (listed := os.environ.get("LSB_MCPU_HOSTS")) and not self._is_own:
            words = listed.split()
            return dict(zip(words[::2], map(int, words[1::2]), strict=True))
        cores: dict[str, int] = {}
        # Such as 2*b:2*c, or b for one core.
        for part in self._ask()[1].split(":"):
            count, _, name = part.rpartition("*")
            cores[name] = cores.get(name, 0) + int(count or 1)
        return cores

    def _ask(self) -> list[str]:
        """The state, the hosts, the time that is left, and why the job waits."""
        text = output_of("bjobs", "-noheader", "-o", FIELDS, self.id)
        fields = [field.strip() for field in text.strip().split("|", 3)]
        return fields if len(fields) == 4 else ["", "", "", ""]
