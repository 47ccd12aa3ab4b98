"""Status, variables and stacks of ranks that work, are blocked, or do not answer."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nbdist import CellError, Cluster
from nbdist.clusters import call_supervisor
from nbdist.clusters.observer import Event, Quiet
from nbdist.clusters.result import CellResult
from nbdist.session import Session
from nbdist.wire import format_ranks
from tests.clusters import flipped_bits
from tests.processes import HANG_S, stop, wait_until
from tests.seed import SEED

BUSY = "import time\nwhile True:\n    if rank: time.sleep(0.01)"
"""Rank 0 computes without a pause. The others leave the cores to it and the test."""


class AllPrinted(Quiet):
    """An observer that sets `event` when every rank has printed."""

    def __init__(self, ranks: int) -> None:
        self._left = ranks
        self.event = threading.Event()

    def take(self, event: Event) -> None:
        if event.output is not None:
            self._left -= 1
            if self._left <= 0:
                self.event.set()


@contextmanager
def running(cluster: Cluster, code: str, ranks: list[int]) -> Iterator[None]:
    """Run the cell in another thread, and interrupt it at the end of the block.

    The block begins when every rank has printed what the cell prints, or else 1.
    """
    all_printed = AllPrinted(len(ranks))

    begun = code if "print(1)" in code else f"print(1)\n{code}"

    def run() -> None:
        with pytest.raises(CellError):
            cluster.execute(begun, ranks, number=31, observer=all_printed)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert all_printed.event.wait(HANG_S)
        yield
    finally:
        cluster.interrupt()
        thread.join(HANG_S)
        assert not thread.is_alive()


@contextmanager
def ended_by(cluster: Cluster, code: str, end: str) -> Iterator[list[CellResult]]:
    """Run the cell in another thread, and end it by a look at the end of the block.

    The block begins when every rank has printed 1. The list has the result then.
    """
    all_printed = AllPrinted(len(cluster.ranks))
    results: list[CellResult] = []
    thread = threading.Thread(
        target=lambda: results.append(cluster.execute(code, observer=all_printed))
    )
    thread.start()
    try:
        assert all_printed.event.wait(HANG_S)
        yield results
    finally:
        cluster.look(end)
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert results


@pytest.fixture
def session(cluster: Cluster) -> Session:
    session = Session()
    session._cluster = cluster
    return session


def test_the_status_of_idle_ranks(cluster: Cluster, session: Session):
    lines = str(session.status_table()).splitlines()
    assert lines[0].split() == [
        "rank", "state", "device", "memory", "host", "pid", "transport",
    ]  # fmt: skip
    for info, line in zip(cluster.ranks, lines[2:6], strict=True):
        assert line.split()[:3] == [str(info.rank), "idle", info.device]
        assert str(info.pid) in line
        assert "MiB" in line
        assert info.host in line
    assert cluster.mpi in lines[-1]


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("while True: pass", "In[31] line 2"),
        ("import time; time.sleep(60)", "In[31] line 2"),
        ("nbdist.all_reduce(torch.ones(2))", "all_reduce"),
        ("nbdist.barrier()", "barrier"),
    ],
)
def test_status_and_stacks_show_the_position_of_busy_ranks(
    cluster: Cluster,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    place: str,
):
    # They are not released from the wait for rank 3, whose cell this is not.
    monkeypatch.setattr(call_supervisor, "STEADY_S", 3600.0)
    with running(cluster, f"if rank != 3:\n    {code}\nelse:\n    {code}", [0, 1, 2]):
        status = str(session.status_table()).splitlines()
        for line in status[2:5]:
            assert "busy: In[31] for" in line
            assert "line 3" in line or place in line
        assert "idle" in status[5]
        begin = "rank 0-2:\n  In[31] line 3, in <module>\n    "
        wait_until(  # a rank may be on the way into the barrier
            lambda: session.stacks_text().startswith(begin),
            HANG_S,
            session.stacks_text,
        )
        stacks = str(session.stacks_text())
        assert stacks.endswith("rank 3:\n  idle")
        full = str(session.stacks_text(everything=True))
        assert "nbdist/engine/cells.py" in full
        assert "idle" not in full
        states = cluster.status()
        assert states[0] is not None
        assert states[0]["what"] == "In[31]"
        assert states[0]["seconds"] > 0


def test_variables_are_shown_while_a_cell_runs(cluster: Cluster, session: Session):
    cluster.execute("same = torch.ones(2, 3)\nown = rank\nhidden_ = 1")
    with running(cluster, "while True: pass", [0, 1, 2, 3]):
        table = str(session.variables_table("*"))
    rows = [line.split() for line in str(table).splitlines()]
    device = cluster.ranks[0].device
    assert [r for r in rows if r[0] == "same"] == [
        ["same", "all", "Tensor", "(2,", "3)", "float32", device, "norm", "2.44949"]
    ]
    assert [r[1:4] for r in rows if r[0] == "own"] == [
        [str(rank), "int", str(rank)] for rank in range(4)
    ]
    assert not {"rank", "torch", "nbdist", "exit"} & {row[0] for row in rows}


def test_variables_are_filtered_by_a_pattern(cluster: Cluster, session: Session):
    cluster.execute("loss_a = 1\nloss_b = 2\nother = 3")
    table = str(session.variables_table("loss_*"))
    names = {line.split()[0] for line in table.splitlines()}
    assert {"loss_a", "loss_b"} <= names
    assert "other" not in names


def test_variables_of_every_kind_can_be_described(cluster: Cluster, session: Session):
    cluster.execute(
        "import numpy as np, warnings\n"
        "kept = warnings.catch_warnings()\n"
        "kept.__enter__()\n"
        "warnings.simplefilter('ignore')\n"
        "class Rude:\n"
        "    def __repr__(self): raise ValueError('no')\n"
        "rude = Rude()\n"
        "names = 'float8_e4m3fn float8_e5m2 bfloat16 float16 complex32 complex64 '\n"
        "names += 'bool uint8 uint16 uint32 uint64 int64'\n"
        "for name in names.split():\n"
        "    for size in (0, 1, 3):\n"
        "        globals()[f't_{name}_{size}'] = "
        "torch.zeros(size).to(getattr(torch, name))\n"
        "sparse = torch.eye(3).to_sparse()\n"
        "meta = torch.empty(2, device='meta')\n"
        "conj = torch.tensor([1+2j, 3]).conj()\n"
        "grad = torch.ones(2, requires_grad=True) * 2\n"
        "array = np.array([('a', 1)], dtype=[('n', 'U3'), ('v', 'i4')])\n"
        "dates = np.array(['2020-01-01'], 'M8[D]')\n"
        "objects = np.array([1, 'x'], dtype=object)\n"
        "model = torch.nn.Linear(2, 2)\n"
        "generator = (i for i in range(3))\n"
        "text = 'x' * 1000\n"
        "kept.__exit__(None, None, None)"
    )
    answers = cluster.variables()
    assert all(answer is not None for answer in answers.values())
    described = {variable.name: variable for variable in answers[0] or []}
    expected = {"rude", "sparse", "meta", "conj", "grad", "array", "dates", "objects"}
    assert (
        expected | {"model", "generator", "text", "t_float8_e5m2_3"} <= described.keys()
    )
    assert not [v for v in described.values() if "cannot be described" in v.value]
    assert "6 parameters" in str(session.variables_table("model"))


def test_a_value_that_cannot_be_printed_is_an_error(cluster: Cluster):
    cluster.execute(
        "class Odd:\n    def __repr__(self): raise LookupError('no text')\n"
        "odd, deep = Odd(), []\n"
        "for _ in range(100_000): deep = [deep]"
    )
    with pytest.raises(CellError, match="LookupError: no text"):
        cluster.inspect("odd")
    with pytest.raises(CellError, match="RecursionError"):
        cluster.inspect("deep")
    cluster.execute("strided = torch.arange(4.0)[::4]")
    (strided,) = cluster.variables("strided")[0] or []
    assert strided.value == "0"
    cluster.execute("del deep")


def test_each_tensor_has_a_text(cluster: Cluster):
    cluster.execute(
        "import warnings, numpy as np\n"
        "kept = warnings.catch_warnings()\n"
        "kept.__enter__()\n"
        "warnings.simplefilter('ignore')\n"
        "coo = (torch.eye(3) * 2).to_sparse()\n"
        "csr = torch.eye(2).to_sparse_csr()\n"
        "twice = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,))\n"
        "empty = torch.zeros(2, 2).to_sparse()\n"
        "quantized = torch.quantize_per_tensor("
        "torch.tensor([3.0, 4.0]), 1.0, 0, torch.qint8)\n"
        "meta = torch.empty(2, device='meta')\n"
        "bad = torch.tensor([1.0, float('nan'), float('inf'), float('nan')])\n"
        "small = bad.to(torch.float8_e5m2)\n"
        "array = bad.numpy()\n"
        "kept.__exit__(None, None, None)"
    )
    described = {v.name: v.value for v in cluster.variables()[0] or []}
    counts = "norm nan (2 nan, 1 inf)"
    expected = {
        "coo": "sparse, 3 values, norm 3.4641",
        "csr": "sparse, 2 values, norm 1.41421",
        "twice": "sparse, 2 values, some perhaps of one index",
        "empty": "sparse, 0 values, norm 0",
        "quantized": "norm 5",
        "meta": "no values",
        **dict.fromkeys(("bad", "small", "array"), counts),
    }
    assert {name: described[name] for name in expected} == expected


def rows_of(table: object) -> dict[str, list[str]]:
    """The ranks of each row of a table of variables, by name."""
    rows: dict[str, list[str]] = {}
    for line in str(table).splitlines()[2:]:
        name, *ranks = re.split(r"  +", line)[:2]
        if ranks:  # the line is no note
            rows.setdefault(name, []).extend(ranks)
    return rows


def test_one_flipped_bit_of_one_rank_is_found_in_100_of_100_places(
    cluster: Cluster, session: Session
):
    rng = random.Random(SEED)
    cluster.run(flipped_bits.make)
    equal = rows_of(session.variables_table("b_*"))
    assert set(map(tuple, equal.values())) == {("all",)}
    assert len(equal) == 12
    for flip in (rng.randrange(2**32) for _ in range(100)):
        rank = rng.randrange(4)
        others = format_ranks({0, 1, 2, 3} - {rank})
        (name,) = cluster.on([rank]).run(flipped_bits.flip, flip)
        found = rows_of(session.variables_table("b_*"))
        assert sorted(found.pop(name)) == sorted([str(rank), others]), (flip, name)
        assert found == {each: equal[each] for each in found}, (flip, name)
        cluster.on([rank]).run(flipped_bits.flip, flip)
    assert rows_of(session.variables_table("b_*")) == equal


def test_inspect_compares_values_and_not_their_texts(
    cluster: Cluster, session: Session
):
    cluster.execute(
        "import pandas as pd\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(3, 3)\n"
        "frame = pd.DataFrame({'a': [0.1] * 100})\n"
        "numbers = torch.full((2000,), 0.1)\n"
        "if rank == 2:\n"
        "    model.weight.data.view(torch.int32)[1, 1] ^= 1\n"
        "    frame.iloc[50, 0] += 1e-15\n"
        "    numbers.view(torch.int32)[1000] ^= 1"
    )
    for expression in ("model", "model.state_dict()", "frame", "numbers"):
        shown = session.inspect_table(expression)._repr_html_()
        ranks = re.findall(r"<tr><td[^>]*>([^<]*)<", shown)
        assert ranks == ["0-1,3", "2"], expression
    assert str(session.inspect_table("model.bias")).splitlines()[2][:3] == "0-3"


def test_inspect_answers_while_a_cell_runs(cluster: Cluster, session: Session):
    cluster.execute(
        "x = torch.tensor([1.0, float('nan'), 3.0])\nif rank != 2: own = [rank]\n"
        "import time\n"
        "class Slow:\n"
        "    def __repr__(self):\n"
        "        while True: time.sleep(0.01)\n"
        "slow = Slow()"
    )
    with running(cluster, BUSY, [0, 1, 2, 3]):
        x = str(session.inspect_table("x"))
        own = str(session.inspect_table("own"))
        slow = str(session.inspect_table("slow"))
    assert "0-3" in x
    assert "1 nan" in x
    assert "[3]" in own
    assert "NameError: name 'own' is not defined" in own
    assert "takes longer" in slow


HARMFUL = """
class Raises:
    def __repr__(self): raise ValueError("not shown")
class Displays:
    def _ipython_display_(self): print("displayed")
class Draws:
    def __repr__(self): return "drawn"
    def _repr_png_(self): raise ValueError("no image")
    def _repr_html_(self): raise ValueError("no HTML")
    def _repr_mimebundle_(self, **options): raise ValueError("no bundle")
raises, displays, draws = Raises(), Displays(), Draws()
"""


def test_a_look_leaves_the_output_and_the_end_of_the_running_cell_alone(
    cluster: Cluster, session: Session
):
    cluster.execute(HARMFUL)
    code = "print(1)\ngo = False\nwhile not go: pass\nprint(2)"
    with ended_by(cluster, code, "globals().update(go=True)") as result:
        raises = str(session.inspect_table("raises"))
        displays = str(session.inspect_table("displays"))
        draws = str(session.inspect_table("draws"))
        session.variables_table("[rd]*")
        session.diff_table("raises")
    assert "ValueError: not shown" in raises
    assert "__main__.Displays" in displays
    assert "drawn" in draws
    assert [result[0][rank].stdout for rank in range(4)] == ["1\n2\n"] * 4
    assert [result[0][rank].outputs for rank in range(4)] == [[]] * 4


def test_slow_looks_leave_no_threads(cluster: Cluster, session: Session):
    cluster.execute(
        "import threading, time\n"
        "class Slow:\n"
        "    def __repr__(self):\n"
        "        while True: time.sleep(0.01)\n"
        "slow = [Slow() for _ in range(5)]\n"
        "def lookers():\n"
        "    return [t for t in threading.enumerate() if t.name == 'nbdist-look']"
    )
    session.variables_table("slow")
    with running(cluster, BUSY, [0, 1, 2, 3]):
        session.inspect_table("slow[0]")
        session.variables_table("slow")
    cluster.execute("while len(lookers()) > 1: time.sleep(0.01)", timeout_s=HANG_S)


def test_inspect_keeps_the_form_of_tensors(cluster: Cluster, session: Session):
    cluster.execute(
        "x = torch.arange(6.0).reshape(2, 3)\nx[1, 2] = float('inf')\n"
        "whole = torch.arange(4)\nnothing = torch.empty(0)\nflag = torch.tensor(True)\n"
        "half = torch.ones(2).to(torch.float8_e5m2)\nparts = torch.ones(2) * 1j"
    )
    device = cluster.ranks[0].device
    end = ")" if device == "cpu" else f", device='{device}')"
    lines = str(session.inspect_table("x")).splitlines()
    assert lines[2] == "0-3    tensor([[0., 1., 2.],"
    assert lines[3] == f"               [3., 4., inf]]{end}"
    assert lines[4].strip() == f"float32 2×3 {device}  █ █ █ █ █"
    assert lines[5].strip() == "min 0, max 4, mean 2, norm 5.47723, 0 nan, 1 inf"
    assert "white-space:pre" in session.inspect_table("x")._repr_html_()
    whole = str(session.inspect_table("whole"))
    assert f"int64 4 {device}" in whole
    assert "min 0, max 3, mean 1.5" in whole
    for name in ("nothing", "flag", "half", "parts", "x.to_sparse()"):
        assert session.inspect_table(name)


OBJECTS = """
import dataclasses, threading
from torch.utils.data.distributed import DistributedSampler

@dataclasses.dataclass
class Config:
    rate: float
    name: str = "base"
    hidden: int = dataclasses.field(default=0, repr=False)

class Plain:
    def __init__(self):
        self.items, self.weight, self._own = [1, 2], torch.full((2, 2), 3.0), 1

class Pretty(Plain):
    def _repr_pretty_(self, printer, cycle):
        printer.text("as it likes")

class Locked(Plain):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

config = Config(0.1 * (1 + (rank == 2)))
sampler = DistributedSampler(range(10), 4, rank)
plain, pretty, locked, empty = Plain(), Pretty(), Locked(), object()
model = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
fresh = torch.optim.SGD(model.parameters(), lr=0.1)
model.weight.grad = torch.full((4, 3), 1.0 + (rank == 1))
optimizer.step()
"""


def test_inspect_has_a_row_for_each_attribute_of_an_object(
    cluster: Cluster, session: Session
):
    cluster.execute(OBJECTS)

    def shown(expression: str) -> str:
        return re.sub(r" +", " ", str(session.inspect_table(expression)))

    def check() -> None:
        config = shown("config")
        assert "0-1,3 Config\n rate 0.1 differs\n name 'base'\n" in config
        assert "2 Config\n rate 0.2 differs\n name 'base'" in config
        sampler = shown("sampler")
        for rank in range(4):
            assert f" rank {rank} differs\n" in sampler
        assert sampler.count(" num_replicas 4\n") == 4
        assert "items [1, 2]\n weight float32 2×2, norm 6" in shown("plain")
        assert "as it likes" in shown("pretty")
        assert "lock <_thread.lock object>" in shown("locked")
        assert "not compared" in shown("locked")
        assert "<object at 0x" in shown("empty")
        state = shown("optimizer")
        assert "parameter shape momentum_buffer\n" in state
        assert "model.weight 4×3 3.4641 differs\n" in state
        assert "model.weight 4×3 6.9282 differs" in state
        assert "parameter shape" not in shown("fresh")

    check()
    with running(cluster, "while True: pass", [0, 1, 2, 3]):
        check()


def test_inspect_has_figures_in_a_grid(cluster: Cluster, session: Session):
    cluster.execute(
        "import matplotlib.pyplot as plt\n"
        "figure, axes = plt.subplots(figsize=(2, 1))\n"
        "axes.plot([rank // 2, 1])\nplt.close(figure)"
    )
    html = session.inspect_table("figure")._repr_html_()
    assert "not compared" not in html
    assert re.findall(r"\[([-\d,]+)\]</div><img src=\"data:image/png", html) == [
        "0-1", "2-3"
    ]  # fmt: skip
    assert "[2-3] <Figure size 200x100" in str(session.inspect_table("figure"))
    some = session.inspect_table("figure if rank else None")._repr_html_()
    assert "<pre>None</pre>" in some
    with running(cluster, "while True: pass", [0, 1, 2, 3]):
        busy = str(session.inspect_table("figure"))
    assert "<Figure size 200x100" in busy


def test_inspect_has_a_row_for_each_parameter_of_a_module(
    cluster: Cluster, session: Session
):
    cluster.execute(
        "model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LazyLinear(2))\n"
        "for p in model[0].parameters(): p.data.fill_(2.0)\n"
        "model[0].weight.grad = torch.full((4, 3), 1.0 + (rank == 2))\n"
        "model[0].bias.requires_grad = False\n"
        "wide = torch.nn.ParameterList(torch.zeros(1) for _ in range(150))\n"
        "alone = torch.nn.ReLU()"
    )
    table = session.inspect_table("model[0]")
    ranks = re.findall(r"<tr><td[^>]*>([^<]*)<", table._repr_html_())
    assert ranks == ["0-1,3", "2"]  # the gradients differ
    text = re.sub(r" +", " ", str(table))
    assert "parameter shape norm norm of gradient" in text
    assert "weight 4×3 6.9282 3.4641 differs\n" in text
    assert "weight 4×3 6.9282 6.9282 differs\n" in text
    assert re.findall("bias 4 4 frozen.*", text) == ["bias 4 4 frozen"] * 2
    whole = re.sub(r" +", " ", str(session.inspect_table("model")))
    assert "1.weight not known yet\n" in whole
    assert "the first 100 of 150 parameters:" in str(session.inspect_table("wide"))
    assert "parameter" not in str(session.inspect_table("alone"))
    with running(cluster, "while True: pass", [0, 1, 2, 3]):
        busy = str(session.inspect_table("model[0]"))
    assert busy == str(table)


def test_what_cannot_be_compared_says_so(cluster: Cluster, session: Session):
    cluster.execute("pieces = (i for i in range(3))\nlist_of = [1, lambda: 1]")
    shown = str(session.variables_table("pieces"))
    assert "all, not compared" in shown
    assert "pieces is not compared: cannot pickle 'generator' object" in shown
    shown = str(session.inspect_table("list_of"))
    assert "not compared: list_of[1]: it is defined in a cell" in shown


def test_one_slow_variable_costs_the_others_nothing(cluster: Cluster, session: Session):
    cluster.execute(
        "import time\n"
        "class Slow:\n"
        "    def __repr__(self):\n"
        "        while True: time.sleep(0.01)\n"
        "class Slower(Slow):\n"
        "    def __reduce__(self):\n"
        "        while True: pass\n"
        "a_slow, b_slow, c = Slow(), Slower(), [1.0]\n"
        "d_large = torch.ones(2_000_000)\n"
    )
    session.variables_table("c")  # the ranks' first look starts a thread
    table = session.variables_table("*")
    rows = rows_of(table)
    assert rows["c"] == rows["d_large"] == rows["a_slow"] == ["all"], table
    assert rows["b_slow"] == ["all, not compared"]
    assert "b_slow is not compared: it takes longer than" in str(table)
    assert "<repr takes longer than" in str(table)
    with running(cluster, BUSY, [0, 1, 2, 3]):
        table = session.variables_table("*")
    assert rows_of(table)["c"] == ["all"], table  # the others had to share two cores
    cluster.execute("del a_slow, b_slow, d_large")


def test_a_look_keeps_nothing_alive(cluster: Cluster, session: Session):
    cluster.execute(
        "import gc, weakref\nkept = torch.ones(10)\nmodel = torch.nn.Linear(2, 2)\n"
        "gone = weakref.ref(kept), weakref.ref(model)"
    )
    session.variables_table("*")
    session.inspect_table("model")
    session.inspect_table("kept")
    cluster.execute("del kept, model\ngc.collect()")
    assert cluster["[each() is None for each in gone]"] == [[True, True]] * 4


def test_a_look_loads_no_torch_in_the_notebook(cluster: Cluster):
    cluster.execute("x = torch.ones(2)")
    assert {type(v).__module__ for v in cluster.variables("x")[0] or []} == {
        "nbdist.wire"
    }


def test_inspect_shows_the_value_of_each_rank(cluster: Cluster, session: Session):
    shown = str(session.inspect_table("'even' if rank % 2 == 0 else 'odd'"))
    lines = [line.split() for line in shown.splitlines()[2:4]]
    assert lines == [["0,2", "'even'"], ["1,3", "'odd'"]]
    with pytest.raises(CellError, match="nothing_there"):
        session.inspect_table("nothing_there")


def test_a_rank_that_does_not_answer_is_named_in_time(
    cluster: Cluster, session: Session
):
    pid = cluster.ranks[1].pid
    stop(pid)
    try:
        status = str(session.status_table()).splitlines()
        assert "does not answer" in status[3]
        assert "idle" in status[2]
        assert "does not answer" in str(session.stacks_text())
        variables = str(session.variables_table("*"))
        assert "rank 1 does not answer" in str(variables)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: cluster.status()[1] is not None, HANG_S)
    assert cluster["rank"] == [0, 1, 2, 3]


def test_busy_ranks_are_compared_without_a_measurement(
    cluster: Cluster, session: Session
):
    cluster.execute(
        "import time\ntorch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "class Slow:\n    def __reduce__(self): time.sleep(60)\n"
        "slow = Slow()\n"
        "if rank == 2:\n    with torch.no_grad(): model[0].weight[1, 2] += 0.5\n"
        "numbers = {'epoch': 3, 'loss': 0.5 + (rank == 1)}"
    )
    with running(cluster, BUSY, [0, 3]):
        (weight,) = cluster.compare("model").differing
        assert (weight.name, weight.count) == ("model.0.weight", None)
        assert weight.groups == ((0, 1, 3), (2,))
        (loss,) = cluster.compare("numbers").differing
        assert loss.groups == ((0, 2, 3), (1,))
        assert loss.difference == "0.5 on rank 0,2-3, 1.5 on rank 1"
        assert not cluster.compare("optimizer.defaults").differing
        table = str(session.diff_table("model"))
        assert "1 of 10 leaves differ. First, model.0.weight differs on rank 2" in table
        assert "were not measured" in table
        missing = cluster.compare("missing")
        assert missing.errors.keys() == {0, 1, 2, 3}
        assert "'missing' is not defined" in missing.errors[0]
        assert "longer than 5 s" in cluster.compare("slow").errors[3]
    (weight,) = cluster.compare("model").differing
    assert weight.index == (1, 2)


def test_completions_come_from_rank_0(cluster: Cluster, session: Session):
    cluster.execute("weights = {'alpha': 1}\nwidth = 3")
    assert "weights" in session.complete("wei", "x = wei", 7)
    assert "width" in session.complete("wid", "wid", 3)
    assert any("zeros_like" in m for m in session.complete("torch.zer", "torch.zer", 9))
    with running(cluster, "while True: pass", [0, 1, 2, 3]):
        assert "weights" in session.complete("weig", "weig", 4)


def test_a_description_comes_from_rank_0(cluster: Cluster, session: Session):
    cluster.execute("def scaled(factor=3):\n    'On rank 0.'")
    with running(cluster, "while True: pass", [0, 1, 2, 3]):
        assert "On rank 0." in session.describe("scaled", 0)["text/plain"]
        assert session.describe("nothing_there", 0) == {}
    stop(cluster.ranks[0].pid)
    try:
        assert session.describe("scaled", 0) == {}
    finally:
        os.kill(cluster.ranks[0].pid, signal.SIGCONT)
    wait_until(lambda: cluster.status()[0] is not None, HANG_S)


def test_logged_values_arrive_while_the_cell_runs(cluster: Cluster):
    # Other tests on this cluster do not log this metric.
    code = f"nbdist.log(arrival=rank + 0.5)\n{BUSY}"
    with running(cluster, code, [0, 1, 2, 3]):
        wait_until(
            lambda: len(last_arrivals(cluster)) == 4,
            HANG_S,
            lambda: str(last_arrivals(cluster)),
        )
    assert last_arrivals(cluster) == {rank: rank + 0.5 for rank in range(4)}


def last_arrivals(cluster: Cluster) -> dict[int, float]:
    if "arrival" not in cluster.collector.metrics:
        return {}
    history = cluster.collector.history("arrival").items()
    return {rank: values[-1] for rank, (_steps, values) in history if values}
