"""What outlives a cell is as good as new after a failure or an interrupt anywhere."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from nbdist import CellError, Cluster
from tests.seed import SEED
from tests.training import interrupted_cases

DEADLINE_S = 60.0
IMPORT_DEADLINE_S = 240.0  # of Keras, on a busy machine


def begin(cluster: Cluster, name: str) -> tuple[torch.Tensor, list[int]]:
    """Make a case on all ranks; its result, and the lines that each rank runs."""
    cluster.execute(
        "from tests.training import interrupted_cases as cases\n"
        f"case = cases.{name}()\n"
        "with cases.ended(None, '') as lines:\n"
        "    result = case.train()\n",
        timeout_s=IMPORT_DEADLINE_S,
    )
    return agreed(cluster), [lines for [lines] in cluster["lines"]]


def agreed(cluster: Cluster) -> torch.Tensor:
    """The result of the last training, which is equal on all ranks."""
    first, *others = cluster["result"]
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-9, atol=1e-12)
    return first


def end_anywhere(
    cluster: Cluster, lines: list[int], draw: random.Random, at: int | None = None
) -> str:
    """End a training on one rank or all of them; what was drawn."""
    kind = draw.choice(["error", "interrupt"])
    ranks = draw.choice([[draw.randrange(4)], list(range(4))])
    after = {r: at or draw.randint(1, max(1, lines[r])) for r in ranks}
    # A cell that catches its own error has completed. One that was interrupted has not.
    how = "caught" if kind == "interrupt" and draw.random() < 0.4 else "alone"
    body = f"    with cases.ended({after}.get(rank), {kind!r}):\n        case.train()\n"
    caught = "except KeyboardInterrupt: pass\n"
    code = f"try:\n{body}" + (caught if how == "caught" else "finally: pass\n")
    with contextlib.suppress(CellError):
        cluster.execute(code, timeout_s=DEADLINE_S)
    return f"{kind} {how} at {after}"


def check(cluster: Cluster, name: str, draw: random.Random, times: int) -> None:
    expected, lines = begin(cluster, name)
    is_repeated = cluster["case.is_repeated"][0]
    for _ in range(times):
        drawn = f"seed {SEED}, {name}: {end_anywhere(cluster, lines, draw)}"
        print(drawn)
        try:
            again = "case.reset()\nresult = case.train()"
            cluster.execute(again, timeout_s=DEADLINE_S)
        except CellError as error:
            pytest.fail(f"{drawn}: {error}")
        result = agreed(cluster)
        if is_repeated:
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", interrupted_cases.CASES)
def test_a_training_that_was_ended_anywhere_trains_again_as_before(
    cluster: Cluster, name: str
) -> None:
    check(cluster, name, random.Random(f"{SEED} {name}"), times=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*interrupted_cases.CASES, "in_keras"])
def test_a_training_that_was_ended_often_trains_again_as_before(
    cluster: Cluster, name: str
) -> None:
    check(cluster, name, random.Random(f"{SEED} {name} often"), times=30)


INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
HALF_A_STEP = """
case.reset()
case.optimizer.zero_grad()
case.model(next(cases.batches())).square().mean().backward()
"""
AGAIN = "case.reset()\nresult = case.train()"


def test_a_step_that_was_interrupted_after_backward_is_forgotten(
    cluster: Cluster,
) -> None:
    expected, _ = begin(cluster, "plain")
    with pytest.raises(CellError):
        cluster.execute(HALF_A_STEP + INTERRUPT, timeout_s=DEADLINE_S)
    cluster.execute(AGAIN, timeout_s=DEADLINE_S)
    torch.testing.assert_close(agreed(cluster), expected)


def test_a_step_is_forgotten_also_if_the_cell_has_caught_the_interrupt(
    cluster: Cluster,
) -> None:
    expected, _ = begin(cluster, "plain")
    caught = f"{HALF_A_STEP}\ntry:\n    {INTERRUPT}\n    [0] * 9\n"
    cluster.execute(f"{caught}except KeyboardInterrupt: pass", timeout_s=DEADLINE_S)
    cluster.execute(AGAIN, timeout_s=DEADLINE_S)
    torch.testing.assert_close(agreed(cluster), expected)


def test_a_failure_on_one_rank_makes_the_others_forget_their_step(
    cluster: Cluster,
) -> None:
    expected, _ = begin(cluster, "two_passes")
    one = f"if rank == 1: raise ValueError\n{HALF_A_STEP}"
    with pytest.raises(CellError):
        cluster.execute(one, timeout_s=DEADLINE_S)
    cluster.execute(AGAIN, timeout_s=DEADLINE_S)
    torch.testing.assert_close(agreed(cluster), expected)


def test_a_commit_that_one_rank_has_not_completed_is_completed(
    cluster: Cluster,
) -> None:
    begin(cluster, "committed")
    with pytest.raises(CellError):
        cluster.execute(
            "def interrupted():\n    raise KeyboardInterrupt\n"
            "if rank == 1: vars(case.state)['_complete'] = interrupted\n"
            "case.state.step = 100\n"
            "try: case.state.commit()\n"
            "finally: vars(case.state).pop('_complete', None)",
            timeout_s=DEADLINE_S,
        )
    cluster.execute("case.state.restore()", timeout_s=DEADLINE_S)
    assert cluster["case.state.step, case.state.commits"] == [(100, 4)] * 4


def test_calls_without_a_name_match_after_a_rank_has_made_more_of_them(
    cluster: Cluster,
) -> None:
    begin(cluster, "plain")
    more = "if rank == 0: cases.hvd.allreduce_async(torch.ones(2))\nraise ValueError"
    with pytest.raises(CellError):
        cluster.execute(more, timeout_s=DEADLINE_S)
    cluster.execute(
        "result = cases.hvd.allreduce(torch.ones(2) * rank)", timeout_s=DEADLINE_S
    )
    assert agreed(cluster).tolist() == [1.5, 1.5]


def test_ranks_that_were_interrupted_in_different_steps_load_the_same_batches(
    cluster: Cluster,
) -> None:
    begin(cluster, "loader")
    with pytest.raises(CellError):
        cluster.execute(
            "for number, _ in enumerate(case.loader):\n"
            "    if number == 2 + rank: raise KeyboardInterrupt",
            timeout_s=DEADLINE_S,
        )
    cluster.execute("result = case.train()", timeout_s=DEADLINE_S)
    # 9 steps of 12 samples, of which rank 0 has begun the third
    assert agreed(cluster).tolist() == [6, 2, 0]


INTERRUPTED_AS_IT_LOCKS = """
import sys, threading

def trace(frame, event, _):
    if frame.f_code is threading.Condition.__enter__.__code__:
        if event == "return":
            raise KeyboardInterrupt
        return trace

if rank == 1:
    sys.settrace(trace)
try:
    cases.hvd.synchronize(cases.hvd.allreduce_async(torch.ones(2)))
finally:
    sys.settrace(None)
raise ValueError
"""


def test_an_interrupt_as_a_lock_is_taken_does_not_leave_it_taken(
    cluster: Cluster,
) -> None:
    expected, _ = begin(cluster, "plain")
    with pytest.raises(CellError):
        cluster.execute(INTERRUPTED_AS_IT_LOCKS, timeout_s=DEADLINE_S)
    cluster.execute(AGAIN, timeout_s=DEADLINE_S)
    torch.testing.assert_close(agreed(cluster), expected)
