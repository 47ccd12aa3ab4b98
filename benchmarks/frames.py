"""How much of the code a small call passes through, and how the code is divided.

A frame is a call of a Python function of this package, on the thread that makes the
call. What C does, and what torch, mpi4py and ipyparallel do, is not counted. A change
of file is a frame in another file than the frame before it.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FrameType

from benchmarks import report

PACKAGE = report.ROOT / "nbdist"
RANKS = 2
WARMUPS = 3
"""The first calls make plans and load modules; later ones are counted."""
COUNTED = 10
SHORT_LINES = 60

Figures = dict[str, int | float]


# -- frames of a call ------------------------------------------------------------------


def frames_of(call: Callable[[], object]) -> Figures:
    """Count the frames of a call, their files and the changes of file.

    Of several calls, that with the fewest frames counts: a call that waits for another
    rank has more.
    """
    for _ in range(WARMUPS):
        call()
    counted = [_frames_of_one(call) for _ in range(COUNTED)]
    return min(counted, key=lambda figures: figures["frames"])


def _frames_of_one(call: Callable[[], object]) -> Figures:
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{PACKAGE}{os.sep}"):
            files.append(name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    changes = sum(before != after for before, after in itertools.pairwise(files))
    return {"frames": len(files), "files": len(set(files)), "changes": changes}


def on_ranks(folder: Path) -> None:
    """Count the collectives, as one of the ranks. Rank 0 writes the figures."""
    import torch
    from mpi4py import MPI

    import nbdist
    import nbdist.horovod as hvd

    hvd.init()
    tensor = torch.zeros(1)
    found = {
        "nbdist.all_reduce": frames_of(lambda: nbdist.all_reduce(tensor)),
        "hvd.allreduce": frames_of(lambda: hvd.allreduce(tensor)),
        "hvd.allreduce_": frames_of(lambda: hvd.allreduce_(tensor)),
    }
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        (folder / "figures").write_text(json.dumps(found))


def collectives() -> dict[str, Figures]:
    """The figures of `on_ranks`."""
    with tempfile.TemporaryDirectory(prefix="nb") as folder:
        mpiexec = Path(sys.executable).with_name("mpiexec")
        command = [str(mpiexec), "-n", str(RANKS), sys.executable, __file__, folder]
        environment = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PYTHONPATH": str(report.ROOT),
            "TMPDIR": folder,
        }
        subprocess.run(command, env=environment, check=True, timeout=300)
        found: dict[str, Figures] = json.loads((Path(folder) / "figures").read_text())
    return found


def cell() -> dict[str, Figures]:
    """The notebook's side of a cell that holds `pass`."""
    import nbdist

    with nbdist.Cluster(RANKS, device="cpu") as cluster:
        return {"Cluster.execute": frames_of(lambda: cluster.execute("pass"))}


# -- modules ---------------------------------------------------------------------------


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, package: list[str]) -> Iterator[tuple[str, bool]]:
    """Each name that a file imports, and whether that happens as the file is loaded."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *filter(None, [node.module])])
            yield from ((f"{prefix}.{alias.name}", True) for alias in node.names)
        else:
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            )
            for name, loading in imports(node, package):
                yield name, loading and not later


def modules() -> Figures:
    """How the package is divided."""
    paths = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    lines = {name: len(path.read_text().splitlines()) for name, path in paths.items()}
    importers: Counter[str] = Counter()
    loaded: dict[str, set[str]] = {}
    for name, path in paths.items():
        package = name.split(".")[: None if path.stem == "__init__" else -1]
        targets: dict[str, bool] = {}
        for imported, loading in imports(ast.parse(path.read_text()), package):
            found = next(
                (each for each in (imported, imported.rpartition(".")[0])
                 if each in paths and each != name), None
            )  # fmt: skip
            if found is not None:
                targets[found] = targets.get(found, False) or loading
        importers.update(targets)
        loaded[name] = {target for target, loading in targets.items() if loading}
    own = [name for name, path in paths.items() if path.stem != "__init__"]
    return {
        "modules": len(paths),
        "lines": sum(lines.values()),
        "median lines of a module": statistics.median(lines.values()),
        f"modules of {SHORT_LINES} lines or fewer": sum(
            count <= SHORT_LINES for count in lines.values()
        ),
        "modules with one importer": sum(importers[name] == 1 for name in own),
        "import circles": circles(loaded),
    }


def circles(graph: dict[str, set[str]]) -> int:
    """How many imports must be taken out of a graph until it has no circle."""
    graph = {name: set(targets) for name, targets in graph.items()}
    for count in itertools.count():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            last, first = error.args[1][:2]  # `last` is imported by `first`
            graph[first].discard(last)
        else:
            return count
    raise AssertionError


# -- the report ------------------------------------------------------------------------


def main() -> None:
    calls = {**collectives(), **cell()}
    divided = modules()
    heads = ["call", "frames", "files", "changes of file"]
    rows = [
        [f"`{name}`", *(str(count) for count in found.values())]
        for name, found in calls.items()
    ]
    counts = [[name, f"{count:,.0f}"] for name, count in divided.items()]
    report.save(
        "frames",
        {"calls": calls, "modules": divided},
        report.table(heads, rows)
        + f"\n\nOf 4 bytes on {RANKS} ranks, and of a cell that holds `pass`.\n\n"
        + report.table(["the package", ""], counts),
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        on_ranks(Path(sys.argv[1]))
    else:
        main()
