"""Training with PyTorch's parallel modules, compared with a single process.

Each case runs on every rank of one launch and compares in float64, so that rounding
does not hide a missing or doubled contribution.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from default_process_groups import meet, process_group
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 5
BATCH = 8
"""Samples of one rank in one step."""
Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # foreach, the default on CUDA, takes no mixture of tensors and DTensors.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
}


_device = torch.device("cpu")
"""The device of the models and samples of this rank."""


def run_all_cases(device: str = "cpu", own_gpus: bool = False) -> dict[str, str | None]:
    """Run every case. Returns this rank's errors, by case. Every rank must call.

    Args:
        device: the kind of device to train on.
        own_gpus: whether each rank has its own GPU.
    """
    global _device
    backend = "cpu:nbdist,cuda:nccl" if own_gpus else "nbdist"
    if device == "cuda":
        torch.cuda.set_device(MPI.COMM_WORLD.rank if own_gpus else 0)
    _device = torch.device(device)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    world = MPI.COMM_WORLD
    outcomes = {}
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.bcast(own))
        for name, case in CASES.items():
            outcomes[name] = _run(case, folder / name, backend)
        meet()  # the folder is shared
    return outcomes


def _run(case: Callable[[Path], None], place: Path, backend: str) -> str | None:
    torch.manual_seed(7)
    meet()
    try:
        with process_group(place.with_suffix(".store"), backend):
            case(place)
    except Exception:  # noqa: BLE001 - it is the outcome
        return traceback.format_exc()
    return None


def model() -> nn.Module:
    """A model, equal on every rank. It has a layer for each of 4 ranks or more."""
    torch.manual_seed(1)
    inner = [nn.Linear(16, 16) for _ in range(dist.get_world_size() - 3)]
    layers = [nn.Linear(6, 16), nn.Tanh(), *inner, nn.Linear(16, 3)]
    return nn.Sequential(*layers).to(_device)


def samples(count: int) -> tuple[Tensor, Tensor]:
    """Samples and targets, equal on every rank."""
    torch.manual_seed(2)
    inputs, targets = torch.randn(count, 6), torch.randn(count, 3)
    return inputs.to(_device), targets.to(_device)


def mine(tensor: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def step(net: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(net(inputs), targets).backward()
    optimizer.step()


def assert_equal(net: nn.Module, reference: nn.Module, rtol: float = 1e-10) -> None:
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    for parameter, expected in pairs:
        actual = (
            parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        )
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol)


# -- DistributedDataParallel -----------------------------------------------------------


def ddp_with(name: str) -> Callable[[Path], None]:
    """DDP with a shuffling sampler equals one process on the union of the batches."""

    def case(_: Path) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        reference = model()
        net = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        data = TensorDataset(*samples(size * BATCH * STEPS))
        single = OPTIMIZERS[name](reference.parameters())
        parallel = OPTIMIZERS[name](net.parameters())
        for epoch in range(2):
            loaders = [_loader(data, size, each, epoch) for each in range(size)]
            for batches in zip(*loaders, strict=True):
                step(net, parallel, *batches[rank])
                columns = zip(*batches, strict=True)
                step(reference, single, *(torch.cat(column) for column in columns))
        assert_equal(net.module, reference)

    return case


def _loader(data: TensorDataset, size: int, rank: int, epoch: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, size, rank, seed=3)
    sampler.set_epoch(epoch)
    return DataLoader(data, BATCH, sampler=sampler)


def ddp_joins_uneven_inputs(_: Path) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    reference, net = model(), DistributedDataParallel(model())
    single = OPTIMIZERS["sgd"](reference.parameters())
    parallel = OPTIMIZERS["sgd"](net.parameters())
    inputs, targets = samples(size * BATCH)
    with Join([net]):
        for _step in range(2 + rank):  # rank 0 runs out of samples first
            step(net, parallel, mine(inputs), mine(targets))
    for step_number in range(size + 1):
        single.zero_grad()
        for peer in range(size):
            if step_number < 2 + peer:
                rows = inputs.chunk(size)[peer], targets.chunk(size)[peer]
                (F.mse_loss(reference(rows[0]), rows[1]) / size).backward()
        single.step()
    # A joined rank keeps its parameters until the last rank to join broadcasts its own.
    assert_equal(net.module, reference)


class Branches(nn.Module):
    """Uses one of two layers: the first on even ranks, the second on odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers = [nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(2, 2)]
        self.layers = nn.ModuleList(layers).to(_device)

    def forward(self, inputs: Tensor, which: int) -> Tensor:
        output: Tensor = self.layers[which](inputs)
        return output


def ddp_finds_unused_parameters(_: Path) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    reference = Branches()
    net = DistributedDataParallel(Branches(), find_unused_parameters=True)
    inputs, targets = samples(size * BATCH)
    F.mse_loss(net(mine(inputs), rank % 2), mine(targets)).backward()
    for peer in range(size):
        rows = inputs.chunk(size)[peer], targets.chunk(size)[peer]
        (F.mse_loss(reference(rows[0], peer % 2), rows[1]) / size).backward()
    for layer, expected in zip(
        net.module.layers[:2], reference.layers[:2], strict=True
    ):
        torch.testing.assert_close(layer.weight.grad, expected.weight.grad)
    assert net.module.layers[2].weight.grad is None


def ddp_accumulates_without_sync(_: Path) -> None:
    reference, net = model(), DistributedDataParallel(model())
    single = OPTIMIZERS["sgd"](reference.parameters())
    parallel = OPTIMIZERS["sgd"](net.parameters())
    inputs, targets = samples(dist.get_world_size() * BATCH)
    for _step in range(STEPS):
        with net.no_sync():
            F.mse_loss(net(mine(inputs)), mine(targets)).backward()
        F.mse_loss(net(-mine(inputs)), mine(targets)).backward()
        parallel.step()
        parallel.zero_grad()
        F.mse_loss(reference(inputs), targets).backward()
        F.mse_loss(reference(-inputs), targets).backward()
        single.step()
        single.zero_grad()
    assert_equal(net.module, reference)


def ddp_compresses_to_fp16(_: Path) -> None:
    net = DistributedDataParallel(model())
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    _train_and_compare(net, rtol=2e-2)


def ddp_compresses_by_power_sgd(_: Path) -> None:
    net = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=16, start_powerSGD_iter=2
    )
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _train_and_compare(net, rtol=1e-6)  # of full rank: nothing is lost


def _train_and_compare(net: DistributedDataParallel, rtol: float) -> None:
    reference = model()
    single = torch.optim.SGD(reference.parameters(), lr=0.1)
    parallel = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, targets = samples(dist.get_world_size() * BATCH)
    for _ in range(STEPS):
        step(net, parallel, mine(inputs), mine(targets))
        step(reference, single, inputs, targets)
    assert_equal(net.module, reference, rtol)


# -- sharded, split and piped ----------------------------------------------------------


def fsdp_matches(_: Path) -> None:
    reference, net = model(), model()
    mesh = init_device_mesh(_device.type, (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    single = OPTIMIZERS["adamw"](reference.parameters())
    parallel = OPTIMIZERS["adamw"](net.parameters())
    inputs, targets = samples(dist.get_world_size() * BATCH)
    for _step in range(STEPS):
        step(net, parallel, mine(inputs), mine(targets))
        step(reference, single, inputs, targets)
    assert_equal(net, reference)


def tensor_parallel_matches(_: Path) -> None:
    reference, net = model(), model()
    mesh = init_device_mesh(
        _device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp")
    )
    parallelize_module(
        net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    single = OPTIMIZERS["adamw"](reference.parameters())
    parallel = OPTIMIZERS["adamw"](net.parameters())
    inputs, targets = samples(BATCH)
    for _step in range(STEPS):
        step(net, parallel, inputs, targets)
        step(reference, single, inputs, targets)
    assert_equal(net, reference)


def pipeline_matches(schedule: type[Any]) -> Callable[[Path], None]:
    """One layer on each rank, with micro-batches."""

    def case(_: Path) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        reference, layers = model(), model()
        stage = PipelineStage(layers[rank], rank, size, _device)
        pipeline = schedule(stage, n_microbatches=size, loss_fn=F.mse_loss)
        single = OPTIMIZERS["sgd"](reference.parameters())
        parallel = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        inputs, targets = samples(size * BATCH)
        for _step in range(STEPS):
            parallel.zero_grad()
            pipeline.step(
                *([inputs] if rank == 0 else []),
                **({"target": targets} if rank == size - 1 else {}),
            )
            parallel.step()
            step(reference, single, inputs, targets)
        assert_equal(layers[rank], reference[rank])

    return case


# -- attention over sequences of which each rank has a part ----------------------------


def context_parallel_matches(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[[Path], None]:
    """Attention over the whole sequence, and its gradients, with a part on each rank.

    Args:
        attention: gets the queries, keys and values of this rank's part.
    """

    def case(_: Path) -> None:
        size = dist.get_world_size()
        torch.manual_seed(3)
        shape = (2, 2 * size, 4 * size, 5)  # batch, heads, positions, features
        full = [torch.randn(shape, device=_device) for _ in range(3)]
        weights = torch.randn(shape, device=_device)
        parts = [part_of(each).clone().requires_grad_() for each in full]
        full = [each.requires_grad_() for each in full]
        expected = F.scaled_dot_product_attention(*full)
        (expected * weights).sum().backward()
        actual = attention(*parts)
        torch.testing.assert_close(actual, part_of(expected), rtol=1e-10, atol=1e-10)
        (actual * part_of(weights)).sum().backward()
        for part, whole in zip(parts, full, strict=True):
            assert part.grad is not None
            assert whole.grad is not None
            torch.testing.assert_close(
                part.grad, part_of(whole.grad), rtol=1e-10, atol=1e-10
            )

    return case


def part_of(tensor: Tensor) -> Tensor:
    """This rank's positions."""
    return tensor.chunk(dist.get_world_size(), 2)[dist.get_rank()].contiguous()


def ulysses(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each rank computes some heads of all positions (arXiv:2309.14509)."""
    size = dist.get_world_size()

    def exchange(tensor: Tensor, split: int, join: int) -> Tensor:
        sent = torch.stack(tensor.chunk(size, split))
        rows = functional.all_to_all_single_autograd(
            sent.flatten(0, 1), None, None, dist.group.WORLD
        )
        return torch.cat((rows * 1.0).view_as(sent).unbind(), join)

    heads = [exchange(each, split=1, join=2) for each in (queries, keys, values)]
    return exchange(F.scaled_dot_product_attention(*heads), split=2, join=1)


def ring_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Keys and values go round in a ring (arXiv:2310.01889)."""
    scores, seen = [], []
    for _turn in range(dist.get_world_size()):
        scores.append(queries @ keys.mT / queries.shape[-1] ** 0.5)
        seen.append(values)
        keys, values = _NextInRing.apply(torch.stack([keys, values])).unbind()
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(seen, 2)


class _NextInRing(torch.autograd.Function):
    """The tensor of the previous rank. Gradients go back to it."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return _turned(tensor, 1)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _turned(gradient, -1)


def _turned(tensor: Tensor, by: int) -> Tensor:
    """Send a tensor to the rank that is `by` further, and receive one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = tensor.contiguous(), torch.empty_like(tensor)
    messages = [
        dist.P2POp(dist.isend, sent, (rank + by) % size),
        dist.P2POp(dist.irecv, received, (rank - by) % size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received


def checkpoint_survives(place: Path) -> None:
    mesh = init_device_mesh(_device.type, (dist.get_world_size(),))
    net = fully_shard(model(), mesh=mesh)
    saved = {"model": net.state_dict()}
    before = {name: value.full_tensor() for name, value in saved["model"].items()}
    save(saved, checkpoint_id=place)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    state = {"model": net.state_dict()}
    load(state, checkpoint_id=place)
    net.load_state_dict(state["model"])
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), before[name], rtol=0, atol=0)


CASES: dict[str, Callable[[Path], None]] = {
    "ddp_sgd": ddp_with("sgd"),
    "ddp_adamw": ddp_with("adamw"),
    "ddp_join": ddp_joins_uneven_inputs,
    "ddp_unused": ddp_finds_unused_parameters,
    "ddp_no_sync": ddp_accumulates_without_sync,
    "ddp_fp16": ddp_compresses_to_fp16,
    "ddp_power_sgd": ddp_compresses_by_power_sgd,
    "fsdp": fsdp_matches,
    "tensor_parallel": tensor_parallel_matches,
    "pipeline_gpipe": pipeline_matches(ScheduleGPipe),
    "pipeline_1f1b": pipeline_matches(Schedule1F1B),
    "context_ulysses": context_parallel_matches(ulysses),
    "context_ring": context_parallel_matches(ring_attention),
    "checkpoint": checkpoint_survives,
}
