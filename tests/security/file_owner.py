"""A program that runs a cluster, as the user whose files are attacked.

It starts a cluster, commits, loses a rank in an elastic run, begins another State from
the kept commit, pushes and pulls. It prints its results as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from pathlib import Path

import nbdist
from nbdist.clusters.world_restart import SavedWorld, last_commit
from nbdist.ipc.private_files import commit_folders
from nbdist.wire import ElasticCall

TRAINING = """
import os, signal
state = nbdist.elastic.State(step=0)

@nbdist.elastic.run
def train(state):
    first = state.step == 0
    while state.step < 40:
        state.step += 1
        if first and state.step == 20 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()

train(state)
"""
CALL = ElasticCall("train", 3, 1, None, 600.0)


def readable(folder: Path) -> list[str]:
    """The path and its mode, if other users have a permission on it."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    return [f"{folder}: {mode:o}"] if mode & 0o077 else []


def opened(folder: Path) -> list[str]:
    """The paths that others can open: a folder of commits, its parent and its files."""
    paths = [folder.parent, folder, *folder.iterdir()]
    return [each for path in paths for each in readable(path)]


def own_names() -> set[str]:
    """The files of this user in the folders that all users share."""
    own = set()
    for folder in ("/tmp", "/dev/shm"):
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            with contextlib.suppress(FileNotFoundError):  # another user has removed it
                if os.lstat(path).st_uid == os.getuid():
                    own.add(path)
    return own


def main() -> None:
    """Use a cluster from its start to its stop."""
    before = own_names()
    with nbdist.Cluster(n=2, device="cpu", threads=1) as cluster:
        cluster.on_note = lambda note: print(note, file=sys.stderr)
        run_dir = cluster._live().run_dir
        cluster.execute(TRAINING, timeout_s=100)
        steps = cluster["state.step"]
        commits = [
            each for folder in commit_folders(run_dir) for each in opened(folder)
        ]
        saved = SavedWorld(CALL, last_commit(run_dir))
        cluster._begin_from(saved.resume(run_dir, None))
        cluster.execute("resumed = nbdist.elastic.State(step=0)")
        cluster.push(value=b"x" * 3_000_000)
        report = {
            "steps": steps,
            "resumed": cluster["resumed.step"],
            "pulled": cluster["len(value)"],
            "open": readable(run_dir) + commits,
            "left": [],
        }
    report["left"] = sorted(own_names() - before)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
