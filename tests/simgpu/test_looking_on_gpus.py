"""Values on GPUs are shown and compared as values in host memory, and stay there.

The first tests are those of tests/clusters, whose variables are here on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from nbdist import CellError, Cluster
from nbdist.session import Session
from tests.clusters.test_diff import (  # noqa: F401
    test_a_rank_without_the_value_is_named,
    test_a_training_without_a_difference_raises_no_alarm,
    test_check_replicas_names_leaf_rank_and_step,
    test_equal_values_are_equal_in_every_leaf,
    test_flipped_bits_are_found_and_named,
    test_the_first_leaf_is_named_with_rank_index_and_difference,
    test_values_of_every_kind_are_compared,
)
from tests.clusters.test_looking import (  # noqa: F401
    rows_of,
    running,
    test_a_look_keeps_nothing_alive,
    test_a_value_that_cannot_be_printed_is_an_error,
    test_inspect_answers_while_a_cell_runs,
    test_inspect_compares_values_and_not_their_texts,
    test_inspect_has_a_row_for_each_parameter_of_a_module,
    test_inspect_keeps_the_form_of_tensors,
    test_one_flipped_bit_of_one_rank_is_found_in_100_of_100_places,
    test_variables_are_shown_while_a_cell_runs,
    test_variables_of_every_kind_can_be_described,
)
from tests.gpu_marks import simulated
from tests.remove_variables import remove_variables
from tests.training.test_watch_on_ranks import (  # noqa: F401
    test_the_rank_whose_gradient_was_first_is_named,
)

N = 4
FEW_BYTES = 20_000
"""Far less than a variable of these tests, and more than digests and numbers take."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    simulated,
]


@pytest.fixture(
    scope="module",
    params=["one GPU", pytest.param("a GPU each", marks=pytest.mark.gpus(4))],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    has_own = request.param == "a GPU each"
    if has_own and torch.cuda.device_count() < N:
        pytest.skip(f"needs {N} GPUs")
    shared = None if has_own else N
    with Cluster(N, device="cuda", ranks_per_gpu=shared, threads=1) as running:
        yield running


@pytest.fixture
def cluster(ranks: Cluster) -> Cluster:
    ranks.run(remove_variables)
    ranks.execute("torch.set_default_device(device)")
    return ranks


@pytest.fixture
def session(cluster: Cluster) -> Session:
    session = Session()
    session._cluster = cluster
    return session


def bytes_to_host() -> int:
    """The bytes that this process has copied from GPUs to host memory."""
    count = ctypes.CDLL(None).simgpu_bytes_to_host
    count.restype = ctypes.c_size_t
    return int(count())


LARGE = """
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 300)).sum().backward()
optimizer.step()
large = torch.arange(200_000.0)
half = torch.ones(100_000).half()[::2]
"""


def test_a_look_copies_no_variable_to_the_host(
    cluster: Cluster, session: Session
) -> None:
    cluster.execute(LARGE)
    looks = {
        "variables": lambda: session.variables_table("*"),
        "large": lambda: session.inspect_table("large"),
        "half": lambda: session.inspect_table("half"),
        "model": lambda: session.inspect_table("model"),
        "diff": lambda: session.diff_table("[model, optimizer, large, half]"),
        "check": lambda: cluster.execute("nbdist.check_replicas(model, optimizer)"),
    }
    for name, look in looks.items():
        for differs in (False, True):
            if differs and name == "check":
                continue  # it raises
            if differs:
                cluster.execute("if rank == 2: large[77_777] += 1; half[7] += 1")
            before = cluster.run(bytes_to_host)
            look()
            after = cluster.run(bytes_to_host)
            moved = [a - b for a, b in zip(after, before, strict=True)]
            assert max(moved) < FEW_BYTES, (name, differs, moved)
            if differs:
                cluster.execute("if rank == 2: large[77_777] -= 1; half[7] -= 1")
    assert max(cluster["large.cpu().numel()"]) == 200_000
    moved = cluster.run(bytes_to_host)[0] - after[0]
    assert moved >= 800_000, "the copies are not counted"


def test_a_look_does_not_wait_for_queued_kernels(
    cluster: Cluster, session: Session
) -> None:
    cluster.execute("x = torch.arange(100.0)")
    code = "done = torch.cuda.Event()\ntorch.cuda._sleep(16_000_000_000)\n"
    code += "done.record()\nwhile True: pass"
    with running(cluster, code, list(range(N))):
        shown = str(session.inspect_table("x"))
        assert "norm 573.018" in shown, shown
        table = session.variables_table("x")
        assert rows_of(table)["x"] == ["all"], table
        assert "False" in str(session.inspect_table("done.query()"))
    assert cluster["rank"] == list(range(N))


def test_ranks_with_tensors_on_other_devices_differ(
    cluster: Cluster, session: Session
) -> None:
    cluster.execute("x = torch.ones(3, device='cpu' if rank == 1 else device)")
    shown = str(session.diff_table("x"))
    assert "rank 1" in shown, shown
    with pytest.raises(CellError, match="the replicas parted at step 1"):
        cluster.execute(
            "model = torch.nn.Linear(2, 2)\nmodel.register_buffer('x', x)\n"
            "nbdist.check_replicas(model)"
        )


def test_what_holds_the_memory_of_a_gpu_is_named(cluster: Cluster):
    cluster.execute("nbdist.all_reduce(torch.ones(1))")  # makes buffers on one GPU
    cluster.execute(
        "weights = torch.nn.Parameter(torch.zeros(3_000_000))\n"
        "saved = (weights * weights).exp()\n"
        "torch.cuda.synchronize()"
    )
    for rank, report in cluster.memory().items():
        assert report is not None
        # The buffers of nbdist are larger, if earlier tests have needed them. Those of
        # the other ranks are not this rank's memory.
        held = next(each for each in report.largest if "nbdist" not in each.name)
        assert (held.name, held.size) == ("weights", 12_000_000)
        device = cluster.ranks[rank].device
        assert held.device == device
        assert report.totals[device] < (report.sizes["allocated"] or 0), (
            "exp has saved a tensor for backward"
        )
