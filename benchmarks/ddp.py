"""A training step of DistributedDataParallel, over nbdist, gloo and NCCL."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.measure import alternate, seconds_of, summary
from benchmarks.peer import allow_open_mpi

Times = dict[str, list[float]]

RANKS = (2, 4)
REPEATS = 15
LIMIT_S = 600
WIDTH, LAYERS, BATCH = 2500, 4, 32
ALONE = "no communication"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.ddp", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = parser.parse_args()
    times = {
        ranks: launch(ranks, chosen.repeats, chosen.device) for ranks in chosen.ranks
    }
    parameters = LAYERS * (WIDTH + 1) * WIDTH / 1e6
    report.save(
        "ddp" if chosen.device == "cpu" else "ddp_cuda",
        times,
        report.table(
            ["ranks", *next(iter(times.values())), "gloo / nbdist", "share of nbdist"],
            [row(ranks, measured) for ranks, measured in times.items()],
        )
        + f"\n\nMedian of {chosen.repeats} steps (and the middle half of them) of a "
        f"perceptron of {parameters:.0f} million parameters in float32: forward and "
        f"backward of {BATCH} samples on each rank, with DDP's own buckets. The "
        'variants take turns; "no communication" is a step under `no_sync`. The '
        "share is what nbdist's step spends beyond that one, as a part of the step.",
    )


def row(ranks: int, times: Times) -> list[str]:
    """One line of the table."""
    alone, ours, gloo = (
        statistics.median(times[name]) for name in (ALONE, "nbdist", "gloo")
    )
    cells = [summary(seconds) for seconds in times.values()]
    return [str(ranks), *cells, f"{gloo / ours:.2f}", f"{1 - alone / ours:.0%}"]


def launch(ranks: int, repeats: int, device: str) -> Times:
    """Rank 0's times, by variant."""
    with allow_open_mpi(), tempfile.TemporaryDirectory(prefix="ddp-") as folder:
        arguments = f"{folder!r}, {repeats}, {device!r}"
        program = f"from benchmarks.ddp import measure; measure({arguments})"
        command = ["mpiexec", "-n", str(ranks), sys.executable, "-c", program]
        subprocess.run(command, check=True, timeout=LIMIT_S, cwd=report.ROOT)
        found: Times = json.loads((Path(folder) / "times").read_text(encoding="utf-8"))
    return found


# -- on the ranks ----------------------------------------------------------------------


def measure(folder: str, repeats: int, device: str) -> None:
    """Take turns with the other ranks; rank 0 writes the times.

    Ranks share a GPU if there are fewer GPUs than ranks. NCCL is then left out.
    """
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from nbdist.collectives import Group, set_default_group
    from nbdist.collectives.torch_backend.registration import register

    torch.set_num_threads(1)
    world = Group(MPI.COMM_WORLD)
    set_default_group(world)
    register()
    if device == "cuda":
        torch.cuda.set_device(world.rank % torch.cuda.device_count())
    store = dist.FileStore(f"{folder}/store", world.size)
    dist.init_process_group(
        "nbdist", store=store, rank=world.rank, world_size=world.size
    )
    steps = {
        ALONE: variant(device, None, sync=False),
        "nbdist": variant(device, None),
        "gloo": variant(device, dist.new_group(backend="gloo")),
    }
    if device == "cuda" and torch.cuda.device_count() >= world.size:
        steps["nccl"] = variant(device, dist.new_group(backend="nccl"))
    times = alternate(steps, repeats, warmups=3)
    if world.rank == 0:
        (Path(folder) / "times").write_text(json.dumps(times), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    world.close()


def variant(device: str, group: Any, *, sync: bool = True) -> Callable[[], float]:
    """A training step, begun by all ranks together."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    module = nn.Sequential(*layers).to(device)
    net = DistributedDataParallel(module, process_group=group)
    inputs = torch.randn(BATCH, WIDTH, device=device)

    def step() -> None:
        with nullcontext() if sync else net.no_sync():
            net(inputs).square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    timed = seconds_of(step)

    def together() -> float:
        net.zero_grad(set_to_none=False)
        dist.barrier()
        return timed()

    return together


if __name__ == "__main__":
    main()
