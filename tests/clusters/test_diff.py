"""`%dist_diff` and `check_replicas`: which leaf differs, on which rank, since when."""

from __future__ import annotations

import random
import re

import pytest

from nbdist import CellError, Cluster
from nbdist.session import Session
from nbdist.wire import Comparison
from tests.clusters import flipped_bits
from tests.seed import SEED

MODEL = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(5, 3)).sum().backward()
optimizer.step()
"""


@pytest.fixture
def session(cluster: Cluster) -> Session:
    session = Session()
    session._cluster = cluster
    return session


def test_equal_values_are_equal_in_every_leaf(cluster: Cluster, session: Session):
    cluster.execute(MODEL)
    assert cluster.compare("model").differing == []
    shown = str(session.diff_table("model"))
    assert shown.splitlines()[-1] == (
        "model is equal on rank 0-3, bit for bit, in 10 leaves"
    )
    every = str(session.diff_table("model", everything=True))
    kind = cluster.ranks[0].device.partition(":")[0]
    assert re.search(rf"model\.0\.weight +float32 4×3 {kind} +equal", every)
    html = session.diff_table("model", everything=True)._repr_html_()
    assert "model.0.weight" in html


def test_the_first_leaf_is_named_with_rank_index_and_difference(
    cluster: Cluster, session: Session
):
    cluster.execute(
        f"{MODEL}\nif rank == 2:\n    with torch.no_grad():\n"
        "        model[0].weight[1, 2] += 0.5\n"
        "        model[0].weight[3, 0] += 0.25\n"
        "        model[1].running_var[3] = float('nan')"
    )
    weight, variance = cluster.compare("model").differing
    assert weight.name == "model.0.weight"
    assert weight.groups == ((0, 1, 3), (2,))
    assert (weight.count, weight.size, weight.index) == (2, 12, (1, 2))
    assert weight.largest == pytest.approx(0.5)
    assert variance.name == "model.1.running_var"
    assert str(variance.largest) == "nan"
    shown = str(session.diff_table("model"))
    assert "2 differ from 0-1,3" in shown
    assert shown.splitlines()[-1] == (
        "2 of 10 leaves differ. First, model.0.weight differs on rank 2 from rank "
        "0-1,3 (2 of 12 elements, first at [1, 2], by at most 0.5)"
    )


def test_values_of_every_kind_are_compared(cluster: Cluster):
    cluster.execute(
        "value = {'lr': 0.1 + (rank == 3), 'name': 'a' if rank else 'b',\n"
        "         'size': [1] * (1 + rank // 2), 'x': torch.zeros(2 + rank // 3),\n"
        "         'late': [0.0, float(rank == 1)], 'same': torch.ones(2)}\n"
        "if rank == 0: value['extra'] = 1"
    )
    found = {leaf.name: leaf for leaf in cluster.compare("value").differing}
    assert found.keys() == {
        "value", "value['lr']", "value['name']", "value['size']", "value['x']",
        "value['late']", "value['extra']",
    }  # fmt: skip
    assert found["value['lr']"].groups == ((0, 1, 2), (3,))
    assert found["value['lr']"].difference == "0.1 on rank 0-2, 1.1 on rank 3"
    assert found["value['name']"].difference == "'a' on rank 1-3, 'b' on rank 0"
    kind = cluster.ranks[0].device.partition(":")[0]
    shapes = f"float32 2 {kind} | float32 3 {kind}"
    assert shapes in found["value['x']"].difference
    assert found["value['late']"].index == (1,)
    assert "missing" in found["value['extra']"].form


def test_a_rank_without_the_value_is_named(cluster: Cluster, session: Session):
    cluster.execute("if rank != 1: only = torch.ones(2)")
    shown = str(session.diff_table("only"))
    assert "rank 1 has no value: NameError: name 'only' is not defined" in shown
    assert "only is equal on rank 0,2-3" in shown
    cluster.execute("pieces = [torch.ones(1), (i for i in range(2))]")
    shown = str(session.diff_table("pieces"))
    assert "not compared: cannot pickle 'generator' object" in shown
    assert "1 of 3 leaves cannot be compared; the others are equal" in shown


def test_flipped_bits_are_found_and_named(cluster: Cluster):
    rng = random.Random(SEED)
    state = "[b_model, b_optimizer, b_nested, b_floats, b_frame, b_array, b_half, "
    state += "b_complex, b_nan, b_sparse, b_scalar, b_empty]"
    cluster.run(flipped_bits.make)
    for flip in (rng.randrange(2**32) for _ in range(25)):
        rank = rng.randrange(4)
        (name,) = cluster.on([rank]).run(flipped_bits.flip, flip)
        comparison: Comparison = cluster.compare(state)
        (leaf,) = comparison.differing
        assert leaf.groups[1:] == ((rank,),), (flip, name)
        assert leaf.count in (None, 1), (flip, name)
        cluster.on([rank]).run(flipped_bits.flip, flip)
    assert cluster.compare(state).differing == []


LOOP = """
for step in range(1, 61):
    if step == 37 and rank == 1:
        optimizer.state[model[0].weight]['exp_avg'].view(torch.int32)[1, 1] ^= 1
    nbdist.check_replicas(model, optimizer, every={every})
"""


@pytest.mark.parametrize(("every", "when"), [(1, "step 37"), (10, "steps 31-40")])
def test_check_replicas_names_leaf_rank_and_step(
    cluster: Cluster, every: int, when: str
):
    cluster.execute(MODEL)
    with pytest.raises(CellError) as caught:
        cluster.execute(LOOP.format(every=every))
    failures = caught.value.result.failures
    assert [failure.ename for failure in failures] == ["ReplicasDiffer"] * 4
    assert len({failure.evalue for failure in failures}) == 1
    message = failures[0].evalue
    assert message.startswith(
        f"the replicas parted at {when}: optimizer.state[0]['exp_avg'] differs on "
        "rank 1 from rank 0,2-3 (1 of 12 elements, first at [1, 1], by at most "
    )
    assert ("With every=1" in message) == (every > 1)


def test_a_training_without_a_difference_raises_no_alarm(cluster: Cluster):
    cluster.execute(
        "from torch.nn.parallel import DistributedDataParallel\n"
        f"{MODEL}\n"
        "ddp = DistributedDataParallel(model)\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n"
        "torch.manual_seed(rank)\n"
        "for _ in range(50):\n"
        "    optimizer.zero_grad()\n"
        "    ddp(torch.randn(8, 3)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    scheduler.step()\n"
        "    nbdist.check_replicas(model[0], optimizer, scheduler, every=5)\n"
    )
    with pytest.raises(CellError, match=r"step 1 or before: model\.1\.running_mean"):
        cluster.execute("nbdist.check_replicas(ddp.module)")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("nbdist.check_replicas()", "give it the model"),
        ("nbdist.check_replicas({})", "weakly referenced"),
        ("nbdist.check_replicas(model, every=0)", "every"),
        ("nbdist.check_replicas(model, (i for i in 'a'))", "cannot compare value"),
        (
            "nbdist.check_replicas(model, (i for i in 'a') if rank == 2 else 1)",
            "cannot compare the values of rank 2",
        ),
    ],
)
def test_a_wrong_call_is_an_error(cluster: Cluster, call: str, message: str):
    cluster.execute(MODEL)
    with pytest.raises(CellError) as caught:
        cluster.execute(call)
    texts = [failure.evalue for failure in caught.value.result.failures]
    assert len(texts) == 4
    assert [text for text in texts if message in text]


def test_an_option_of_a_module_that_differs_is_named(cluster: Cluster) -> None:
    cluster.execute(
        "model = torch.nn.Sequential(torch.nn.Dropout(0.9 - 0.8 * (rank > 0)))"
    )
    [options] = cluster.compare("model").differing
    assert options.name == "model.0 (options)"
    assert "p=0.9" in str(options)
