"""docs/debugging.md: its cells end as the page says, in the words of its outputs.

The cells that take long, or end a rank, are those of tests/cluster.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbdist import Cluster
from nbdist.errors import CellError

PAGE = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n%%distributed.*\n((?s:.*?))^```", PAGE, re.MULTILINE)
WORDS = " ".join(PAGE.split())
DEADLINE_S = 60


def cell_with(text: str) -> str:
    """The one cell of the page that contains a text."""
    (block,) = (each for each in BLOCKS if text in each)
    return block


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("if rank != 0:", "released from all_reduce: the cell of rank 0 has ended"),
        ("else x[:2]", "the ranks called different collectives; no data was touched."),
    ],
)
def test_a_cell_fails_in_the_page_s_words(cluster: Cluster, text: str, words: str):
    assert words in WORDS
    cluster.execute("x = torch.ones(3) * rank")
    with pytest.raises(CellError, match=re.escape(words)):
        cluster.execute(cell_with(text), timeout_s=DEADLINE_S)


@pytest.mark.parametrize("text", ["nbdist.memory()", "torch.profiler"])
def test_a_cell_prints(cluster: Cluster, text: str):
    result = cluster.execute(cell_with(text), timeout_s=DEADLINE_S)
    assert "holds" in result[0].stdout or "aten::" in result[0].stdout
