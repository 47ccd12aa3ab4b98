"""Values between the notebook and four ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from nbdist import CellError, Cluster, TransferError, UsageError
from nbdist.clusters.observer import Event, Quiet
from nbdist.ipc import flight_record
from nbdist.ipc.private_files import memory_folder

HUNDRED_MB = 100_000_000


def files(cluster: Cluster) -> list[Path]:
    """The files of this cluster in shared memory, apart from the flight records."""
    folder = memory_folder(cluster._live().run_dir)
    found = [path for path in folder.iterdir() if path.is_file()]
    return [path for path in found if path.suffix != flight_record.SUFFIX]


def test_pushed_values_are_on_the_ranks(cluster: Cluster):
    cluster.push(lr=0.1, names=["a", "b"])
    cluster["more"] = {"x": 1}
    assert cluster["(lr, names, more)"] == [(0.1, ["a", "b"], {"x": 1})] * 4


def test_values_are_copied_to_and_from_some_ranks(cluster: Cluster):
    cluster.push([1, 3], some=5)
    assert cluster["'some' in globals()"] == [False, True, False, True]
    assert cluster.pull("rank * 2", [3, 0]) == [0, 6]
    with pytest.raises(UsageError, match="is not one of 0-3"):
        cluster.pull("rank", [4])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64,
        torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
        torch.uint16,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)], ids=str)
def test_tensors_of_every_kind_make_the_round_trip(
    cluster: Cluster, dtype: torch.dtype, shape: tuple[int, ...]
):
    value = (torch.arange(15) % 2)[: int(np.prod(shape))].reshape(shape).to(dtype)
    cluster.push(value=value)
    for received in cluster["value"]:
        assert received.dtype == dtype
        assert received.shape == shape
        assert received.tolist() == value.tolist()


def test_parameters_arrays_and_nested_values_make_the_round_trip(cluster: Cluster):
    value = {
        "weight": torch.nn.Parameter(torch.ones(2, 2)),
        "strided": torch.arange(10.0)[::2],
        "array": np.arange(6).reshape(2, 3).T,
        "deep": [{"t": (torch.zeros(1, requires_grad=True),)}],
    }
    cluster.push(value=value)
    received = cluster["value"][2]
    assert isinstance(received["weight"], torch.nn.Parameter)
    assert torch.equal(received["strided"], value["strided"])
    np.testing.assert_array_equal(received["array"], value["array"])
    assert received["deep"][0]["t"][0].requires_grad
    kinds = cluster["[type(v).__name__ for v in value.values()]"]
    assert kinds == [["Parameter", "Tensor", "ndarray", "list"]] * 4


def test_a_hundred_megabytes_reach_all_ranks_and_come_back(cluster: Cluster):
    value = torch.arange(HUNDRED_MB // 8, dtype=torch.int64)
    cluster.push(value=value)
    assert torch.equal(cluster.pull("value", [3])[0], value)
    assert files(cluster) == []


def test_every_rank_has_a_copy_of_its_own(cluster: Cluster):
    mine = {"small": torch.zeros(3), "large": torch.zeros(2_000_000)}
    cluster.push(**mine)
    cluster.execute("small += rank\nlarge[:10] += rank")
    for name in mine:
        assert cluster[f"{name}[0].item()"] == [0.0, 1.0, 2.0, 3.0]
        mine[name] += 9
    assert cluster["large[5].item()"] == [0.0, 1.0, 2.0, 3.0]
    pulled = cluster["large"]
    pulled[0] += 100
    assert pulled[1][0] == 1.0
    assert cluster["large[0].item()"] == [0.0, 1.0, 2.0, 3.0]


def test_a_value_that_cannot_be_pushed_is_named_with_its_type(cluster: Cluster):
    with pytest.raises(TransferError, match=r"'lock' is a _thread\.lock"):
        cluster.push(fine=1, lock=threading.Lock())
    assert cluster["'fine' in globals()"] == [False] * 4


def test_a_value_that_cannot_be_pulled_is_named_with_its_rank_and_type(
    cluster: Cluster,
):
    cluster.execute("import threading\nthing = threading.Lock() if rank == 2 else 1")
    with pytest.raises(TransferError) as refused:
        _ = cluster["thing"]
    for part in ("'thing'", "rank 2", "_thread.lock"):
        assert part in str(refused.value)
    assert "rank 1" not in str(refused.value)


def test_a_variable_that_some_ranks_lack_is_an_error(cluster: Cluster):
    cluster.execute("if rank: there = torch.zeros(1_000_000)")
    with pytest.raises((TransferError, CellError), match="'there' is not defined"):
        _ = cluster["there"]
    assert files(cluster) == [], "what the other ranks had packed is discarded"


def test_a_value_that_cannot_be_unpickled_here_is_an_error(cluster: Cluster):
    cluster.execute(
        "class Homebound:\n"
        "    def __reduce__(self):\n"
        '        return eval, (\'__import__("os").environ["NBDIST_RUN_DIR"]\',)\n'
        "thing = Homebound()"
    )
    for action in (
        lambda: cluster["thing"],
        lambda: cluster["[thing, torch.zeros(1_000_000)]"],
        lambda: cluster.run(eval_there, "thing", timeout_s=20),
    ):
        with pytest.raises(TransferError, match="cannot be unpickled in this process"):
            action()
    assert files(cluster) == []


def eval_there(expression: str) -> object:
    from IPython import get_ipython

    return eval(expression, get_ipython().user_ns)


def test_functions_run_on_every_rank_with_their_arguments(cluster: Cluster):
    factor = 3

    def scaled(value: int, plus: int = 0) -> int:
        import nbdist

        return nbdist.rank() * value * factor + plus

    async def later(value: int) -> int:
        return value

    assert cluster.run(scaled, 2, plus=1) == [1, 7, 13, 19]
    assert cluster.run(scaled, 1, ranks=[2]) == [6]
    assert cluster.run(later, 4) == [4] * 4
    tensors = cluster.run(lambda t: t + 1, torch.zeros(2))
    assert [t.tolist() for t in tensors] == [[1.0, 1.0]] * 4


def test_the_error_of_a_function_names_its_ranks(cluster: Cluster):
    class Odd(BaseException):
        pass

    def wrong(kind: type[BaseException]) -> None:
        raise kind("wrong")

    for kind in (ValueError, Odd, SystemExit):
        with pytest.raises(CellError, match=f"{kind.__name__}: wrong"):
            cluster.run(wrong, kind, timeout_s=20)
    assert cluster["rank"] == [0, 1, 2, 3]


def test_a_result_or_argument_that_cannot_be_pickled_is_an_error(cluster: Cluster):
    with pytest.raises(TransferError, match=r"0-3: the result is a _thread\.lock"):
        cluster.run(threading.Lock)
    with pytest.raises(TransferError, match="an argument cannot be pickled"):
        cluster.run(print, threading.Lock())


def test_the_output_of_a_function_reaches_the_observer(cluster: Cluster):
    class Heard(Quiet):
        def __init__(self) -> None:
            self.text: dict[int, str] = {}

        def take(self, event: Event) -> None:
            if event.output is not None:
                text = self.text.get(event.rank, "") + event.output["content"]["text"]
                self.text[event.rank] = text

    heard = Heard()
    cluster.run(print, "said", observer=heard)
    assert heard.text == dict.fromkeys(range(4), "said\n")
