"""A JupyterLab server and a page of it in headless Chromium, for tests.

The fixture `notebook7` has the same with a page of Notebook 7.

    def test_it(lab):
        lab.open_notebook(["x = 1", "x + 1"])
        lab.run_cell(0)
        lab.start_cell(1)          # does not wait for it to end
        lab.wait("() => document.querySelector('canvas') !== null")
        lab.wait_cell(1)
        lab.screenshot("it")       # out/screenshots/it.png

Every wait has a deadline in seconds and raises when it passes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.ipc.ports import free_ports

if TYPE_CHECKING:  # every test session loads this file
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parent.parent
SCREENSHOTS = ROOT / "out" / "screenshots"
CHROMIUM = (
    os.environ.get("NBDIST_CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("google-chrome")
)
CHROMIUM_OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


class LabServer:
    """JupyterLab on a loopback port, with its own home directory.

    Its kernels import nbdist from this repository. It ends with `close`, and with the
    process that started it.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="nblab"))
        self.notebooks = self.home / "work"
        self.notebooks.mkdir()
        self._disable_news()
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        self._process = subprocess.Popen(
            self._command(),
            cwd=self.notebooks,
            env=self._environment() | (environment or {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if not self._ready.wait(60) or self._process.poll() is not None:
            self.close()
            raise RuntimeError("JupyterLab did not start:\n" + "".join(self.log))

    def close(self) -> None:
        """End the server and its kernels, and remove its home."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._reader.join(5)
        shutil.rmtree(self.home, ignore_errors=True)

    def _command(self) -> list[str]:
        with_parent = ["setpriv", "--pdeathsig", "TERM"] if _has_setpriv() else []
        return [
            *with_parent, sys.executable, "-m", "jupyterlab", "--no-browser",
            "--allow-root", f"--ServerApp.port={self.url.rsplit(':', 1)[1]}",
            "--ServerApp.port_retries=0", "--IdentityProvider.token=",
            "--ServerApp.disable_check_xsrf=True",
            f"--ServerApp.root_dir={self.notebooks}",
            "--LabApp.expose_app_in_browser=True",
            "--JupyterNotebookApp.expose_app_in_browser=True",
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        names = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR",
                 "IPYTHONDIR"]  # fmt: skip
        private = {name: str(self.home / name.lower()) for name in names}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        paths = {"PYTHONPATH": path, "JUPYTER_PATH": str(self._with_extension())}
        return os.environ | private | {"HOME": str(self.home)} | paths

    def _with_extension(self) -> Path:
        """A folder in which JupyterLab finds this repository's extension."""
        extensions = self.home / "share" / "labextensions"
        extensions.mkdir(parents=True)
        (extensions / "nbdist").symlink_to(ROOT / "nbdist" / "labextension")
        return extensions.parent

    def _disable_news(self) -> None:
        folder = self.home / "jupyter_config_dir" / "labconfig"
        folder.mkdir(parents=True)
        news = "@jupyterlab/apputils-extension:announcements"
        config = json.dumps({"disabledExtensions": {news: True}})
        (folder / "page_config.json").write_text(config, encoding="utf-8")

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.log.append(line)
                if "is running at" in line:
                    self._ready.set()
        self._ready.set()  # it has ended: release the waiting thread


class Lab:
    """A page of JupyterLab, with at most one notebook open.

    Args:
        server: The server.
        page: A new page.
        address: Where JupyterLab is on the server.
    """

    def __init__(self, server: LabServer, page: Page, address: str = "lab") -> None:
        self.page = page
        self.errors: list[str] = []
        """Errors that the JavaScript of widgets has raised, with their stacks."""
        self._console: deque[str] = deque(maxlen=100)
        self._server = server
        self._count = 0
        page.on("pageerror", lambda error: self._note(error.stack or str(error)))
        page.on("console", lambda message: self._console.append(message.text))
        self._load(f"{address}?reset")

    def open_notebook(self, cells: list[str]) -> Path:
        """Open a new notebook, and start its kernel. Returns the notebook's path."""
        import nbformat

        self._count += 1
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        path = self._server.notebooks / f"notebook{self._count}.ipynb"
        nbformat.write(notebook, path)
        self.show_notebook(path)
        return path

    def show_notebook(self, path: Path) -> None:
        """Open an existing notebook, and start its kernel."""
        self.open_page(path)
        self._run(
            """
            const { sessionContext } = nbdistTest.panel;
            await sessionContext.ready;
            await sessionContext.session.kernel.info;
            """
        )

    def open_page(self, path: Path, *, kernel: bool = True) -> None:
        """Open an existing notebook. This does not wait for its kernel.

        Args:
            path: The notebook.
            kernel: Whether a kernel is started.
        """
        self._run(
            """
            await jupyterapp.restored;
            const panel = await jupyterapp.commands.execute('docmanager:open', {
              path: argument.path,
              factory: 'Notebook',
              kernelPreference: { shouldStart: argument.kernel },
            });
            await panel.context.ready;
            window.nbdistTest = { panel, runs: {} };
            """,
            {"path": path.name, "kernel": kernel},
        )

    def save(self) -> None:
        """Save the notebook."""
        self._run("await nbdistTest.panel.context.save();")

    def reload(self, path: Path, away_s: float = 0.0) -> None:
        """Save the notebook, load the page again, and open the notebook in it.

        This does not wait for the kernel, which may be busy.

        Args:
            path: The notebook.
            away_s: Seconds for which no page is open.
        """
        self.save()
        url = self.page.url
        self.page.goto("about:blank")
        self.page.wait_for_timeout(away_s * 1000)
        self.page.goto(url)
        self.wait("() => window.jupyterapp !== undefined")
        self.open_page(path)

    def start_cell(self, index: int) -> None:
        """Start a cell, and return while it runs."""
        self._run(
            """
            const { panel, runs } = nbdistTest;
            const { shell } = jupyterapp;
            // The command runs a cell of the current notebook. That may still be
            // another one, which JupyterLab restores.
            while (shell.currentWidget !== panel) {
              shell.activateById(panel.id);
              await new Promise((resolve) => setTimeout(resolve, 20));
            }
            panel.content.activeCellIndex = argument;
            runs[argument] = jupyterapp.commands.execute('notebook:run-cell');
            """,
            index,
        )

    def wait_cell(self, index: int, timeout: float = 60) -> list[dict[str, Any]]:
        """Wait for the end of a started cell. Returns its outputs, as of nbformat."""
        self._run("await nbdistTest.runs[argument];", index, timeout)
        return self.outputs(index)

    def run_cell(self, index: int, timeout: float = 60) -> list[dict[str, Any]]:
        """Run a cell to its end. Returns its outputs, as of nbformat."""
        self.start_cell(index)
        return self.wait_cell(index, timeout)

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """The current outputs of a cell, as of nbformat."""
        cell = "nbdistTest.panel.content.widgets[argument]"
        return self._run(f"return {cell}.model.outputs.toJSON();", index)

    def wait(self, condition: str, timeout: float = 30) -> None:
        """Wait until a JavaScript function returns a true value.

        At the timeout, the page is saved as out/screenshots/timed-out.png.

        Raises:
            AssertionError: It was not true in time. It has what the page shows, and
                what its console says.
        """
        from playwright.sync_api import TimeoutError

        try:
            self.page.wait_for_function(condition, timeout=timeout * 1000)
        except TimeoutError:
            self.screenshot("timed-out")
            shown = self.page.evaluate("() => document.body.innerText")
            raise AssertionError(
                f"not true after {timeout} s: {condition}\n"
                f"the page shows:\n{shown}\n"
                "its console says:\n" + "\n".join(self._console)
            ) from None

    def set_theme(self, name: str) -> None:
        """Change the theme: "JupyterLab Light" or "JupyterLab Dark"."""
        change = "await jupyterapp.commands.execute('apputils:change-theme', argument);"
        self._run(change, {"theme": name})
        light = "true" if "Light" in name else "false"
        self.wait(f"() => document.body.dataset.jpThemeLight === '{light}'")
        self.wait("() => document.getElementById('jupyterlab-splash') === null")

    def screenshot(self, name: str) -> Path:
        """Save the page as out/screenshots/<name>.png."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        self.page.screenshot(path=path)
        return path

    def close_notebook(self) -> None:
        """End the notebook's kernel and close it."""
        self._run(
            """
            const panel = window.nbdistTest?.panel;
            if (!panel || panel.isDisposed) return;
            if (panel.context.model.dirty) await panel.context.save();
            await panel.sessionContext.shutdown();
            panel.dispose();
            """
        )

    def _load(self, address: str) -> None:
        self.page.goto(f"{self._server.url}/{address}")
        self.wait("() => window.jupyterapp !== undefined")
        self._run("await jupyterapp.restored; jupyterapp.shell.collapseLeft?.();")

    def _note(self, error: str) -> None:
        if "blob:" in error:  # where widgets' modules are loaded from
            self.errors.append(error)

    def _run(self, body: str, argument: Any = None, timeout: float = 60) -> Any:
        """Run the body of an async JavaScript function. Returns its value."""
        return self.page.evaluate(
            f"""([argument, milliseconds]) => Promise.race([
              (async () => {{ {body} }})(),
              new Promise((_, reject) => setTimeout(() => reject(
                new Error(`not done in ${{milliseconds}} ms`)), milliseconds)),
            ])""",
            [argument, timeout * 1000],
        )


class Notebook7(Lab):
    """A page of Notebook 7, which shows one notebook."""

    def __init__(self, server: LabServer, page: Page) -> None:
        super().__init__(server, page, "tree")

    def open_page(self, path: Path, *, kernel: bool = True) -> None:
        """Open an existing notebook. This does not wait for its kernel.

        Raises:
            NotImplementedError: Without a kernel. Notebook 7 starts one.
        """
        if not kernel:
            raise NotImplementedError("Notebook 7 starts a kernel")
        if not self.page.url.endswith(f"/notebooks/{path.name}"):
            self._load(f"notebooks/{path.name}")
        self.wait("() => jupyterapp.shell.currentWidget?.context !== undefined")
        self._run(
            """
            const panel = jupyterapp.shell.currentWidget;
            await panel.context.ready;
            window.nbdistTest = { panel, runs: {} };
            """
        )


@pytest.fixture(scope="session")
def lab_server() -> Iterator[LabServer]:
    """A JupyterLab server for the whole test run."""
    server = LabServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def lab_browser() -> Iterator[Browser]:
    """A headless Chromium for the whole test run."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=CHROMIUM_OPTIONS
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def _lab_page(lab_server: LabServer, lab_browser: Browser) -> Iterator[Lab]:
    page = lab_browser.new_page(viewport={"width": 1200, "height": 900})
    yield Lab(lab_server, page)
    page.close()


@pytest.fixture
def lab(_lab_page: Lab) -> Iterator[Lab]:
    """JupyterLab's page; the notebook that a test opens is closed after it."""
    _lab_page.errors.clear()
    yield _lab_page
    _lab_page.close_notebook()
    assert not _lab_page.errors, "\n".join(_lab_page.errors)


@pytest.fixture
def notebook7(lab_server: LabServer, lab_browser: Browser) -> Iterator[Notebook7]:
    """A page of Notebook 7; the notebook that a test opens is closed after it."""
    page = lab_browser.new_page(viewport={"width": 1200, "height": 900})
    notebook7 = Notebook7(lab_server, page)
    yield notebook7
    notebook7.close_notebook()
    page.close()
    assert not notebook7.errors, "\n".join(notebook7.errors)


@pytest.fixture
def second_tab(lab_server: LabServer, lab_browser: Browser) -> Iterator[Lab]:
    """A second page of JupyterLab. It does not end the kernels of its notebooks."""
    page = lab_browser.new_page(viewport={"width": 1200, "height": 900})
    lab = Lab(lab_server, page)
    yield lab
    page.close()
    assert not lab.errors, "\n".join(lab.errors)


def _has_setpriv() -> bool:
    return shutil.which("setpriv") is not None
