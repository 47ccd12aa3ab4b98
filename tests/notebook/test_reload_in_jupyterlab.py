"""A page of JupyterLab that is loaded again while cells run on the ranks."""

from __future__ import annotations

import re
from typing import Any

from tests.jupyterlab_driver import Lab
from tests.notebook.test_jupyterlab import output, texts
from tests.notebook.test_widgets_in_jupyterlab import START_TIMEOUT_S

STEPS = """
from IPython.display import display, HTML
import time
from pathlib import Path
bar = display(HTML("<b>at step 0</b>"), display_id=True)
for step in range(1, 10_000):
    print("step", step, "of", rank)
    bar.update(HTML(f"<b>at step {step}</b>"))
    time.sleep(0.1)
    if Path(f"enough{len(done)}").exists():
        break
print("done", done)
done.append(1)
"""
CELLS = [
    "%load_ext nbdist\n%dist_start -n 2 --device cpu",
    "%%distributed\ndone = []",
    f"%%distributed{STEPS}",
    f"%%distributed -b{STEPS}",
    "1 + 1",
]
BLOCKING, BEHIND, OTHER = 2, 3, 4
COUNT = "nbdistTest.panel.content.widgets[{cell}].model.executionCount"


def shown(cell: int) -> str:
    """JavaScript for the text in a cell's output area, which a new page may lack."""
    return f"({output(cell)}?.textContent ?? '')"


def has_both(cell: int, step: int) -> str:
    """JavaScript: whether a cell shows the steps of both ranks up to one."""
    text = shown(cell)
    return (
        f"() => [0, 1].every(rank => {text}.includes(`step {step} of ${{rank}}`) "
        f"&& {text}.includes(`step 1 of ${{rank}}`))"
    )


def steps(outputs: list[dict[str, Any]], rank: int) -> list[int]:
    """The steps that a rank has printed, in the order shown."""
    found = re.findall(rf"step (\d+) of {rank}\n", texts(outputs))
    return [int(step) for step in found]


def test_a_page_that_is_loaded_again_goes_on_with_the_output(lab: Lab) -> None:
    path = lab.open_notebook(CELLS)
    lab.run_cell(0, START_TIMEOUT_S)
    lab.run_cell(1)
    for cell in (BLOCKING, BEHIND):
        lab.start_cell(cell)
        lab.wait(has_both(cell, 5))
        lab.reload(path)
        lab.wait(has_both(cell, 20))
        # The display is updated in its place.
        html = shown(cell)
        lab.wait(f"() => {html}.match(/at step (\\d+)/)?.[1] > 20")
        lab.wait(f"() => window.before = {html}.match(/at step (\\d+)/)?.[1]")
        lab.wait(f"() => window.before !== {html}.match(/at step (\\d+)/)?.[1]")
        lab.screenshot(f"reload-{cell}")
        if cell == BLOCKING:
            prompt = "widgets[2].promptNode.textContent"
            lab.wait(f"() => nbdistTest.panel.content.{prompt}.includes('*')")
        (path.parent / f"enough{cell - BLOCKING}").touch()
        lab.wait(f"() => {html}.includes('done')")
        lab.wait(f"() => {html}.includes('✓ rank 0-1 finished')")
        for rank in (0, 1):
            printed = steps(lab.outputs(cell), rank)
            assert printed == list(range(1, len(printed) + 1)), "each step once"
        lab.wait(f"() => {COUNT.format(cell=cell)} === {cell + 1}")
        lab.screenshot(f"reload-{cell}-done")
    # The cell can be run again, and another one too.
    assert texts(lab.run_cell(OTHER)) == "2"
    (path.parent / "enough2").touch()
    assert "done" in texts(lab.run_cell(BLOCKING))


def test_a_cell_that_ends_while_no_page_is_open_is_shown(lab: Lab) -> None:
    code = "%%distributed\nimport time\ntime.sleep(3)\nprint('at the', 'end')"
    path = lab.open_notebook([CELLS[0], code])
    lab.run_cell(0, START_TIMEOUT_S)
    lab.start_cell(1)
    lab.wait("() => document.querySelector('[data-status=busy]') !== null")
    lab.reload(path, away_s=4)  # the cell ends meanwhile
    lab.wait(f"() => {shown(1)}.includes('at the end')")
    lab.wait(f"() => {COUNT.format(cell=1)} === 2")
