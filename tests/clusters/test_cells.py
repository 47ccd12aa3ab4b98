"""The code, output, displays and errors of cells on four ranks."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nbdist import CellError, CellInterrupted, CellTimeout, Cluster, UsageError
from nbdist.clusters.failures import ANSI
from nbdist.clusters.observer import Event, Quiet
from nbdist.clusters.result import CellResult
from nbdist.ipc import endpoints, serialization
from nbdist.ipc.signed_messages import Opened
from nbdist.wire import REPLY, TELEMETRY
from tests.cluster_processes import ClusterProcesses
from tests.processes import HANG_S, wait_until


def stdout(result: CellResult) -> list[str]:
    return [result[rank].stdout for rank in result.ranks]


def last(result: CellResult) -> list[str]:
    return [result[rank].outputs[-1]["text/plain"] for rank in result.ranks]


def fail(cluster: Cluster, code: str, **options: object) -> CellError:
    with pytest.raises(CellError) as failed:
        cluster.execute(code, **options)
    return failed.value


# -- code ----------------------------------------------------------------------------


def test_the_names_of_every_cell_are_defined(cluster: Cluster):
    result = cluster.execute(
        "assert torch.distributed is dist and dist.is_initialized()\n"
        "assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)\n"
        "assert (nbdist.rank(), nbdist.size(), nbdist.local_rank()) == "
        "(rank, world_size, local_rank)\n"
        "assert nbdist.device() == device == torch.device('cpu')\n"
        "(rank, world_size, local_rank)"
    )
    assert last(result) == [f"({rank}, 4, {rank})" for rank in range(4)]


def test_the_variables_of_torchrun_are_set(cluster: Cluster):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    values = cluster[f"[__import__('os').environ[n] for n in {names.split()}]"]
    ports = {v.pop() for v in values}
    assert values == [[str(r), "4", str(r), "4", "127.0.0.1"] for r in range(4)]
    assert len(ports) == 1
    assert int(ports.pop()) > 0


def test_the_ranks_threads_share_the_cores(cluster: Cluster):
    threads = cluster["torch.get_num_threads()"]
    assert threads == [info.threads for info in cluster.ranks]


def test_torch_distributed_works(cluster: Cluster):
    cluster.execute("t = torch.ones(3) * rank\ndist.all_reduce(t)")
    assert [t.tolist() for t in cluster["t"]] == [[6.0, 6.0, 6.0]] * 4


def test_collectives_of_nbdist_work(cluster: Cluster):
    cluster.execute("t = torch.ones(3) * rank\nnbdist.all_reduce(t)")
    assert [t.tolist() for t in cluster["t"]] == [[6.0, 6.0, 6.0]] * 4


def test_variables_stay_between_cells(cluster: Cluster):
    cluster.execute("kept = rank * 10")
    assert last(cluster.execute("kept + 1")) == ["1", "11", "21", "31"]


def test_a_cell_runs_on_some_ranks_only(cluster: Cluster):
    result = cluster.execute("here = rank; rank", ranks=[3, 1, 1])
    assert list(result.ranks) == [1, 3]
    assert [part.rank for part in result] == [1, 3]
    assert len(result) == 2
    assert [rank in result for rank in range(4)] == [False, True, False, True]
    assert all(part in result for part in result)
    assert result[3].rank == 3
    with pytest.raises(KeyError, match="rank 2: the cell ran on rank 1,3"):
        result[2]
    assert last(result) == ["1", "3"]
    assert cluster["'here' in globals()"] == [False, True, False, True]


@pytest.mark.parametrize(
    ("ranks", "said"), [([4], "rank 4"), ([0, 7, 8], "rank 7-8"), ([], "none")]
)
def test_ranks_that_do_not_exist_are_refused(
    cluster: Cluster, ranks: list[int], said: str
):
    with pytest.raises(UsageError, match="is not one of 0-3") as refused:
        cluster.execute("touched = 1", ranks=ranks)
    assert said in str(refused.value)
    assert cluster["'touched' in globals()"] == [False] * 4


def test_magics_shell_commands_and_await_work(cluster: Cluster):
    result = cluster.execute(
        "import asyncio\n"
        "%env NBDIST_TEST=yes\n"
        "!echo shell $NBDIST_TEST\n"
        "lines = !echo one; echo two\n"
        "await asyncio.sleep(0.01)\n"
        "async def three():\n"
        "    await asyncio.sleep(0)\n"
        "    return 3\n"
        "lines, await three()"
    )
    assert all("shell yes" in text for text in stdout(result))
    assert last(result) == ["(['one', 'two'], 3)"] * 4


def test_an_aggressive_reset_leaves_the_modules_of_a_rank(cluster: Cluster):
    result = cluster.execute("import colorsys\n%reset -f --aggressive")
    assert "Cannot restore" in result[0].stdout
    cluster.execute("x = torch.ones(1)\nnbdist.all_reduce(x)")
    assert cluster.pull("x.item()") == [4.0] * 4


def test_a_reset_keeps_the_names_of_every_cell(cluster: Cluster):
    cluster.execute("mine = 1")
    cluster.execute("%reset -f")
    assert cluster["(rank, world_size, 'mine' in globals())"] == [
        (rank, 4, False) for rank in range(4)
    ]
    cluster.execute("nbdist.all_reduce(torch.ones(1, device=device))")


def test_a_shell_command_prints_and_sets_its_exit_code(cluster: Cluster):
    result = cluster.execute("word = 'known'\n!echo {word}; exit 3\n_exit_code")
    assert stdout(result) == ["known\n"] * 4
    assert last(result) == ["3"] * 4
    cluster.execute("%%capture caught\n!echo hidden; echo too >&2")
    assert cluster["caught.stdout"] == ["hidden\ntoo\n"] * 4


def test_cell_magics_work(cluster: Cluster):
    result = cluster.execute("%%capture caught\nprint('hidden')")
    assert stdout(result) == [""] * 4
    assert cluster["caught.stdout"] == ["hidden\n"] * 4
    assert all("Wall time" in text for text in stdout(cluster.execute("%%time\n1")))


def test_the_last_expression_is_shown_and_kept(cluster: Cluster):
    assert last(cluster.execute("torch.ones(2) * rank"))[2] == "tensor([2., 2.])"
    assert last(cluster.execute("_ + 1"))[2] == "tensor([3., 3.])"
    assert cluster.execute("1;").ranks[0].outputs == []


def test_help_is_shown_under_the_cell(cluster: Cluster):
    cluster.execute("def helped(x):\n    'Says what it does.'")
    for question in ("helped?", "?helped", "helped??"):
        pages = last(cluster.execute(question))
        assert all("Says what it does" in page for page in pages)


def test_ranks_work_in_the_notebooks_folder(cluster: Cluster):
    import os

    assert cluster["__import__('os').getcwd()"] == [os.getcwd()] * 4


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ("input('name? ')", "input(): this process's standard input is not a term"),
        ("import getpass; getpass.getpass()", "getpass(): this process's standard"),
        ("breakpoint()", "breakpoint(): this process's standard input is not a"),
        ("import pdb; pdb.set_trace()", "pdb.set_trace(): this process's standard"),
        ("dist.breakpoint(rank)", "input(): this process's standard input is not"),
        (
            "import pdb, sys; pdb.Pdb(stdin=sys.stdin, stdout=sys.stdout).set_trace()",
            "pdb: a rank's own standard input is empty",
        ),
    ],
)
def test_input_without_a_terminal_is_an_error(cluster: Cluster, asks: str, said: str):
    failure = fail(cluster, f"def ask():\n    {asks}\n    x = 1\nask()", number=7)
    assert re.match(r"ranks 0-3 of 4 in In\[7\] line [23]: NoInput: ", str(failure))
    assert said in str(failure)
    assert "Traceback" not in "".join(failure.rendered)


def test_a_post_mortem_debugger_is_an_error(cluster: Cluster):
    fail(cluster, "1 / 0")
    assert "standard input is not a terminal" in str(fail(cluster, "%debug"))


def test_a_debugger_that_listens_on_a_port_is_called(cluster: Cluster):
    result = cluster.execute(
        "import os, sys, types\n"
        "sys.modules['elsewhere'] = types.SimpleNamespace(stop=lambda: print('here'))\n"
        "os.environ['PYTHONBREAKPOINT'] = 'elsewhere.stop'\n"
        "breakpoint()\n"
        "os.environ['PYTHONBREAKPOINT'] = '0'\n"
        "breakpoint()\n"
        "del os.environ['PYTHONBREAKPOINT'], sys.modules['elsewhere']"
    )
    assert stdout(result) == ["here\n"] * 4


def test_a_cell_may_take_long(cluster: Cluster):
    assert cluster.execute("import time; time.sleep(15); 'done'").ok


def test_an_empty_cell_succeeds(cluster: Cluster):
    for code in ("", "\n\n", "# only a comment"):
        assert cluster.execute(code).ok


def test_a_call_without_output_takes_one_message_of_each_rank(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    arrived: list[str] = []
    client = cluster._live().client._client
    _control, _shell, output, *_ = client.gates
    admit, take_reply = output.opened, client._take_reply

    def opened(frames: Sequence[Any]) -> Opened | None:
        message = admit(frames)
        assert message is not None
        arrived.append(message.message["msg_type"])
        return message

    def take(*reply: Any) -> None:
        arrived.append(REPLY)
        take_reply(*reply)

    monkeypatch.setattr(output, "opened", opened)
    monkeypatch.setattr(client, "_take_reply", take)
    cluster.run(len, [])
    cluster.execute("x = 1")
    assert [kind for kind in arrived if kind != TELEMETRY] == [REPLY] * 8
    arrived.clear()
    cluster.execute("print('once')", ranks=[0])
    kinds = sorted(kind for kind in arrived if kind != TELEMETRY)
    assert kinds == sorted([REPLY, "stream", "status"])


def test_calls_and_cells_bypass_the_controller(cluster: Cluster):
    cluster.run(len, [])
    controller = ClusterProcesses.of(cluster).helper("controller")
    assert controller is not None
    controller.suspend()
    try:
        assert cluster.run(len, "four", timeout_s=20) == [4] * 4
        assert cluster.execute("x = 1", timeout_s=20).ok
    finally:
        controller.resume()


def test_messages_of_every_size_arrive_in_order(cluster: Cluster):
    """Small messages bypass the controller, large ones pass through it."""
    sizes = [10, 70_000, 20, 900_000, 30, 66_000]
    cluster.execute("seen = []")

    def see(text: str, size: int) -> str:
        import __main__

        __main__.seen.append(len(text))
        return "x" * size

    for size in sizes:
        assert cluster.run(see, "x" * size, 5) == ["x" * 5] * 4
        assert cluster.run(see, "", size) == ["x" * size] * 4
    assert cluster["seen"] == [[each for size in sizes for each in (size, 0)]] * 4


def test_a_cell_runs_after_the_direct_sockets_are_closed(cluster: Cluster):
    client = cluster._live().client._client
    before = dict(client.direct)
    for end in before.values():
        end._end.shutdown(socket.SHUT_RDWR)
    for _ in range(3):
        assert cluster.run(len, "four", timeout_s=20) == [4] * 4
    assert all(client.direct[uuid] not in (None, before[uuid]) for uuid in before)


def test_a_context_variable_keeps_its_value_in_the_next_cells(cluster: Cluster):
    cluster.execute(
        "import contextvars\n"
        "kept = contextvars.ContextVar('kept', default='')\n"
        "kept.set(f'of rank {rank}')"
    )
    cluster.execute("import asyncio\nawait asyncio.sleep(0)")
    assert cluster.run(lambda: None) == [None] * 4
    assert cluster["kept.get()"] == [f"of rank {rank}" for rank in range(4)]


def test_a_request_waits_for_one_that_awaits(cluster: Cluster):
    def the_shell() -> Any:
        import gc

        from nbdist.engine.rpc_server import _Shell

        (shell,) = [each for each in gc.get_objects() if isinstance(each, _Shell)]
        return shell

    async def await_a_request() -> int:
        import asyncio

        shell = the_shell()
        while not shell._waiting:
            await asyncio.sleep(0.01)
        shell.order = ["first"]
        return len(shell._waiting)

    def follow() -> list[str]:
        return [*vars(the_shell()).pop("order"), "second"]

    client = cluster._live().client
    for info in cluster.ranks:
        exchanges = [
            client.send(
                info.engine_uuid,
                endpoints.CALL,
                serialization.dumps((function, (), {})),
            )
            for function in (await_a_request, follow)
        ]
        answers = [exchange.reply.result(timeout=30) for exchange in exchanges]
        first, second = (
            serialization.loads([*map(bytearray, answer.value.frames)])
            for answer in answers
        )
        assert first == 1
        assert second == ["first", "second"]
    assert cluster.run(len, "four", timeout_s=20) == [4] * 4


def test_a_stream_that_a_cell_has_closed_does_not_delay_the_reply(cluster: Cluster):
    close = "import io, sys\nown, sys.stdout = sys.stdout, io.StringIO()"
    cluster.execute(f"{close}\nsys.stdout.close()", timeout_s=30)
    again = cluster.execute("sys.stdout = own\nprint('here again')", timeout_s=30)
    assert stdout(again) == ["here again\n"] * 4


# -- output --------------------------------------------------------------------------


def test_ten_thousand_lines_of_each_rank_arrive_complete_and_in_order(cluster: Cluster):
    result = cluster.execute("for i in range(10_000): print(rank, i)")
    for rank in range(4):
        expected = "".join(f"{rank} {i}\n" for i in range(10_000))
        assert result[rank].stdout == expected


def test_flushed_lines_arrive_complete_and_in_order(cluster: Cluster):
    result = cluster.execute("for i in range(10_000): print(rank, i, flush=True)")
    assert [len(text.splitlines()) for text in stdout(result)] == [10_000] * 4


def test_every_way_of_printing_arrives_in_order(cluster: Cluster):
    result = cluster.execute(
        "import ctypes, os, subprocess, sys\n"
        "print('python')\n"
        "os.write(1, b'descriptor\\n')\n"
        "print('python again')\n"
        "os.system('echo system')\n"
        "subprocess.run(['echo', 'child'])\n"
        "sys.stdout.write('no newline')\n"
        "ctypes.CDLL(None).puts(b' C at the end');"
    )
    for text in stdout(result):
        assert text.splitlines() == [
            "python", "descriptor", "python again", "system", "child",
            "no newline C at the end",
        ]  # fmt: skip


def test_stderr_warnings_and_logging_arrive(cluster: Cluster):
    result = cluster.execute(
        "import logging, os, subprocess, sys, warnings\n"
        "print('to stderr é', file=sys.stderr)\n"
        "warnings.warn('careful')\n"
        "logging.getLogger('job').warning('logged')\n"
        "os.write(2, b'raw\\n')\n"
        "subprocess.run('echo child >&2', shell=True);"
    )
    for rank in range(4):
        assert result[rank].stdout == ""
        for part in ("to stderr é", "UserWarning: careful", "logged", "raw", "child"):
            assert part in result[rank].stderr


def test_a_warning_has_the_same_text_on_all_ranks(cluster: Cluster):
    result = cluster.execute("import warnings\nwarnings.warn('alike')")
    assert len({result[rank].stderr for rank in range(4)}) == 1


def test_a_megabyte_to_stderr_does_not_block(cluster: Cluster):
    result = cluster.execute(
        "import subprocess, sys\n"
        "sys.stderr.write('x' * 500_000)\n"
        "subprocess.run([sys.executable, '-c', "
        "\"import sys; sys.stderr.write('y' * 500_000)\"]).returncode",
        timeout_s=60,
    )
    for rank in range(4):
        assert len(result[rank].stderr) == 1_000_000


def test_a_forked_child_prints_too(cluster: Cluster):
    result = cluster.execute(
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Loud(Dataset):\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, i):\n"
        "        print('item', i)\n"
        "        return i\n"
        "sum(int(b) for b in DataLoader(Loud(), num_workers=1, "
        "multiprocessing_context='fork'))",
        ranks=[0, 1],
        timeout_s=90,
    )
    assert last(result) == ["3", "3"]
    for text in stdout(result):
        assert sorted(text.split("\n")) == ["", "item 0", "item 1", "item 2"]


def test_a_progress_bar_arrives_with_its_returns(cluster: Cluster):
    result = cluster.execute("from tqdm import tqdm\nfor _ in tqdm(range(50)): pass")
    for rank in range(4):
        assert "50/50" in result[rank].stderr
        assert "\r" in result[rank].stderr


def test_tqdm_chooses_the_text_bar(cluster: Cluster):
    result = cluster.execute(
        "import tqdm.auto, tqdm.autonotebook, tqdm.notebook\n"
        "assert issubclass(tqdm.auto.tqdm, tqdm.std.tqdm)\n"
        "assert not issubclass(tqdm.auto.tqdm, tqdm.notebook.tqdm)\n"
        "for _ in tqdm.auto.trange(3): pass\n"
        "for _ in tqdm.autonotebook.trange(3): pass\n"
        "for _ in tqdm.notebook.trange(3): pass\n"
        "for _ in tqdm.notebook.tqdm([1, 2, 3], colour='red'): pass\n"
        "with tqdm.notebook.tqdm(total=3, display=False) as bar: bar.update(3)"
    )
    assert [result[rank].stderr.count("3/3 [") for rank in range(4)] == [4] * 4
    assert [result[rank].outputs for rank in range(4)] == [[]] * 4


def test_tb_shows_the_last_traceback(cluster: Cluster):
    with pytest.raises(CellError, match="not here"):
        cluster.execute("def inner():\n    raise ValueError('not here')\ninner()")
    result = cluster.execute("%tb\n%tb Minimal", ranks=[0, 3])
    for rank in (0, 3):
        text = ANSI.sub("", result[rank].stdout)
        assert "inner()" in text
        assert text.count("ValueError: not here") == 2
        assert result[rank].outputs == []
    with pytest.raises(CellError, match="ZeroDivisionError"):
        cluster.execute("1 / 0")


def test_autoreload_loads_a_changed_module_on_every_rank(
    cluster: Cluster, tmp_path: Path
):
    module = tmp_path / "lessons.py"

    def write(text: str, seconds: int) -> None:
        module.write_text(text)
        os.utime(module, (seconds, seconds))  # Python compares the times of the file

    write("class Lesson:\n    def number(self): return 1\n", 1_000_000_000)
    cluster.execute(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "%load_ext autoreload\n%autoreload 2\n"
        "from lessons import Lesson; lesson = Lesson()"
    )
    try:
        write("class Lesson:\n    def number(self): return 22\n", 1_000_000_100)
        assert cluster.inspect("Lesson().number()") == dict.fromkeys(range(4), "1")
        cluster.execute("numbers = Lesson().number(), lesson.number()")
        assert cluster["numbers"] == [(22, 22)] * 4
        write("class Lesson\n", 1_000_000_200)
        result = cluster.execute("numbers = lesson.number()")
        assert cluster["numbers"] == [22] * 4  # the old code stays
        assert "SyntaxError" in result[3].stdout + result[3].stderr
    finally:
        cluster.execute(
            "%autoreload 0\n%unload_ext autoreload\n"
            "sys.path.pop(0); del sys.modules['lessons'], Lesson, lesson"
        )


def test_long_output_is_capped_and_kept_in_a_file(cluster: Cluster):
    result = cluster.execute("for i in range(300_000): print('line', i)", ranks=[2])
    assert len(result[2].stdout) < 3_000_000
    note = re.search(r"the full text is in (\S+) until", result[2].stderr)
    assert note is not None, result[2].stderr[-500:]
    with open(note[1], encoding="utf-8") as spill:
        assert spill.read() == "".join(f"line {i}\n" for i in range(300_000))
    assert stdout(cluster.execute("print('small')")) == ["small\n"] * 4


LATE = """
import threading
go, gone = threading.Event(), threading.Event()
def late():
    go.wait(30)
    print('late')
    gone.set()
threading.Thread(target=late).start()
"""


def test_text_that_a_thread_prints_after_its_cell_is_shown_with_the_next(
    cluster: Cluster,
):
    cluster.execute(LATE)
    assert cluster["(go.set(), gone.wait(30))[1]"] == [True] * 4
    assert stdout(cluster.execute("print('next')")) == ["late\nnext\n"] * 4
    assert stdout(cluster.execute("print('alone')")) == ["alone\n"] * 4


def test_the_file_of_long_output_stays_while_a_thread_prints(cluster: Cluster):
    lines = "for i in range(300_000): print('line', i)"
    result = cluster.execute(LATE + lines, ranks=[0])
    path = re.search(r"full text is in (\S+) until", result[0].stderr)
    assert path is not None
    assert cluster.pull("(go.set(), gone.wait(30))[1]", [0]) == [True]
    with open(path[1], encoding="utf-8") as spill:
        assert spill.readline() == "line 0\n"
        assert sum(1 for _ in spill) >= 299_999


# -- displays ------------------------------------------------------------------------


def test_rich_output_arrives(cluster: Cluster):
    result = cluster.execute(
        "from IPython.display import HTML, display\n"
        "import pandas\n"
        "display(HTML(f'<b>{rank}</b>'))\n"
        "pandas.DataFrame({'a': [rank]})"
    )
    for rank in range(4):
        html, frame = (bundle["text/html"] for bundle in result[rank].outputs)
        assert html == f"<b>{rank}</b>"
        assert "<table" in frame


def test_a_figure_arrives(cluster: Cluster):
    result = cluster.execute(
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([rank, 2]);",
        ranks=[0, 3],
        timeout_s=120,
    )
    for rank in (0, 3):
        assert any("image/png" in bundle for bundle in result[rank].outputs)


# -- errors --------------------------------------------------------------------------


def test_a_failure_on_some_ranks_keeps_the_others_results(cluster: Cluster):
    code = "print('started', rank)\nif rank % 2: 1 / 0\nkept = rank\nrank"
    error = fail(cluster, code, number=6)
    who = "ranks 1,3 of 4 in In[6] line 2"
    assert str(error) == f"{who}: ZeroDivisionError: division by zero"
    assert stdout(error.result) == [f"started {rank}\n" for rank in range(4)]
    assert [error.result[rank].ok for rank in range(4)] == [True, False, True, False]
    assert cluster.pull("kept", [0, 2]) == [0, 2]


@pytest.mark.parametrize(
    ("code", "line"),
    [("1 / 0", 1), ("\n\n1 / 0", 3), ("\n  x = 1\n  1 / 0\n", 3), ("  1 / 0", 1)],
)
def test_an_error_has_the_line_of_the_code(cluster: Cluster, code: str, line: int):
    assert f"In[8] line {line}: ZeroDivision" in str(fail(cluster, code, number=8))


def test_a_traceback_is_shown_once_with_hosts_and_the_cells_own_lines(cluster: Cluster):
    error = fail(cluster, "a = 1\n\nif rank:\n    raise ValueError('bad')", number=77)
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error._render_traceback_()))
    assert text.count("raise ValueError('bad')") == 1
    assert "ranks 1-3 of 4 on " + cluster.ranks[0].host in text
    assert "In[77], line 4" in text
    assert "nbdist/engine" not in text


def test_different_failures_are_all_shown(cluster: Cluster):
    error = fail(cluster, "[][rank] if rank < 2 else {}[rank]", number=8)
    assert str(error).splitlines() == [
        "ranks 0-1 of 4 in In[8] line 1: IndexError: list index out of range",
        "rank 2 of 4 in In[8] line 1: KeyError: 2",
        "rank 3 of 4 in In[8] line 1: KeyError: 3",
    ]


def test_a_syntax_error_is_shown_once(cluster: Cluster):
    error = fail(cluster, "x = (1,\ny = 2", number=5)
    assert {f.ename for f in error.result.failures} == {"SyntaxError"}
    assert len(error.rendered) < 12, "once, not once for each rank"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import sys; sys.exit(3)", "SystemExit"),
        ("exit()", "SystemExit"),
        ("quit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class Odd(BaseException): pass\nraise Odd", "Odd"),
        ("import asyncio\nawait asyncio.sleep(0)\n1 / 0", "ZeroDivisionError"),
        ("%nosuchmagic", "UsageError"),
        ("raise Exception('é' * 10_000)", "Exception"),
    ],
)
def test_whatever_is_raised_ends_the_cell_and_not_the_rank(
    cluster: Cluster, code: str, name: str
):
    error = fail(cluster, code)
    assert [f.ename for f in error.result.failures] == [name] * 4
    assert last(cluster.execute("rank")) == ["0", "1", "2", "3"]


LARGE = """
import sys, weakref
class Large: pass
def load():
    global kept
    large = Large()
    kept = weakref.ref(large)
    if rank == 0:
        raise ValueError('bad') from OSError('worse')
    nbdist.barrier()
"""


@pytest.mark.parametrize(
    ("kind", "call"), [("def", "load()"), ("async def", "await load()")]
)
def test_a_failed_cells_variables_are_kept_until_the_next_cell(
    cluster: Cluster, kind: str, call: str
):
    cluster.execute(LARGE.replace("def", kind))
    fail(cluster, call, number=3)
    assert cluster.inspect("kept() is None")[0] == "False"
    result = cluster.execute(
        "assert kept() is None\n"
        "if rank == 0: print(sys.last_value, sys.last_value.__cause__)"
    )
    assert "bad worse" in result[0].stdout


def test_a_generator_outlives_the_error_that_it_has_caught(cluster: Cluster):
    fail(
        cluster,
        "def numbers():\n"
        "    try: yield 1 / 0\n"
        "    except ZeroDivisionError as error:\n"
        "        yield error\n"
        "        yield 2\n"
        "left = numbers()\n"
        "raise ValueError('bad') from next(left)",
    )
    assert last(cluster.execute("next(left)")) == ["2"] * 4


def test_an_old_traceback_is_not_shown_for_a_new_failure(cluster: Cluster):
    fail(cluster, "1 / 0")
    error = fail(cluster, "import sys; sys.exit(3)")
    assert "ZeroDivision" not in "\n".join(error.rendered)


def test_an_exception_whose_str_raises_ends_the_cell(cluster: Cluster):
    error = fail(
        cluster,
        "class Mute(Exception):\n"
        "    def __str__(self): raise RuntimeError('no text')\n"
        "raise Mute",
        timeout_s=30,
    )
    assert not isinstance(error, CellTimeout)


def test_text_that_utf8_cannot_encode_is_shown_escaped(cluster: Cluster):
    result = cluster.execute(
        "class Odd:\n"
        "    def __repr__(self): return 'odd ' + chr(0xd800)\n"
        "odd = Odd()\n"
        "print('printed', chr(0xdbff), flush=True)\n"
        "odd"
    )
    assert stdout(result) == ["printed \\udbff\n"] * 4
    assert last(result) == [r"odd \ud800"] * 4
    assert set(cluster.inspect("odd").values()) == {r"odd \ud800"}
    values = {described[0].value for described in cluster.variables("odd").values()}
    assert values == {r"odd \ud800"}
    assert cluster["chr(0xd800)"] == ["\ud800"] * 4  # values are not escaped


def test_an_error_whose_text_utf8_cannot_encode_is_shown_escaped(cluster: Cluster):
    error = fail(cluster, "raise ValueError('bad ' + chr(0xd800))")
    assert str(error).endswith(r"line 1: ValueError: bad \ud800")
    shown = "\n".join(error.rendered)
    shown.encode()
    assert r"bad \ud800" in shown
    assert "UnicodeEncodeError" not in shown
    with pytest.raises(CellError, match=r"ValueError: bad \\ud800"):
        cluster.run(_raise_odd)


def _raise_odd() -> None:
    raise ValueError("bad " + chr(0xD800))


def test_without_check_the_result_names_the_failed_ranks(cluster: Cluster):
    result = cluster.execute("assert rank != 2", check=False)
    assert not result.ok
    assert [failure.rank for failure in result.failures] == [2]


def test_the_cell_after_an_error_runs(cluster: Cluster):
    for number in range(20):
        fail(cluster, f"count = {number}\nassert rank != 1")
        assert last(cluster.execute("count")) == [str(number)] * 4


# -- time ----------------------------------------------------------------------------


def test_a_timeout_shows_the_position_of_each_rank(cluster: Cluster):
    with pytest.raises(CellTimeout) as late:
        cluster.execute(
            "kept = 5\nimport time\nif rank > 1:\n    time.sleep(3600)",
            timeout_s=1,
            number=9,
        )
    assert "not finished after 1 s" in str(late.value)
    for rank in (2, 3):
        assert f"rank {rank} at In[9] line 4" in str(late.value)
    assert "rank 0 at" not in str(late.value)
    assert cluster["kept"] == [5] * 4


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_timeout_must_be_above_zero(cluster: Cluster, seconds: float):
    with pytest.raises(UsageError, match="above 0"):
        cluster.execute("touched = 1", timeout_s=seconds)
    assert cluster["'touched' in globals()"] == [False] * 4


class Outcomes(Quiet):
    """Keeps the outcome of each rank."""

    def __init__(self) -> None:
        self.by_rank: dict[int, str] = {}

    def take(self, event: Event) -> None:
        if event.output is None:
            self.by_rank[event.rank] = event.outcome


@pytest.mark.parametrize(
    ("code", "timeout_s", "outcomes"),
    [
        ("rank", None, ["finished"] * 4),
        ("assert rank != 2", None, ["finished", "finished", "failed", "finished"]),
        ("if rank: import time; time.sleep(60)", 0.5, ["finished", *["timed out"] * 3]),
        (
            "if rank: nbdist.barrier()\nelse: import time; time.sleep(60)",
            0.5,
            ["timed out"] * 4,
        ),
    ],
)
def test_an_observer_receives_the_outcome_of_each_rank(
    cluster: Cluster, code: str, timeout_s: float | None, outcomes: list[str]
):
    heard = Outcomes()
    with contextlib.suppress(CellError):
        cluster.execute(code, timeout_s=timeout_s, observer=heard)
    assert [heard.by_rank[rank] for rank in range(4)] == outcomes


POOL = """
import multiprocessing, os, signal, sys
def work(number):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    print("worker", number)
    return handlers == [signal.default_int_handler, signal.SIG_DFL], os.getpid()
with multiprocessing.get_context("fork").Pool(2) as pool:
    results = pool.map(work, range(4))
"""


def test_a_forked_pool_has_pythons_signal_handlers(cluster: Cluster):
    for _ in range(3):
        result = cluster.execute(POOL)
        for part in result:
            printed = (part.stdout + part.stderr).split("\n")
            assert sorted(filter(None, printed)) == [f"worker {n}" for n in range(4)]
    assert cluster["all(default for default, _pid in results)"] == [True] * 4
    cluster.execute("nbdist.barrier()")


def test_a_child_ends_by_a_signal_that_comes_while_it_is_forked(cluster: Cluster):
    cluster.execute(
        "import os, signal\n"
        "ended = []\n"
        "for _ in range(50):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        while True:\n"
        "            signal.pause()\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
        timeout_s=30,
    )
    assert cluster["ended"] == [[-15] * 50] * 4
    assert cluster["signal.pthread_sigmask(signal.SIG_BLOCK, [])"] == [set()] * 4


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("raise ValueError", 1), ("sys.exit(0)", 1)]
)
def test_a_forked_child_that_leaves_its_cell_ends(
    cluster: Cluster, ending: str, code: int
):
    cluster.execute(
        "import os, sys\n"
        "child = os.fork()\n"
        f"if child == 0:\n    {ending}\n"
        "else:\n    _, status = os.waitpid(child, 0)",
        timeout_s=30,
    )
    assert cluster["os.waitstatus_to_exitcode(status)"] == [code] * 4

    def fork() -> int:
        import os

        child = os.fork()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0

    assert cluster.run(fork, timeout_s=30) == [0] * 4
    cluster.execute("nbdist.barrier()")


def test_debugpy_is_not_loaded_but_can_be_imported(cluster: Cluster):
    cluster.execute("import importlib.util, ipykernel.debugger, sys")
    assert cluster["'debugpy' in sys.modules"] == [False] * 4
    assert cluster["importlib.util.find_spec('debugpy') is None"] == [False] * 4
    assert cluster["ipykernel.ipkernel.sys is sys"] == [True] * 4


# -- metrics -------------------------------------------------------------------------


def test_the_last_step_of_a_cell_is_known_when_it_has_ended(cluster: Cluster):
    cluster.execute("nbdist.log(loss=0.0, step=100)")
    cluster.execute("for step in range(5 + rank): nbdist.log(loss=step)")
    steps = cluster.collector.snapshot().steps
    assert steps == {rank: 105 + rank for rank in range(cluster.size)}


def test_a_cell_that_times_out_is_marked(cluster: Cluster):
    with pytest.raises(CellTimeout):
        cluster.execute("while True: pass", timeout_s=0.5, number=77)
    assert str(cluster.collector.marks[-1]) == "In[77] timed out"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_over_a_dataloader_has_a_remaining_time(cluster: Cluster, workers: int):
    cell = cluster.execute(
        "import time\n"
        "def loader(n):\n"
        "    data = torch.utils.data.TensorDataset(torch.zeros(n))\n"
        f"    return torch.utils.data.DataLoader(data, num_workers={workers})\n"
        "for batch in loader(500):\n"
        "    for _ in loader(3): pass\n"  # a loop that ends within it
        "    time.sleep(0.02)\n",
        wait=False,
    )

    def is_known() -> bool:
        eta = cluster.collector.snapshot().eta
        return eta is not None and eta.total == 500 and eta.left_s is not None

    wait_until(is_known, HANG_S, lambda: str(cluster.collector.snapshot().eta))
    cell.interrupt()
    with pytest.raises(CellInterrupted):
        cell.result(20)
    cluster.execute("nbdist.log(done=1)")
    assert cluster.collector.snapshot().eta is None


def test_a_loop_without_an_end_has_no_remaining_time(cluster: Cluster):
    cluster.execute(
        "class Endless(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self): return iter(range(10))\n"
        "    def __len__(self): raise AssertionError('torch notes who asks')\n"
        "class Sampler(torch.utils.data.Sampler):\n"
        "    def __init__(self): pass\n"
        "    def __iter__(self): return iter(range(3))\n"
        "class Unknown(Sampler):\n"
        "    def __len__(self): return self.not_set_yet\n"
        "for _ in torch.utils.data.DataLoader(Endless()): pass\n"
        "for _ in torch.utils.data.DataLoader([1, 2, 3], sampler=Unknown()): pass\n"
        "for _ in torch.utils.data.DataLoader([1, 2, 3], sampler=Sampler()): pass\n"
        "nbdist.log(done=1)"
    )
    assert cluster.collector.snapshot().eta is None


@pytest.mark.parametrize("slow", [0, 3])
def test_the_remaining_time_is_that_of_the_slowest_rank(cluster: Cluster, slow: int):
    cell = cluster.execute(
        "import time\n"
        "for step in range(10_000):\n"
        "    nbdist.log(step=step, total=10_000, pace=1.0)\n"
        f"    time.sleep(0.04 if rank == {slow} else 0.01)",
        wait=False,
    )

    def slowest_is_known() -> bool:
        eta = cluster.collector.snapshot().eta
        # Until every rank has a rate, there is no remaining time.
        return eta is not None and eta.left_s is not None and eta.left_s > 350

    wait_until(slowest_is_known)
    eta = cluster.collector.snapshot().eta
    assert eta is not None
    assert (eta.total, eta.unit) == (10_000, "steps")
    histories = cluster.collector.history("pace")
    assert eta.done < min(histories[r][0][-1] for r in range(4) if r != slow)
    cell.interrupt()
    with pytest.raises(CellInterrupted):
        cell.result(20)
    wait_until(lambda: cluster.collector.snapshot().eta is None)


@pytest.mark.parametrize("ending", ["", "\nif rank == 2: 1 / 0"])
def test_the_values_of_a_cell_are_there_when_it_has_ended(
    cluster: Cluster, ending: str
):
    for step in range(20):
        with contextlib.suppress(CellError):
            cluster.execute(f"nbdist.log(ends={step} + rank){ending}")
        histories = cluster.collector.history("ends")
        assert [values[-1] for _, values in histories.values()] == [
            step + rank for rank in range(4)
        ]


def test_the_history_of_a_rank_has_the_notebooks_numbers(
    cluster: Cluster, tmp_path: Path
):
    cluster.execute("first = 1", number=40)
    cluster.execute("print('again')", number=47)
    cluster.execute("6 * 7", number=49)
    saved = tmp_path / "f"
    code = (
        "assert In[47] == _i47 == \"print('again')\", In[-5:]\n"
        "assert (In[40], In[48], Out[49], _49) == ('first = 1', '', 42, 42)\n"
        f"if rank == 0: get_ipython().run_line_magic('save', '{saved} 47')\n"
        "%rerun 47\n%history 40 49"
    )
    result = cluster.execute(code, number=50)
    shown = "=== Executing: ===\nprint('again')\n=== Output: ===\nagain\n"
    assert result[1].stdout == f"{shown}first = 1\n6 * 7\n"
    assert saved.with_suffix(".py").read_text().endswith("\nprint('again')\n")
    cluster.execute("other = 3", number=47)  # a new kernel has attached
    cluster.execute("assert In[47:] == ['other = 3', In[48]]", number=48)


def test_a_death_is_not_explained_by_the_text_of_an_earlier_cell(cluster: Cluster):
    write = "import os\nif rank == 3: os.write(2, b'{}\\n')\n"
    cluster.execute(write.format("earlier"))
    code = write.format("present") + "if rank == 3: os.kill(os.getpid(), 9)\n"
    with pytest.raises(CellError, match=r"rank 3 .*SIGKILL") as failed:
        cluster.execute(code)
    assert "present" in str(failed.value) or "present" in str(failed.value.rendered)
    assert "earlier" not in str(failed.value) + str(failed.value.rendered)
    cluster.execute("pass")


def test_run_cell_shows_what_ranks_print(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(CellError, match="AssertionError"):
        cluster.run_cell("print('rank', rank); assert rank != 2", [1, 2])
    text = capsys.readouterr()
    shown = ANSI.sub("", text.out).splitlines()
    assert sorted(shown[:2]) == ["[1] rank 1", "[2] rank 2"]
    assert "print('rank', rank); assert rank != 2" in ANSI.sub("", text.err)


def test_monitor_is_a_widget_of_the_logged_values(cluster: Cluster):
    monitor = cluster.monitor("loss", x="time")
    try:
        assert (monitor.metrics, monitor.x) == (["loss"], "time")
    finally:
        monitor.close()
