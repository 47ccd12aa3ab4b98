"""Calls in the background, in coroutines, and on some ranks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, wait

import pytest

from nbdist import CellError, Cluster
from nbdist.clusters.futures import BackgroundCalls, CallFuture
from nbdist.errors import NotRunning, TransferError, UsageError
from tests.processes import wait_until

DEADLINE_S = 60.0


def my_rank() -> int:
    import nbdist

    return nbdist.rank()


async def my_rank_later() -> int:
    await asyncio.sleep(0)
    return my_rank()


def note(word: str) -> None:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None
    shell.user_ns.setdefault("words", []).append(word)


def fail_on(rank: int) -> int:
    if my_rank() == rank:
        raise ValueError("not here")
    return my_rank()


def wait_for_ever() -> None:
    threading.Event().wait()


def is_busy(cluster: Cluster) -> bool:
    states = cluster.status()
    return all(state and state["what"] == "wait_for_ever" for state in states.values())


def test_the_future_of_a_call_has_its_results(cluster: Cluster):
    future = cluster.run(my_rank, wait=False)
    assert future.result(DEADLINE_S) == [0, 1, 2, 3]
    assert cluster.run(my_rank_later, ranks=[2, 1], wait=False).result() == [1, 2]


def test_calls_run_in_the_order_in_which_they_were_made(cluster: Cluster):
    futures = [cluster.run(note, word, wait=False) for word in "abc"]
    cluster.execute("words.append('d')")
    assert all(future.done() for future in futures)
    assert cluster["words"] == [list("abcd")] * 4


def test_the_future_has_the_error(cluster: Cluster):
    failed = cluster.run(fail_on, 2, wait=False)
    after = cluster.run(fail_on, -1, wait=False)
    done, _ = wait([failed, after], DEADLINE_S)
    assert done == {failed, after}
    with pytest.raises(CellError, match="not here"):
        failed.result()
    assert after.result() == [0, 1, 2, 3]


def test_an_argument_that_cannot_be_pickled_raises_at_once(cluster: Cluster):
    with pytest.raises(TransferError, match="lock"):
        cluster.run(print, threading.Lock(), wait=False)


def test_a_running_call_is_ended_by_interrupt_and_a_waiting_call_by_cancel(
    cluster: Cluster,
):
    running = cluster.run(wait_for_ever, wait=False)
    waits = cluster.run(my_rank, wait=False)
    wait_until(lambda: is_busy(cluster), DEADLINE_S)
    assert not running.cancel()
    assert waits.cancel()
    cluster.interrupt()
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        running.result(DEADLINE_S)
    with pytest.raises(CancelledError):
        waits.result()
    assert cluster.run(my_rank) == [0, 1, 2, 3]


def test_the_event_loop_runs_while_a_call_is_awaited(cluster: Cluster):
    async def both() -> tuple[list[int], list[int]]:
        first = cluster.run(wait_for_ever, wait=False)
        second = cluster.run(my_rank, wait=False)
        wait_until(lambda: is_busy(cluster), DEADLINE_S)
        asyncio.get_running_loop().call_later(0.01, cluster.interrupt)
        with pytest.raises(CellError, match="KeyboardInterrupt"):
            await first
        return await second, await asyncio.wait_for(
            cluster.run(my_rank, wait=False), 60
        )

    assert asyncio.run(both()) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_a_selection_of_ranks_has_the_same_calls(cluster: Cluster):
    some = cluster.on([3, 1])
    assert some.ranks == (1, 3)
    assert some.run(my_rank) == [1, 3]
    assert some.run(my_rank, wait=False).result(DEADLINE_S) == [1, 3]
    some.push(x=[5])
    some["y"] = 6
    some.execute("x.append(rank)")
    assert some["x"] == some.pull("x") == [[5, 1], [5, 3]]
    assert some.inspect("y") == {1: "6", 3: "6"}
    assert cluster.pull("'x' in globals()") == [False, True, False, True]
    assert cluster.on(2).run(my_rank) == [2]
    with pytest.raises(UsageError, match="rank 4 is not one of 0-3"):
        cluster.on([0, 4]).run(my_rank)


def test_a_cluster_in_a_coroutine_stops_at_the_end_of_its_block():
    async def work() -> CallFuture[list[None]]:
        async with Cluster(2, device="cpu") as cluster:
            assert await cluster.run(my_rank, wait=False) == [0, 1]
            pending = cluster.run(wait_for_ever, wait=False)
            wait_until(lambda: is_busy(cluster), DEADLINE_S)
        assert not cluster.running
        return pending

    assert isinstance(asyncio.run(work()).exception(DEADLINE_S), NotRunning)


def test_a_start_that_is_cancelled_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch,
):
    cluster = Cluster(1, device="cpu")
    entered, go_on, stopped = threading.Event(), threading.Event(), threading.Event()

    def start() -> Cluster:
        entered.set()
        assert go_on.wait(DEADLINE_S)
        return cluster

    monkeypatch.setattr(cluster, "start", start)
    monkeypatch.setattr(cluster, "stop", stopped.set)

    async def cut_short() -> None:
        async def enter() -> None:
            async with cluster:
                pytest.fail("the start was cancelled")

        task = asyncio.create_task(enter())
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cut_short())
    assert stopped.is_set()


def test_a_background_call_can_make_another_call():
    calls = BackgroundCalls()

    def outer() -> str:
        calls.settle()  # as a call does that repairs the cluster
        return threading.current_thread().name

    future = calls.submit(outer)
    assert future.result(DEADLINE_S) == "nbdist-calls"
    calls.settle()
    assert not calls.busy


def test_the_thread_ends_with_the_last_call():
    calls = BackgroundCalls()
    for _ in range(2):
        thread = calls.submit(threading.current_thread).result(DEADLINE_S)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
