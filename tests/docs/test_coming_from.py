"""Each row of docs/coming-from.md is run, here or by the test that is named."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from nbdist import Cluster

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
HOROVOD = "tests/horovod/test_horovod_functions.py:test_function"
OPTIMIZER = "tests/horovod/test_distributed_optimizer.py:test_training"
SCRIPT = "tests/clusters/test_scripts.py"
WORKERS = "tests/clusters/test_workers.py"
CLOUDERA = f"{WORKERS}:test_the_calls_of_clouderas_library_work_as_written"
REPLICAS = "tests/strategies/test_replicas.py"
SERVERS = "tests/strategies/test_servers.py"
PLACEMENT = "tests/clusters/test_placement.py"
KERAS = "tests/keras/test_keras.py:test_keras"
ELASTIC = "tests/clusters/test_elastic.py"


class Cell(NamedTuple):
    """A cell that runs on four ranks."""

    code: str


class Kernel(NamedTuple):
    """Python of the notebook's kernel."""

    code: str


MISSING = "missing"
"""The row says that nbdist does not have it."""

GIVEN = """
import nbdist.horovod as hvd
hvd.init()
strategy = nbdist.strategies.Mirrored()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

Check = Cell | Kernel | str

ROWS: dict[str, Check] = {
    # Horovod
    "import horovod.torch as hvd": Cell("assert hvd.size() == world_size"),
    "import horovod.keras as hvd": KERAS,
    "horovodrun -np 4": "tests/horovod/test_horovod_script.py:"
    "test_the_script_trains_under_a_launcher",
    "horovod.run(fn": "tests/horovod/test_hvd_run.py:test_results_are_in_rank_order",
    "hvd.init()`, `rank()": Cell("assert (hvd.rank(), hvd.cross_rank()) == (rank, 0)"),
    "allreduce`, `grouped_allreduce": HOROVOD,
    "Average`, `Sum": Cell("hvd.allreduce(torch.ones(1), op=hvd.Max)"),
    "join()`, `barrier()": Cell("hvd.barrier(); hvd.join()"),
    "DistributedOptimizer`, `SyncBatchNorm": OPTIMIZER,
    "HOROVOD_FUSION_THRESHOLD": OPTIMIZER,
    "HOROVOD_CYCLE_TIME": OPTIMIZER,
    "broadcast_parameters`": Cell(
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
    ),
    "hvd.elastic.run": "tests/horovod/test_horovod_elastic.py:"
    "test_a_rank_dies_and_is_replaced",
    "stall checks": "tests/clusters/test_stall_detector.py",
    "horovodrun --min-np": "tests/clusters/test_membership.py",
    "HOROVOD_TIMELINE": HOROVOD,
    # torchrun
    "torchrun --nproc-per-node": f"{SCRIPT}:test_a_torchrun_script_trains_digits",
    "RANK`, `WORLD_SIZE": Cell(
        "import os\nassert [os.environ[n] for n in ('RANK', 'WORLD_SIZE')] == "
        "[str(rank), str(world_size)]"
    ),
    "dist.init_process_group(": f"{SCRIPT}:test_other_backends_use_the_default_group",
    "DistributedDataParallel": "tests/process_group/test_training.py",
    "DataLoader` with": "tests/training/test_loader.py",
    "torch.save` on rank 0": "tests/training/test_files.py",
    "--max-restarts": f"{SCRIPT}:test_all_ranks_begin_again_after_one_fails",
    "a snapshot that each restart": f"{ELASTIC}:"
    "test_a_killed_rank_is_replaced_within_the_cell",
    "--nnodes 2": "tests/hosts/test_magics_on_hosts.py",
    "--nnodes 1:4": "tests/hosts/test_elastic_hosts.py",
    "mp.spawn(train": f"{SCRIPT}:test_worlds_on_one_port_are_an_error_that_names_it",
    "the script outside": "tests/engine/test_torchrun.py:test_ranks_of_torchrun_join",
    "--standalone": "tests/security/test_ports.py",
    "pkill` when": "tests/clusters/test_interrupt.py:"
    "test_the_cell_ends_and_the_next_one_runs",
    # Cloudera's workers
    "launch_workers(n, cpu": CLOUDERA,
    "launch_workers(..., code": CLOUDERA,
    'worker["id"]': CLOUDERA,
    "kernel`, resource": MISSING,
    "list_workers()": CLOUDERA,
    "await_workers(ids": CLOUDERA,
    'result["workers"]': CLOUDERA,
    "stop_workers(*ids)": CLOUDERA,
    "output in the console": f"{WORKERS}:test_workers_have_their_own_ids_and_results",
    "CDSW_MASTER_IP": f"{WORKERS}:test_workers_form_a_torch_distributed_world",
    "cluster_spec, session_addr": CLOUDERA,
    "workers end with": f"{WORKERS}:test_no_worker_outlives_its_notebook",
    "a queue in the session": Kernel(
        "assert cluster.run(lambda x: x + 1, 1) == [2] * 4"
    ),
    # tf.distribute
    "MirroredStrategy()`": REPLICAS,
    "MirroredStrategy(devices": Cell(
        "nbdist.strategies.Mirrored(devices=['/cpu:0'] * 4)"
    ),
    "MultiWorkerMirroredStrategy()": Cell(
        "assert nbdist.strategies.MultiWorkerMirrored().num_replicas == 4"
    ),
    "CollectiveCommunication.RING": Cell(
        "nbdist.strategies.MultiWorkerMirrored(communication='RING').setup("
        "model, optimizer)"
    ),
    "OneDeviceStrategy": Cell(
        "assert nbdist.strategies.OneDevice('/cpu:0').reduce('SUM', rank) == rank"
    ),
    "TPUStrategy(": "tests/strategies/test_xla.py",
    "CentralStorageStrategy": REPLICAS,
    "ParameterServerStrategy": SERVERS,
    "ClusterCoordinator": SERVERS,
    "SyncReplicasOptimizer": f"{SERVERS}:test_a_straggler_is_dropped",
    "around a model of Keras": KERAS,
    "around a loop of your own": Cell("strategy.setup(model, optimizer)"),
    "experimental_distribute_dataset": Cell(
        "assert len(list(strategy.distribute([1.0] * 8, 4))) == 2"
    ),
    "distribute_datasets_from_function": Cell(
        "part = strategy.distribute_datasets_from_function(\n"
        "    lambda context: context.input_pipeline_id)\n"
        "assert part == rank"
    ),
    "strategy.run(fn": Cell("assert strategy.run(lambda a: a, (rank,)) == rank"),
    "strategy.reduce(": Cell(
        "assert strategy.reduce('SUM', torch.ones(2), axis=None).tolist() == [4, 4]"
    ),
    "experimental_local_results": Cell(
        "assert strategy.local_results(rank) == (rank,)"
    ),
    "compute_average_loss": Cell(
        "assert strategy.average_loss(torch.ones(2), 8).item() == 1"
    ),
    "num_replicas_in_sync": Cell("assert strategy.num_replicas_in_sync == 4"),
    "TF_CONFIG`": f"{SCRIPT}:"
    "test_a_script_has_the_environment_of_torchrun_and_leaves_nothing",
    "list_physical_devices": Kernel(
        "assert {info.device for info in cluster.ranks} == {'cpu'}"
    ),
    "set_memory_growth": "tests/training/test_memory.py",
    "LogicalDeviceConfiguration": "tests/training/test_memory.py",
    "set_logical_device_configuration": f"{PLACEMENT}:"
    "test_ranks_that_share_a_gpu_are_neighbours_and_share_its_memory",
    "with tf.device": Cell(
        "with torch.device(device):\n    assert torch.ones(1).device == device"
    ),
    "set_soft_device_placement": MISSING,
    "BackupAndRestore": "tests/training/test_elastic_state.py",
    "SlurmClusterResolver": "tests/hosts/test_slurm.py",
}
"""What runs each row, by the text with which its first column begins or that it has.
A path is that of a test file, with the name of a test after the colon."""


@cache
def rows() -> list[tuple[str, str]]:
    """Both columns of each row."""
    cells = re.findall(r"^\| (.*?) \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    heads = {"Horovod", "torchrun", "tf.distribute", "`cdsw`, or `cml.workers_v1`"}
    return [(left, right) for left, right in cells if left not in heads]


def check_of(left: str) -> Check:
    """What runs the row with this first column. Exactly one entry fits."""
    bare = left.removeprefix("`")
    found = [key for key in ROWS if bare.startswith(key)]
    found = found or [key for key in ROWS if key in left]
    assert len(found) == 1, (left, found)
    return ROWS[found[0]]


def test_every_entry_is_the_check_of_one_row() -> None:
    used = [id(check_of(left)) for left, _ in rows()]
    assert len(used) == len(rows()) == len(ROWS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_row_runs(row: tuple[str, str], cluster: Cluster) -> None:
    left, right = row
    check = check_of(left)
    if isinstance(check, Cell):
        cluster.execute(GIVEN + check.code, timeout_s=60)
    elif isinstance(check, Kernel):
        exec(compile(check.code, left, "exec"), {"cluster": cluster})
    elif check == MISSING:
        assert "issing" in right
    else:
        path, _, name = check.partition(":")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        tests = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        assert any(each.startswith(name or "test_") for each in tests), (path, name)
