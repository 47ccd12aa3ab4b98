"""Calls that libraries for torch.distributed make, in cells."""

from __future__ import annotations

import textwrap

import pytest

from nbdist import Cluster
from nbdist.errors import CellError, CellTimeout

pytestmark = pytest.mark.usefixtures("patience")

DEADLINE_S = 20


def run(cluster: Cluster, code: str, ranks: list[int] | None = None):
    return cluster.execute(textwrap.dedent(code), ranks=ranks, timeout_s=DEADLINE_S)


def assert_whole(cluster: Cluster) -> None:
    run(cluster, "x = torch.ones(1); dist.all_reduce(x); assert x.item() == 4")


# -- dist.init_process_group and dist.destroy_process_group ----------------------------


def test_init_process_group_uses_the_default_group(cluster: Cluster):
    ran = run(
        cluster,
        """
        from torch.distributed import destroy_process_group, init_process_group
        before = dist.group.WORLD
        for backend in ("gloo", "nccl", None):
            init_process_group(backend)
            assert dist.get_backend() == (backend or "nbdist")
            part = dist.new_group([0, 1])
            destroy_process_group()
        init_process_group(rank=rank, world_size=world_size)
        assert dist.group.WORLD is before and dist.get_backend() == "nbdist"
        print(len(dist.distributed_c10d._world.pg_map))
        """,
    )
    assert [ran[rank].stdout for rank in range(4)] == ["1\n"] * 4  # the parts ended
    assert_whole(cluster)
    with pytest.raises(CellError, match=r"rank=0, world_size=1.* leave both out"):
        run(cluster, "dist.init_process_group('gloo', rank=0, world_size=1)")


def test_a_script_does_not_end_the_groups_of_the_cells(cluster: Cluster, tmp_path):
    run(cluster, "pair = dist.new_group([0, 1])")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "own = dist.new_group([2, 3])\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo')\n"
        "dist.new_group([1, 2])\n"
    )
    cluster.run_script(script)
    run(
        cluster,
        """
        assert len(dist.distributed_c10d._world.pg_map) == 1 + (rank < 2)
        x = torch.ones(1)
        if rank < 2:
            dist.all_reduce(x, group=pair)
            assert x.item() == 2
        dist.destroy_process_group()
        """,
    )
    assert_whole(cluster)


# -- groups that only some ranks have made or destroyed --------------------------------


@pytest.mark.parametrize("backend", ["nbdist", "gloo"])
def test_groups_can_be_made_after_a_cell_that_made_one_on_some_ranks(
    cluster: Cluster, backend: str
):
    with pytest.raises(CellError, match=r"rank 1 of 4 in .*: ValueError: before it"):
        run(
            cluster,
            "if rank == 1: raise ValueError('before it')\n"
            "alone = dist.new_group([rank])",
        )
    run(cluster, "alone = dist.new_group([2])", ranks=[2])
    run(
        cluster,
        f"""
        every = dist.new_group([0, 1, 2, 3], backend={backend!r})
        x = torch.ones(1)
        dist.all_reduce(x, group=every)
        assert x.item() == 4
        dist.destroy_process_group()
        """,
    )
    assert_whole(cluster)


def test_a_rank_is_released_from_making_a_group_that_another_rank_does_not_make(
    cluster: Cluster,
):
    for _ in range(2):
        with pytest.raises(CellError) as raised:
            run(cluster, "assert rank != 3, 'not I'\npair = dist.new_group([0, 3])")
        first, second = str(raised.value).splitlines()
        assert first.endswith("AssertionError: not I")
        assert second.startswith("rank 0 of 4 in In[")
        assert second.endswith("released from new_group: the cell of rank 3 has ended")
    run(
        cluster,
        """
        pair = dist.new_group([0, 3])
        x = torch.ones(1)
        if rank in (0, 3):
            dist.all_reduce(x, group=pair)
            assert x.item() == 2
        dist.destroy_process_group()
        """,
    )


def test_a_group_that_one_rank_destroys_ends_on_all_ranks(cluster: Cluster):
    run(cluster, "pair = dist.new_group([0, 1]); other = dist.new_group([0, 1])")
    with pytest.raises(CellError, match="rank 1"):
        run(
            cluster,
            "if rank == 1: raise ValueError\n"
            "if rank == 0: dist.destroy_process_group(pair)\n"
            "dist.barrier()",
        )
    assert_whole(cluster)
    run(
        cluster,
        """
        x = torch.ones(1)
        if rank < 2:
            dist.all_reduce(x, group=other)
            assert x.item() == 2
        """,
    )
    with pytest.raises(CellError, match="rank 0 has closed this group of ranks: make"):
        run(cluster, "dist.all_reduce(x, group=pair)", ranks=[1])
    run(cluster, "dist.destroy_process_group()")
    assert_whole(cluster)


# -- the process -----------------------------------------------------------------------


def test_libraries_detect_a_launch_by_torchrun(cluster: Cluster):
    run(
        cluster,
        """
        import os, sys
        assert dist.is_torchelastic_launched() and not hasattr(sys, "ps1")
        assert (os.environ["GROUP_RANK"], os.environ["ROLE_RANK"]) == ("0", str(rank))
        """,
    )


def test_an_average_of_integers_is_rounded_as_by_nccl(cluster: Cluster):
    run(
        cluster,
        """
        for dtype in (torch.int64, torch.uint8):
            x = torch.tensor([rank, 5], dtype=dtype)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            assert x.tolist() == [1, 5] and x.dtype == dtype, x
        x = torch.tensor([-rank], dtype=torch.int32)
        work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)
        work.wait()
        assert x.item() == -1, x
        """,
    )


def test_a_collective_in_a_forked_child_raises(cluster: Cluster):
    with pytest.raises(CellError) as raised:
        run(
            cluster,
            """
            import torch.multiprocessing as mp

            def child(_, asynchronous):
                assert dist.get_rank() == rank  # what a DataLoader's worker asks
                dist.init_process_group("gloo")
                work = dist.all_reduce(torch.ones(1), async_op=asynchronous)
                work.wait()

            if rank == 2:
                for asynchronous in (True, False):
                    try:
                        mp.start_processes(child, (asynchronous,), start_method="fork")
                    except mp.ProcessRaisedException as error:
                        assert "a forked child of rank 2" in str(error)
                        last = error
                raise last
            """,
        )
    first = str(raised.value).splitlines()[0]
    assert first.startswith("rank 2 of 4 in In[")
    assert "ProcessRaisedException: -- Process 0 terminated" in first
    assert_whole(cluster)


def test_a_library_can_handle_the_interrupt_and_exit(cluster: Cluster):
    """Lightning's handler: it ignores SIGINT after the first one, and exits."""
    with pytest.raises(CellTimeout):
        cluster.execute(
            textwrap.dedent(
                """
                import signal, sys
                try:
                    while True: pass
                except KeyboardInterrupt:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    sys.exit(1)
                """
            ),
            timeout_s=1,
        )
    with pytest.raises(CellTimeout) as raised:
        cluster.execute("while True: pass", timeout_s=1)
    assert "did not react" not in str(raised.value)


@pytest.mark.parametrize("name", ["CentralStorage", "LocalSGD", "ParameterServer"])
def test_some_strategies_refuse_a_model_in_ddp(cluster: Cluster, name: str):
    """A parameter server never comes to the workers' backward: they would wait."""
    arguments = {"LocalSGD": "2", "ParameterServer": "n_ps=1"}.get(name, "")
    with pytest.raises(CellError, match=r"ranks 0-3 of 4 .* pass model.module"):
        run(
            cluster,
            f"""
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            nbdist.strategies.{name}({arguments}).setup(model, optimizer)
            """,
        )
