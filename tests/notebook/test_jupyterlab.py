"""nbdist in JupyterLab, driven by a browser."""

from __future__ import annotations

from tests.jupyterlab_driver import Lab

START_TIMEOUT_S = 120
CELLS = [
    "%load_ext nbdist\n%dist_start -n 2",
    "%dist_monitor",
    """%%distributed
import time
x = torch.full((3,), rank + 1.0)
nbdist.all_reduce(x)
print("sum", x[0].item())
for step in range(60):
    nbdist.log(loss=1 / (step + 1) + 0.1 * rank)
    time.sleep(0.1)
print("done")""",
    "%%distributed\nif rank == 1:\n    raise ValueError('on purpose')",
    "%dist_status",
    """%%distributed -b
import time
for step in range(40):
    print("step", step, "\\n" if step == 3 else "", end="\\r")
    time.sleep(0.1)
if rank == 1:
    raise ValueError("behind the front")""",
    "%dist_jobs",
    "%dist_wait",
    "%%distributed\nfor step in range(3000 * (1 + rank)): print(rank, 'step', step)",
    "%dist_stop",
]
MONITOR, TRAINING, FAILING, STATUS, BEHIND, JOBS, WAITING, LONG, STOP = range(1, 10)
PICTURE = "document.querySelector('.nbdist-monitor canvas').toDataURL()"


def texts(outputs: list[dict[str, object]]) -> str:
    """The text that a cell has printed or displayed."""
    parts = []
    for output in outputs:
        data = output.get("data", {})
        assert isinstance(data, dict)
        parts.append(str(output.get("text", data.get("text/plain", ""))))
    return "".join(parts)


def test_a_cluster_is_started_used_watched_and_stopped(lab: Lab) -> None:
    lab.open_notebook(CELLS)
    started = texts(lab.run_cell(0, START_TIMEOUT_S))
    assert "transport" in started
    assert "Open MPI" in started
    lab.run_cell(MONITOR)
    lab.start_cell(TRAINING)
    lab.wait("() => document.querySelector('.nbdist-monitor canvas') !== null")
    lab.wait(f"() => {{ window.before = {PICTURE}; return true; }}")
    # The cell still runs, so the picture changes while it runs.
    lab.wait(f"() => window.before !== {PICTURE}", timeout=5)
    lab.screenshot("jupyterlab-running")
    done = texts(lab.wait_cell(TRAINING))
    assert "[0-1]\x1b[0m sum 3.0" in done
    assert "[0-1]\x1b[0m done" in done
    failed = lab.run_cell(FAILING)
    assert [output["ename"] for output in failed] == ["CellError"]
    assert "rank 1 of 2 in In[4] line 3: ValueError: on purpose" in str(
        failed[0]["evalue"]
    )
    lab.screenshot("jupyterlab-failed")
    assert texts(lab.run_cell(STATUS)).count("idle") == 2
    assert "● rank 0-1 running" in texts(lab.run_cell(BEHIND))
    assert "running for" in texts(lab.run_cell(JOBS))
    lab.wait(f"() => {shown(BEHIND)}.includes('[0-1] step 3')")
    check_contrast(lab)
    lab.screenshot("jupyterlab-background")
    waited = lab.run_cell(WAITING)
    assert "behind the front" in str(waited[0]["evalue"])
    lab.wait(f"() => {shown(BEHIND)}.includes('ValueError: behind the front')")
    lab.screenshot("jupyterlab-background-failed")
    ended = lab.outputs(BEHIND)
    assert [output["ename"] for output in ended if "ename" in output] == ["CellError"]
    assert "✗ rank 1 failed after" in texts(ended)
    collapsed = str(lab.run_cell(LONG))
    assert len(collapsed) < 60_000
    assert "all lines, until the cluster stops: " in collapsed
    details = f"{output(LONG)}.querySelectorAll('details')"
    lab.wait(f"() => {details}.length === 2")
    lab.page.evaluate(f"{details}[1].open = true")
    # The first 1,000 lines are shown, whichever rank has printed them.
    lab.wait(f"() => /\\[1\\] [56],\\d+ more lines/.test({output(LONG)}.textContent)")
    lab.page.evaluate(f"{details}[1].scrollIntoView()")
    lab.screenshot("jupyterlab-long")
    search(lab, "1 Step 42", "111 of 9,000 lines")  # 42, 420 to 429, and 4200 to 4299
    lab.screenshot("jupyterlab-long-searched")
    assert "stopped" in texts(lab.run_cell(STOP))
    lab.wait(f"() => {output(LONG)}.querySelector('input') === null")


def search(lab: Lab, text: str, found: str) -> None:
    """Type into the field below the collapsed lines, and wait for what it finds."""
    field = lab.page.get_by_label("search all lines")
    field.fill(text)
    field.press("Enter")
    lab.wait(f"() => {shown(LONG)}.includes('{found}')")


CONTRAST = """([cell, selector]) => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], below) =>
    [r, g, b].map((value, i) => a * value + (1 - a) * below[i]);
  const luminance = rgb => rgb.map(value => value / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const background = node => {
    const below = node.parentElement ? background(node.parentElement) : [255, 255, 255];
    return over(parts(getComputedStyle(node).backgroundColor), below);
  };
  const area = nbdistTest.panel.content.widgets[cell].node;
  const node = area.querySelector(`.jp-Cell-outputArea ${selector}`);
  const below = background(node);
  const colour = over(parts(getComputedStyle(node).color), below);
  const [dark, light] = [luminance(below), luminance(colour)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}"""


def check_contrast(lab: Lab) -> None:
    """The labels of ranks, the status and the tables are readable in both themes."""
    places = [(TRAINING, "pre span"), (BEHIND, "pre[role=status]"), (STATUS, "th")]
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        lab.set_theme(theme)
        for place in places:
            ratio = lab.page.evaluate(CONTRAST, [*place])
            assert ratio >= 4.5, (theme, place, ratio)


def shown(cell: int) -> str:
    """JavaScript for the text in the output area of a cell."""
    return f"{output(cell)}.textContent"


def output(cell: int) -> str:
    """JavaScript for the output area of a cell."""
    return (
        "nbdistTest.panel.content.widgets"
        f"[{cell}].node.querySelector('.jp-Cell-outputArea')"
    )
