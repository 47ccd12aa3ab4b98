"""Runs the Python blocks of README.md and docs/ in order, as a reader would type them.

A page omits what every reader has: a model, data, a step of training. `GIVEN` defines
that for each page. Blocks with `%%distributed` run on four ranks, the others in a
notebook's namespace.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nbdist import Cluster
from nbdist.session import Session

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60
MAGIC = re.compile(r"^%%distributed.*\n")

DIGITS = """
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.functional import cross_entropy

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

torch.manual_seed(0)
images, labels = torch.rand(256, 64), torch.arange(256) % 10
train_set = dataset = torch.utils.data.TensorDataset(images, labels)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

GIVEN = {
    "collectives.md": "",
    "data.md": DIGITS,
    "elastic.md": DIGITS + """
data = torch.arange(256)

def step(ddp, optimizer, indices):
    optimizer.zero_grad()
    F.cross_entropy(ddp(images[indices]), labels[indices]).backward()
    optimizer.step()
""",
    "front-ends.md": "",
    "horovod.md": DIGITS,
    "how-do-i.md": "lr = 0.1",  # %dist_push
    "monitor.md": DIGITS + """
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

def train_step():
    return torch.tensor(0.5)
""",
    "strategies.md": DIGITS,
    "torch-backend.md": DIGITS,
}  # fmt: skip
ON_RANKS = {"data.md", "horovod.md"}
"""Pages whose blocks without a magic are cells, too."""


def blocks_of(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    # Loading Keras takes longer than running all pages, and TPU needs torch_xla.
    # tests/keras and tests/strategies/test_xla.py test the same.
    elsewhere = ("nbdist.keras", "import keras", "strategies.TPU")
    return [block for block in blocks if not any(name in block for name in elsewhere)]


@pytest.mark.parametrize("page", sorted(GIVEN))
def test_a_page_runs_as_written(
    cluster: Cluster, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    blocks = blocks_of(ROOT / "docs" / page)
    assert blocks
    here = cluster.run(os.getcwd)[0]
    cluster.run(os.chdir, str(tmp_path))
    notebook = {"cluster": cluster}
    session = Session()
    monkeypatch.setattr(session, "_cluster", cluster)
    monkeypatch.setattr("nbdist.session._notebook_session", session)
    try:
        cluster.execute(GIVEN[page], timeout_s=DEADLINE_S)
        for block in blocks:
            if block.startswith("%%distributed") or page in ON_RANKS:
                cluster.execute(MAGIC.sub("", block), timeout_s=DEADLINE_S)
            else:
                exec(compile(block, page, "exec"), notebook)
    finally:
        session._close_streams(list(session._streams))
        cluster.run(os.chdir, here)


def test_the_cells_of_the_front_page_run_as_written(cluster: Cluster):
    blocks = blocks_of(ROOT / "README.md")
    first, training = (MAGIC.sub("", block) for block in blocks if MAGIC.match(block))
    printed = cluster.execute(first, timeout_s=DEADLINE_S)[2].stdout
    assert printed.strip() == "rank 2 of 4: [6.0, 6.0, 6.0]"
    cluster.execute(training, timeout_s=DEADLINE_S)
    norms = cluster.inspect("net[0].weight.norm()").values()
    assert len(set(norms)) == 1
