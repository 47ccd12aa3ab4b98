"""The magics in a kernel, to which the tests send what a notebook sends."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ipykernel
import pytest
from jupyter_client.manager import KernelManager

from tests.cluster_processes import is_fork_server
from tests.processes import Footprint

CELL_S = 90.0
RUN_DIR = (
    "import nbdist.magics as m; "
    "[x.session.cluster._started.process_supervisor.run_dir "
    "for x, _ in m._registered.values()][0]"
)


@dataclass
class Reply:
    """The output of a cell, as a notebook shows it."""

    status: str = ""
    error: str = ""
    traceback: str = ""
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All output, without colours."""
        shown = [self.stdout, self.stderr, *(d["text/plain"] for d in self.displays)]
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join([*shown, self.traceback]))


def _take(reply: Reply, kind: str, content: dict[str, Any]) -> None:
    """Add a message of a kernel to a cell's output."""
    if kind == "stream":
        name = content["name"]
        setattr(reply, name, getattr(reply, name) + content["text"])
    elif kind in ("display_data", "execute_result", "update_display_data"):
        reply.displays.append(content["data"])
    elif kind == "error":
        reply.traceback = "\n".join(content["traceback"])
    elif kind == "clear_output":
        reply.stdout, reply.stderr, reply.displays = "", "", []


class Notebook:
    """A kernel, and methods that run cells in it."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(folder))
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def send(self, code: str) -> str:
        return str(self.client.execute(code, store_history=True))

    def finish(
        self, request: str, on_output: Callable[[Reply], None] = lambda _: None
    ) -> Reply:
        """Read the output of a request until the request has ended."""
        reply, deadline = Reply(), time.monotonic() + CELL_S
        while True:
            message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            _take(reply, kind, content)
            on_output(reply)
        answer = self.client.get_shell_msg(timeout=CELL_S)
        while answer["parent_header"].get("msg_id") != request:
            answer = self.client.get_shell_msg(timeout=CELL_S)
        reply.status = answer["content"]["status"]
        reply.error = answer["content"].get("ename", "")
        return reply

    def run(self, code: str) -> Reply:
        """Run a cell, again if the kernel still aborts cells after an error."""
        while (reply := self.finish(self.send(code))).status == "aborted":
            pass
        return reply

    def converse(
        self, code: str, *answers: str | Callable[[], object]
    ) -> tuple[Reply, list[str]]:
        """Run a cell that asks the user.

        Args:
            code: The cell.
            answers: A line for each prompt, or a function to call instead of an answer.

        Returns:
            The cell's output, and the prompts.
        """
        request, prompts = self.send(code), []
        for answer in answers:
            message = self.client.get_stdin_msg(timeout=CELL_S)
            prompts.append(message["content"]["prompt"])
            if isinstance(answer, str):
                self.client.input(answer)
            else:
                answer()
        return self.finish(request), prompts

    def start(self, code: str) -> tuple[str, Reply]:
        """Run a cell that goes on in the background.

        Returns:
            The request, and its output so far.
        """
        request = self.send(code)
        return request, self.finish(request)

    def read(self, request: str, reply: Reply, until: Callable[[Reply], bool]) -> None:
        """Read the output of an ended request until a condition holds for it."""
        deadline = time.monotonic() + CELL_S
        while not until(reply):
            message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            if message["parent_header"].get("msg_id") == request:
                _take(reply, message["msg_type"], message["content"])

    def interrupt_when_it_prints(self, code: str) -> Reply:
        pressed = False

        def press(reply: Reply) -> None:
            nonlocal pressed
            if not pressed and reply.stdout:
                pressed = True
                self.manager.interrupt_kernel()

        return self.finish(self.send(code), press)

    def footprint(self, *, fork_server: bool = True) -> Footprint:
        """The processes that the kernel started, with or without its fork server."""
        run_dir = self.run(RUN_DIR).displays[-1]["text/plain"]
        path = re.search(r"Path\('(.*)'\)", run_dir)
        assert path is not None, run_dir
        pid = self.manager.provisioner.process.pid
        footprint = Footprint([pid], Path(path[1]))
        footprint.processes = {
            process
            for process in footprint.processes
            if process.pid != pid and (fork_server or not is_fork_server(process))
        }
        assert len(footprint.processes) >= 4
        return footprint

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def _shared_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("a notebook"))
    try:
        assert notebook.run("%load_ext nbdist").status == "ok"
        started = notebook.run("%dist_start -n 2 --device cpu")
        assert started.status == "ok", started.text
        assert "transport" in started.text
        yield notebook
    finally:
        notebook.close()


@pytest.fixture
def notebook(_shared_notebook: Notebook) -> Iterator[Notebook]:
    yield _shared_notebook
    assert _shared_notebook.run("%dist_status").text.count("idle") == 2


def test_a_cell_is_shown_under_its_ranks(notebook: Notebook):
    reply = notebook.run("%%distributed\nprint('hello')\nprint('I am', rank)\nrank * 2")
    assert reply.status == "ok"
    lines = [line for line in reply.text.splitlines() if line]
    assert "[0-1] hello" in lines
    for rank in (0, 1):
        assert f"[{rank}] I am {rank}" in lines
        assert [
            x for x in lines if re.fullmatch(rf"\[{rank}\] Out\[\d+\]: {rank * 2}", x)
        ]


def test_a_cell_runs_on_the_chosen_ranks_only(notebook: Notebook):
    assert "[0]" not in notebook.run("%%distributed -r 1\nprint('x')").text


def test_a_figure_and_html_are_shown_under_their_rank(notebook: Notebook):
    reply = notebook.run(
        "%%distributed\n%matplotlib inline\nimport matplotlib.pyplot as plt\n"
        "from IPython.display import HTML, display\n"
        "plt.plot([rank, 1]); plt.show()\ndisplay(HTML(f'<i>{rank}</i>'))"
    )
    html = [data.get("text/html", "") for data in reply.displays]
    ours = [text for text in html if text and "role=" not in text]  # not the status
    figures, texts = ours
    assert figures.count('<img src="data:image/png;base64,') == 2
    for shown in (figures, texts):
        assert 0 < shown.index("[0]") < shown.index("[1]")
    assert texts.index("<i>0</i>") < texts.index("<i>1</i>")


OUT_OF_STEP = """%%distributed
import time
from IPython.display import HTML, display
time.sleep(0.5 * (1 - rank))
print("alike")
print("mine is", rank)
display(HTML("<b>alike</b>"))
display(HTML(f"<i>{rank}</i>"))
print("end")
"value"
"""


@pytest.mark.parametrize("option", ["", " -b"], ids=["front", "behind"])
def test_output_is_in_rank_order_and_equal_output_shown_once_at_the_end(
    notebook: Notebook, option: str
):
    if option and ipykernel.version_info[0] < 7:
        pytest.skip("before ipykernel 7 a thread cannot clear the output of its cell")
    code = OUT_OF_STEP.replace("%%distributed", f"%%distributed{option}")
    request, reply = notebook.start(code)
    if option:
        notebook.read(request, reply, lambda reply: "finished in" in reply.stdout)
    number = re.search(r"Out\[(\d+)\]", reply.text)
    assert number is not None
    lines = re.sub(r"\x1b\[[\d;]*m", "", reply.stdout).splitlines()
    assert lines[: 6 if option else None] == [
        "[0-1] alike", "[0] mine is 0", "[1] mine is 1", "[0-1]", "[0-1] end",
        f"[0-1] Out[{number[1]}]: 'value'",
    ]  # fmt: skip
    alike, side_by_side = (data["text/html"] for data in reply.displays)
    assert alike == "<b>alike</b>"
    assert side_by_side.index("<i>0</i>") < side_by_side.index("<i>1</i>")


def test_output_that_the_notebook_itself_prints_is_not_cleared(notebook: Notebook):
    cell = "import time\ntime.sleep(0.5 * (1 - rank))\nprint('alike')"
    reply = notebook.run(
        f"print('before')\nget_ipython().run_cell_magic('distributed', '', {cell!r})"
    )
    assert "before" in reply.text
    assert "[1] alike" in reply.text


def test_a_display_is_updated(notebook: Notebook):
    reply = notebook.run(
        "%%distributed -r 0\nhandle = display('first', display_id=True)\n"
        "handle.update('second')"
    )
    texts = [data["text/plain"] for data in reply.displays]
    assert texts.index("'first'") < texts.index("'second'")


def test_a_failed_cell_fails_and_shows_the_notebooks_lines(notebook: Notebook):
    reply = notebook.run("%%distributed\na = 1\nif rank:\n    raise ValueError('bad')")
    assert (reply.status, reply.error) == ("error", "CellError")
    assert "rank 1 of 2" in reply.text
    assert re.search(r"In\[\d+\], line 4", reply.text), reply.text
    assert "nbdist/clusters" not in reply.text
    assert notebook.run("%%distributed\na").status == "ok"


@pytest.mark.parametrize(
    ("cell", "parts"),
    [
        ("%dist_start", ["2 ranks", "%dist_stop"]),
        ("%dist_start -n 3", ["2 ranks is running", "%dist_stop"]),
        ("%%distributed -r 5\n1", ["rank 5", "0-1"]),
        ("%%distributed -r one\n1", ["'one'", "0,2-3"]),
        ("%%distributed --timeout soon\n1", ["'soon'", "number"]),
        ("%%distributed --timeout -1\n1", ["-1", "above 0"]),
        ("%dist_push nothing_here", ["nothing_here"]),
        ("%dist_pull not-a-name", ["'not-a-name'"]),
        ("%dist_inspect", ["expression"]),
        ("%dist_diff -a", ["expression", "model"]),
        ("%%distributed -b -r 5\n1", ["rank 5", "0-1"]),
        ("%%distributed -b --timeout -1\n1", ["-1", "above 0"]),
        ("%dist_start -N 4", ["-N 4", "did you mean -n 4?"]),
        ("%dist_start 4", ["did you mean -n 4?"]),
        ("%dist_start --ranks-per-gpus=2", ["did you mean --ranks-per-gpu 2?"]),
        ("%dist_scale 3", ["did you mean -n 3?"]),
        ("%dist_restart 1", ["did you mean -r 1?"]),
        ("%%distributed 1\n1", ["did you mean -r 1?"]),
        ("# a comment\n%%distributed\nprint(rank)", ["must be the first line"]),
        ("%dist_push x=1/0", ["ZeroDivisionError"]),
        ("%dist_push x=(1", ["x=(1", "not an expression"]),
        ("%dist_push a.b=1", ["'a.b=1'", "NAME=EXPRESSION"]),
        ("%dist_wait 999", ["In[999]", "%dist_jobs"]),
        ("%dist_auto maybe", ["maybe"]),
        ("%%local junk\n1", ["%%local takes no arguments", "junk"]),
        ("%dist_wait five", ["'five'", "In[5]"]),
        ("%dist_interrupt 999", ["In[999]", "%dist_jobs"]),
        ("%dist_stop now", ["unrecognized arguments: now"]),
        ("%dist_stop --help", ["unrecognized arguments: --help"]),
        ("%dist_status -v", ["unrecognized arguments: -v"]),
        ("%dist_config x", ["unrecognized arguments: x"]),
        ("%dist_run /tmp", ["/tmp is a folder"]),
        ("%dist_run 'a b.py", ["'a b.py: a quotation mark is not closed"]),
    ],
)
def test_an_invalid_line_is_an_error_of_one_line(
    notebook: Notebook, cell: str, parts: list[str]
):
    reply = notebook.run(cell)
    assert reply.status == "error"
    assert [part for part in parts if part not in reply.text] == []
    assert "Traceback" not in reply.traceback


def test_a_folder_that_cannot_be_made_is_named(notebook: Notebook):
    notebook.run("%%distributed\nnbdist.barrier()")
    reply = notebook.run("%dist_collectives --save /proc/x")
    assert "--save /proc/x: No such file or directory: name another" in reply.text
    assert "Traceback" not in reply.traceback


def test_a_comment_may_follow_a_magic(notebook: Notebook):
    assert notebook.run("%dist_jobs  # all of them").status == "ok"
    assert notebook.run("%%distributed -r 1  # 'one'\nprint(rank)").text.startswith(
        "[1] 1"
    )
    assert "no variable matches #x" in notebook.run("%dist_vars '#x'  # none").text


def test_a_rank_that_loads_the_extension_is_as_it_was(notebook: Notebook):
    cell = "%%distributed\n%load_ext nbdist\n%reload_ext nbdist\nx = torch.ones(2)"
    assert notebook.run(f"{cell}\nnbdist.all_reduce(x)").status == "ok"
    assert notebook.run("%%distributed\nnbdist.barrier()").status == "ok"


def test_functions_of_a_rank_raise_wrong_process_in_the_notebook(notebook: Notebook):
    reply = notebook.run("import nbdist\nnbdist.all_reduce(1)")
    assert reply.error == "WrongProcess"
    assert "%%distributed" in reply.text


def test_push_pull_inspect_and_vars_work(notebook: Notebook):
    assert notebook.run("number = 5\n%dist_push number").status == "ok"
    notebook.run("%%distributed\nsquare = number * number + rank")
    assert notebook.run("%dist_pull square").status == "ok"
    assert notebook.run("square").displays[-1]["text/plain"] == "[25, 26]"
    notebook.run("%dist_pull square -r 1")
    assert notebook.run("square").displays[-1]["text/plain"] == "26"
    assert "25" in notebook.run("%dist_inspect square").text
    assert "bit for bit, in 1 leaf" in notebook.run("%dist_diff number").text
    assert "25 on rank 0, 26 on rank 1" in notebook.run("%dist_diff -a square").text
    table = notebook.run("%dist_vars num*").text
    assert "number" in table
    assert "square" not in table
    assert "rank 0-1" in notebook.run("%dist_stacks").text
    assert "rank 1" in notebook.run("%dist_collectives -n 3 -r 1").text


def test_push_and_pull_take_expressions(notebook: Notebook):
    notebook.run("rates = {'a b': 0.5}")
    assert notebook.run("%dist_push lr=rates['a b'] both=[1, 2] rates").status == "ok"
    notebook.run("%%distributed\nmodel = [lr * rank, both, rates]")
    assert notebook.run("%dist_pull model[0] + 1 as w").status == "ok"
    assert notebook.run("w").displays[-1]["text/plain"] == "[1.0, 1.5]"
    notebook.run("%dist_pull model[1][-1] as last -r 1")
    assert notebook.run("last").displays[-1]["text/plain"] == "2"
    reply = notebook.run("%dist_pull model[0]")
    assert "as in %dist_pull losses[-1] as last" in reply.text


def test_the_notebooks_cluster_is_there_for_python(notebook: Notebook):
    notebook.run("%%distributed\nmine = rank + 1")
    reply = notebook.run("import nbdist\nnbdist.cluster()['mine']")
    assert reply.displays[-1]["text/plain"] == "[1, 2]"


def test_an_interrupt_and_a_timeout_end_push_and_pull(
    notebook: Notebook, tmp_path: Path
):
    slow = (
        "class Slow:\n"
        "    def __reduce__(self):\n"
        "        import time\n"
        "        print('here')\n"  # an interrupt of ipykernel's flush would stop it
        "        time.sleep(60)\n"
        "thing = Slow()"
    )
    notebook.run(slow)
    notebook.run(f"%%distributed\n{slow}")
    reply = notebook.interrupt_when_it_prints("%dist_push thing")
    assert reply.error == "CellInterrupted"
    assert "push was interrupted while pickling 'thing' in this process" in reply.text
    reply = notebook.run("%dist_push thing --timeout 0.3")
    assert reply.error == "CellTimeout"
    assert "0.3 s: pickling 'thing' in this process" in reply.text
    reply = notebook.interrupt_when_it_prints("print('go')\n%dist_pull thing")
    assert reply.error == "CellInterrupted"
    reply = notebook.run("%dist_pull thing --timeout 0.3")
    assert reply.error == "CellTimeout"
    assert re.search(r"rank 1 at pickling 'thing', In\[\d+\] line 6", reply.text)
    assert "Traceback" not in reply.traceback
    assert notebook.run("%%distributed\nnbdist.barrier()").status == "ok"
    assert notebook.run("x = 1\n%dist_push x --timeout 20").status == "ok"


def test_a_timeout_ends_a_cell(notebook: Notebook):
    reply = notebook.run("%%distributed --timeout 0.5\nimport time; time.sleep(60)")
    assert reply.error == "CellTimeout"
    assert "0.5 s" in reply.text


def test_an_interrupted_cell_fails_and_the_next_one_runs(notebook: Notebook):
    code = "%%distributed\nprint('here')\nimport time\ntime.sleep(60)"
    for number in range(5):
        reply = notebook.interrupt_when_it_prints(code)
        assert (reply.status, reply.error) == ("error", "CellInterrupted")
        assert f"[0-1] {number}" in notebook.run(f"%%distributed\nprint({number})").text


def test_an_interrupt_stops_run_all(notebook: Notebook):
    first = notebook.send("%%distributed\nprint('here')\nimport time; time.sleep(60)")
    second = notebook.send("%%distributed\nprint('must not run')")
    pressed = False

    def press(reply: Reply) -> None:
        nonlocal pressed
        if not pressed and reply.stdout:
            pressed = True
            notebook.manager.interrupt_kernel()

    assert notebook.finish(first, press).error == "CellInterrupted"
    answer = notebook.client.get_shell_msg(timeout=CELL_S)
    assert answer["parent_header"]["msg_id"] == second
    assert answer["content"]["status"] == "aborted"


@pytest.mark.parametrize(
    ("code", "completed"),
    [
        ("%%distributed\nx = learning_r", "%%distributed\nx = learning_rates"),
        (
            "%%distributed\n# first\nlearning_r",
            "%%distributed\n# first\nlearning_rates",
        ),
        (
            "%%distributed\nx = learning_rates.app",
            "%%distributed\nx = learning_rates.append",
        ),
        ("%dist_inspect learning_r", "%dist_inspect learning_rates"),
        ("%dist_inspect learning_rates.app", "%dist_inspect learning_rates.append"),
        ("x = 1\n%dist_pull learning_r", "x = 1\n%dist_pull learning_rates"),
        ("%dist_start --dev", "%dist_start --device"),
        ("%dist_start -n 4 --", "%dist_start -n 4 --threads"),
        ("%dist_restart -", "%dist_restart --ranks"),
    ],
)
def test_completion(notebook: Notebook, code: str, completed: str):
    notebook.run("%%distributed\nlearning_rates = [1]")
    assert completed in completions(notebook, code)


def completions(notebook: Notebook, code: str) -> set[str]:
    """The code with each of the completions that Tab offers at its end."""
    notebook.client.complete(code, len(code))
    answer = notebook.client.get_shell_msg(timeout=CELL_S)
    while answer["msg_type"] != "complete_reply":
        answer = notebook.client.get_shell_msg(timeout=CELL_S)
    content = answer["content"]
    return {
        code[: content["cursor_start"]] + match + code[content["cursor_end"] :]
        for match in content["matches"]
    }


def inspect(notebook: Notebook, code: str, cursor: int | None = None) -> str:
    """The text of Shift-Tab at a cursor, by default at the end of the code."""
    notebook.client.inspect(code, len(code) if cursor is None else cursor)
    answer = notebook.client.get_shell_msg(timeout=CELL_S)
    while answer["msg_type"] != "inspect_reply":
        answer = notebook.client.get_shell_msg(timeout=CELL_S)
    content = answer["content"]
    assert content["status"] == "ok"
    assert content["found"] == bool(content["data"])
    shown: str = content["data"].get("text/plain", "")
    return re.sub(r"\x1b\[[\d;]*m", "", shown)


def test_shift_tab_in_a_distributed_cell(notebook: Notebook):
    notebook.run("%%distributed\ndef scaled(factor=3):\n    'Only on the ranks.'")
    notebook.run("local_only = 1")
    text = inspect(notebook, "%%distributed -r 0\nx = 1\nscaled(x, ")
    assert "scaled(factor=3)" in text
    assert "Only on the ranks." in text
    assert "all_reduce(" in inspect(notebook, "%%distributed\nnbdist.all_reduce")
    assert inspect(notebook, "%%distributed\nlocal_only") == ""
    assert inspect(notebook, "%%distributed\n") == ""
    assert inspect(notebook, "scaled") == ""
    assert "int" in inspect(notebook, "local_only")
    assert "timeout" in inspect(notebook, "%%distributed\nscaled", len("%%distributed"))


def test_help_in_a_distributed_cell(notebook: Notebook):
    assert "Tensor" in notebook.run("%%distributed -r 0\ntorch.ones?").text


def test_long_output_is_cut_in_the_notebook(notebook: Notebook):
    code = "for i in range(400_000): print('line', i)"
    reply = notebook.run(f"%%distributed\n{code}")
    assert reply.status == "ok"
    assert len(reply.stdout) < 6_000_000, "1 MB of each rank, and the labels"
    assert "the full text is in" in reply.text


def test_the_first_part_of_a_long_print_is_shown_with_the_path_of_its_file(
    notebook: Notebook,
):
    reply = notebook.run("%%distributed -r 1\nprint('0123456789' * 1_000_000)")
    assert reply.status == "ok"
    shown = re.sub(r"\x1b\[[\d;]*m", "", reply.stdout)
    assert "[1] " + "0123456789" * 100_000 + "\n" in shown
    kept = re.search(r"printed more than 1 MB here.*full text is in (\S+)", reply.text)
    assert kept is not None, reply.stderr
    assert Path(kept[1]).read_text() == "0123456789" * 1_000_000 + "\n"


def test_an_error_whose_text_utf8_cannot_encode_is_shown(notebook: Notebook):
    reply = notebook.run("%%distributed\nraise ValueError('bad ' + chr(0xd800))")
    assert reply.error == "CellError"
    assert r"ValueError: bad \ud800" in reply.text
    reply = notebook.run("%%distributed\nprint('odd', chr(0xd800))")
    assert reply.status == "ok"
    assert r"[0-1] odd \ud800" in reply.text


# -- plain cells on the ranks ---------------------------------------------------------


@pytest.fixture
def automatic(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook whose plain cells run on the ranks."""
    assert "plain cells run in the notebook" in notebook.run("%dist_auto").text
    assert "plain cells run on the ranks" in notebook.run("%dist_auto on").text
    yield notebook
    assert "plain cells run in the notebook" in notebook.run("%dist_auto off").text
    assert notebook.run("print('here')").text.strip() == "here"


def test_plain_cells_run_on_the_ranks_and_say_so(automatic: Notebook):
    reply = automatic.run("double = rank * 2\ndouble")
    shown = re.sub(r"\x1b\[[\d;]*m", "", reply.stdout).splitlines()
    assert re.fullmatch(r"\[0\] Out\[\d+\]: 0", shown[0])
    assert re.fullmatch(r"\[1\] Out\[\d+\]: 2", shown[1])
    last = r"✓ rank 0-1 finished in \d\.\d s   \(%dist_auto\)"
    assert re.fullmatch(last, shown[2])
    reply = automatic.run("import asyncio\nawait asyncio.sleep(0)\n1 / rank")
    assert reply.error == "CellError"
    assert re.search(r"rank 0 of 2 on \S+ in In\[\d+\] line 3\]", reply.text)
    assert "✗ rank 0 failed" in reply.text


def test_some_cells_run_in_the_notebook_meanwhile(automatic: Notebook):
    automatic.run("mine = rank")
    reply = automatic.run("%%local\nhere = 'here'\n1 / 0")
    assert reply.error == "ZeroDivisionError"
    assert re.search(r"----> 3 1 */ *0", reply.text), reply.text
    assert "'here'" in automatic.run("%%local\nhere").text
    assert automatic.run("import time\n%dist_pull mine").status == "ok"
    assert "[0, 1]" in automatic.run("%%local\nmine").text
    assert "[1] 1" in automatic.run("%%distributed -r 1\nprint(rank)").text
    assert automatic.run("%%time\nx = 1").text.count("Wall time") == 1


def test_completion_and_help_ask_the_ranks_meanwhile(automatic: Notebook):
    automatic.run("only_here = [1]")
    assert "x = only_here" in completions(automatic, "x = only_h")
    assert "list" in inspect(automatic, "only_here")
    assert inspect(automatic, "%%local\nonly_here") == ""


# -- cells in the background ---------------------------------------------------------


def is_there(text: str) -> Callable[[Reply], bool]:
    return lambda reply: text in reply.text


STEPS = """%%distributed --background
import time
for step in range(3):
    print("step", step, "of rank", rank)
    time.sleep(0.3)
"last"
"""
ENDLESS = "%%distributed -b\nprint('here')\nimport time\ntime.sleep(600)"


def test_a_cell_in_the_background_shows_its_output_in_its_own_area(notebook: Notebook):
    request, reply = notebook.start(STEPS)
    assert reply.status == "ok"
    assert "● rank 0-1 running" in reply.text
    assert "step 2" not in reply.text
    other = notebook.run("print('the kernel is free')")
    assert other.text.strip() == "the kernel is free"
    notebook.read(request, reply, is_there("finished in"))
    for rank in (0, 1):
        assert f"[{rank}] step 2 of rank {rank}" in reply.text
    assert "[0-1] Out[" in reply.text
    assert reply.stdout.rstrip().splitlines()[-1].count("✓ rank 0-1 finished in") == 1
    waited = notebook.run("%dist_wait")
    assert re.search(r"In\[\d+\] finished in \d", waited.text)
    assert "no cell in the background" in notebook.run("%dist_wait").text


def number_of(reply: Reply) -> str:
    found = re.search(r"%dist_interrupt (\d+) ends In", reply.text)
    assert found is not None, reply.text
    return found[1]


WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("setting", ["0", "1"])
def test_the_button_of_a_cell_in_the_background_can_be_left_out(
    notebook: Notebook, setting: str
):
    notebook.run(f"import os\nos.environ['NBDIST_WIDGETS'] = '{setting}'")
    try:
        _, reply = notebook.start("%%distributed -b\nprint(rank)")
    finally:
        notebook.run("del os.environ['NBDIST_WIDGETS']")
    assert any(WIDGET in each for each in reply.displays) == (setting == "1")
    assert notebook.run("%dist_wait").status == "ok"


def test_cells_in_the_background_are_listed_queued_and_interrupted(notebook: Notebook):
    first, output = notebook.start(ENDLESS)
    number = number_of(output)
    _second, waiting = notebook.start("%%distributed -b -r 0\nnever = 1")
    assert f"waits for In[{number}]" in waiting.text
    table = notebook.run("%dist_jobs").text
    assert re.search(rf"In\[{number}\] +0-1 +running for .* print\('here'\)", table)
    assert re.search(r"In\[\d+\] +0 +waits for its turn +never = 1", table)
    assert notebook.run("%dist_status").text.count(f"busy: In[{number}]") == 2
    assert "time.sleep(600)" in notebook.run("%dist_stacks").text
    done = notebook.run(f"%dist_interrupt {number_of(waiting)}").text
    assert "cancelled before it began" in done
    assert "is interrupted" in notebook.run("%dist_interrupt").text
    notebook.read(first, output, lambda reply: bool(reply.traceback))
    assert "CellInterrupted" in output.traceback
    assert "■ rank 0-1 interrupted" in output.text
    reply = notebook.run(f"%dist_wait {number}")
    assert reply.error == "CellInterrupted"
    assert "all ranks keep their variables" in reply.text
    reply = notebook.run(f"%dist_wait In[{number_of(waiting)}]")
    assert "cancelled before it began" in reply.text
    assert "interrupted after" in notebook.run("%dist_jobs").text
    assert "no cell runs in the background" in notebook.run("%dist_interrupt").text


def test_a_failure_in_the_background_is_shown_and_raised_by_dist_wait(
    notebook: Notebook,
):
    code = "%%distributed -b\nif rank:\n    raise ValueError('on purpose')"
    request, reply = notebook.start(code)
    notebook.read(request, reply, lambda reply: bool(reply.traceback))
    assert "✗ rank 1 failed" in reply.text
    for shown in (reply, notebook.run("%dist_wait")):
        assert "rank 1 of 2" in shown.text
        assert "ValueError: on purpose" in shown.text
        assert re.search(r"In\[\d+\], line 3", shown.text), shown.text
    assert shown.error == "CellError"
    assert "failed after" in notebook.run("%dist_jobs").text


def test_calls_that_need_the_ranks_say_that_they_wait(notebook: Notebook):
    notebook.start("%%distributed -b\nimport time\ntime.sleep(1.5)\nx = rank")
    reply = notebook.run("%dist_pull x")
    assert reply.status == "ok"
    assert re.search(r"waits for In\[\d+\], in the background", reply.text)
    assert notebook.run("x").displays[-1]["text/plain"] == "[0, 1]"


def test_the_interrupt_button_ends_a_wait_and_not_the_cell(notebook: Notebook):
    request, output = notebook.start(ENDLESS)
    number = number_of(output)
    reply = notebook.interrupt_when_it_prints(f"print('x')\n%dist_wait {number}")
    assert reply.error == "CellInterrupted"
    assert "continues in the background" in reply.text
    reply = notebook.interrupt_when_it_prints("%%distributed\nnever = 1")
    assert reply.error == "CellInterrupted"
    assert "nothing was run" in reply.text
    assert notebook.run("%dist_status").text.count(f"busy: In[{number}]") == 2
    notebook.run(f"%dist_interrupt {number}")
    notebook.read(request, output, lambda reply: bool(reply.traceback))


# -- prompts of ranks ----------------------------------------------------------------

STOP = """%%distributed
def work(x):
    y = x + 1
    breakpoint()
    return y

if rank == {rank}:
    print("result", work(rank))
nbdist.barrier()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_breakpoint_asks_in_the_notebook(notebook: Notebook, rank: int):
    reply, prompts = notebook.converse(STOP.format(rank=rank), "p y * 100", "n", "c")
    assert reply.status == "ok", reply.text
    assert prompts == [f"[{rank}] (Pdb) "] * 3
    shown = re.sub(r"\x1b\[[\d;]*m", "", reply.stdout).splitlines()
    assert re.fullmatch(
        rf"debugger on rank {rank} of 2 \(\S+\), In\[\d+\] line 4", shown[0]
    )
    assert f"[{rank}] {(rank + 1) * 100}" in shown
    assert f"[{rank}] -> return y" in shown
    assert f"[{rank}] result {rank + 1}" in shown
    waits = [d["text/plain"] for d in reply.displays if "⚠" in d["text/plain"]]
    assert f"rank {1 - rank} waits for the debugger on {rank}" in waits[0]


def test_two_ranks_stop_and_a_command_goes_to_both(notebook: Notebook):
    code = "%%distributed\nx = rank + 5\nbreakpoint()\nnbdist.barrier()"
    reply, prompts = notebook.converse(code, "ranks all p x * 10", "c", "c")
    assert reply.status == "ok", reply.text
    assert prompts == ["[0] (Pdb) ", "[0] (Pdb) ", "[1] (Pdb) "]
    assert "[0] 50" in reply.text
    assert "[1] 60" in reply.text


WORK = """import nbdist
def work(x):
    y = x + 1
    {line}
    return y
nbdist.cluster().run(work, 4)"""


def test_a_function_of_the_notebook_has_its_cell_and_lines_on_the_ranks(
    notebook: Notebook,
):
    number = int(notebook.run("len(In)").displays[-1]["text/plain"])
    text = notebook.run(WORK.format(line="[0][y]")).text
    assert f'File "In[{number}]", line 4, in work\n    [0][y]\n' in text
    reply, _ = notebook.converse(WORK.format(line="breakpoint()"), "p y", "c", "c")
    assert re.search(
        rf"debugger on rank 0 of 2 \(.+\), In\[{number + 1}\] line 4", reply.text
    )
    assert "[0] -> breakpoint()" in reply.text
    assert "[0] 5" in reply.text


def test_quit_and_the_interrupt_button_end_the_cell_on_all_ranks(notebook: Notebook):
    reply, _ = notebook.converse(STOP.format(rank=1), "q")
    assert reply.error == "CellInterrupted"
    assert "the debugger was quit on rank 1 in In[" in reply.text
    press = notebook.manager.interrupt_kernel
    reply, _ = notebook.converse(STOP.format(rank=0), press)
    assert reply.error == "CellInterrupted"
    assert notebook.run("%%distributed\nnbdist.barrier()").status == "ok"


def test_the_death_of_a_rank_ends_its_prompt(notebook: Notebook):
    notebook.run("%%distributed\nimport os\npid = os.getpid()")
    notebook.run("%dist_pull pid")
    pids = notebook.run("pid").displays[-1]["text/plain"]
    pid = int(pids.strip("[]").split(",")[1])
    reply, _ = notebook.converse(
        STOP.format(rank=1), lambda: os.kill(pid, signal.SIGKILL)
    )
    assert reply.error == "CellError"
    assert "rank 1 of 2: RankDied" in reply.text


def test_input_asks_for_each_rank_in_the_notebook(notebook: Notebook):
    reply, prompts = notebook.converse(
        "%%distributed\nprint('hello', input('name? '))", "ada", "bob"
    )
    assert prompts == ["[0] name? ", "[1] name? "]
    assert "[0] hello ada" in reply.text
    assert "[1] hello bob" in reply.text


def test_dist_debug_opens_where_a_cell_has_failed(notebook: Notebook):
    notebook.run("%%distributed\n1")
    reply = notebook.run("%dist_debug")
    assert reply.error == "UsageError"
    assert "the last cell has not failed" in reply.text
    code = "%%distributed\ndef f(x):\n    return x / (rank - 1)\nf(4)"
    assert notebook.run(code).error == "CellError"
    long = "import time; time.sleep(2.1)"  # so that a last line is shown
    reply, prompts = notebook.converse("%dist_debug", "p x", "up", "l", long, "q")
    assert reply.status == "ok"
    assert prompts == ["[1] (Pdb) "] * 5
    assert re.search(r"✓ rank 1 finished in \d\.\d s\x1b\[0m$", reply.stdout)
    assert "[1] 4" in reply.text
    assert "-> f(4)" in reply.text
    reply = notebook.run("%dist_debug -r 0")
    assert "rank 0 has not failed" in reply.text


@pytest.mark.parametrize("asks", ["input()", "breakpoint()"])
def test_a_front_end_that_cannot_ask_gets_an_error(notebook: Notebook, asks: str):
    client = notebook.client
    code = f"%%distributed\n{asks}"
    request = client.execute(code, store_history=True, allow_stdin=False)
    reply = notebook.finish(str(request))
    assert reply.error == "CellError"
    assert f"NoInput: {asks}: this front end cannot ask" in reply.text
    assert "%dist_push" in reply.text
    request, reply = notebook.start(f"%%distributed -b\n{asks}")
    notebook.read(request, reply, lambda reply: bool(reply.traceback))
    assert "run the cell without -b" in reply.text


# -- a notebook of its own -----------------------------------------------------------


@pytest.fixture
def own_notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    try:
        notebook.run("%load_ext nbdist")
        started = notebook.run("%dist_start -n 1 --device cpu")
        assert started.status == "ok", started.text
        yield notebook
    finally:
        notebook.close()


def test_a_cluster_starts_again_after_dist_stop(own_notebook: Notebook):
    footprint = own_notebook.footprint(fork_server=False)
    assert "stopped" in own_notebook.run("%dist_stop").text
    footprint.assert_gone()
    assert "no cluster was running" in own_notebook.run("%dist_stop").text
    for cell in (
        "%%distributed\n1", "%dist_status", "%dist_vars", "%dist_stacks",
        "%dist_collectives",
        "import nbdist; nbdist.cluster()", "%dist_auto on",
    ):  # fmt: skip
        reply = own_notebook.run(cell)
        assert reply.error == "NotRunning"
        assert "%dist_start" in reply.text
    assert own_notebook.run("%dist_start -n 1 --device cpu").status == "ok"
    assert "[0] 0" in own_notebook.run("%%distributed\nprint(rank)").text
    footprint = own_notebook.footprint()
    assert own_notebook.run("%unload_ext nbdist").status == "ok"
    footprint.assert_gone()


@pytest.mark.parametrize("busy", [False, True, "-b"], ids=["idle", "busy", "behind"])
def test_a_kernel_restart_leaves_nothing(own_notebook: Notebook, busy: bool | str):
    footprint = own_notebook.footprint()
    if busy == "-b":
        own_notebook.start(ENDLESS)
    elif busy:
        request = own_notebook.send("%%distributed\nprint('here')\nwhile True: pass")
        wait_for_text(own_notebook, request)
    own_notebook.manager.restart_kernel(now=busy is True)
    footprint.assert_gone()
    own_notebook.client.stop_channels()
    own_notebook._connect()
    assert own_notebook.run("%load_ext nbdist").status == "ok"
    assert own_notebook.run("%dist_status").error == "NotRunning"


def wait_for_text(notebook: Notebook, request: str) -> None:
    while True:
        message = notebook.client.get_iopub_msg(timeout=CELL_S)
        ours = message["parent_header"].get("msg_id") == request
        if ours and message["msg_type"] == "stream":
            return


@pytest.mark.parametrize("now", [False, True], ids=["shutdown", "kill -9"])
def test_the_end_of_a_kernel_leaves_nothing(own_notebook: Notebook, now: bool):
    footprint = own_notebook.footprint()
    own_notebook.manager.shutdown_kernel(now=now)
    footprint.assert_gone()


def test_after_mpiexec_was_killed_the_next_cell_starts_all_ranks_again(
    own_notebook: Notebook,
):
    footprint = own_notebook.footprint(fork_server=False)
    launchers = ("mpiexec", "prterun", "mpirun")
    # All before the first is killed: the others end then.
    for process in [p for p in footprint.processes if p.name() in launchers]:
        process.kill()
    footprint.assert_gone()
    reply = own_notebook.run("%%distributed\nprint(rank)")
    assert reply.status == "ok"
    assert "mpiexec has ended with SIGKILL, and all ranks with it" in reply.text
    assert "started again, without their variables" in reply.text
    assert "[0] 0" in reply.text


def test_run_all_stops_at_a_failed_cell(tmp_path: Path):
    cells = [
        "%load_ext nbdist\n%dist_start -n 1 --device cpu",
        "%%distributed\nraise ValueError('stop here')",
        "open('must-not-exist', 'w')",
    ]
    # Their imports take two seconds, of each process that collects the tests.
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = NotebookClient(
        book, timeout=CELL_S, resources={"metadata": {"path": str(tmp_path)}}
    )
    with pytest.raises(CellExecutionError, match="stop here"):
        client.execute()
    assert not (tmp_path / "must-not-exist").exists()


LINES = {
    "%dist_run -m no_module": "no module 'no_module'",
    "%dist_run --nproc-per-node 5 s.py": "--nproc-per-node 5: the cluster has 2 ranks",
    "%dist_run --nproc_per_node=x s.py": "--nproc-per-node 'x' is not a whole number",
    "%dist_run --nnodes 2:4 s.py": "--nnodes 2:4: the cluster has 1",
    "%dist_run --no-python s.py": "--no-python: %dist_run runs Python",
    "%dist_run --unknown 5 s.py": "unrecognized arguments",
    "%dist_run": "the following arguments are required: script",
    "%dist_status 5": "unrecognized arguments: 5",
    "%dist_auto maybe": "invalid choice",
    "%dist_push": "the following arguments are required",
    "%dist_monitor --metric": "expected one argument",
    "%%distributed --unknown\n1": "unrecognized arguments",
}


def test_a_wrong_line_of_a_magic_fails_its_cell_with_one_line(notebook: Notebook):
    for line, said in LINES.items():
        reply = notebook.run(line)
        assert (reply.status, bool(reply.traceback)) == ("error", True), line
        assert said in reply.text, line
        if "module" not in line:
            assert reply.error == "UsageError"
            assert len(reply.text.strip().splitlines()) == 1, reply.text


def test_dist_run_has_the_options_of_torchrun(notebook: Notebook):
    lines = [
        "--nproc-per-node 2 --nnodes=1 --standalone",
        "--nproc_per_node=auto --nnodes 1:3 --rdzv-backend=c10d --max_restarts 1",
        "--rdzv_id 7 --master_addr localhost --master-port 29500 --node-rank 0",
        "--tee 3 --log-dir logs",
    ]
    for line in lines:
        reply = notebook.run(f"%dist_run {line} -m platform --terse")
        assert reply.status == "ok", reply.text
        assert "Linux" in reply.text
        assert ("--log-dir, --tee: no effect" in reply.text) == ("--tee" in line)


LINGERS = """
import time
from nbdist.clusters import startup

def linger(*_):
    print("go")
    time.sleep(60)

startup._Start._await_engines = linger
%load_ext nbdist
"""


def test_an_interrupted_start_is_one_sentence(tmp_path: Path):
    notebook = Notebook(tmp_path)
    try:
        notebook.run(LINGERS)
        reply = notebook.interrupt_when_it_prints("%dist_start -n 1 --device cpu")
        assert reply.error == "StartInterrupted"
        assert "the start was interrupted, and nothing of it is left" in reply.traceback
        assert "Traceback" not in reply.text
    finally:
        notebook.close()


LINGERS_IN_RESTART = """
import nbdist, time

def linger(*_):
    print("go")
    time.sleep(60)

nbdist.cluster().restart = linger
"""


def test_an_interrupted_restart_stops_no_ranks_that_run(own_notebook: Notebook):
    own_notebook.run("%%distributed\nkept = 5")
    own_notebook.run(LINGERS_IN_RESTART)
    reply = own_notebook.interrupt_when_it_prints("%dist_restart")
    assert reply.error == "KeyboardInterrupt"
    assert "5" in own_notebook.run("%%distributed\nprint(kept)").text
