"""A rank reads the memory of its device, and limits its own use."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
import torch

from nbdist.errors import UsageError
from nbdist.training.memory import Memory, memory

CAPPED = """
import torch
from nbdist.training.memory import memory, _allocated_data
now = memory(_allocated_data() + 2**28)  # 256 MiB more than now
assert now.limit is not None
torch.zeros(2**24)  # 64 MiB: fits
try:
    torch.zeros(2**28)  # 1 GiB
except RuntimeError as error:
    assert "can't allocate memory" in str(error), error
else:
    raise AssertionError("it was allowed")
assert memory("64GiB" if now.total > 2**36 else 1.0).limit > now.limit
torch.zeros(2**28)
try:
    memory(2**20)
except ValueError as error:
    print(error)
"""


def test_the_memory_of_a_cpu_rank_is_that_of_its_process():
    now = memory(device="cpu")
    assert now.device == "cpu"
    resident = psutil.Process().memory_info().rss
    assert now.held == pytest.approx(resident, rel=0.1)
    assert now.held < now.used <= now.total
    assert now.tensors is None
    assert "this rank holds" in str(now)


def test_a_cap_is_enforced_until_it_is_raised():
    answer = subprocess.run(
        [sys.executable, "-c", CAPPED], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    assert "limit 1048576 is 1 MiB, and this rank holds" in answer.stdout


def test_the_text_shows_the_memory_of_a_gpu_rank():
    gib = 2**30
    now = Memory("cuda:0", 140 * gib, 100 * gib, 40 * gib, 39 * gib, 70 * gib)
    assert str(now) == (
        "cuda:0: 140.00 GiB, 100.00 GiB in use by all; this rank holds 40.00 GiB "
        "(39.00 GiB in tensors), of at most 70.00 GiB"
    )


@pytest.mark.parametrize("limit", ["much", -1, 0, 2**60])
def test_an_invalid_limit_is_refused(limit):
    with pytest.raises(UsageError, match="limit"):
        memory(limit, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_memory_of_a_gpu_rank_is_capped():
    before = memory()
    held = torch.zeros(2**26, device="cuda")
    now = memory("1GiB", growth=True)
    assert now.tensors - (before.tensors or 0) == 4 * held.numel()
    assert now.limit == pytest.approx(2**30, rel=1e-6)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(2**29, device="cuda")
    memory(1.0)
