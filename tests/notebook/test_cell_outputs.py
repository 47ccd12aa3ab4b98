"""What a kernel tells a page that is loaded while its cells run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.widgets.cell_outputs import CUT, MOST_CHARACTERS, REQUEST, _Cell
from tests.notebook.test_kernel import Notebook

DEADLINE_S = 30.0
WAITS = """
import time
while not os.path.exists({path!r}): time.sleep(0.02)
"""


PUBLISHES = """
outputs = get_ipython().kernel.iopub_thread.send_multipart.__self__
sent, publish = [], outputs._publish
outputs._publish = lambda frames: sent.append(frames)
try:
    for frames in ([b"odd"], [b"<IDS|MSG>"], [b"<IDS|MSG>", *[b"{}"] * 5]):
        outputs._send(frames)
finally:
    outputs._publish = publish
print(len(sent), "were published")
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("outputs"))
    notebook.run("%load_ext nbdist\nimport os\nfrom IPython.display import *")
    yield notebook
    notebook.close()


def start(notebook: Notebook, code: str, cell_id: str) -> str:
    """Run a cell as JupyterLab does, which names it. Returns the request's id."""
    client = notebook.client
    content = {
        "code": code, "silent": False, "store_history": True, "user_expressions": {},
        "allow_stdin": False, "stop_on_error": True,
    }  # fmt: skip
    message = client.session.msg(
        "execute_request", content, metadata={"cellId": cell_id}
    )
    client.shell_channel.send(message)
    return str(message["header"]["msg_id"])


def ask(notebook: Notebook) -> str:
    """Ask for the outputs of the cells. Returns the request's id."""
    message = notebook.client.session.msg(REQUEST, {})
    notebook.client.control_channel.send(message)
    return str(message["header"]["msg_id"])


def published(notebook: Notebook, request: str, *, after: str) -> list[dict[str, Any]]:
    """The messages of a request up to one with a text."""
    messages, deadline = [], time.monotonic() + DEADLINE_S
    while not messages or after not in str(messages[-1]["content"]):
        message = notebook.client.get_iopub_msg(timeout=deadline - time.monotonic())
        if message["parent_header"].get("msg_id") == request:
            messages.append(message)
    return messages


def lines(content: dict[str, Any]) -> str:
    return "".join(
        each["content"].get("text", "")
        for each in content["messages"]
        if each["msg_type"] == "stream"
    )


def test_a_page_gets_all_output_so_far_and_then_what_follows(
    notebook: Notebook, tmp_path: Path
):
    go_on = tmp_path / "go on"
    shows = "h = display(HTML('first'), display_id=True)\nh.update(HTML('second'))"
    counts = "for i in range(200_000):\n    print('line', i)"
    code = f"print('begun', flush=True)\n{shows}\n{counts}\n"
    code += WAITS.format(path=str(go_on)) + "print('the', 'end')"
    request = start(notebook, code, "mine")
    published(notebook, request, after="line 1000\\n")
    ask(notebook)  # while it prints
    messages = published(notebook, request, after="'cell_id': 'mine'")
    content = messages[-1]["content"]
    assert messages[-1]["msg_type"] == "nbdist_outputs"
    assert content["session"] == notebook.client.session.session
    assert content["is_running"]
    go_on.touch()
    after = published(notebook, request, after="'idle'")
    text = lines(content) + "".join(
        each["content"]["text"] for each in after if each["msg_type"] == "stream"
    )
    expected = "begun\n" + "".join(f"line {i}\n" for i in range(200_000)) + "the end\n"
    assert text == expected, "nothing is lost, and nothing is there twice"
    shown = [m for m in content["messages"] if m["msg_type"] == "display_data"]
    assert [each["content"]["data"]["text/html"] for each in shown] == ["second"]
    assert content["execution_count"] == 2


def test_the_output_of_a_cell_without_ranks_is_forgotten_with_its_end(
    notebook: Notebook, tmp_path: Path
):
    request = start(notebook, "print('short')", "ended")
    published(notebook, request, after="'idle'")
    go_on = tmp_path / "go on"
    code = "print('running', flush=True)" + WAITS.format(path=str(go_on))
    request = start(notebook, code, "running")
    published(notebook, request, after="running")
    ask(notebook)
    seen = []
    while not seen or seen[-1]["content"].get("cell_id") != "running":
        message = notebook.client.get_iopub_msg(timeout=DEADLINE_S)
        if message["msg_type"] == "nbdist_outputs":
            seen.append(message)
    assert len(seen) == 1
    go_on.touch()
    published(notebook, request, after="'idle'")


def test_the_extension_can_be_unloaded(notebook: Notebook):
    notebook.run("%unload_ext nbdist")
    request = start(notebook, "print('as before')", "another")
    published(notebook, request, after="as before")
    notebook.run("%load_ext nbdist")


def test_a_cell_is_cleared_and_cut():
    cell = _Cell({}, "id", 1)
    cell.add("stream", {"name": "stdout", "text": "old"})
    cell.add("clear_output", {"wait": True})
    assert lines(cell.content) == "old"
    cell.add("stream", {"name": "stdout", "text": "new"})
    cell.add("stream", {"name": "stdout", "text": "er"})
    assert lines(cell.content) == "newer"
    cell.add("stream", {"name": "stdout", "text": "x" * MOST_CHARACTERS})
    for _ in range(2):
        cell.add("stream", {"name": "stdout", "text": "lost"})
    assert lines(cell.content) == f"newer{CUT}"


def test_a_display_that_later_cells_update_is_kept(notebook: Notebook) -> None:
    code = "from nbdist.magics import _registered\n"
    code += "outputs = next(iter(_registered.values()))[0].session._outputs\n"
    code += "later = display(HTML('old'), display_id=True)\noutputs.keep_display()"
    request = start(notebook, code, "shows")
    published(notebook, request, after="'idle'")
    notebook.run("later.update(HTML('new'))")
    asked = ask(notebook)
    content = published(notebook, request, after="'cell_id': 'shows'")[-1]["content"]
    published(notebook, asked, after="'idle'")
    assert content["is_live"]
    assert not content["is_running"]
    (display,) = content["messages"]
    assert display["content"]["data"]["text/html"] == "new"
    # The cell is run again: the earlier output is forgotten.
    again = start(notebook, "print('again')", "shows")
    published(notebook, again, after="'idle'")
    ask(notebook)
    assert states(notebook) == ["busy", "idle"]


def test_the_kernel_says_that_it_is_busy_until_the_cell_ends(
    notebook: Notebook, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    code = "print('running', flush=True)" + WAITS.format(path=str(go_on))
    request = start(notebook, code, "busy")
    published(notebook, request, after="running")
    ask(notebook)
    assert states(notebook, 3) == ["busy", "idle", "busy"]
    go_on.touch()
    published(notebook, request, after="'idle'")


def states(notebook: Notebook, count: int = 2) -> list[str]:
    """The next states that the kernel publishes, and nothing else but outputs."""
    found: list[str] = []
    while len(found) < count:
        message = notebook.client.get_iopub_msg(timeout=DEADLINE_S)
        if message["msg_type"] == "status":
            found.append(message["content"]["execution_state"])
        else:
            assert message["content"].get("cell_id") != "shows"
    return found


def test_what_is_no_message_of_jupyters_does_not_end_the_output(
    notebook: Notebook,
) -> None:
    """Another extension may publish frames of its own."""
    reply = notebook.run(PUBLISHES)
    assert reply.stdout == "3 were published\n"
