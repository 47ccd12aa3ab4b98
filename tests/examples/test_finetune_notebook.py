"""The notebook that fine-tunes a language model. It needs `nbdist[llm]`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

EXECUTED = Path(__file__).parents[2] / "out" / "finetune.ipynb"


@pytest.mark.timeout(400)  # four ranks on two cores, and then four more of torchrun
def test_a_model_is_tuned_saved_resumed_and_equal_under_torchrun(
    run_example: Callable[..., str],
) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason="pip install nbdist[llm] installs it")
    printed = run_example("finetune", time_limit_s=380)
    losses = [float(x) for x in re.findall(r"\] step \d+: loss ([\d.]+)", printed)]
    assert losses[3] < losses[0] - 0.2, "the first four are those of steps 5 to 20"
    assert losses[4:] == losses[2:4], "those of the resumed training"
    assert "the losses of steps 11 to 20 are equal" in printed
    found = re.search(r"torchrun: step 10: loss ([\d.]+), here ([\d.]+)", printed)
    assert found is not None, printed
    assert abs(float(found[1]) - float(found[2])) < 1e-3
    held = re.findall(r"rank \d holds ([\d,]+)", printed)
    every = re.search(r"of ([\d,]+) parameters are trained", printed)
    assert every is not None
    total = sum(int(each.replace(",", "")) for each in held)
    assert total == int(every[1].replace(",", "")), "each rank holds its shards only"
    assert side_by_side('The "for" statement', 'The "import" statement')


def side_by_side(*titles: str) -> bool:
    """Whether one display of the executed notebook has what two ranks have shown."""
    notebook = nbformat.read(EXECUTED, as_version=4)
    shown = [
        output.data.get("text/html", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    ]
    return any(all(title in html for title in titles) for html in shown)
