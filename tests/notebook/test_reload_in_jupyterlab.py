"""A page of JupyterLab that is loaded again while cells run on the ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.jupyterlab_driver import Lab, Notebook7
from tests.notebook.test_jupyterlab import output, texts
from tests.notebook.test_widgets_in_jupyterlab import START_TIMEOUT_S
from tests.processes import wait_until

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
    code = "import time\ntime.sleep(3)\nprint('at the', 'end')"
    path = lab.open_notebook(
        [CELLS[0], f"%%distributed\n{code}", f"%%distributed -b\n{code}"]
    )
    lab.run_cell(0, START_TIMEOUT_S)
    for cell in (1, 2):
        lab.start_cell(cell)
        if cell == 1:
            lab.wait("() => document.querySelector('[data-status=busy]') !== null")
        else:  # the notebook's file has its count, but not its output
            lab.wait_cell(cell)
        lab.reload(path, away_s=4)  # the cell ends meanwhile
        lab.wait(f"() => {shown(cell)}.includes('at the end')")
        lab.wait(f"() => {COUNT.format(cell=cell)} === {cell + 1}")


TRAINING = """
import time
from pathlib import Path
for step in range(100_000):
    nbdist.log(loss=1 / (step + 1) + rank, lr=0.1)
    time.sleep(0.05)
    if Path("trained{number}").exists():
        break
print("done")"""
MONITORED = [
    CELLS[0],
    "%dist_monitor",
    f"%%distributed{TRAINING.format(number=0)}",
    f"%%distributed -b{TRAINING.format(number=1)}",
]
MONITOR, TRAINS, TRAINS_BEHIND = 1, 2, 3
CHOSEN = "document.querySelector('.nbdist-choice select').value"
STEP = (
    "Number(document.querySelector('.nbdist-ranks tbody td.number')"
    "?.textContent.replaceAll(',', ''))"
)
LAST_STEP = (
    "Math.max(...[...document.querySelectorAll('.nbdist-ranks tbody tr')].map("
    "tr => Number(tr.querySelector('td.number').textContent.replaceAll(',', ''))))"
)
STATUS = "nbdistTest.panel.sessionContext.session.kernel.status"


def still(lab: Lab) -> str:
    """The alternative text of the still picture, as the notebook is saved."""
    html = "".join(
        "".join(each["data"].get("text/html", "")) for each in lab.outputs(MONITOR)
    )
    found = re.search('alt="([^"]*)"', html)
    return found[1] if found else html


def choose(lab: Lab, metric: str) -> None:
    lab.page.locator(".nbdist-choice select").select_option(metric)


def reload_during(lab: Lab, path: Path, cell: int) -> None:
    """Reload the page while a cell trains, and look at its monitor and picture."""
    trained = path.parent / f"trained{cell - TRAINS}"
    trained.unlink(missing_ok=True)
    lab.start_cell(cell)
    before = lab.page.evaluate(STEP) if cell == TRAINS_BEHIND else 0
    lab.wait(f"() => {STEP} > 20 && {STEP} !== {before}")
    choose(lab, "lr")
    wait_until(lambda: still(lab).startswith("lr of 2 ranks"))
    lab.reload(path)
    lab.wait(f"() => {STEP} > 20", 15)
    assert lab.page.evaluate(CHOSEN) == "lr", "the choice is remembered"
    step = lab.page.evaluate(STEP)
    lab.wait(f"() => {STEP} > {step} + 40", 15)
    lab.screenshot(f"reload-monitor-{type(lab).__name__.lower()}-{cell}")
    choose(lab, "loss")
    wait_until(lambda: still(lab).startswith("loss of 2 ranks"))
    if cell == TRAINS:
        # The indicator shows that a cell runs, although another channel is used.
        lab.wait(f"() => {STATUS} === 'busy'", 5)
    trained.touch()
    lab.wait(f"() => {shown(cell)}.includes('✓ rank 0-1 finished')")
    assert texts(lab.outputs(cell)).count("done") == 1
    if cell == TRAINS:  # another one begins with step 0 again
        # The picture has the last step of the rank that is ahead.
        wait_until(
            lambda: still(lab).endswith(f"at step {lab.page.evaluate(LAST_STEP):.0f}"),
            10,
            lambda: f"{still(lab)} of {lab.page.evaluate(LAST_STEP)}",
        )


def test_the_monitor_is_there_after_a_reload_during_a_cell(lab: Lab) -> None:
    path = lab.open_notebook(MONITORED)
    lab.run_cell(0, START_TIMEOUT_S)
    lab.run_cell(MONITOR)
    reload_during(lab, path, TRAINS)
    reload_during(lab, path, TRAINS_BEHIND)


def test_the_monitor_is_there_after_a_reload_in_notebook_7(
    notebook7: Notebook7,
) -> None:
    path = notebook7.open_notebook(MONITORED)
    notebook7.run_cell(0, START_TIMEOUT_S)
    notebook7.run_cell(MONITOR)
    reload_during(notebook7, path, TRAINS)


IMPATIENT = """() => {
  const { timeout } = AbortSignal;
  AbortSignal.timeout = (milliseconds) => {
    if (milliseconds > 2000) return timeout(milliseconds);
    const controller = new AbortController();
    queueMicrotask(() => {
      controller.abort();
      window.lostPatience = true;
    });
    return controller.signal;
  };
}"""
"""The two seconds in which anywidget expects a model to load are over at once, as on a
machine that is busy."""


def test_a_monitor_that_a_page_loads_slowly_is_alive(notebook7: Notebook7) -> None:
    path = notebook7.open_notebook(MONITORED)
    trained = path.parent / "trained0"
    trained.unlink(missing_ok=True)
    notebook7.run_cell(0, START_TIMEOUT_S)
    notebook7.page.evaluate(IMPATIENT)
    notebook7.run_cell(MONITOR)
    notebook7.start_cell(TRAINS)
    notebook7.wait(f"() => {STEP} > 20")
    choose(notebook7, "lr")
    wait_until(lambda: still(notebook7).startswith("lr of 2 ranks"))
    trained.touch()
    notebook7.wait_cell(TRAINS)
    assert notebook7.page.evaluate("window.lostPatience")


def test_a_second_tab_shows_the_monitor_during_a_cell(
    lab: Lab, second_tab: Lab
) -> None:
    path = lab.open_notebook(MONITORED)
    lab.run_cell(0, START_TIMEOUT_S)
    lab.run_cell(MONITOR)
    lab.save()
    trained = path.parent / "trained0"
    trained.unlink(missing_ok=True)
    lab.start_cell(TRAINS)
    lab.wait(f"() => {STEP} > 20")
    second_tab.open_page(path)
    second_tab.wait(f"() => {STEP} > 20", 15)
    choose(second_tab, "lr")
    lab.wait(f"() => {CHOSEN} === 'lr'", 10)
    for tab in (lab, second_tab):
        step = tab.page.evaluate(STEP)
        tab.wait(f"() => {STEP} > {step} + 20", 15)
    second_tab.screenshot("reload-second-tab")
    trained.touch()
    lab.wait_cell(TRAINS)
