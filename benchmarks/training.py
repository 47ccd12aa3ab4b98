"""Every way of training, on 1, 2 and 4 CPU ranks: samples a second, and how it scales.

Leaves the picture of the predicted scaling in docs/images.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report, scaling
from benchmarks.measure import alternate, seconds_of
from benchmarks.peer import allow_open_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

World = dict[str, Any]
"""What one world measured; `measure` makes it."""

RANKS = (1, 2, 4)
REPEATS = 9
LIMIT_S = 300
MESSAGES = [4**power for power in range(2, 13)]
"""Bytes, from 16 B to 16 MiB."""
ADDED_BYTES = 2**20
POOL_BYTES, PAGE_BYTES = 2**26, 2**12
ROUND_S = 0.02
PICTURE = report.ROOT / "docs" / "images" / "scaling.png"


# -- in the launcher -------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.training", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    chosen = parser.parse_args()
    if not {1, 2} <= set(chosen.ranks):
        parser.error("--ranks: expected 1 and 2 among them, which the prediction needs")
    worlds = {ranks: launch(ranks, chosen.repeats) for ranks in sorted(chosen.ranks)}
    scaling.plot(worlds, PICTURE)
    parts = [
        *(throughputs(worlds, model) for model in worlds[1]["models"]),
        explanation(worlds, chosen.repeats),
        scaling.section(worlds),
    ]
    report.save("training", worlds, "\n\n".join(parts))


def launch(ranks: int, repeats: int) -> World:
    """What rank 0 of a world has measured."""
    with allow_open_mpi(), tempfile.TemporaryDirectory(prefix="train-") as folder:
        call = f"measure({folder!r}, {repeats})"
        program = f"from benchmarks.training import measure; {call}"
        command = ["mpiexec", "-n", str(ranks), sys.executable, "-c", program]
        subprocess.run(command, check=True, timeout=LIMIT_S, cwd=report.ROOT)
        found: World = json.loads((Path(folder) / "found").read_text(encoding="utf-8"))
    return found


def throughputs(worlds: dict[int, World], model: str) -> str:
    """A table of one model: a line for each way."""
    measured = worlds[1]["models"][model]
    ways = worlds[max(worlds)]["models"][model]["ways"]  # the largest world has all
    several = [ranks for ranks in worlds if ranks > 1]
    header = [
        measured["title"],
        *(f"samples/s, {_ranks(ranks)}" for ranks in worlds),
        *(f"efficiency, {_ranks(ranks)}" for ranks in several),
        *(f"× DDP over gloo, {_ranks(ranks)}" for ranks in several),
    ]
    return report.table(header, [line(worlds, model, way) for way in ways])


def line(worlds: dict[int, World], model: str, way: str) -> list[str]:
    one = rate(worlds[1], model, scaling.ALONE)
    several = {ranks: found for ranks, found in worlds.items() if ranks > 1}
    return [
        way,
        *(rates(found, model, way) for found in worlds.values()),
        *(
            f"{rate(found, model, way) / (ranks * one):.0%}"
            if way in found["models"][model]["ways"]
            else "–"
            for ranks, found in several.items()
        ),
        *(
            f"{rate(found, model, way) / rate(found, model, scaling.PEER):.2f}"
            if way in found["models"][model]["ways"]
            else "–"
            for found in several.values()
        ),
    ]


def rate(world: World, model: str, way: str) -> float:
    """The median of samples a second, of all ranks together."""
    measured = world["models"][model]["ways"][way]
    return measured["samples"] / statistics.median(measured["seconds"])


def rates(world: World, model: str, way: str) -> str:
    """The median and the middle half, or a dash where a way needs more ranks."""
    measured = world["models"][model]["ways"].get(way)
    if measured is None:
        return "–"
    each = [measured["samples"] / seconds for seconds in measured["seconds"]]
    if len(each) == 1:
        return f"{each[0]:.0f}"
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def explanation(worlds: dict[int, World], repeats: int) -> str:
    """What the tables hold."""
    ways = worlds[max(worlds)]["models"]["compute-bound"]["ways"]
    servers = (
        "A parameter server has one rank that holds the parameters and trains nothing; "
        "its workers' samples are shared by all ranks in the efficiency. "
        if any(way.startswith("ParameterServer") for way in ways)
        else "`ParameterServer` was not there to be measured. "
    )
    return (
        f"Measured: median of {repeats} turns (and the middle half of them) of "
        f"{scaling.STEPS} steps of SGD in float32 on noise; forward, backward, "
        "communication and update of the slowest rank. The ways take turns in the same "
        'processes. "no communication" is plain torch on each rank, all at once: on 1 '
        "rank the throughput of one process, on more what the cores and the memory "
        "would give if communication were free. Efficiency is the throughput through "
        "the ranks times that of plain torch on one rank, so with more ranks than "
        f"cores it cannot be near 100 %. {servers}`LocalSGD` communicates once in a "
        "turn."
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


# -- on the ranks ----------------------------------------------------------------------


def measure(folder: str, repeats: int) -> None:
    """Take turns with the other ranks; rank 0 writes what was found."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import nbdist
    from benchmarks.ways import MODELS, all_ways

    torch.set_num_threads(1)
    nbdist.init()
    comm = MPI.COMM_WORLD.Dup()
    gloo = dist.new_group(backend="gloo")
    models = {}
    for name, problem in MODELS.items():
        ways = all_ways(problem, gloo)
        turns = {way: slowest(comm, each.turn) for way, each in ways.items()}
        times = alternate(turns, repeats)
        nbytes = sum(4 * each.numel() for each in problem.make().parameters())
        models[name] = {
            "title": f"{name}: {nbytes / 1e6:.2g} MB, {problem.batch} samples",
            "bytes": nbytes,
            "ways": {
                way: {"samples": each.samples, "seconds": times[way]}
                for way, each in ways.items()
            },
            "ring": ring(comm, nbytes, repeats),
        }
    costs = measure_costs(comm) if comm.size == 2 else None
    if comm.rank == 0:
        found = json.dumps({"models": models, "costs": costs})
        (Path(folder) / "found").write_text(found, encoding="utf-8")
    comm.Barrier()


def slowest(comm: MPI.Comm, turn: Callable[[], float]) -> Callable[[], float]:
    """A turn that all ranks begin together, with the seconds of the slowest."""
    from mpi4py import MPI

    def together() -> float:
        comm.Barrier()
        return float(comm.allreduce(turn(), MPI.MAX))

    return together


def ring(comm: MPI.Comm, nbytes: int, repeats: int) -> float:
    """Median seconds of nbdist's ring all-reduce of float32."""
    import torch

    import nbdist

    tensor = torch.zeros(nbytes // 4)
    turn = slowest(
        comm, seconds_of(lambda: nbdist.all_reduce(tensor, algorithm="ring"))
    )
    return statistics.median(alternate({"ring": turn}, repeats)["ring"])


def measure_costs(comm: MPI.Comm) -> dict[str, Any]:
    """Seconds of messages between two ranks that both send, and of a sum. Both call."""
    import numpy as np

    outgoing, incoming = np.ones((2, POOL_BYTES), np.uint8)
    other = 1 - comm.rank

    def swap(piece: slice) -> None:
        comm.Sendrecv(outgoing[piece], other, recvbuf=incoming[piece], source=other)

    def add(piece: slice) -> None:
        # Bytes of 1 and their sums are floats like others: none is subnormal.
        target = outgoing[piece].view(np.float32)
        np.add(target, incoming[piece].view(np.float32), out=target)

    return {
        "sizes": MESSAGES,
        "seconds": [fastest(comm, swap, size) for size in MESSAGES],
        "gamma": fastest(comm, add, ADDED_BYTES) / ADDED_BYTES,
    }


def fastest(
    comm: MPI.Comm, work: Callable[[slice], None], nbytes: int, rounds: int = 9
) -> float:
    """Seconds of one call, on the slower rank, on memory that is in no cache.

    In the best of several rounds: it is the machine's cost that is asked for, without
    what else the machine was doing.
    """
    stride = max(nbytes, PAGE_BYTES)
    places = itertools.cycle(range(0, POOL_BYTES - nbytes + 1, stride))

    def once() -> None:
        place = next(places)
        work(slice(place, place + nbytes))

    first = slowest(comm, seconds_of(once))
    count = max(1, min(1000, int(ROUND_S / min(first() for _ in range(5)))))

    def often() -> None:
        for _ in range(count):
            once()

    several = slowest(comm, seconds_of(often))
    return min(several() for _ in range(rounds)) / count


if __name__ == "__main__":
    main()
