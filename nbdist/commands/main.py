"""The command line of `python -m nbdist`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nbdist.errors import NbdistError

__all__ = ["main"]


def main() -> None:
    """Run the command that the command line names, and end with its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nbdist",
        description="Turn one Jupyter notebook into a distributed PyTorch program. In "
        "a notebook, %load_ext nbdist does so; from a shell there is:",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="say what is installed here, and whether ranks can start"
    )
    doctor.add_argument("--json", action="store_true", help="print a JSON array")
    doctor.add_argument(
        "--no-start", action="store_true", help="start no ranks, look alone"
    )
    demo = commands.add_parser("demo", help="train a small network in this terminal")
    demo.add_argument("-n", type=int, default=4, help="the number of ranks (default 4)")
    demo.add_argument("--device", help="auto, cuda or cpu")
    examples = commands.add_parser("examples", help="copy the example notebooks")
    examples.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("nbdist-examples"),
        help="where to (default nbdist-examples)",
    )
    args = parser.parse_args()
    try:
        sys.exit(_run(args))
    except NbdistError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _run(args: argparse.Namespace) -> int:
    if args.command == "doctor":
        from nbdist.commands import doctor

        return doctor.show(as_json=args.json, starts_ranks=not args.no_start)
    if args.command == "demo":
        from nbdist.commands import demo

        return demo.run(args.n, args.device)
    from nbdist.commands import examples

    return examples.copy(args.folder)
