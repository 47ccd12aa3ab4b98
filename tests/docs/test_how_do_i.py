"""docs/how-do-i.md, run in a kernel from its first line to its last, as written.

Lines that need two GPUs, or that stand for a choice that another line has made, are not
run; `NOT_RUN` names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.notebook.test_kernel import Notebook

PAGE = Path(__file__).parents[2] / "docs" / "how-do-i.md"
NOT_RUN = {
    "Use my GPUs?",  # tests/collectives/test_gpu.py and tests/simgpu
    "Use several notebooks?",  # two GPUs, too
}
FILES = {
    "train.py": "import sys\nprint('trained', *sys.argv[1:])\n",
    "layers.py": "import torch\n\n\nclass Net(torch.nn.Linear):\n    pass\n",
}
"""What the page takes for granted."""
SHOWS = {
    "See the output of all ranks?": ["] 4 ranks", "[3] rank 3 on cpu"],
    "Port a notebook of one process?": ["on the ranks", "in the notebook"],
    "Use the notebook while a cell runs?": ["] finished in"],
    "Run my script?": ["] trained --epochs 3 --lr 0.1"],
    "Watch the loss?": ["loss"],
    "Change the number of ranks?": ["6"],
}
"""Words of the output below a heading. On a busy machine, equal lines may be apart."""


def recipes(page: str) -> Iterator[tuple[str, list[str]]]:
    """Each heading, and the cells below it: a block, or each of its magic lines."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        cells: list[str] = []
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.M):
            is_cell = block.startswith("%%") or not block.startswith("%")
            cells += [block] if is_cell else block.splitlines()
        yield heading, cells


def test_a_block_is_a_cell_and_each_line_of_magics_is_one():
    page = (
        "# T\n## A?\nx\n```python\n%%distributed\ny\n```\n```\n%dist_a\n%dist_b\n```\n"
    )
    assert list(recipes(page)) == [("A?", ["%%distributed\ny\n", "%dist_a", "%dist_b"])]


def test_every_recipe_runs_as_written(tmp_path: Path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    notebook = Notebook(tmp_path)
    ran = []
    try:
        for heading, cells in recipes(PAGE.read_text(encoding="utf-8")):
            if heading in NOT_RUN:
                continue
            shown = ""
            for cell in cells:
                reply = notebook.run(cell)
                assert reply.status == "ok", f"{heading}\n{cell}\n{reply.text}"
                shown += reply.text
                ran.append(cell)
            missing = [words for words in SHOWS.get(heading, []) if words not in shown]
            assert not missing, f"{heading}: {missing} are not in\n{shown}"
    finally:
        notebook.close()
    assert len(ran) >= 30
