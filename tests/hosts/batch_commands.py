"""Stand-ins for the commands of PBS, Grid Engine, LSF and HTCondor.

They print what the real commands print by their manuals. A job's script runs, by ssh,
on the first of the job's hosts, and ends when the job is deleted. A job waits as long
as the file `hold` exists.

Run as `python batch_commands.py COMMAND ARGUMENTS`, in the folder of $BATCH_FOLDER.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("BATCH_FOLDER", ""))
HOSTS = ("b", "c")
SLOTS = 2


def submit(system: str, script: str, n: int, nodes: int) -> str:
    """Keep a job of `n` slots on `nodes` hosts. Returns its number."""
    number = str(len(list(FOLDER.glob("job.*"))) + 41)
    shares = dict.fromkeys(HOSTS[:nodes], n // nodes)
    job = {"id": number, "system": system, "hosts": shares, "state": "waits"}
    (FOLDER / f"script.{number}").write_text(script)
    write(job)
    return number


def write(job: dict[str, Any]) -> None:
    path = FOLDER / f"job.{job['id']}"
    path.with_suffix(".new").write_text(json.dumps(job))
    path.with_suffix(".new").rename(path)


def read(number: str) -> dict[str, Any]:
    """A job, which begins to run when nothing holds it."""
    job: dict[str, Any] = json.loads((FOLDER / f"job.{number}").read_text())
    if job["state"] == "waits" and not (FOLDER / "hold").exists():
        job["state"] = "runs"
        for host in job["hosts"]:
            with (FOLDER / f"script.{number}").open() as script:
                subprocess.Popen(
                    ["ssh", host, "sh", "-s", f"batch-job-{number}"],
                    stdin=script,
                    stdout=subprocess.DEVNULL,
                    stderr=(FOLDER / f"log.{number}").open("a"),
                )
            if job["system"] != "condor":
                break
        write(job)
    return job


def delete(number: str) -> None:
    job = read(number)
    for host in job["hosts"]:
        # HTCondor ends the processes of a job; the others end the script alone.
        pattern = f"[b]atch-job-{number}"
        subprocess.run(["ssh", host, "pkill", "-f", pattern], check=False)
        if job["system"] == "condor":
            # ssh gives the words to a shell.
            subprocess.run(["ssh", host, "pkill -f '[n]bdist agent'"], check=False)
    write({**job, "state": "ended"})


def option(script: str, pattern: str, default: str = "") -> str:
    found = re.search(pattern, script, re.MULTILINE)
    return found[1] if found else default


def qsub(path: str) -> None:
    script = Path(path).read_text()
    if "queue=absent" in script or "-q absent" in script:
        sys.exit("qsub: Unknown queue")
    if "#$" in script:
        n = int(option(script, r"^#\$.* -pe \w+ (\d+)", "1"))
        number = submit("sge", script, n, min(n, 2))
        print(f'Your job {number} ("nbdist") has been submitted')
        return
    nodes, cores = re.findall(r"^#PBS -l select=(\d+):ncpus=(\d+)", script, re.M)[0]
    print(submit("pbs", script, int(nodes) * int(cores), int(nodes)) + ".laptop")


def qstat(*arguments: str) -> None:
    if "-xml" in arguments:
        print("<?xml version='1.0'?><job_info><queue_info>")
        for path in FOLDER.glob("job.*"):
            job = read(path.suffix[1:])
            if job["system"] == "sge" and job["state"] != "ended":
                print_tasks(job)
        print("</queue_info></job_info>")
        return
    job = read(arguments[1])
    if job["state"] == "ended":
        print(f"qstat: {job['id']}.laptop Job has finished", file=sys.stderr)
        sys.exit(35)
    print(f"Job Id: {job['id']}.laptop\n    Job_Name = nbdist")
    if job["state"] == "waits":
        print("    job_state = Q\n    comment = Not Running: not enough nodes")
        return
    hosts = "+".join(f"{host}/0*{count}" for host, count in job["hosts"].items())
    print(f"    job_state = R\n    exec_host = {hosts[:3]}\n\t{hosts[3:]}")
    print(
        "    Resource_List.walltime = 00:10:00\n    resources_used.walltime = 00:09:00"
    )


def print_tasks(job: dict[str, Any]) -> None:
    row = f"<JB_job_number>{job['id']}</JB_job_number>"
    if job["state"] == "waits":
        print(
            f"<job_list state='pending'>{row}<state>qw</state><queue_name/></job_list>"
        )
        return
    for index, (host, count) in enumerate(job["hosts"].items()):
        kinds = ["MASTER"] * (index == 0) + ["SLAVE"] * count
        for kind in kinds:
            print(
                f"<job_list state='running'>{row}<state>r</state><queue_name>all.q@"
                f"{host}</queue_name><master>{kind}</master></job_list>"
            )


def bsub() -> None:
    script = sys.stdin.read()
    if "-q absent" in script:
        sys.exit("absent: No such queue. Job not submitted.")
    n = int(option(script, r"^#BSUB -n (\d+)"))
    each = int(option(script, r"ptile=(\d+)", str(n)))
    number = submit("lsf", script, n, n // each)
    print(f"Job <{number}> is submitted to default queue <normal>.")


def bjobs(*arguments: str) -> None:
    job = read(arguments[-1])
    hosts = ":".join(f"{count}*{host}" for host, count in job["hosts"].items())
    rows = {
        "waits": "PEND|-|-|New job is waiting for scheduling",
        "runs": f"RUN|{hosts}|0:1 L|-",
        "ended": f"EXIT|{hosts}|-|-",
    }
    print(rows[job["state"]])


def condor_submit(path: str) -> None:
    script = Path(path).read_text()
    cores = int(option(script, r"^request_cpus = (\d+)"))
    nodes = int(option(script, r"^queue (\d+)$"))
    quoted = option(script, "^arguments = \"-c '(.*)'\"$")
    line = quoted.replace("$(DOLLAR)", "$").replace('""', '"').replace("''", "'")
    number = submit("condor", line + "\n", cores * nodes, nodes)
    print(f"Submitting job(s).\n{nodes} job(s) submitted to cluster {number}.")


def condor_q(number: str, *_: str) -> None:
    job = read(number)
    for index, host in enumerate(job["hosts"]):
        if job["state"] == "waits":
            print(index, 1, "undefined")
        elif job["state"] == "runs":
            print(index, 2, f"slot1_1@{host}")


def condor_ssh_to_job(number: str, command: str) -> None:
    cluster, _, index = number.partition(".")
    host = list(read(cluster)["hosts"])[int(index)]
    os.execvp("ssh", ["ssh", "-T", "-oBatchMode=yes", host, command])


COMMANDS = {
    "qsub": qsub,
    "qstat": qstat,
    "qdel": delete,
    "bsub": bsub,
    "bjobs": bjobs,
    "bkill": delete,
    "condor_submit": condor_submit,
    "condor_q": condor_q,
    "condor_rm": delete,
    "condor_ssh_to_job": condor_ssh_to_job,
}
INSTALL = "\n".join(
    f"printf '#!/bin/sh\\nexec %s %s {name} \"$@\"\\n' {shlex.quote(sys.executable)} "
    f"{shlex.quote(__file__)} > $0/{name}; chmod 755 $0/{name}"
    for name in COMMANDS
)
"""A shell script that writes the commands to the folder $0."""

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
