"""The transport of CUDA tensors that is chosen for a machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.collectives.group import Group
from nbdist.collectives.sync.shared_barrier import SharedBarrier
from nbdist.collectives.transports import select as devices
from nbdist.collectives.transports.cuda_ipc import DeviceTransport
from nbdist.collectives.transports.local import LocalTransport
from nbdist.collectives.transports.mpi import DirectTransport
from nbdist.collectives.transports.nccl import NcclTransport
from nbdist.collectives.transports.staged import StagedTransport
from nbdist.config import CollectiveConfig
from nbdist.errors import UsageError

HOOKS: Any = SimpleNamespace(check=lambda: None)
ONE_HOST: Any = object.__new__(SharedBarrier)
SEVERAL_HOSTS: Any = None


class Machine:
    """A simulated machine with two ranks, which find the same devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cards = ["a", "b"]
        self.nccl = self.ipc = self.aware = False
        monkeypatch.setattr(devices, "takes_device_memory", lambda: self.aware)
        monkeypatch.setattr(devices, "identity", lambda: self.cards[0])
        nccl = SimpleNamespace(connect=lambda *_: "nccl" if self.nccl else None)
        ipc = SimpleNamespace(connect=lambda *_: "ipc" if self.ipc else None)
        monkeypatch.setattr(devices, "NcclTransport", nccl)
        monkeypatch.setattr(devices, "DeviceTransport", ipc)

    def swap(self, item: Any) -> list[Any]:
        return self.cards if item == self.cards[0] else [item] * len(self.cards)

    def transports(self, barrier: Any, wanted: str = "auto") -> dict[str, Any]:
        comm: Any = SimpleNamespace(rank=0, size=len(self.cards))
        host: Any = dict.fromkeys(("auto", "mpi", "ring"), LocalTransport())
        config = CollectiveConfig(transport=wanted)
        return devices.gpu_transports(host, barrier, config, HOOKS, comm, self.swap)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_single_rank_needs_no_transport(machine: Machine) -> None:
    machine.cards = ["a"]
    assert isinstance(machine.transports(ONE_HOST)["auto"], LocalTransport)


def test_ranks_with_a_gpu_each_use_nccl(machine: Machine) -> None:
    machine.nccl = machine.ipc = machine.aware = True
    for barrier in (ONE_HOST, SEVERAL_HOSTS):
        found = machine.transports(barrier)
        assert found["auto"] == "nccl"
        assert "ipc" not in found, "memory for nothing"
    assert machine.transports(ONE_HOST, "ipc")["auto"] == "ipc"


def test_a_shared_gpu_or_a_torch_without_nccl_uses_ipc(machine: Machine) -> None:
    machine.ipc = machine.aware = True
    assert machine.transports(ONE_HOST)["auto"] == "ipc"
    machine.cards, machine.nccl = ["a", "a"], True
    assert machine.transports(ONE_HOST)["auto"] == "ipc"


def test_between_hosts_without_nccl_a_cuda_aware_mpi_is_chosen(
    machine: Machine,
) -> None:
    machine.aware = True
    found = machine.transports(SEVERAL_HOSTS)
    assert isinstance(found["auto"], DirectTransport)
    assert found["auto"] is found["mpi"] is found["ring"]
    found = machine.transports(ONE_HOST)
    assert isinstance(found["auto"], StagedTransport), "shared memory is faster"
    assert isinstance(found["mpi"], DirectTransport)


def test_otherwise_tensors_are_staged(machine: Machine) -> None:
    for barrier in (ONE_HOST, SEVERAL_HOSTS):
        found = machine.transports(barrier)
        assert {type(each) for each in found.values()} == {StagedTransport}
        assert found["auto"] is found["staged"]


def test_a_requested_transport_that_is_unavailable_is_an_error(
    machine: Machine,
) -> None:
    with pytest.raises(UsageError, match="'nccl' for CUDA tensors: expected auto, mpi"):
        machine.transports(ONE_HOST, "nccl")
    assert machine.transports(ONE_HOST, "staged")["auto"].description.startswith("sta")


def on_gpu(transports: dict[str, dict[str, Any]]) -> Any:
    """A group of two ranks without a connection, on the second GPU."""
    group: Any = object.__new__(Group)
    group.size = 2
    group._connection = SimpleNamespace(
        gpu=torch.device("cuda", 1),
        transports=transports,
        transport=lambda kind, name: transports[kind][name],
    )
    return group


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_rank_keeps_its_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    group = on_gpu({"cuda": {"auto": "the fastest", "ring": "the ring"}})
    assert group.transport(torch.device(device)) == "the fastest"
    assert group.transport("cuda", "ring") == "the ring"
    with pytest.raises(UsageError, match="tensor on cuda:0: expected one on cuda:1"):
        group.transport(torch.device("cuda", 0))


def test_a_graph_captures_no_call_in_which_the_host_takes_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="make one before the capture"):
        on_gpu({"cpu": {}}).transport(torch.device("cuda", 1))
    group = on_gpu({"cuda": {"auto": NcclTransport, "ipc": DeviceTransport}})
    assert group.transport("cuda") is NcclTransport
    with pytest.raises(UsageError, match="over CUDA IPC, in which the host"):
        group.transport("cuda", "ipc")
