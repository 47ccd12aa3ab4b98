"""The backend of a group, as torch.distributed sees it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import launch

from nbdist.engine import torch_group


def test_backends_by_device() -> None:
    assert launch(1, __file__, "answers") == [None]


def answers() -> None:
    """On a rank: the default group's backends, without and with a simulated NCCL."""
    from default_process_groups import process_group  # initialises MPI

    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with process_group(Path(tempfile.mkdtemp()) / "store"):
        group = dist.group.WORLD
        assert group is not None
        backend = group._get_backend(cpu)
        assert backend is group
        assert not backend.supports_coalescing
        assert not backend.supports_splitting
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="cuda"):
                group._get_backend(cuda)
        assert torch_group.abort() is False

        calls: list[str] = []
        nccl = SimpleNamespace(
            name=lambda: "nccl",
            abort=lambda: calls.append("abort"),
            shutdown=lambda: calls.append("shutdown"),
        )
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._register_backend(cuda, kind, vars(group)["_backend"])
        group.__dict__["_nccl"] = SimpleNamespace(_get_backend=lambda _: nccl)
        assert group._get_backend(torch.device("cuda:0")) is nccl
        assert torch_group.abort() is True
    assert calls == ["abort", "shutdown"]  # its group was destroyed
