"""`python -m nbdist demo`: some cells, run in this terminal as IPython runs them."""

from __future__ import annotations

import importlib.util

from nbdist.errors import UsageError

__all__ = ["run"]

TRAIN = """%%distributed
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

digits = load_digits()  # 1,797 images of handwritten digits
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
data = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
loader = nbdist.loader(data, batch_size=16)
net = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
).to(device)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(20):
    for image, label in loader:
        loss = cross_entropy(model(image.to(device)), label.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nbdist.log(loss=loss.item())
right = net(images[1500:].to(device)).argmax(1).cpu() == labels[1500:]
print(f"{right.float().mean():.1%} of the other images are recognised")"""
LOSE = """%%distributed
import os
if rank == 1:
    os.kill(os.getpid(), 9)
nbdist.barrier()"""
AFTER = """%%distributed
total = torch.ones(1)
nbdist.all_reduce(total)
print(f"{int(total)} ranks are here")"""


def run(n: int, device: str | None) -> int:
    """Train scikit-learn's digits on some ranks, kill a rank, and go on.

    Args:
        n: The number of ranks, from 2.
        device: As for `%dist_start --device`; None for its default.

    Returns:
        The exit code: 1 if a cell has failed that should not.

    Raises:
        UsageError: There are fewer than 2 ranks, or scikit-learn is not installed.
    """
    from IPython.terminal.interactiveshell import TerminalInteractiveShell

    if n < 2:
        raise UsageError(f"-n {n}: the demo needs 2 ranks or more, because one dies")
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("the demo trains on its digits: pip install scikit-learn")
    option = f" --device {device}" if device else ""
    shell = TerminalInteractiveShell.instance()
    cells = [
        f"%load_ext nbdist\n%dist_start -n {n}{option}\n%dist_monitor",
        TRAIN,
        LOSE,
        AFTER,
        "%dist_stop",
    ]
    for cell in cells:
        indent = "\n" + " " * len(f"In [{shell.execution_count}]: ")
        print(f"\nIn [{shell.execution_count}]: {cell.replace(chr(10), indent)}")
        done = shell.run_cell(cell, store_history=True)
        if not done.success and cell is not LOSE:
            shell.run_line_magic("dist_stop", "")
            return 1
    return 0
