"""From `kill -9` of a rank to the next training step, and what a commit costs."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import nbdist
from benchmarks import report
from benchmarks.measure import alternate, summary

RANKS = 4
REPEATS = 7
STEPS = 40
DIES_AT = 20
LIMIT_S = 180

# The same training for all: each rank notes in a file when a step has ended, and the
# victim when it dies. The monotonic clock is that of the whole machine.
TRAINING = """
import os, signal, time
import torch
from torch.nn.parallel import DistributedDataParallel

def make_training():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(500, 500) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

def take_step(ddp, optimizer):
    optimizer.zero_grad()
    ddp(torch.ones(8, 500)).square().mean().backward()
    optimizer.step()

def tell(name, step):
    with open(f"{folder}/{name}", "a") as file:
        file.write(f"{step} {time.monotonic()}\\n")

def die_once(step, rank):
    if step == DIES_AT and rank == 1 and not os.path.exists(f"{folder}/death"):
        tell("death", step)
        os.kill(os.getpid(), signal.SIGKILL)
""".replace("DIES_AT", str(DIES_AT))

ELASTIC = f"""
@nbdist.elastic.run
def train(state):
    ddp = DistributedDataParallel(state.model)
    while state.step < {STEPS}:
        die_once(state.step, nbdist.rank())
        take_step(ddp, state.optimizer)
        state.step += 1
        state.commit()
        tell("steps", state.step)

model, optimizer = make_training()
state = nbdist.elastic.State(model=model, optimizer=optimizer, step=0)
train(state)
"""

CHECKPOINTED = f"""
path = folder + "/checkpoint"
model, optimizer = make_training()
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
ddp = DistributedDataParallel(model)
while step < {STEPS}:
    die_once(step, dist.get_rank())
    take_step(ddp, optimizer)
    step += 1
    if dist.get_rank() == 0:
        state = dict(model=model.state_dict(), optimizer=optimizer.state_dict())
        torch.save(dict(state, step=step), path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
    tell("steps", step)
"""

# A store for each attempt: in torchrun's, gloo finds the addresses of the last one.
SCRIPT = """
import os, sys
import torch.distributed as dist
folder = sys.argv[1]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = f"{folder}/store-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
store = dist.FileStore(store, size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
"""

# Two equal states: the copies of the one in the run lie in files on rank 0.
COMMIT = """
import time
import torch

torch.manual_seed(0)
layers = [torch.nn.Linear(2500, 2500) for _ in range(4)]
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
state = nbdist.elastic.State(model=model, optimizer=optimizer, step=0)
private = nbdist.elastic.State(model=model, optimizer=optimizer, step=0)
inputs = torch.ones(BATCH, 2500, device=device)

def finish():
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()

times = {"step": [], "commit": [], "private commit": []}

def timed(name, work):
    nbdist.barrier()
    begun = finish()
    work()
    times[name].append(finish() - begun)

@nbdist.elastic.run
def train(state):
    ddp = torch.nn.parallel.DistributedDataParallel(state.model)

    def step():
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    for turn in range(REPEATS + 3):
        timed("step", step)
        commits = [("commit", state.commit), ("private commit", private.commit)]
        for name, commit in commits[:: 1 if turn % 2 else -1]:
            timed(name, commit)

train(state)
times = {name: values[3:] for name, values in times.items()}
"""
BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.recovery", description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    repeats = parser.parse_args().repeats
    os.environ["OMP_NUM_THREADS"] = "1"
    variants: dict[str, Callable[[Path], None]] = {
        "elastic run, shrink": lambda folder: elastic(folder, "shrink"),
        "elastic run, replace": lambda folder: elastic(folder, "replace"),
        "`%dist_restart` and a checkpoint": restarted,
        "`torchrun --max-restarts` and a checkpoint": by_torchrun,
    }
    times = alternate(
        {name: lambda work=work: gap(work) for name, work in variants.items()},
        repeats,
        warmups=0,
    )
    restart = statistics.median(times["`%dist_restart` and a checkpoint"])
    rows = [
        [name, summary(s, "s"), f"{statistics.median(s) / restart:.2f}"]
        for name, s in times.items()
    ]
    commits = commit_times(repeats)
    step, shared, private = (
        statistics.median(commits[name])
        for name in ("step", "commit", "private commit")
    )
    report.save(
        "recovery",
        {"recovery": times, "commit": commits},
        report.table(["a rank of 4 is killed", "next step after", "ratio"], rows)
        + f"\n\n{repeats} runs each, from the victim's `kill -9` to the end of the "
        "first step that follows, of a million parameters; each step is committed, or "
        "written to a checkpoint. \n\nA commit of 25 million parameters with SGD's "
        f"momentum takes {summary(commits['commit'])}, {shared / step:.1%} of a step "
        f"of {BATCH} samples on each of 2 ranks ({summary(commits['step'])}). With "
        "private memory for rank 0's copies, which a death of all ranks would lose, it "
        f"takes {summary(commits['private commit'])}: the ratio is "
        f"{shared / private:.2f}.",
    )


def gap(work: Callable[[Path], None]) -> float:
    """Seconds between the death and the end of the next step."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        work(folder)
        ((_step, death),) = told(folder / "death")
        return (
            min(end for step, end in told(folder / "steps") if step > DIES_AT) - death
        )


def told(path: Path) -> list[tuple[int, float]]:
    """(step, time) as the training has written them down."""
    lines = path.read_text().splitlines()
    return [(int(step), float(end)) for step, end in map(str.split, lines)]


def elastic(folder: Path, on_failure: str) -> None:
    """nbdist's own way, within one cell."""
    with nbdist.Cluster(RANKS, device="cpu", on_failure=on_failure) as cluster:
        cluster.on_note = lambda _note: None
        cluster.push(folder=str(folder))
        cluster.execute(TRAINING, setup=True)
        cluster.execute(ELASTIC, timeout_s=LIMIT_S)


def restarted(folder: Path) -> None:
    """All ranks end and begin again, as a notebook's user would have it."""
    code = f"folder = {str(folder)!r}\n{TRAINING}\n{CHECKPOINTED}"
    with nbdist.Cluster(RANKS, device="cpu", on_failure="stop") as cluster:
        try:
            cluster.execute(code, timeout_s=LIMIT_S)
        except nbdist.CellError:
            cluster.restart()
        cluster.execute(code, timeout_s=LIMIT_S)


def by_torchrun(folder: Path) -> None:
    """torch's own launcher, on this machine."""
    script = folder / "train.py"
    script.write_text(SCRIPT + TRAINING + CHECKPOINTED)
    options = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, script, folder],
        check=True,
        timeout=LIMIT_S,
        capture_output=True,
    )


def commit_times(repeats: int) -> dict[str, list[float]]:
    """Seconds of steps and of commits, on rank 0 of 2."""
    with nbdist.Cluster(2, device="cpu", threads=1) as cluster:
        cluster.push(REPEATS=repeats, BATCH=BATCH)
        cluster.execute(COMMIT, timeout_s=LIMIT_S)
        times: dict[str, list[float]] = cluster["times"][0]
        return times


if __name__ == "__main__":
    main()
