"""Clusters in marimo: output, monitor, interrupt, cells that run again, sessions."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, TimeoutError, expect

from nbdist.ipc.ports import free_ports
from tests.processes import HANG_S, runs, wait_until

pytest.importorskip("marimo", reason="pip install marimo installs it")

NOTEBOOK = '''
import marimo

app = marimo.App()


@app.cell
def _():
    import nbdist

    cluster = nbdist.Cluster(2, device="cpu").start()
    return (cluster,)


@app.cell
def _(cluster):
    cluster.monitor("loss")
    return


@app.cell
def _(cluster):
    cluster.run_cell(
        """
        from IPython.display import HTML, display

        nbdist.log(loss=0.5)
        print("on all")
        display(HTML(f"<i>from {rank}</i>"))
        x = rank + 40
        """
    )
    last = 1
    return (last,)


@app.cell
def _(cluster, last):
    f"the sum is {sum(cluster['x']) + last}"
    return


if __name__ == "__main__":
    app.run()
'''
ENDLESS = 'cluster.run_cell("import time; print(2 * 21); time.sleep(1000)")'


@contextmanager
def server(mode: str, notebook: Path, *options: str) -> Iterator[tuple[int, str]]:
    """A server of marimo: its process and address. No process of it may be left."""
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "marimo", mode, notebook, "--headless", "--no-token",
         "--port", str(port), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: answers(url), HANG_S, lambda: "marimo does not answer")
        yield process.pid, url
        started = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.terminate()
        process.wait(HANG_S)
    wait_until(lambda: not any(map(runs, started)), HANG_S, lambda: f"{started}")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=HANG_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def clusters(pid: int) -> set[int]:
    """The process supervisors of all clusters of a server."""
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if "nbdist.clusters.process_supervisor" in process.cmdline():
                found.add(process.pid)
        except psutil.NoSuchProcess:  # or a zombie
            continue
    return found


@pytest.fixture
def page(lab_browser: Browser) -> Iterator[Page]:
    page = lab_browser.new_page(viewport={"width": 1200, "height": 2000})
    page.set_default_timeout(HANG_S * 1000)
    expect.set_options(timeout=HANG_S * 1000)
    yield page
    page.close()


def run(page: Page, cell: int) -> None:
    page.locator(".cm-content").nth(cell).click()
    page.keyboard.press("Control+Enter")


def is_interrupted(page: Page) -> bool:
    """Press the stop button, which does nothing in the first moments of a run."""
    page.get_by_test_id("interrupt-button").first.click()
    try:
        page.get_by_text("all ranks keep their variables").wait_for(timeout=3000)
    except TimeoutError:
        return False
    return True


def test_cells_show_output_are_interrupted_and_run_again(page: Page, tmp_path: Path):
    notebook = tmp_path / "notebook.py"
    notebook.write_text(
        NOTEBOOK.replace("if __name__", f"@app.cell\ndef _(cluster):\n    {ENDLESS}\n"
                         "    return\n\n\nif __name__"),
        encoding="utf-8",
    )  # fmt: skip
    with server("edit", notebook, "--skip-update-check") as (pid, url):
        page.goto(url)
        for cell in range(4):
            run(page, cell)
        expect(page.get_by_text("the sum is 82")).to_be_visible()
        expect(page.get_by_text(re.compile(r"\[0(-1)?\] on all"))).to_be_visible()
        expect(page.get_by_text("from 1", exact=True)).to_be_visible()
        expect(page.get_by_label("nbdist monitor")).to_contain_text("loss")

        run(page, 4)
        expect(page.get_by_text(re.compile(r"\[0(-1)?\] 42"))).to_be_visible()
        wait_until(lambda: is_interrupted(page), HANG_S, lambda: "it runs on")
        run(page, 3)
        expect(page.get_by_text("the sum is 82")).to_be_visible()

        before = clusters(pid)
        assert len(before) == 1
        run(page, 0)
        wait_until(
            lambda: clusters(pid).isdisjoint(before) and len(clusters(pid)) == 1,
            HANG_S,
            lambda: f"clusters {clusters(pid)}, before {before}",
        )


def test_each_session_of_an_app_has_a_cluster_that_ends_with_it(
    page: Page, lab_browser: Browser, tmp_path: Path
):
    notebook = tmp_path / "notebook.py"
    notebook.write_text(NOTEBOOK, encoding="utf-8")
    with server("run", notebook, "--session-ttl", "1") as (pid, url):
        page.goto(url)
        expect(page.get_by_text("the sum is 82")).to_be_visible()
        first = clusters(pid)
        other = lab_browser.new_page()
        other.goto(url)
        expect(other.get_by_text("the sum is 82")).to_be_visible()
        assert len(clusters(pid)) == 2
        page.close()
        wait_until(
            lambda: clusters(pid).isdisjoint(first), HANG_S, lambda: "it runs on"
        )
        assert len(clusters(pid)) == 1
        other.close()
        wait_until(lambda: not clusters(pid), HANG_S, lambda: "the second runs on")
