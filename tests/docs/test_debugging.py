"""The cells of docs/debugging.md and docs/reliability.md end as the pages say.

tests/clusters tests the cells that take long or end a rank.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbdist import Cluster
from nbdist.errors import CellError

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "\n".join(
    (DOCS / name).read_text(encoding="utf-8")
    for name in ("debugging.md", "reliability.md")
)
BLOCKS = re.findall(r"^```python\n%%distributed.*\n((?s:.*?))^```", PAGES, re.MULTILINE)
WORDS = " ".join(PAGES.split())
DEADLINE_S = 60


def cell_with(text: str) -> str:
    """The cell of the pages that contains a text."""
    (block,) = (each for each in BLOCKS if text in each)
    return block


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("if rank != 0:", "released from all_reduce: the cell of rank 0 has ended"),
        ('ValueError("no data")', "ValueError: no data"),
        ("else x[:2]", "the ranks called different collectives; no data was touched."),
    ],
)
def test_a_cell_fails_as_its_page_says(cluster: Cluster, text: str, words: str):
    assert words in WORDS
    cluster.execute("x = torch.ones(3) * rank")
    with pytest.raises(CellError, match=re.escape(words)):
        cluster.execute(cell_with(text), timeout_s=DEADLINE_S)


def test_a_cell_prints_what_its_page_shows(cluster: Cluster):
    result = cluster.execute(cell_with("nbdist.memory()"), timeout_s=DEADLINE_S)
    assert "holds" in result[0].stdout


def test_the_next_cell_frees_the_tensors_of_a_failed_function(cluster: Cluster):
    cluster.execute(
        "import weakref\n"
        "kept = []\n"
        "def fail():\n"
        "    large = torch.ones(1000)\n"
        "    kept.append(weakref.ref(large))\n"
        "    raise ValueError"
    )
    with pytest.raises(CellError, match="ValueError"):
        cluster.execute("fail()", timeout_s=DEADLINE_S)
    assert cluster["kept[0]() is not None"] == [True] * 4
    cluster.execute("pass")
    assert cluster["kept[0]() is not None"] == [False] * 4
