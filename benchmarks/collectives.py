"""All-reduce of nbdist against what a user would pick instead, on this machine.

    python benchmarks/collectives.py [--ranks 2 4 8] [--largest 268435456]
        [--device cuda] [--out out/bench]

For each size, each way of doing it takes turns with the others in the same processes:
a noisy machine is noisy for all; the best round counts. algbw is S/t and busbw
2(N-1)/N S/t, as in nccl-tests; for GPUs it stands beside the card's copy bandwidth.
Leaves collectives.json, .png and .md in the output folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
MIB = 2**20
ROUNDS = 30
ROUND_S = 0.007
WAYS = ["nbdist", "ipc", "staged", "ring", "mpi", "gloo", "nccl", "copy"]
COLOURS = [
    "#0072B2", "#56B4E9", "#000000", "#E69F00", "#009E73", "#CC79A7", "#D55E00",
    "#999999",
]  # fmt: skip


# -- on the ranks ----------------------------------------------------------------------


def measure(folder: Path, largest: int, kind: str | None) -> None:
    """Time every way at every size; rank 0 writes the rows.

    Args:
        folder: Where they are written.
        largest: Bytes of the largest tensor.
        kind: "cpu" or "cuda"; None for each that there is.
    """
    import torch
    from mpi4py import MPI

    import nbdist.collectives as nc

    comm = MPI.COMM_WORLD
    rows: list[Row] = []
    for device in devices(comm):
        if kind not in (None, device):
            continue
        size = 4
        while size <= largest:
            tensor = torch.zeros(size // 4, device=device)
            best = time_ways(comm, ways(comm, folder, tensor))
            row = {"ranks": comm.size, "bytes": size, "seconds": best}
            rows.append({**row, "device": device, "sharing": sharing(comm)})
            size *= 4
        rows[-1]["check"] = check_costs(comm, device)
    if comm.rank == 0:
        (folder / "rows").write_text(json.dumps(rows))
    nc.close_groups()  # no rank ends while another reads its memory


def devices(comm: Any) -> list[str]:
    """The kinds of device to measure; each rank takes a GPU, shared where need be."""
    import torch

    if not torch.cuda.is_available():
        return ["cpu"]
    torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    return ["cpu", "cuda"]


def sharing(comm: Any) -> int:
    """How many ranks use one GPU; 1 where there is none."""
    import torch

    return -(-comm.size // max(torch.cuda.device_count(), 1))


def ways(comm: Any, folder: Path, tensor: Any) -> dict[str, Callable[[], object]]:
    """What there is to all-reduce a tensor in place, and the copy that is the floor."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import nbdist
    import nbdist.collectives as nc

    if not dist.is_initialized():
        store = dist.FileStore(str(folder / "store"), comm.size)
        dist.init_process_group(
            "gloo", store=store, rank=comm.rank, world_size=comm.size
        )
        nc.set_default_group(nc.Group(comm))
    if tensor.is_cuda:
        nc.default_group().transport("cuda")
    target = torch.empty_like(tensor)
    found: dict[str, Callable[[], object]] = {
        "nbdist": lambda: nbdist.all_reduce(tensor),
        "gloo": lambda: dist.all_reduce(tensor),
        "copy": lambda: target.copy_(tensor),
    }
    if not tensor.is_cuda:
        found["ring"] = lambda: nc.all_reduce(tensor, algorithm="ring")
        found["mpi"] = lambda: comm.Allreduce(MPI.IN_PLACE, tensor.numpy())
        return found
    found["staged"] = lambda: nc.all_reduce(tensor, algorithm="staged")
    if not _rivals:
        _rivals.update(ipc=ipc_group(comm), nccl=nccl_group(comm))
    if ipc := _rivals["ipc"]:
        found["ipc"] = lambda: nc.all_reduce(tensor, group=ipc)
    if nccl := _rivals["nccl"]:
        found["nccl"] = lambda: dist.all_reduce(tensor, group=nccl)
    return found


_rivals: dict[str, Any] = {}
"""Groups of all ranks for CUDA tensors, made once; None where there can be none."""


def ipc_group(comm: Any) -> Any:
    """Over CUDA IPC, where nbdist would take something else; None where it cannot."""
    from dataclasses import replace

    import nbdist.collectives as nc
    from nbdist.errors import UsageError

    chosen = nc.default_group()
    if "CUDA IPC" in chosen.describe() or comm.size == 1:
        return None
    group = nc.Group(comm, config=replace(chosen.config, transport="ipc"))
    try:
        group.transport("cuda")
    except UsageError:
        return None
    return group


def nccl_group(comm: Any) -> Any:
    """Torch's own, where each rank has a GPU for itself; else None, on all ranks."""
    import torch
    import torch.distributed as dist

    if torch.cuda.device_count() < comm.size or not dist.is_nccl_available():
        return None
    return dist.new_group(backend="nccl")


def time_ways(comm: Any, found: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds per call, of the slowest rank, in the best of several rounds."""
    counts = {}
    for name, call in found.items():
        call()
        counts[name] = comm.bcast(max(1, int(ROUND_S / max(once(comm, call, 2), 1e-7))))
        counts[name] = min(counts[name], 2000)
    best = dict.fromkeys(found, float("inf"))
    for _ in range(ROUNDS):
        for name, call in found.items():
            best[name] = min(best[name], once(comm, call, counts[name]))
    return best


def once(comm: Any, call: Callable[[], object], count: int) -> float:
    import torch
    from mpi4py import MPI

    comm.Barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a call for a GPU returns once it is queued
    return float(comm.allreduce((time.perf_counter() - start) / count, MPI.MAX))


def check_costs(comm: Any, device: str) -> dict[str, float]:
    """Seconds that comparing signatures adds, at 4 B and at 1 MiB."""
    from dataclasses import replace

    import torch

    import nbdist.collectives as nc

    checked = nc.default_group()
    bare = nc.Group(comm, config=replace(checked.config, check=False))
    costs = {}
    for size in (4, MIB):
        tensor = torch.zeros(size // 4, device=device)
        times = time_ways(
            comm,
            {
                "checked": lambda tensor=tensor: nc.all_reduce(tensor),
                "bare": lambda tensor=tensor: nc.all_reduce(tensor, group=bare),
            },
        )
        costs[str(size)] = times["checked"] - times["bare"]
        costs[f"{size} share"] = costs[str(size)] / times["bare"]
    bare.close()
    return costs


# -- in the launcher -------------------------------------------------------------------


def launch(ranks: int, largest: int, kind: str | None) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="nb") as folder:
        mpiexec = Path(sys.executable).with_name("mpiexec")
        command = [str(mpiexec), "-n", str(ranks), sys.executable, __file__]
        only = ["--device", kind] if kind else []
        subprocess.run(
            [*command, "--folder", folder, "--largest", str(largest), *only],
            env={
                **os.environ,
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "TMPDIR": folder,
            },
            check=True,
            timeout=1800,
        )
        rows: list[Row] = json.loads((Path(folder) / "rows").read_text())
    return rows


def report(rows: list[Row]) -> str:
    """A Markdown section: one table for each world size."""
    lines = [machine(), ""]
    for (device, ranks), mine in tables(rows).items():
        names = [name for name in WAYS if name in mine[0]["seconds"]]
        lines += [f"### {ranks} ranks, {device.upper()} tensors", ""]
        lines += ["Time of one call in microseconds.", ""]
        extra = ["card's copy GB/s"] if device == "cuda" else []
        heads = ["size", *names, "busbw GB/s", *extra, "gloo / nbdist", "best rival"]
        lines += [f"| {' | '.join(heads)} |", "|" + " ---: |" * len(heads)]
        lines += [line(row, names) for row in mine]
        lines += ["", *check_lines(mine[-1]["check"]), ""]
    return "\n".join(lines)


def tables(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """The rows of each device and number of ranks."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["device"], row["ranks"]), []).append(row)
    return dict(sorted(found.items()))


def line(row: Row, names: list[str]) -> str:
    seconds = row["seconds"]
    ours = seconds["nbdist"]
    busbw = 2 * (row["ranks"] - 1) / row["ranks"] * row["bytes"] / ours / 1e9
    rival = min(seconds[name] for name in ("mpi", "gloo", "nccl") if name in seconds)
    cells = [readable(row["bytes"])]
    cells += [f"{seconds[name] * 1e6:.1f}" for name in names]
    cells.append(f"{busbw:.2f}")
    if row["device"] == "cuda":
        cells.append(f"{card_bandwidth(row) / 1e9:.0f}")
    cells += [f"{seconds['gloo'] / ours:.1f}", f"{rival / ours:.2f}"]
    return f"| {' | '.join(cells)} |"


def card_bandwidth(row: Row) -> float:
    """Bytes that a GPU reads and writes in a second, when all its ranks copy."""
    moved = 2 * row["bytes"] * row["sharing"]
    return float(moved / row["seconds"]["copy"])


def check_lines(check: dict[str, float]) -> list[str]:
    return [
        f"Comparing signatures costs {check['4'] * 1e6:.2f} microseconds at 4 B and "
        f"{check[f'{MIB} share']:.1%} at 1 MiB."
    ]


def readable(size: int) -> str:
    for unit, scale in (("MiB", MIB), ("KiB", 1024)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"


def machine() -> str:
    import torch

    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}. copy: all ranks copy "
        "as many bytes at the same time, which is the least main memory must move; "
        "best rival: the faster of MPI_Allreduce, gloo and NCCL over nbdist."
    )


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = tables(rows)
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(5 * len(shown), 4), squeeze=False, sharey=True
    )
    for axis, ((device, ranks), mine) in zip(axes[0], shown.items(), strict=True):
        for name, colour in zip(WAYS, COLOURS, strict=True):
            if name in mine[0]["seconds"]:
                times = [row["seconds"][name] * 1e6 for row in mine]
                style = "--" if name == "copy" else "-"
                axis.plot(
                    [r["bytes"] for r in mine], times, style, c=colour, label=name
                )
        title = f"{ranks} ranks, {device.upper()}"
        axis.set(xscale="log", yscale="log", title=title, xlabel="bytes")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--largest", type=int, default=256 * MIB)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        measure(options.folder, options.largest, options.device)
        return
    rows = [
        row
        for ranks in options.ranks
        for row in launch(ranks, options.largest, options.device)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(rows)
    (options.out / "collectives.json").write_text(json.dumps(rows, indent=1))
    (options.out / "collectives.md").write_text(text)
    plot(rows, options.out / "collectives.png")
    print(text)


if __name__ == "__main__":
    main()
