"""Ranks that are started from a notebook in which much has happened before.

Launchers that fork the notebook's process, such as those of Accelerate and Lightning,
refuse to start or hang in these states.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.ipc.ports import free_ports
from tests.gpu_marks import needs_gpus
from tests.notebook.test_kernel import Notebook

START = "%load_ext nbdist\n%dist_start -n 2{options}"
ON_CPU = START.format(options=" --device cpu")
DDP = """%%distributed
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(2, 4, device=device)).square().mean()
loss.backward()
optimizer.step()
print("step on", world_size, "ranks on", torch.device(device).type)"""


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    """A notebook in which nbdist was not loaded yet."""
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.close()


def ok(notebook: Notebook, code: str) -> str:
    reply = notebook.run(code)
    assert reply.status == "ok", reply.text
    return reply.text


def assert_trains(notebook: Notebook, start: str, device: str = "cpu") -> None:
    """Start ranks, and take a step with DDP."""
    ok(notebook, start)
    assert f"[0-1] step on 2 ranks on {device}" in ok(notebook, DDP)


def test_the_second_cell_after_the_installation_takes_a_step(notebook: Notebook):
    assert_trains(notebook, ON_CPU)


IMPORTED = """
import sys, threading
[each.join(60) for each in threading.enumerate() if each.name == "nbdist-import"]
print("ipywidgets" in sys.modules)
"""


def test_the_first_cell_in_the_background_need_not_import(notebook: Notebook):
    ok(notebook, ON_CPU)
    assert ok(notebook, IMPORTED).strip() == "True"


BUSY = """
import logging, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from torch.utils.data import DataLoader
torch.set_num_threads(2)
(torch.ones(600, 600) @ torch.ones(600, 600)).sum()  # starts OpenMP's threads
logging.basicConfig(filename="log.txt", level=logging.INFO)
lock, count = threading.Lock(), 0
def work():
    global count
    while True:
        with lock:  # which another thread nearly always holds
            logging.info("a line")
            count += 1
            time.sleep(0.001)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
pool = ThreadPoolExecutor(4)
_ = list(pool.map(time.sleep, [0.01] * 8))
batches = DataLoader(range(1000), num_workers=2, persistent_workers=True)
some = iter(batches)
next(some)
"""


GROUP = """
import os
import torch.distributed as dist
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
dist.init_process_group("gloo")
"""


def test_threads_workers_and_a_process_group_of_the_notebook_go_on(notebook: Notebook):
    ok(notebook, BUSY)
    ok(notebook, GROUP.replace("{port}", str(free_ports(1)[0])))
    before = int(ok(notebook, "print(count)"))
    assert_trains(notebook, ON_CPU)
    assert int(ok(notebook, "print(count)")) > before
    assert "tensor([1])" in ok(notebook, "print(next(some))")
    variables = "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])"
    shown = ok(notebook, f"%%distributed\n{variables}")
    assert "[0] 0 2" in shown
    assert "[1] 1 2" in shown
    assert ok(notebook, "print(dist.get_world_size())").strip() == "1"


def test_an_accelerator_of_the_notebook_is_another_one(notebook: Notebook):
    pytest.importorskip("accelerate")
    make = "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
    assert ok(notebook, f"{make}print(accelerator.num_processes)").strip() == "1"
    assert_trains(notebook, ON_CPU)
    code = f"%%distributed\n{make}print(accelerator.num_processes, 'processes')"
    assert "[0-1] 2 processes" in ok(notebook, code)


TAKEN = """
import multiprocessing, os, socket
import torch
multiprocessing.set_start_method("spawn", force=True)
taken = socket.create_server(("127.0.0.1", 0))
os.environ |= {"MASTER_ADDR": "127.0.0.1"}
os.environ["MASTER_PORT"] = str(taken.getsockname()[1])

class Net(torch.nn.Linear):
    scale = 2

def train(net):
    return [net.scale * net.in_features for _ in range(2)]

net = Net(4, 1)
"""


def test_a_taken_port_and_classes_of_the_notebook_are_no_obstacle(notebook: Notebook):
    ok(notebook, TAKEN)
    assert_trains(notebook, ON_CPU)
    ok(notebook, "%dist_push net train")
    assert "[0-1] Net [8, 8]" in ok(
        notebook, "%%distributed\nprint(type(net).__name__, train(net))"
    )
    failed = notebook.run("%%distributed\nif rank: raise ValueError('once')")
    assert failed.status == "error"
    assert "step on 2 ranks" in ok(notebook, DDP)  # and it runs again
    assert "True" in ok(notebook, "taken.close()\nprint(taken.fileno() == -1)")


# -- with CUDA in the notebook's process -----------------------------------------------

USES_CUDA = """
import torch
mine = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.AdamW(mine.parameters())
mine(torch.ones(2, 4, device="cuda")).sum().backward()
optimizer.step()
torch.cuda.synchronize()
print(torch.cuda.is_initialized())
"""


@pytest.mark.gpu
@needs_gpus(2)
def test_cuda_may_be_initialised_and_a_model_on_a_gpu(notebook: Notebook):
    assert ok(notebook, USES_CUDA).strip() == "True"
    assert_trains(notebook, START.format(options=""), "cuda")
    ok(notebook, "%dist_push mine")
    shown = ok(notebook, "%dist_inspect mine.weight.double().sum().item()")
    here = ok(notebook, "print(mine.weight.double().sum().item())").strip()
    assert here[:8] in shown
    ok(notebook, USES_CUDA)
    assert_trains(notebook, "%dist_restart", "cuda")
