"""Run an example notebook from its first cell to its last, without a browser.

    python examples/run.py quickstart

prints each cell's text as the cell ends, and leaves the executed notebook in `out/`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

EXAMPLES = Path(__file__).parent
OUT = EXAMPLES.parent / "out"
CELL_TIMEOUT_S = 300
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def text_of(cell: NotebookNode) -> str:
    """What a code cell printed and displayed, as plain text without colours."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            texts.append(output.text)
        elif output.output_type == "error":
            texts.append("\n".join(output.traceback))
        else:
            texts.append(output.data.get("text/plain", "") + "\n")
    return COLOURS.sub("", "".join(texts)).strip()


def execute(path: Path, executed: Path) -> NotebookNode:
    """Run a notebook and save it with its outputs, also when a cell fails.

    Raises:
        CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(path, as_version=4)

    def show(cell: NotebookNode, cell_index: int, **_reply: object) -> None:
        if cell.cell_type == "code":
            print(f"--- cell {cell_index + 1}\n{text_of(cell)}", flush=True)

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_executed=show,
    )
    try:
        client.execute()
    finally:
        executed.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, executed)
    return notebook


def final_accuracy(notebook: NotebookNode) -> float | None:
    """The last "test accuracy: 97.5%" that a cell printed, as a fraction."""
    code = (cell for cell in notebook.cells if cell.cell_type == "code")
    texts = "\n".join(text_of(cell) for cell in code)
    found = re.findall(r"test accuracy: ([\d.]+)%", texts)
    return float(found[-1]) / 100 if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("example", help="its name, such as quickstart")
    path = EXAMPLES / f"{parser.parse_args().example}.ipynb"
    executed = OUT / path.name
    begun = time.monotonic()
    try:
        notebook = execute(path, executed)
    except CellExecutionError as error:
        print(f"{error}\nthe notebook up to there: {executed}", file=sys.stderr)
        return 1
    accuracy = final_accuracy(notebook)
    print()
    if accuracy is not None:
        print(f"final test accuracy: {accuracy:.1%}")
    print(f"finished in {time.monotonic() - begun:.0f} s")
    print(f"executed notebook:   {executed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
