"""A cell changes what Python and torch share in a process; the next cells work."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator

import pytest

from nbdist import CellError, CellInterrupted, Cluster
from nbdist.clusters import call_supervisor, ipp_client
from tests.processes import wait_until

pytestmark = pytest.mark.usefixtures("patience")

DEADLINE_S = 60.0
OF_PICKLE = "" if sys.version_info >= (3, 14) else "PicklingError|"
"""Python 3.14's pickle raises the error itself."""
DONE = {
    "torch": """
import torch
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.use_deterministic_algorithms(True)
torch.autograd.set_detect_anomaly(True)
torch.set_printoptions(profile="full")
""",
    "a tensor's repr": "import torch\ntorch.Tensor.__repr__ = lambda self: 1 / 0",
    "warnings are errors": "import warnings\nwarnings.simplefilter('error')",
    "tracing": """
import sys, threading
sys.settrace(lambda *_: None)
sys.setprofile(lambda *_: None)
threading.settrace(lambda *_: None)
""",
    "limits": """
import gc, os, resource, socket, sys
gc.disable()
socket.setdefaulttimeout(0.001)
sys.setrecursionlimit(100)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(
    resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, most)
)
""",
    "the process": """
import os, tempfile
os.umask(0o777)
os.environ.clear()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.getpid() != os.getpgrp(): os.setpgrp()
""",
    "the folder": """
import os, tempfile
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
""",
    "clocks": """
import time
time.time = time.monotonic = time.perf_counter = lambda: 0.0
time.sleep = lambda seconds: None
""",
    "signals": """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
""",
    "no output": "import sys\nsys.stdout = sys.stderr = None",
    "closed output": "import sys\nsys.stdout.close()\nsys.stderr.close()",
    "hooks": """
import asyncio, logging, sys
asyncio.set_event_loop(None)
logging.disable()
logging.basicConfig(force=True)
sys.displayhook = sys.excepthook = sys.unraisablehook = None
""",
    "the names of a cell": """
rank = world_size = local_rank = device = torch = dist = nbdist = None
""",
    "reset": "get_ipython().run_line_magic('reset', '-f')",
    "the process group": "dist.destroy_process_group()",
}
WORK = """
import nbdist, torch
torch.set_grad_enabled(True)
net = torch.nn.Linear(3, 2, device="cpu")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.ones(5, 3, device="cpu")).sum().backward()
    nbdist.all_reduce(net.weight.grad)
    optimizer.step()
    nbdist.log(value=1.0)
total = int(net.weight.grad[0, 0])
print("printed", total)
"""
WAIT = """
import nbdist, torch
if nbdist.rank():
    nbdist.all_reduce(torch.ones(1, device="cpu"))
while True:
    pass
"""
DIE = "import os\nif os.getpid() == {}: os.kill(os.getpid(), 9)"


SETTINGS = """
import torch
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.autograd.set_detect_anomaly(True, check_nan=False)
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.benchmark = True
"""
READ = """
x = torch.ones(2, requires_grad=True)
found = (
    str(x.dtype), x.device.type, torch.is_grad_enabled(),
    torch.is_deterministic_algorithms_warn_only_enabled(),
    torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(),
    torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark,
)
"""


@pytest.fixture(scope="module")
def _cluster() -> Iterator[Cluster]:
    with Cluster(n=2, device="cpu", on_failure="replace") as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    yield _cluster
    _cluster.restart()


def interrupted(cluster: Cluster, code: str) -> CellError:
    """The error of a cell that another thread interrupts when it runs on rank 1."""

    def interrupt() -> None:
        def runs() -> bool:
            state = cluster.status()[1]
            return state is not None and state["what"] is not None

        wait_until(runs, DEADLINE_S)
        cluster.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(CellError) as raised:
        cluster.execute(code, timeout_s=DEADLINE_S)
    thread.join()
    return raised.value


@pytest.mark.parametrize("code", DONE.values(), ids=DONE.keys())
def test_the_next_cells_work(cluster: Cluster, code: str) -> None:
    # torch imports it with the first optimizer, if the fork server had no time to. Some
    # of these cells would prevent that.
    cluster.execute("import torch._dynamo")
    cluster.execute(code, timeout_s=DEADLINE_S)
    printed = cluster.execute(WORK, timeout_s=DEADLINE_S)
    assert cluster["total"] == [10, 10]
    if "sys.std" not in code:
        assert [each.stdout.strip() for each in printed] == ["printed 10"] * 2
    with pytest.raises(CellError, match=r"line 2: ZeroDivisionError"):
        cluster.execute("\n1 / 0", timeout_s=DEADLINE_S)
    assert "KeyboardInterrupt" in str(interrupted(cluster, WAIT))
    cluster.push(pushed=[1, 2])
    assert cluster["pushed"] == [[1, 2]] * 2
    assert cluster.run(len, "four") == [4, 4]
    assert all(state is not None for state in cluster.status().values())
    with pytest.raises(CellError, match="rank 1 was replaced"):
        cluster.execute(DIE.format(cluster.infos[1].pid), timeout_s=DEADLINE_S)
    cluster.execute(WORK, timeout_s=DEADLINE_S)
    assert cluster["total"] == [10, 10]


def test_a_rank_that_joins_has_the_settings_of_torch(cluster: Cluster) -> None:
    cluster.execute(SETTINGS)
    cluster.replace([1])
    cluster.execute(READ)
    expected = "torch.float64", "meta", False, True, True, False, "medium", True
    assert cluster["found"] == [expected] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("pickle.dumps = None", "TypeError"),
        ("json.dumps = json.dump = None", "TypeError"),
        ("builtins.__import__ = None", f"{OF_PICKLE}TypeError"),
        (
            "builtins.__import__ = lambda *_, **__: 1 / 0",
            f"{OF_PICKLE}ZeroDivisionError",
        ),
    ],
)
def test_a_rank_that_cannot_answer_ends_and_is_replaced(
    cluster: Cluster, change: str, reason: str
) -> None:
    """What a cell prints is sent as JSON, and its reply is pickled."""
    cluster.execute("kept = 7")
    broken = f"import builtins, json, pickle\nif rank == 1: {change}\nprint('printed')"
    with pytest.raises(CellError, match="rank 1") as raised:
        cluster.execute(broken, timeout_s=DEADLINE_S)
    said = rf"it can no longer answer the notebook \(({reason})"
    assert re.search(said, str(raised.value))
    assert cluster["kept"] == [7, 7]


@pytest.mark.parametrize(
    "how",
    [
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])",
    ],
)
def test_a_cell_that_blocks_interrupts_ends_without_its_rank(
    cluster: Cluster, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_supervisor, "INTERRUPT_GRACE_S", 5.0)
    cluster.execute("kept = rank")
    code = (
        "import signal, time\n"
        f"if rank == 1:\n    {how}\n    while True: time.sleep(0.01)"
    )
    error = interrupted(cluster, code)
    assert isinstance(error, CellInterrupted)
    assert "Rank 1 did not react within 5 s" in str(error)
    assert "In[" in str(error)
    assert "%dist_restart -r 1" in str(error)
    cluster.replace([1])
    cluster.execute(WORK, timeout_s=DEADLINE_S)
    assert cluster["kept"] == [0, 0]


def test_a_cell_ends_without_the_end_of_its_output(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipp_client, "OUTPUT_TIMEOUT_S", 1.0)
    code = "if rank == 1: get_ipython().kernel._publish_status = lambda *_, **__: None"
    cluster.execute(code)
    first, second = cluster.execute("print('printed')", timeout_s=DEADLINE_S)
    assert (first.stdout, first.stderr) == ("printed\n", "")
    assert (second.stdout, second.stderr) == ("printed\n", ipp_client.OUTPUT_LOST)


def test_an_interrupted_rank_is_idle_without_the_end_of_its_output(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "if rank == 1: get_ipython().kernel._publish_status = lambda *_, **__: None"
    cluster.execute(code)
    monkeypatch.setattr(call_supervisor, "INTERRUPT_GRACE_S", 5.0)
    error = interrupted(cluster, "print('printed')\nwhile True: pass")
    assert isinstance(error, CellInterrupted)
    assert "did not react" not in str(error)
    monkeypatch.setattr(ipp_client, "OUTPUT_TIMEOUT_S", 1.0)
    results = cluster.execute("print('next')", timeout_s=DEADLINE_S)
    assert [each.stdout for each in results] == ["next\n"] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # asyncio cannot handle the next message.
        ("selectors.EVENT_WRITE", "its event loop has failed (TypeError"),
        ("pickle.loads", "it can no longer answer the notebook (TypeError"),
    ],
)
def test_a_rank_that_can_take_no_message_ends_and_is_replaced(
    cluster: Cluster, change: str, reason: str
) -> None:
    cluster.execute("kept = 7")
    cluster.execute(f"import pickle, selectors\nif rank == 1: {change} = None")
    with pytest.raises(CellError, match="rank 1") as raised:
        cluster.execute("dist.barrier()", timeout_s=DEADLINE_S)
    assert reason in str(raised.value)
    assert cluster["kept"] == [7, 7]
