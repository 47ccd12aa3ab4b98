"""Widgets of ranks, in a kernel to which the tests send what a front end sends."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.notebook.test_kernel import CELL_S, Notebook

Message = dict[str, Any]


class FrontEnd:
    """The models of widgets that a front end would have, from a kernel's messages."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.states: dict[str, dict[str, Any]] = {}
        """The state of each open comm."""
        self.sent: Counter[str] = Counter()
        """The number of messages of each comm."""
        self.custom: dict[str, list[Any]] = {}
        """The contents of the custom messages of each comm."""
        self.printed: dict[str, str] = {}
        """The text under each request."""
        self.shown: dict[str, dict[str, Any]] = {}
        """The newest content of each display, by its id."""
        self.idle: set[str] = set()
        """The requests that have ended."""

    def run(self, code: str, **options: Any) -> str:
        """Run a cell. Returns its request."""
        request = str(self.notebook.client.execute(code, **options))
        self.until(lambda: request in self.idle)
        return request

    def until(self, condition: Callable[[], object]) -> None:
        """Read messages until a condition holds."""
        deadline = time.monotonic() + CELL_S
        while not condition():
            left_s = deadline - time.monotonic()
            self._take(self.notebook.client.get_iopub_msg(timeout=left_s))

    def set(self, comm: str, **state: Any) -> str:
        """Change a widget, as the user does. Returns the request."""
        return self.send(comm, method="update", state=state, buffer_paths=[])

    def send(self, comm: str, **data: Any) -> str:
        client = self.notebook.client
        message = client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def comm_info(self) -> set[str]:
        """The comms that the kernel knows."""
        reply = self.notebook.client.comm_info(reply=True, timeout=CELL_S)
        return set(reply["content"]["comms"])

    def of(self, model: str) -> list[str]:
        """The comms of the open models of a kind, in the order of their opening."""
        return [
            comm
            for comm, state in self.states.items()
            if state.get("_model_name") == f"{model}Model"
        ]

    def text(self, request: str) -> str:
        return re.sub(r"\x1b\[[\d;]*m", "", self.printed.get(request, ""))

    def _take(self, message: Message) -> None:
        kind, content = message["msg_type"], message["content"]
        parent = message["parent_header"].get("msg_id", "")
        if kind == "comm_open":
            self.states[content["comm_id"]] = content["data"]["state"]
        elif kind == "comm_msg":
            data = content["data"]
            self.sent[content["comm_id"]] += 1
            if data["method"] == "update":
                self.states[content["comm_id"]].update(data["state"])
            elif data["method"] == "custom":
                self.custom.setdefault(content["comm_id"], []).append(data["content"])
        elif kind == "comm_close":
            del self.states[content["comm_id"]]
        elif kind == "stream":
            self.printed[parent] = self.printed.get(parent, "") + content["text"]
        elif kind in ("display_data", "update_display_data"):
            name = content.get("transient", {}).get("display_id", "")
            self.shown[name] = content["data"]
        elif kind == "status" and content["execution_state"] == "idle":
            self.idle.add(parent)


@pytest.fixture(scope="module")
def _shared_front_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    notebook = Notebook(tmp_path_factory.mktemp("widgets"))
    try:
        front_end = FrontEnd(notebook)
        front_end.run("%load_ext nbdist")
        front_end.run("%dist_start -n 4 --device cpu")
        front_end.run("%%distributed --setup\nimport time, ipywidgets")
        yield front_end
    finally:
        notebook.close()


@pytest.fixture
def front_end(_shared_front_end: FrontEnd) -> Iterator[FrontEnd]:
    """The front end, and idle ranks. A test's widgets are closed after it."""
    yield _shared_front_end
    request = _shared_front_end.run("%%distributed\nipywidgets.Widget.close_all()")
    assert "failed" not in _shared_front_end.text(request)
    _shared_front_end.run("import ipywidgets; ipywidgets.Widget.close_all()")
    assert _shared_front_end.comm_info() == set()


SLIDER = """%%distributed
slider = ipywidgets.IntSlider(value=3, description="rate")
slider.observe(lambda change: print("now", change.new), "value")
slider
"""


def sliders(front_end: FrontEnd) -> tuple[str, list[str]]:
    """Show a slider of each rank. Returns the cell's request, and comms by rank."""
    cell = front_end.run(SLIDER)
    names = front_end.text(front_end.run("%%distributed\nprint(slider.model_id)"))
    comms = [line.split()[1] for line in sorted(names.splitlines())]
    assert set(comms) == set(front_end.of("IntSlider"))
    return cell, comms


def test_bars_of_all_ranks_reach_their_end_in_one_display(front_end: FrontEnd):
    front_end.run(
        "%%distributed\nfrom tqdm.auto import tqdm\n"
        "for _ in tqdm(range(50)): time.sleep(0.005)\n"
        "from tqdm.notebook import trange\n"
        "for _ in trange(20, desc='more'): pass"
    )
    bars = [front_end.states[comm] for comm in front_end.of("FloatProgress")]
    assert sorted((bar["value"], bar["max"]) for bar in bars) == sorted(
        [(50.0, 50.0), (20.0, 20.0)] * 4
    )
    assert {bar["bar_style"] for bar in bars} == {"success"}
    (board,) = [
        data for data in front_end.shown.values() if "50/50" in data["text/plain"]
    ]
    lines = board["text/plain"].splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"rank {r}" for r in range(4)]
    assert all("50/50" in line and "more: 100%" in line for line in lines)
    assert set(front_end.states) <= front_end.comm_info()


def test_a_moved_slider_runs_the_callback_on_its_rank(front_end: FrontEnd):
    cell, comms = sliders(front_end)
    moved = front_end.set(comms[2], value=8)
    front_end.until(lambda: "[2] now 8" in front_end.text(cell))
    front_end.until(lambda: moved in front_end.idle)
    values = front_end.run("%%distributed\nprint(slider.value)")
    assert sorted(front_end.text(values).splitlines()) == ["[0-1,3] 3", "[2] 8"]
    # The rank changes it: the front end follows.
    front_end.run("%%distributed -r 2\nslider.value = 9")
    assert front_end.states[comms[2]]["value"] == 9


def test_a_button_interrupts_a_cell_in_the_background(front_end: FrontEnd):
    code = "%%distributed -b\nprint('begun')\ntime.sleep(600)"
    first, second = front_end.run(code), front_end.run(code)
    front_end.until(lambda: "begun" in front_end.text(first))
    one, other = front_end.of("Button")
    assert front_end.states[one]["description"].startswith("interrupt In[")
    # JupyterLab shows this text in place of an output that is collapsed.
    texts = [data.get("text/plain", "") for data in front_end.shown.values()]
    assert len([text for text in texts if "] in the background" in text]) == 2
    front_end.send(other, method="custom", content={"event": "click"})
    front_end.until(lambda: other not in front_end.states)
    front_end.send(one, method="custom", content={"event": "click"})
    front_end.until(lambda: "■ rank 0-3 interrupted" in front_end.text(first))
    assert one not in front_end.states
    front_end.run("%dist_wait")
    assert "begun" not in front_end.text(second)
    assert not any("Button" in str(data) for data in front_end.shown.values())


def test_a_busy_rank_gets_the_last_value_when_its_cell_ends(front_end: FrontEnd):
    cell, comms = sliders(front_end)
    busy = front_end.run(
        "%%distributed -b\ntime.sleep(1.5)\nprint('was', slider.value)"
    )
    for value in range(4, 100):
        front_end.set(comms[1], value=value)
    last = front_end.set(comms[1], value=100)
    front_end.until(lambda: last in front_end.idle)
    assert "was" not in front_end.text(busy)  # the rank is busy, the notebook is not
    front_end.until(lambda: "[1] now 100" in front_end.text(cell))
    front_end.until(lambda: "[0-3] was 3" in front_end.text(busy))
    assert front_end.text(cell).count("now") <= 2
    front_end.run("%dist_wait")


def test_a_burst_of_updates_is_merged(front_end: FrontEnd):
    front_end.sent.clear()
    request = front_end.run(
        "%%distributed\n"
        "number = ipywidgets.IntText()\n"
        "begun = time.perf_counter()\n"
        "for step in range(20_000): number.value = step\n"
        "print('seconds', time.perf_counter() - begun)\n"
    )
    seconds = max(map(float, re.findall(r"seconds (\S+)", front_end.text(request))))
    comms = front_end.of("IntText")
    assert [front_end.states[comm]["value"] for comm in comms] == [19_999] * 4
    for comm in comms:
        assert 1 <= front_end.sent[comm] <= 10 * seconds + 3


def test_custom_messages_and_buffers_arrive_in_their_order(front_end: FrontEnd):
    front_end.run(
        "%%distributed -r 3\n"
        "from traitlets import Bytes\n"
        "class Raw(ipywidgets.DOMWidget):\n"
        "    data = Bytes(b'').tag(sync=True)\n"
        "raw = Raw()\n"
        "heard = []\n"
        "raw.on_msg(lambda _, content, buffers: heard.append(content))\n"
        "raw.data = b'first'; raw.send('a')\n"
        "raw.data = b'second'; raw.send('b', [b'c'])\n"
        "raw.data = b'third'\n"
        "raw"
    )
    (comm,) = front_end.of("DOMWidget")
    front_end.send(comm, method="custom", content="x")
    front_end.send(comm, method="custom", content="y")
    heard = front_end.run("%%distributed -r 3\nprint(heard, raw.data)")
    assert front_end.text(heard).startswith("[3] ['x', 'y'] b'third'")
    assert front_end.custom[comm] == ["a", "b"]
    states = front_end.run(
        "import ipywidgets.widgets.widget as w\n"
        f"print(w._instances['{comm}'].get_state()['data'])"
    )
    assert front_end.text(states) == "b'third'\n"


def test_an_error_in_a_callback_is_shown_below_the_widget(front_end: FrontEnd):
    cell = front_end.run(
        "%%distributed\n"
        "button = ipywidgets.Button()\n"
        "button.on_click(lambda _: 1 / 0)\n"
        "button"
    )
    front_end.send(
        front_end.of("Button")[0], method="custom", content={"event": "click"}
    )
    front_end.until(lambda: "ZeroDivisionError" in front_end.text(cell))


def test_a_callback_that_does_not_end_does_not_hold_the_notebook(front_end: FrontEnd):
    front_end.run(
        "%%distributed\n"
        "def ask(_):\n"
        "    print('begins', flush=True)\n"
        "    x = torch.ones(1)\n"
        "    nbdist.all_reduce(x)\n"
        "button = ipywidgets.Button(); button.on_click(ask)\n"
        "endless = ipywidgets.Button()\n"
        "def run(_):\n"
        "    print('endless')\n"
        "    while True: time.sleep(0.001)\n"
        "endless.on_click(run)\n"
        "display(button, endless)"
    )
    notebook = front_end.notebook
    comms = front_end.run(
        "%%distributed -r 1\nprint(button.model_id, endless.model_id)"
    )
    waiting, endless = front_end.text(comms).split()[1:]
    front_end.send(waiting, method="custom", content={"event": "click"})
    # The other ranks never make this call: the next cell releases rank 1 from it.
    after = front_end.run("%%distributed\nprint('after')")
    assert "[0-3] after" in front_end.text(after)

    front_end.send(endless, method="custom", content={"event": "click"})
    front_end.until(lambda: "endless" in "".join(front_end.printed.values()))
    request = notebook.send("%%distributed\nprint('never on 1')")
    front_end.until(lambda: "never on 1" in front_end.text(request))
    notebook.manager.interrupt_kernel()
    front_end.until(lambda: request in front_end.idle)
    status = front_end.run("%dist_status")
    assert any(d["text/plain"].count("idle") == 4 for d in front_end.shown.values()), (
        status
    )


def test_without_a_front_end_of_widgets_bars_are_text(front_end: FrontEnd):
    front_end.run("%dist_stop")
    assert front_end.comm_info() == set()
    notebook = front_end.notebook
    bars = (
        "%%distributed\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(20)): pass\n"
        "ipywidgets.IntSlider(5)"
    )
    notebook.client.allow_stdin = False
    try:
        front_end.run("%dist_start -n 2 --device cpu")
        front_end.run("%%distributed\nimport ipywidgets, time")
        request = front_end.run(bars)
        assert "20/20" in front_end.text(request)
        assert "IntSlider(value=5)" in front_end.text(request)
        assert front_end.comm_info() == set()
    finally:
        notebook.client.allow_stdin = True
        front_end.run("%dist_stop")
        front_end.run("%dist_start -n 4 --device cpu")
        front_end.run("%%distributed --setup\nimport time, ipywidgets")


def test_a_dead_rank_leaves_the_texts_of_its_widgets(front_end: FrontEnd):
    cell, comms = sliders(front_end)
    front_end.run(
        "%%distributed -r 2\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    front_end.until(lambda: comms[2] not in front_end.states)
    front_end.set(comms[2], value=7)  # nobody is there: nothing happens
    front_end.set(comms[3], value=7)
    front_end.until(lambda: "[3] now 7" in front_end.text(cell))
    labels = {front_end.states[comm]["value"] for comm in front_end.of("Label")}
    assert {"rank 2 (ended)", "rate: 3", "rank 3"} <= labels


def test_a_restart_closes_the_widgets(front_end: FrontEnd):
    _cell, comms = sliders(front_end)
    front_end.run("%dist_restart")
    front_end.until(lambda: not set(comms) & set(front_end.states))
    assert front_end.comm_info() == set()
    texts = [data["text/plain"] for data in front_end.shown.values()]
    assert "\n".join(f"rank {r}  rate: 3" for r in range(4)) in texts
    _cell, comms = sliders(front_end)
    assert set(comms) <= front_end.comm_info()
