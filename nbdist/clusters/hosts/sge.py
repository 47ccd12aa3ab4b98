"""A job of Grid Engine (SGE) for the ranks of a cluster."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

from nbdist.clusters.hosts.batch_job import WAITING, BatchJob, JobState, output_of
from nbdist.errors import UsageError

__all__ = ["SgeJob"]


class SgeJob(BatchJob):
    """A job of Grid Engine."""

    system = "Grid Engine"
    command = "qsub"

    @staticmethod
    def current() -> str | None:
        # The names are those of other programs too: only these two together are SGE's.
        return os.environ.get("JOB_ID") if os.environ.get("PE_HOSTFILE") else None

    def submit(self) -> str:
        # Slow to import, and not needed without Grid Engine.
        from ipyparallel.cluster.launcher import SGELauncher

        class Launcher(SGELauncher):  # type: ignore[misc]
            output_template = "#$ -j y\n#$ -o {output_file}"

        config = self._config
        asked = config.job_args or ""
        if (config.n or 1) > 1 and not re.search(r"(^|\s)-pe\s", asked):
            raise UsageError(
                f"--launcher sge with {config.n} ranks needs a parallel environment, "
                f"whose names the site chooses (`qconf -spl`): "
                f"--job-arg '-pe NAME {config.n}'"
            )
        lines = ["#!/bin/sh", "#$ -S /bin/sh", "#$ -N nbdist"]
        if config.time:
            lines.append(f"#$ -l h_rt={config.time}")
        if config.account:
            lines.append(f"#$ -A {config.account}")
        if asked:
            lines.append(f"#$ {asked}")
        return self.submit_script(Launcher, "\n".join([*lines, WAITING, ""]))

    def look(self) -> JobState:
        states = {row.findtext("state", "") for row in self._rows()}
        text = " ".join(sorted(states))
        if not states or any("d" in state for state in states):
            return JobState("ended", text)
        if any("E" in state for state in states):
            return JobState("ended", f"{text}: `qstat -j {self.id}` has the reason")
        if any("q" in state for state in states):
            return JobState("waits", f"state {text}")
        return JobState("runs", text)

    def delete(self) -> None:
        output_of("qdel", self.id)

    def cores(self) -> dict[str, int]:
        if (listed := os.environ.get("PE_HOSTFILE")) and not self._is_own:
            lines = Path(listed).read_text(encoding="utf-8").splitlines()
            return {host: int(count) for host, count, *_ in map(str.split, lines)}
        masters: dict[str, int] = {}
        slaves: dict[str, int] = {}
        for row in self._rows():
            host = row.findtext("queue_name", "").rpartition("@")[2]
            counts = masters if row.findtext("master") == "MASTER" else slaves
            if host:
                counts[host] = counts.get(host, 0) + 1
        # The master has a row of its own beside those of the slots, unless it is alone.
        return slaves or masters

    def _rows(self) -> list[ElementTree.Element]:
        """Of each task of the job, what qstat says."""
        text = output_of("qstat", "-xml", "-g", "t", "-u", "*")
        rows = ElementTree.fromstring(text).iter("job_list")
        return [row for row in rows if row.findtext("JB_job_number") == self.id]
