"""The monitor in JupyterLab is live while a cell blocks, usable, and saved.

Screenshots are in out/screenshots/.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser

from tests.jupyterlab_driver import ROOT, SCREENSHOTS, Lab
from tests.processes import wait_until

SETUP = """
import math, threading, time
from pathlib import Path
from nbdist.telemetry.collector import Collector
from nbdist.wire import (
    Batch, DeviceSample, Mark, RankInfo, Sample, StepProgress, TimeSplit
)
from nbdist.widgets.display import show

N = {ranks}
stop = Path("{stop}")
collector = Collector()
collector.set_ranks(
    RankInfo(r, N, r, N, "e", f"node{{r // 8}}", r, f"cuda:{{r % 8}}",
             "GPU", None, None, 1, "x")
    for r in range(N)
)

MARKS = {{
    60: [("lost", "rank 2 (pid 9 on node0) has died with SIGKILL", (2,)),
         ("replaced", "rank 2 was replaced", (2,))],
    80: [("interrupted", "In[2] was interrupted")],
    90: [("restarted", "all ranks were started again")],
    110: [("resized", "the world has 4 ranks")],
    130: [("nan", "loss is nan", (1,))],
}}

def records(rank, step, now):
    noise = 0.06 * math.sin(12.9898 * step + 78.233 * rank)
    late = 0.2 if rank == N - 1 and step > 60 else 0.0
    loss = 2.5 * math.exp(-step / 80) + 0.3 + noise * math.exp(-step / 200) + late
    yield Sample(rank, step, now, {{"loss": loss, "lr": 0.1 * 0.99**step}})
    if rank == 0 and step % 40 == 30:
        yield Mark(now, "commit", f"commit {{step // 40 + 1}}")
    for delay, mark in enumerate(MARKS.get(step, ()) if rank == 0 else ()):
        yield Mark(now + delay / 100, *mark)
    if step % 10 == 0:
        used = (40 + rank % 8 + step // 40) * 2**30
        busy = 80 + 15 * math.sin(step / 30 + rank)
        data = 0.6 if rank == N - 1 and step > 60 else 0.05
        shares = 0.9 - data - 0.1 * (rank % 2), 0.1 * (1 + rank % 2), data, 0.0
        split = TimeSplit(*shares, "", "In[1] line 2", 0.5)
        yield DeviceSample(
            rank, now, "cuda:0", busy, used, 80 * 2**30, 99.0, 2**29,
            allocated=2**29, reserved=2**30, temperature=60.0 + rank, power=300.0,
            disk=2.5e6, network=1e6, bus_bandwidth=3.2e9, split=split,
        )
        names = ("compute", "communication", "data", "other")
        shares = {{"time/" + name: share for name, share in zip(names, shares)}}
        yield Sample(rank, step, now, shares, is_internal=True)

def feed(steps):
    start = time.time()
    for step in range(steps):
        for rank in range(N):
            now = start + step / 20
            new = tuple(records(rank, step, now))
            progress = StepProgress(now, step + 1, 4_000, "steps")
            at = max(0, step - 3 * (rank == N - 1))
            collector.receive(Batch(rank, "source", step, 0, new, progress, at))
        if paced.wait(0.02 if step >= {at_once} else 0):
            return

paced = threading.Event()
thread = threading.Thread(target=feed, args=({steps},), daemon=True)
monitor = show(collector)
"""
RUN = """
thread.start()
while not stop.exists():  # this cell keeps the kernel busy
    time.sleep(0.02)
paced.set()
thread.join()
"""
EVENTS = [
    "step 60: rank 2 (pid 9 on node0) has died with SIGKILL",
    "step 60: rank 2 was replaced", "step 80: In[2] was interrupted",
    "step 90: all ranks were started again", "step 110: the world has 4 ranks",
    "step 130: rank 1: loss is nan",
]  # fmt: skip
"""What the monitor says of the marks but those of commits."""
AXE = ROOT / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
SEQUENCE = "Number(document.querySelector('.nbdist-monitor')?.dataset.sequence)"
PIXELS = "document.querySelector('.nbdist-monitor canvas').toDataURL()"
PLANE = ".nbdist-plane"


class Run:
    """A notebook whose second cell blocks while a thread feeds the monitor."""

    def __init__(self, lab: Lab, stop: Path, ranks: int, at_once: int = 0) -> None:
        self._stop = stop
        self._lab = lab
        setup = SETUP.format(ranks=ranks, stop=stop, steps=2000, at_once=at_once)
        self.path = lab.open_notebook([setup, RUN, "monitor.close()"])
        outputs = lab.run_cell(0)
        assert [o["output_type"] for o in outputs] == ["display_data"] * 2, outputs
        lab.wait(f"() => {SEQUENCE} >= 0")
        lab.page.locator(".nbdist-monitor").scroll_into_view_if_needed()
        lab.start_cell(1)
        lab.wait(f"() => {step_shown()} >= 150", timeout=60)

    def end(self) -> None:
        """Let the cell end, and wait for it."""
        self._stop.touch()
        assert self._lab.wait_cell(1) == []


def step_shown() -> str:
    """The step of the first row of the table, as JavaScript."""
    cell = "document.querySelector('.nbdist-ranks tbody td.number')"
    return f"Number({cell}?.textContent.replaceAll(',', ''))"


def hover(lab: Lab, across: float) -> None:
    over = lab.page.locator(".nbdist-plane .u-over").first
    x = across * over.evaluate("element => element.clientWidth")
    over.hover(position={"x": x, "y": 60})  # scrolls, and waits until it is there


def test_the_chart_is_live_while_a_cell_blocks(lab: Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path / "stop", ranks=4)
    before, at = lab.page.evaluate(PIXELS), lab.page.evaluate(SEQUENCE)
    lab.wait(f"() => {SEQUENCE} >= {at + 5} && {PIXELS} !== '{before}'", timeout=10)
    status = lab.page.locator(".nbdist-status").inner_text()
    found = re.search(
        r"running · 4 ranks · (\d+) of 4,000 steps · 20 steps/s · (\d):(\d\d) left",
        status,
    )
    assert found is not None, status
    done, minutes, seconds = map(int, found.groups())
    assert 60 * minutes + seconds == pytest.approx((4000 - done) / 20, abs=1)
    hover(lab, 0.7)
    lab.screenshot("monitor-live")
    run.end()


def test_a_mark_is_described_beside_it(lab: Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path / "stop", ranks=4)
    page = lab.page
    events = page.locator(".nbdist-monitor ul[aria-label=Events] li")
    texts = events.all_text_contents()
    assert texts[0] == "step 30: commit 1"
    assert texts[1].startswith("step 60: rank 2 (pid 9 on node0) has died")
    run.end()  # else the step below the cursor changes
    page.locator(PLANE).focus()
    page.keyboard.press("Home")
    assert page.locator(".nbdist-readout .event").count() == 0
    for _ in range(60):
        page.keyboard.press("ArrowRight")
    shown = page.locator(".nbdist-readout .event").all_inner_texts()
    assert "rank 2 was replaced" in shown
    assert "SIGKILL" in (page.locator(PLANE).get_attribute("aria-valuetext") or "")
    lab.screenshot("monitor-marks")


def test_every_kind_of_mark_is_there_again_after_a_reload(
    lab: Lab, tmp_path: Path
) -> None:
    run = Run(lab, tmp_path / "stop", ranks=4)
    events = lab.page.locator(".nbdist-monitor ul[aria-label=Events] li")

    def shown() -> list[str]:
        return [each for each in events.all_text_contents() if "commit" not in each]

    assert shown() == EVENTS
    lab.reload(run.path)
    lab.wait(f"() => {step_shown()} >= 160", timeout=60)
    assert shown() == EVENTS
    run.end()


def test_the_view_answers_while_a_cell_blocks(lab: Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path / "stop", ranks=4)
    page = lab.page

    page.locator(".nbdist-choice select").select_option("lr")
    lab.wait(
        "() => document.querySelector('.nbdist-ranks thead').textContent.endsWith('lr')"
    )
    page.locator(".nbdist-choice select").select_option("loss")
    page.locator(".nbdist-controls input[type=checkbox]").check()
    page.locator(".nbdist-controls button", has_text="time").click()
    page.locator(".nbdist-legend button").nth(1).click()
    lab.wait(
        f"() => document.querySelector('{PLANE}').ariaLabel.startsWith('loss by time')"
    )
    hover(lab, 0.5)
    readout = page.locator(".nbdist-readout")
    assert readout.locator(".rank").all_inner_texts() == ["0", "2", "3"]
    assert " s" in readout.locator(".title").inner_text()

    page.locator(PLANE).focus()
    page.keyboard.press("Home")
    first = page.locator(PLANE).get_attribute("aria-valuetext")
    page.keyboard.press("ArrowRight")
    second = page.locator(PLANE).get_attribute("aria-valuetext")
    assert first is not None
    assert first != second
    assert "rank 3" in first
    assert "rank 1" not in first

    lab.set_theme("JupyterLab Dark")
    lab.screenshot("monitor-dark-log-time")
    lab.set_theme("JupyterLab Light")
    run.end()


def x_range(lab: Lab, panel: int) -> list[str]:
    """The values at the ends of a chart, as its plane reads them aloud."""
    plane = lab.page.locator(PLANE).nth(panel)
    plane.focus()
    read = []
    for key in ("Home", "End"):
        lab.page.keyboard.press(key)
        read.append((plane.get_attribute("aria-valuetext") or "").partition(":")[0])
    return read


def test_several_charts_share_the_axis_and_the_pointer(
    lab: Lab, tmp_path: Path
) -> None:
    run = Run(lab, tmp_path / "stop", ranks=4, at_once=200)
    page = lab.page
    page.locator(".nbdist-controls button", has_text="chart").click()
    lab.wait("() => document.querySelectorAll('.nbdist-plane canvas').length === 2")
    run.end()
    chosen = "[...document.querySelectorAll('.nbdist-choice select')].map(s => s.value)"
    assert page.evaluate(chosen) == ["loss", "lr"]
    # The last values may be on their way.
    wait_until(lambda: x_range(lab, 0) == x_range(lab, 1))

    hover(lab, 0.25)
    titles = page.locator(".nbdist-readout .title").all_inner_texts()
    assert len(titles) == 2
    assert titles[0] == titles[1]
    lab.screenshot("monitor-several")

    box = page.locator(".nbdist-plane .u-over").nth(1).bounding_box()
    assert box is not None
    before = page.evaluate(PIXELS)
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 20, steps=4)
    page.mouse.up()
    lab.wait(f"() => {PIXELS} !== '{before}'")  # the first chart is zoomed too
    hover(lab, 0.5)
    titles = page.locator(".nbdist-readout .title").all_inner_texts()
    assert titles[0] == titles[1]
    lab.screenshot("monitor-several-zoomed")
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 20)
    lab.wait(f"() => {PIXELS} === '{before}'")  # and shows everything again
    page.locator(".nbdist-choice button").nth(0).click()
    lab.wait("() => document.querySelectorAll('.nbdist-plane canvas').length === 1")
    assert page.evaluate(chosen) == ["lr"]
    # The picture of the saved notebook has the charts that the user has chosen.
    still = "document.querySelector(\"img[src^='data:image/svg']\")"
    lab.wait(f"() => {still}.alt.startsWith('lr of 4 ranks')")
    page.locator(".nbdist-controls button", has_text="chart").click()
    imgs = "document.querySelectorAll(\"img[src^='data:image/svg']\")"
    lab.wait(f"() => {imgs}.length === 2 && {imgs}[1].alt.startsWith('loss of 4')")


@pytest.mark.skipif(not AXE.exists(), reason="needs npm ci in frontend/")
def test_the_monitor_is_accessible(lab: Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path / "stop", ranks=4, at_once=200)
    lab.page.add_script_tag(path=AXE)
    check = "async () => (await axe.run('.nbdist-monitor')).violations.map(v => v.help)"
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        lab.set_theme(theme)
        assert lab.page.evaluate(check) == []
    run.end()


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_many_ranks_are_drawn_as_a_band(lab: Lab, tmp_path: Path, theme: str) -> None:
    lab.set_theme(f"JupyterLab {theme}")
    run = Run(lab, tmp_path / "stop", ranks=24, at_once=300)
    label = lab.page.locator(PLANE).get_attribute("aria-label")
    assert label is not None
    assert "median and range" in label
    hover(lab, 0.5)
    assert lab.page.locator(".nbdist-readout .rank").count() == 24
    before = lab.page.evaluate(PIXELS)
    lab.page.locator(".nbdist-legend button").nth(23).hover()
    lab.wait(f"() => {PIXELS} !== '{before}'")
    lab.screenshot(f"monitor-band-{theme.lower()}")
    lab.set_theme("JupyterLab Light")
    run.end()


STILL = "img[src^='data:image/svg']"


def test_a_saved_notebook_shows_the_picture(lab: Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path / "stop", ranks=4, at_once=200)
    assert not lab.page.locator(STILL).is_visible()
    run.end()
    lab.close_notebook()
    lab.show_notebook(run.path)
    see_still(lab, "monitor-saved")
    saved = run.path.read_text()
    assert [each for each in EVENTS if f"<li>{each}</li>" not in saved] == []
    lab.close_notebook()

    lab.open_page(run.path, kernel=False)
    see_still(lab, "monitor-saved-no-kernel")
    assert lab.page.evaluate(KERNEL) is None
    lab.close_notebook()

    received = sent_by_another(run.path)
    lab.open_page(received, kernel=False)
    see_still(lab, "monitor-saved-untrusted")
    assert not lab.page.evaluate(TRUSTED)


def see_still(lab: Lab, name: str) -> None:
    """Wait until the page shows the picture, and save a screenshot of it."""
    lab.page.locator(STILL).wait_for(state="visible")
    lab.page.locator(STILL).scroll_into_view_if_needed()
    lab.screenshot(name)


KERNEL = "nbdistTest.panel.sessionContext.session?.kernel ?? null"
TRUSTED = "nbdistTest.panel.content.widgets[0].model.trusted"


def sent_by_another(notebook: Path) -> Path:
    """A copy of a notebook that the server has not seen, and does not trust."""
    content = nbformat.read(notebook, as_version=4)
    content.cells.append(nbformat.v4.new_markdown_cell("A greeting."))
    copy = notebook.with_name("received.ipynb")
    nbformat.write(content, copy)
    return copy


def test_a_page_of_nbconvert_shows_the_picture(
    lab: Lab, lab_browser: Browser, tmp_path: Path
) -> None:
    run = Run(lab, tmp_path / "stop", ranks=4, at_once=200)
    run.end()
    lab.save()
    subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "html", run.path,
         "--output-dir", tmp_path],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    page = lab_browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto((tmp_path / run.path.name).with_suffix(".html").as_uri())
    page.locator(STILL).wait_for(state="visible")
    page.locator(STILL).scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "monitor-nbconvert.png")
    page.close()
