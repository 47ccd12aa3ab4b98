"""Serves a kept cluster over standard input and output, or over a Unix socket."""

from __future__ import annotations

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nbdist.mcp",
        description="Serve a kept cluster to assistants and scripts, by the Model "
        "Context Protocol. Without --allow-run, no cell runs and no rank ends.",
    )
    parser.add_argument(
        "--cluster", metavar="NAME", help="its name, if several clusters are kept"
    )
    parser.add_argument(
        "--allow-run",
        action="store_true",
        help="allow to run code, to interrupt, and to replace ranks",
    )
    parser.add_argument(
        "--socket",
        action="store_true",
        help="listen on a Unix socket, whose path is printed, instead of standard "
        "input and output",
    )
    args = parser.parse_args()
    try:
        from nbdist.mcp.tools import Tools, server
    except ModuleNotFoundError as error:
        sys.exit(f"there is no module {error.name}: pip install 'nbdist[mcp]'")
    if args.socket:
        from nbdist.mcp.socket import serve

        serve([option for option in sys.argv[1:] if option != "--socket"])
    else:
        server(Tools(args.cluster, allow_run=args.allow_run)).run("stdio")


if __name__ == "__main__":
    main()
