"""The server for assistants and scripts, to which a real client of MCP speaks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import nbdist
from nbdist import KeptCluster
from nbdist.clusters.kept.clusters import stop_cluster
from nbdist.errors import NotRunning, UsageError
from nbdist.mcp.expressions import check_reads_only
from tests.processes import wait_until
from tests.reliability.matrix import FAULTS

NAME = "served"
SETUP = Path(__file__).parents[1] / "reliability" / "faulty_step.py"
READING = {"clusters", "status", "stacks", "inspect", "diff", "collectives"}
RUNNING = {"run", "interrupt", "replace"}
Answer = dict[str, Any]
Ask = Callable[..., Answer]
"""Calls a tool, and returns its structured answer; its error is an AssertionError."""


@pytest.fixture(scope="module", autouse=True)
def _names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Names of clusters apart from those of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The name of a kept cluster of three ranks, to which no notebook is attached."""
    with KeptCluster(3, device="cpu", threads=1, name=NAME).start() as kept:
        kept.execute(SETUP.read_text(), setup=True)
        kept.execute("step('nowhere', 'none', 0)")  # the first step is slow
    yield NAME
    with contextlib.suppress(NotRunning):
        stop_cluster(NAME)


class Assistant:
    """A client whose server is a process of its own."""

    def __init__(self, *options: str) -> None:
        from mcp import StdioServerParameters  # a second, of each process that collects

        self._parameters = StdioServerParameters(
            command=sys.executable,
            args=["-m", "nbdist.mcp", *options],
            env=dict(os.environ),
        )
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=anyio.run, args=[self._converse])
        self._thread.start()
        assert self._is_ready.wait(30)

    async def _converse(self) -> None:
        from mcp import Client
        from mcp.client.stdio import stdio_client

        async with Client(stdio_client(self._parameters)) as client:
            self._client, self._token = client, anyio.lowlevel.current_token()
            self._is_ready.set()
            await anyio.to_thread.run_sync(self._is_over.wait)

    def _await(self, function: Callable[..., Any], *args: Any) -> Any:
        return anyio.from_thread.run(function, *args, token=self._token)

    def tools(self) -> list[Any]:
        return list(self._await(self._client.list_tools).tools)

    def ask(self, tool: str, **arguments: Any) -> Answer:
        result = self._await(self._client.call_tool, tool, arguments)
        assert not result.is_error, result.content[0].text
        answer: Answer = result.structured_content
        return answer

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def assistant(cluster: str) -> Iterator[Assistant]:
    one = Assistant("--allow-run")
    yield one
    one.close()


@pytest.fixture
def ask(assistant: Assistant) -> Ask:
    return assistant.ask


# -- what is offered -------------------------------------------------------------------


def test_without_allow_run_nothing_can_be_changed(cluster: str, ask: Ask):
    ask("run", code="x = [torch.ones(2), rank]")
    reader = Assistant("--cluster", cluster)
    try:
        tools = reader.tools()
        assert {tool.name for tool in tools} == READING
        assert all(tool.annotations.read_only_hint for tool in tools)
        for name in RUNNING:
            with pytest.raises(Exception, match=name):
                reader.ask(name, code="x = 1", ranks=[0])
        for change in ("x.clear()", "[x := 1]", "(lambda: 1)()", "f'{x}'", "x + x"):
            for name in ("inspect", "diff"):
                with pytest.raises(AssertionError, match="without --allow-run"):
                    reader.ask(name, expression=change)
        shown = reader.ask("inspect", expression="x[0]")
        assert [value["ranks"] for value in shown["values"]] == [[0, 1, 2]]
        assert shown["is_equal"]
        assert not reader.ask("diff", expression="x")["is_equal"]
    finally:
        reader.close()


def test_with_allow_run_all_tools_are_there(assistant: Assistant):
    tools = {tool.name: tool for tool in assistant.tools()}
    assert tools.keys() == READING | RUNNING
    for name, tool in tools.items():
        assert tool.annotations.read_only_hint == (name in READING)
        assert tool.description
        assert tool.output_schema


@pytest.mark.parametrize(
    "expression", ["model", "model.layers[0].weight", "x[-1]", "x['a', 1:2]", " x "]
)
def test_names_attributes_and_indices_only_read(expression: str):
    check_reads_only(expression)


@pytest.mark.parametrize(
    "expression", ["f()", "x = 1", "x + 1", "[y for y in x]", "x[f()]", "await x", ""]
)
def test_other_expressions_may_change_something(expression: str):
    with pytest.raises(UsageError):
        check_reads_only(expression)


# -- beside a notebook -----------------------------------------------------------------


def test_the_ranks_are_looked_at_while_a_notebook_runs_a_cell(cluster: str, ask: Ask):
    notes: list[str] = []
    notebook = nbdist.attach(cluster)
    notebook.on_note = notes.append
    try:
        notebook.execute("import threading\nkeep_on = threading.Event()")
        code = "print('begun')\nwhile rank == 1: keep_on.wait(1)\nnbdist.barrier()"
        running = notebook.execute(code, wait=False, number=7)
        wait_until(lambda: "running" in str(ask("collectives")["table"]))
        (described,) = ask("clusters")["result"]
        assert described["notebook"] == os.getpid()
        state = ask("status")
        assert "In[7]" in state["doing"]
        assert [each["state"] for each in state["ranks"]] == ["busy"] * 3
        assert "In[7] line 2" in state["ranks"][1]["at"]
        assert "barrier" in state["ranks"][0]["at"]
        stacks = {tuple(s["ranks"]): s["stack"] for s in ask("stacks")["result"]}
        assert "keep_on.wait(1)" in stacks[1,]
        parted = ask("collectives")["parted"]
        assert (parted["missing"], parted["waiting"]) == ([1], [0, 2])
        assert ask("inspect", expression="world_size")["values"][0]["value"] == "3"
        compared = ask("diff", expression="rank")
        assert compared["were_busy"]
        assert compared["different"][0]["groups"] == [[0], [1], [2]]
        with pytest.raises(AssertionError, match=r"busy with In\[7\]"):
            ask("run", code="x = 1")
        assert "is interrupted" in ask("interrupt")["result"]
        with pytest.raises(nbdist.CellError):
            running.result(20)
        assert ask("run", code="'mine'")["outcome"] == "finished"
        assert re_any(r"process \d+ runs a cell: 'mine'", notes)
        assert notebook["rank"] == [0, 1, 2], "the notebook is still attached"
        assert notebook.unseen_cells == ()
    finally:
        notebook.detach()


def re_any(pattern: str, texts: list[str]) -> bool:
    return any(re.search(pattern, text) for text in texts)


def test_a_long_text_is_cut_in_its_middle(ask: Ask):
    answer = ask("run", code="print('a' * 100_000 + 'end')", ranks=[2])
    (output,) = answer["ranks"]
    assert output["rank"] == 2
    assert output["cut"] == 80_004
    assert output["stdout"].endswith("end\n")
    assert len(output["stdout"]) < 21_000


# -- finding the cause -----------------------------------------------------------------


def diagnosis(result: Answer, state: Answer, collectives: Answer) -> tuple[str, int]:
    """What a script concludes from the fields of the answers: the fault, and the rank.

    Args:
        result: Of `run`.
        state: Of `status`, right after it.
        collectives: Of `collectives`, right after it.
    """
    for failure in result["failures"]:
        if failure["ending"]:
            return failure["ending"], failure["rank"]
    for each in state["ranks"]:
        if each["state"] == "silent":
            return "silent", each["rank"]
    parted = collectives["parted"]
    if len(parted["calls"]) > 1:
        most, odd = sorted(parted["calls"], key=lambda call: -len(call["ranks"]))
        differs = [
            key for key in ("shape", "reduce_op", "root") if most[key] != odd[key]
        ]
        return "other " + " and ".join(differs), odd["ranks"][0]
    for failure in result["failures"]:
        if not failure["is_effect"]:
            return failure["error"], failure["rank"]
    if len(parted["missing"]) > 1:
        ((called,),) = (call["ranks"] for call in parted["calls"])
        return "alone in a collective", called
    (missing,) = parted["missing"]
    is_over = result["outcome"] == "failed"
    return "has ended its cell" if is_over else "does not come", missing


CONCLUSIONS = {
    "raise": "ValueError",
    "SIGKILL": "SIGKILL",
    "segfault": "SIGSEGV",
    "exit": "exit code 3",
    "SIGSTOP": "silent",
    "leave": "has ended its cell",
    "wrong shape": "other shape",
    "wrong op": "other reduce_op",
    "wrong root": "other root",
    "loop": "does not come",
    "blocked": "alone in a collective",
}


def test_every_fault_of_the_matrix_has_its_conclusion():
    assert CONCLUSIONS.keys() == {fault.name for fault in FAULTS}


@pytest.mark.parametrize(
    ("fault", "victim"),
    [(name, number % 3) for number, name in enumerate(CONCLUSIONS)],
)
def test_a_script_finds_the_cause_of_a_fault(ask: Ask, fault: str, victim: int):
    timeout_s = 3.0 if fault in ("loop", "blocked", "SIGSTOP") else 60.0
    code = f"step('in forward', {fault!r}, {victim})"
    result = ask("run", code=code, timeout_s=timeout_s)
    collectives, state = ask("collectives"), ask("status")
    found = diagnosis(result, state, collectives)
    assert found == (CONCLUSIONS[fault], victim), (result, state, collectives)
    if fault == "SIGSTOP":
        after = ask("replace", ranks=[victim])
        assert after["ranks"][victim]["state"] == "idle"
    assert ask("run", code="nbdist.barrier()\nrank")["outcome"] == "finished"


# -- transports ------------------------------------------------------------------------


def test_a_socket_serves_in_a_folder_of_this_user(cluster: str):
    command = [sys.executable, "-m", "nbdist.mcp", "--socket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        path = Path(server.stdout.readline().strip())
        try:
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            for _ in range(2):  # one after the other
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(30)
                    connection.connect(str(path))
                    assert "clusters" in tools_of(connection)
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
    assert not path.exists()


def tools_of(connection: socket.socket) -> set[str]:
    """The names of the tools, as a client of a few lines asks for them."""
    about = {"name": "test", "version": "1"}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": about}
    with connection.makefile("rw") as file:

        def send(**message: Any) -> None:
            file.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            file.flush()

        send(id=1, method="initialize", params=hello)
        assert json.loads(file.readline())["result"]["serverInfo"]["name"] == "nbdist"
        send(method="notifications/initialized")
        send(id=2, method="tools/list")
        return {tool["name"] for tool in json.loads(file.readline())["result"]["tools"]}


def test_without_a_cluster_a_tool_says_how_to_start_one(tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
        lonely = Assistant()
        try:
            assert lonely.ask("clusters") == {"result": []}
            with pytest.raises(AssertionError, match="%dist_start --keep"):
                lonely.ask("status")
        finally:
            lonely.close()
