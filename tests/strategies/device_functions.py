"""Functions that test_xla.py and test_private_device.py run on ranks.

Their tensors are on a device that is neither the CPU nor a GPU.
"""

from __future__ import annotations

from datetime import timedelta

import private_device
import torch
import torch.distributed as dist
from digits_training import flat, make_model, sgd, train_alone, train_with
from replica_functions import adam, start
from torch import Tensor

import nbdist.collectives as nc
from nbdist.collectives.sync.device_work import synchronize
from nbdist.errors import CollectiveMismatch, UsageError
from nbdist.training.strategies import TPU, Mirrored

Found = dict[str, object]


def run_on_xla() -> Found:
    """All functions of this file, on the device of torch_xla."""
    import torch_xla

    group = start()
    device = torch_xla.device()
    return {
        **run_on(device, group),
        "tpu sgd": compare(TPU(), sgd, device),
        "tpu adam": compare(TPU(), adam, device),
        "refused": refused(),
    }


def run_on_private_device(library: str) -> Found:
    """The functions of this file for any device, on that of private_device.cpp.

    Args:
        library: The compiled file.
    """
    device = private_device.load(library)
    group = start()
    found = run_on(device, group)
    before = private_device.waits(library)
    handle = nc.all_reduce(torch.ones(3, device=device), async_op=True)
    assert handle is not None
    handle.wait()
    return {**found, "waits": private_device.waits(library) - before}


def run_on(device: torch.device, group: nc.Group) -> Found:
    """The functions for any device, in one world."""
    return {
        "operations": operations(device, group),
        "mismatch": mismatch(device),
        "messages": messages(device, group.rank),
        "mirrored": compare(Mirrored(), sgd, device),
        "mirrored adam": compare(Mirrored(), adam, device),
        "transport": group.describe(),
    }


def compare(strategy: Mirrored, make: object, device: torch.device) -> Found:
    """The weights, and their distance to one process on the same batches."""
    model, _losses = train_with(strategy, 1, make, device=device)
    weights = flat(model).cpu()
    distance = float((weights - flat(train_alone(1, make))).abs().max())
    return {"weights": weights, "distance": distance}


def operations(device: torch.device, group: nc.Group) -> list[bool]:
    """Whether each operation gives its result, and changes what it should."""
    rank, size = group.rank, group.size
    total = size * (size + 1) / 2
    own = torch.arange(7.0, device=device) + rank
    everyone = [torch.arange(7.0) + peer for peer in range(size)]

    def equal(found: Tensor, expected: Tensor) -> bool:
        return bool(torch.equal(found.cpu(), expected))

    checks = []
    for length in (0, 3, 2_000_000):  # more than one piece
        for async_op in (False, True):
            tensor = torch.full((length,), rank + 1.0, device=device) * 2
            handle = nc.all_reduce(tensor, async_op=async_op)
            if handle is not None:
                handle.wait()
            doubled = tensor * 2
            tensor.zero_()
            checks.append(equal(doubled, torch.full((length,), 4 * total)))
    strided = (torch.zeros(4, 6, device=device) + rank + 1).t()[::2]
    nc.all_reduce(strided)
    checks.append(equal(strided, torch.full((3, 4), total)))
    copy = own.clone()
    nc.broadcast(copy, 1)
    checks.append(equal(copy, everyone[1]))
    rows = [torch.empty(7, device=device) for _ in range(size)]
    nc.all_gather(rows, own)
    checks += map(equal, rows, everyone)
    part = torch.empty(7, device=device)
    nc.reduce_scatter(part, [own + peer for peer in range(size)])
    checks.append(equal(part, sum(everyone) + size * rank))
    nc.all_to_all(rows, [own + 10 * peer for peer in range(size)])
    checks += [equal(row, everyone[at] + 10 * rank) for at, row in enumerate(rows)]
    return checks


def mismatch(device: torch.device) -> str:
    """The error of ranks whose tensors are on different kinds of device."""
    here = device if dist.get_rank() else "cpu"
    tensor = torch.ones(3, device=here)
    try:
        nc.all_reduce(tensor)
    except CollectiveMismatch as error:
        return f"{error} {tensor.cpu().tolist()}"
    return ""


def messages(device: torch.device, rank: int) -> list[float]:
    """What rank 1 has received from rank 0."""
    tensor = torch.full((3,), float(rank), device=device)
    if rank == 0:
        dist.send(tensor + 7, 1)
    elif rank == 1:
        nc.recv(tensor, 0, timeout=timedelta(seconds=20))
    synchronize(device)
    return tensor.cpu().tolist()


def refused() -> str:
    """The error of a model that is not on the device."""
    model = make_model()
    try:
        TPU().setup(model, sgd(model.parameters()))
    except UsageError as error:
        return str(error)
    return ""
