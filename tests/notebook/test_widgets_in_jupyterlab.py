"""Widgets of ranks in JupyterLab, driven by a browser."""

from __future__ import annotations

from pathlib import Path

from tests.jupyterlab_driver import Lab

START_TIMEOUT_S = 120
CELLS = [
    "%load_ext nbdist\n%dist_start -n 4 --device cpu",
    """%%distributed
import time
from tqdm.auto import tqdm
for step in tqdm(range(100), desc="train"):
    time.sleep(0.005 * (1 + rank))""",
    """%%distributed
import ipywidgets
rate = ipywidgets.IntSlider(value=3, max=10, description="rate")
press = ipywidgets.Button(description="press")
def moved(change):
    print("the rate is", change.new)
rate.observe(moved, "value")
press.on_click(lambda _: print("pressed", rank))
ipywidgets.HBox([rate, press])""",
    "%%distributed\nprint('rate', rate.value)",
    """%%distributed
for step in tqdm(range(100)):
    if rank == 2 and step == 40:
        time.sleep(1)
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)""",
    "%dist_stop",
]
BARS, SLIDERS, READING, DYING, STOPPING = range(1, 6)
ROWS = """
    [...nbdistTest.panel.content.widgets[{cell}].node
        .querySelectorAll('.jp-OutputArea .widget-vbox > .widget-hbox')]
"""


def rows(cell: int) -> str:
    """JavaScript for the rows of the ranks in a cell's output."""
    return ROWS.format(cell=cell)


def shown(cell: int) -> str:
    """JavaScript for the text in the output area of a cell."""
    return (
        "nbdistTest.panel.content.widgets"
        f"[{cell}].node.querySelector('.jp-Cell-outputArea').textContent"
    )


def reopen(lab: Lab, path: Path) -> None:
    """Close the notebook and open it again, while its kernel runs."""
    lab.page.evaluate(
        """async () => {
          await nbdistTest.panel.context.save();
          nbdistTest.panel.dispose();
        }"""
    )
    lab.show_notebook(path)


def test_widgets_of_ranks_are_live(lab: Lab) -> None:
    path = lab.open_notebook(CELLS)
    lab.run_cell(0, START_TIMEOUT_S)
    lab.start_cell(BARS)
    lab.wait(f"() => {rows(BARS)}.length === 4")
    lab.screenshot("widgets-running")
    lab.wait_cell(BARS)
    labels = f"{rows(BARS)}.map(row => row.querySelector('.widget-label').textContent)"
    lab.wait(f"() => {labels}.join() === 'rank 0,rank 1,rank 2,rank 3'")
    lab.wait(f"() => {rows(BARS)}.every(r => r.textContent.includes('100/100'))")
    bars = f"{rows(BARS)}.map(row => row.querySelector('.progress-bar'))"
    lab.wait(f"() => {bars}.every(bar => bar.style.width === '100%')")

    lab.run_cell(SLIDERS)
    lab.wait(f"() => {rows(SLIDERS)}.length === 4")
    handle = lab.page.locator(".noUi-handle").nth(1)
    handle.focus()
    handle.press("ArrowRight")
    handle.press("ArrowRight")
    lab.wait(f"() => {shown(SLIDERS)}.includes('[1] the rate is 5')")
    lab.page.get_by_role("button", name="press").nth(3).click()
    lab.wait(f"() => {shown(SLIDERS)}.includes('[3] pressed 3')")
    lab.screenshot("widgets-sliders")
    reopen(lab, path)
    lab.wait(f"() => {rows(SLIDERS)}.length === 4")
    lab.page.locator(".noUi-handle").nth(1).press("ArrowRight")
    lab.wait(
        f"() => {rows(SLIDERS)}[1].querySelector('.widget-readout').textContent === '6'"
    )
    lab.screenshot("widgets-reopened")
    read = str(lab.run_cell(READING))
    assert "[1]\\x1b[0m rate 6" in read
    assert "[0,2-3]\\x1b[0m rate 3" in read

    failed = lab.run_cell(DYING)
    assert "rank 2" in str(failed)
    lab.wait(f"() => {shown(DYING)}.includes('rank 2 (ended)')")
    lab.screenshot("widgets-dead")
    lab.run_cell(STOPPING)
    lab.wait(f"() => {rows(DYING)}.length === 0")
    for rank in (0, 1, 3):
        lab.wait(
            f"() => {shown(DYING)}.includes('rank {rank}  100% ██████████ 100/100')"
        )
    lab.wait(f"() => /rank 2 .ended.  [34]\\d% █/.test({shown(DYING)})")
    lab.screenshot("widgets-stopped")
