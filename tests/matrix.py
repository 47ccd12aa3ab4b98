"""Runs a quick part of the tests with other Pythons and releases of torch.

    python tests/matrix.py                        # the rows of .ci/matrix.toml
    python tests/matrix.py 3.14 newest [--pre]    # one; --pre takes pre-releases
    python tests/matrix.py --list                 # the rows, as JSON

Python 3.14 is the program python3.14. TORCH_INDEX names a further index for torch. The
date of a row that passes is written to the file and to docs/architecture.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FILE = ROOT / ".ci" / "matrix.toml"
PAGE = ROOT / "docs" / "architecture.md"
HEADING = "| Python | torch | last passed |\n|---|---|---|\n"
NEWEST = ("torch", "ipykernel", "ipyparallel", "mpi4py", "numpy")
TESTS = (
    "tests/process_group", "tests/collectives/test_contract.py",
    "tests/clusters/test_start.py", "tests/clusters/test_cells.py",
    "tests/clusters/test_worker_processes.py", "tests/clusters/test_kept.py",
    "tests/clusters/test_elastic.py", "tests/clusters/test_transfer.py",
)  # fmt: skip


def rows() -> list[dict[str, str]]:
    """The rows of the file."""
    found: list[dict[str, str]] = tomllib.loads(FILE.read_text())["run"]
    return found


def table() -> str:
    """The rows as a table of the page."""
    lines = [f"| {r['python']} | {r['torch']} | {r['last']} |\n" for r in rows()]
    return HEADING + "".join(lines)


def run(python: str, torch: str, *, pre: bool) -> str:
    """Install and test in a new environment. Returns why that failed, or ""."""
    interpreter = shutil.which(f"python{python}")
    if interpreter is None:
        return f"there is no program python{python}"
    index = os.environ.get("TORCH_INDEX")
    options = ["--extra-index-url", index] if index else []
    if torch == "newest":
        options += ["--upgrade", *(["--pre"] if pre else []), *NEWEST]
    with tempfile.TemporaryDirectory() as folder:
        there = f"{folder}/bin/python"
        pip = [there, "-m", "pip", "install", "--quiet"]
        commands = [
            [interpreter, "-m", "venv", folder],
            *([[*pip, *options, f"torch=={torch}"]] if torch != "newest" else []),
            [*pip, "--editable", ".[test]"],
            *([[*pip, *options]] if torch == "newest" else []),
            [there, "-m", "pip", "list"],
            [there, "-m", "pytest", "-q", "-m", "not slow", *TESTS],
        ]
        for command in commands:
            done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL)
            if done.returncode:
                return f"{' '.join(command[:4])} ended with {done.returncode}"
    return ""


def note(python: str, torch: str) -> None:
    """Write the date of a row that has passed."""
    today = datetime.date.today().isoformat()
    row = f'python = "{python}"\ntorch = "{torch}"\nlast = "'
    text = FILE.read_text()
    FILE.write_text(re.sub(re.escape(row) + r"[\d-]*", row + today, text))
    page = PAGE.read_text()
    PAGE.write_text(re.sub(re.escape(HEADING) + r"(\|.*\n)*", table(), page))


def main() -> None:
    """Run the rows that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", nargs="?")
    parser.add_argument("torch", nargs="?", default="newest")
    parser.add_argument("--pre", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print(json.dumps(rows()))
        return
    wanted = [(args.python, args.torch)]
    if args.python is None:
        wanted = [(row["python"], row["torch"]) for row in rows()]
    failed = []
    for python, torch in wanted:
        print(f"-- Python {python}, torch {torch}", flush=True)
        why = run(python, torch, pre=args.pre)
        if why:
            failed.append(f"Python {python}, torch {torch}: {why}")
        elif not args.pre:
            note(python, torch)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
