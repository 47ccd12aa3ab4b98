"""Run benchmarks one after the other, and put their tables into the pages."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import report

HERE = Path(__file__).parent
HELPERS = {
    "__init__", "__main__", "cost", "footprint", "lone_ranks", "machine", "measure",
    "peer", "report", "scaling", "ways",
}  # fmt: skip


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in HELPERS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    # No choices: argparse would check the empty default against them.
    parser.add_argument("name", nargs="*", help=f"some of: {', '.join(names())}")
    chosen = parser.parse_args().name or names()
    if unknown := set(chosen) - set(names()):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    failed = []
    for name in chosen:
        print(f"=== {name}", flush=True)
        # A process each: a cluster that one leaves in a bad state is its own affair.
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"])
        if done.returncode:
            failed.append(name)
        elif report.section_path(name).exists():
            report.publish(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
