"""Groups of torch's own backends in a cell: their members meet, or are released."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nbdist import Cluster
from nbdist.errors import CellError
from tests.processes import wait_until

LIMIT_S = 60.0
SUMS = """group = dist.new_group({ranks}backend="gloo")
total = torch.ones(2)
if rank in {members}:
    dist.all_reduce(total, group=group)
    assert total.tolist() == [len({members})] * 2, total
dist.destroy_process_group()
"""


def where(cluster: Cluster, rank: int) -> str:
    return str((cluster.status()[rank] or {})["where"])


def test_members_meet_where_a_rank_has_made_more_groups(cluster: Cluster) -> None:
    cluster.execute(
        'if rank == 1:\n    dist.new_group([1], backend="gloo")\n'
        'if rank in (2, 3):\n    dist.new_group([2, 3], backend="gloo")\n'
        + SUMS.format(ranks="", members=range(4))
        + SUMS.format(
            ranks="[rank // 2 * 2, rank // 2 * 2 + 1], ", members="group_of"
        ).replace("group_of", "(rank // 2 * 2, rank // 2 * 2 + 1)")
        + "dist.new_group(use_local_synchronization=True, backend='gloo')\n",
        timeout_s=LIMIT_S,
    )


def test_a_rank_is_released_whose_peers_make_no_group(cluster: Cluster) -> None:
    with pytest.raises(CellError, match=r"from new_group.* rank 1-3 has ended"):
        cluster.execute(
            'if rank == 0:\n    dist.new_group(backend="gloo")', timeout_s=LIMIT_S
        )
    cluster.execute(SUMS.format(ranks="", members=range(4)), timeout_s=LIMIT_S)


def test_an_interrupt_ends_a_wait_for_the_members(cluster: Cluster) -> None:
    cell = cluster.execute(
        'import time\nif rank == 0:\n    dist.new_group(backend="gloo")\n'
        "time.sleep(600)",
        timeout_s=LIMIT_S,
        wait=False,
    )
    wait_until(lambda: "new_group" in where(cluster, 0), LIMIT_S)
    cluster.interrupt()
    with pytest.raises(CellError, match=r"ranks 0-3 of 4.*: KeyboardInterrupt"):
        cell.result(LIMIT_S)
    cluster.execute(SUMS.format(ranks="", members=range(4)), timeout_s=LIMIT_S)


def test_a_process_without_ranks_of_ours_makes_groups_of_torchs() -> None:
    program = """
from nbdist.collectives.torch_backend.registration import register
import torch, torch.distributed as dist
register()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
