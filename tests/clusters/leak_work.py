"""A program that starts and stops clusters by magics, as a notebook does.

    python -m tests.clusters.leak_work TIMES

After each stop it prints a line of JSON with the resources of this process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

import psutil
from IPython.core.interactiveshell import InteractiveShell

from nbdist.ipc.private_files import memory_folder
from tests.cluster_processes import fork_server
from tests.processes import left_in

CELL = "x = torch.ones(3); dist.all_reduce(x); nbdist.log(x=x[0]); print('sum')"


def main(times: int) -> None:
    """Start, use and stop clusters, one after another."""
    shell = InteractiveShell.instance()
    shell.extension_manager.load_extension("nbdist")
    shell.user_ns["large"] = b"x" * 2_000_000
    for _ in range(times):
        memory = live(shell)
        gc.collect()
        print(json.dumps(inventory(memory)), flush=True)


def live(shell: InteractiveShell) -> Path:
    """Start, use and stop one cluster. Returns its folder in memory."""
    shell.run_line_magic("dist_start", "-n 2 --device cpu")
    magics = shell.magics_manager.registry["DistMagics"]
    run_dir = magics.session.cluster._live().run_dir
    memory = memory_folder(run_dir)
    shell.run_cell_magic("distributed", "", CELL)
    shell.run_line_magic("dist_push", "large")
    shell.run_line_magic("dist_status", "")
    shell.run_line_magic("dist_stop", "")
    return memory


def inventory(memory: Path) -> dict[str, object]:
    """The resources of this process, and the files of the stopped cluster."""
    this = psutil.Process()
    below = {*this.children(recursive=True)} - {fork_server()}
    return {
        "processes": len(below),
        "descriptors": sorted(
            os.readlink(path) if path.is_symlink() else ""
            for path in Path("/proc/self/fd").iterdir()
        ),
        "threads": len(os.listdir("/proc/self/task")),
        "temporary": [path.name for path in left_in(Path(tempfile.gettempdir()))],
        "memory folder": memory.exists(),
        "resident_bytes": this.memory_info().rss,
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
