"""Looks at variables that cannot be read, block, raise, or are very large."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbdist import CellError, CellTimeout, Cluster, NbdistError
from nbdist.wire import Variable
from tests.clusters import odd_values
from tests.clusters.test_looking import ended_by
from tests.seed import SEED

HOSTILE = """
import os, threading, weakref, numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode
path = f'{folder}/cut-{rank}.npy'
np.save(path, np.ones(100_000))
cut = np.load(path, mmap_mode='r')
cut_tensor = torch.from_file(path, shared=True, size=100_000)
cut_list = [cut]
class Holder:
    def __init__(self, data): self.data, self.lock = data, threading.Lock()
    def __repr__(self): return f'a sum of {self.data.sum()}'
holder = Holder(cut)
os.truncate(path, 4096)
fake = FakeTensorMode().from_tensor(torch.ones(3))
with FakeTensorMode(): fake_model = torch.nn.Linear(1000, 1000)
freed = torch.ones(1000); freed.untyped_storage().resize_(0)
from torch.distributed.fsdp import fully_shard
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
fully_shard(net[0]); fully_shard(net)
state = []
hook = net[0].register_forward_pre_hook(lambda m, i: state.append(m.weight))
net(torch.ones(2, 8))
gathered = state[0]
class Handle: pass
handle = Handle()
handle.cut, handle.number = cut, 5
class Exits:
    @property
    def __class__(self): raise SystemExit('class')
    def __repr__(self): raise KeyboardInterrupt
    def __reduce_ex__(self, protocol): raise SystemExit('reduce')
exits = Exits()
class Blocks:
    @property
    def __class__(self): __import__('time').sleep(60)
blocks = Blocks()
class Target: pass
target = Target()
proxy = weakref.proxy(target)
del target
huge_int = 10**5000
deep = []
for _ in range(5000): deep = [deep]
plain = 5
"""


@contextmanager
def kept_alive(cluster: Cluster, replaced: int | None = None) -> Iterator[None]:
    """Check that the ranks, but for one, are those of before, and work."""
    before = {i.rank: i.pid for i in cluster.ranks if i.rank != replaced}
    yield
    assert cluster.died() == {}
    assert {i.rank: i.pid for i in cluster.ranks if i.rank != replaced} == before
    cluster.execute("t = torch.ones(2)\nnbdist.all_reduce(t)")
    assert [t.tolist() for t in cluster["t"]] == [[4.0, 4.0]] * 4


def described(cluster: Cluster, pattern: str = "*") -> dict[str, Variable]:
    """Rank 0's variables. Every rank must have answered."""
    answers = cluster.variables(pattern)
    assert all(answer is not None for answer in answers.values()), answers
    return {each.name: each for each in answers[0] or []}


@pytest.fixture
def hostile(cluster: Cluster, tmp_path: Path) -> Cluster:
    cluster.execute(f"folder = {str(tmp_path)!r}\n{HOSTILE}")
    return cluster


def test_a_table_shows_what_cannot_be_read_in_its_rows(hostile: Cluster):
    with kept_alive(hostile):
        rows = described(hostile)
    assert rows["plain"].value == "5"
    for name in ("cut", "cut_tensor", "cut_list", "holder"):
        assert "cannot be shown" in rows[name].value, rows[name]
    assert "has become shorter" in rows["cut"].uncompared
    for name in ("freed", "gathered"):
        assert "it was freed" in rows[name].uncompared, rows[name]
    assert rows["handle"].value == "<__main__.Handle object>"
    assert "has become shorter" in rows["handle"].uncompared
    assert rows["fake_model"].kind == "Linear"
    assert rows["exits"].kind == "Exits"
    assert rows["proxy"].uncompared
    assert rows["huge_int"].value == "an integer of 16,610 bits"
    assert rows["huge_int"].uncompared == ""


NAMES = "cut cut_tensor cut_list holder fake fake_model freed gathered state exits"
NAMES += " proxy huge_int deep cut[90_000] cut_tensor[90_000]"


def test_no_look_at_one_value_ends_a_rank(hostile: Cluster):
    with kept_alive(hostile):
        for name in NAMES.split():
            for look in (hostile.inspect, hostile.compare, hostile.pull):
                with contextlib.suppress(NbdistError):
                    look(name)
            assert hostile.died() == {}, name


RUDE = """
import numpy as np

def refuses(*_):
    raise TypeError("no")

class Text(str):
    __reduce__ = __reduce_ex__ = refuses

class Int(int):
    __reduce__ = __reduce_ex__ = refuses

class Shaped(np.ndarray):
    __reduce__ = __reduce_ex__ = refuses

class Numbered(np.ndarray): pass

class Pictured:
    def _repr_png_(self): return refuses
    def __repr__(self): return Text("pictured")

rude_shaped, rude_numbered = (np.ones(3).view(kind) for kind in (Shaped, Numbered))
Shaped.shape = refuses
Numbered.shape = property(lambda self: [Int(3)])
rude_pictured, rude_text = Pictured(), Text("text")
"""
"""Values of which a part cannot be pickled."""


def test_a_look_sends_no_object_of_the_users_classes(cluster: Cluster):
    cluster.execute(RUDE)
    with kept_alive(cluster):
        rows = described(cluster, "rude_*")
        assert rows["rude_numbered"].shape == (3,)
        assert rows["rude_pictured"].value == "pictured"
        assert rows["rude_shaped"].shape is None
        for name in rows:
            with contextlib.suppress(NbdistError):  # numpy's repr wants a shape
                cluster.inspect(name)


def test_an_answer_that_cannot_be_pickled_is_an_error(cluster: Cluster):
    """No look makes one, but the rank must not end if one does."""
    replace = (
        "from nbdist.engine import inspection, rpc_server\n"
        "was = inspection.variables\n"
        "lock = __import__('threading').Lock()\n"
        "inspection.variables = lambda *_: [lock]\n"
        "rpc_server.function_of.cache_clear()"
    )
    restore = "inspection.variables = was; rpc_server.function_of.cache_clear()"
    with kept_alive(cluster):
        cluster.execute(replace, ranks=[1])
        answers = cluster.variables("x")
        cluster.execute(restore, ranks=[1])
        assert answers[1] is None
        assert cluster.variables("x")[1] == []


def test_an_object_shows_the_attributes_that_can_be_read(hostile: Cluster):
    text = hostile.inspect("handle")[0]
    assert "cut     <cannot be shown: its file " in text
    assert "number  5" in text


def test_check_replicas_refuses_what_cannot_be_read(hostile: Cluster):
    hostile.execute(
        "holders = [torch.nn.Module() for _ in range(2)]\n"
        "holders[0].register_buffer('data', cut_tensor)\n"
        "holders[1].register_buffer('data', freed)\n"
        "said = []\n"
        "for each in (*holders, fake_model):\n"
        "    try: nbdist.check_replicas(each)\n"
        "    except nbdist.UsageError as error: said.append(str(error))"
    )
    (shorter, was_freed, fake), *_ = hostile["said"]
    assert "has become shorter" in shorter
    assert "it was freed" in was_freed
    assert "no content of its own" in fake


def test_a_rank_with_unreadable_memory_survives_the_replacement_of_another(
    hostile: Cluster,
):
    notes: list[str] = []
    hostile.on_note = notes.append
    before = {info.rank: info.pid for info in hostile.ranks}
    hostile.replace([1])
    after = {info.rank: info.pid for info in hostile.ranks}
    assert {rank for rank in after if after[rank] != before[rank]} == {1}
    assert hostile.pull("plain", [1]) == [5]
    told = "\n".join(notes)
    for name in ("cut", "cut_tensor", "freed", "holder"):
        assert name in told, told


def test_a_look_adds_no_items_and_draws_no_random_numbers(cluster: Cluster):
    cluster.execute(
        "import collections, random, numpy as np\n"
        "counts = collections.defaultdict(list, a=[1])\n"
        "class Noisy:\n"
        "    def __getitem__(self, index):\n"
        "        return random.random() + np.random.rand() + torch.rand(1).item()\n"
        "noisy = Noisy()\n"
        "def states():\n"
        "    key = np.random.get_state()\n"
        "    return random.getstate(), key[1].tolist(), key[2], "
        "torch.get_rng_state().tolist()\n"
        "before = states()"
    )
    with pytest.raises(CellError, match="'new', which a look does not add"):
        cluster.inspect("counts['new']")
    assert cluster.inspect("counts['a']")[0] == "[1]"
    cluster.inspect("noisy[0]")
    cluster.compare("noisy[0]")
    assert cluster["len(counts), states() == before"] == [(1, True)] * 4


# -- bounds ----------------------------------------------------------------------------

PEAK = """
def peak():
    status = open('/proc/self/status').read()
    return int(status.split('VmHWM:')[1].split()[0]) << 10
def begin():
    global begun
    open('/proc/self/clear_refs', 'w').write('5')
    begun = peak()
begin()
"""


@pytest.mark.parametrize(
    "make",
    [
        "torch.ones(256 << 20, dtype=torch.uint8)",
        "torch.ones(32 << 20, 8, dtype=torch.uint8).t()",
        "__import__('numpy').ones(256 << 20, 'u1')",
        "torch.ones(1).expand(10**9)",
    ],
)
def test_a_look_takes_little_memory(cluster: Cluster, make: str):
    cluster.execute(f"large = {make} if rank == 0 else None\n{PEAK}")
    described(cluster, "large")
    assert cluster["peak() - begun"][0] < 200 << 20
    cluster.execute("begin()")
    with contextlib.suppress(CellTimeout):
        cluster.inspect("large", [0], timeout_s=2.0)
    assert cluster["peak() - begun"][0] < 200 << 20


def test_an_expanded_tensor_is_read_as_it_lies_in_memory(cluster: Cluster):
    cluster.execute("wide = torch.full((1, 2), 3.0).expand(10**9, 2)")
    assert described(cluster, "wide")["wide"].value == "norm 134164"


def test_a_large_value_is_sampled_and_the_table_says_so(cluster: Cluster):
    cluster.execute(
        "import nbdist.engine.value_numbers as numbers\n"
        "before, numbers.SAMPLE_BYTES = numbers.SAMPLE_BYTES, 4 << 20\n"
        "large = torch.ones(4 << 20)"
    )
    try:
        assert described(cluster, "large")["large"].value == "norm 2048, from a sample"
        assert "from a sample" in cluster.inspect("large")[0]
    finally:
        cluster.execute("numbers.SAMPLE_BYTES = before")


def test_the_statistics_agree_with_torch(cluster: Cluster):
    cluster.execute(
        "torch.manual_seed(5)\n"
        "many = torch.randn(700, 1100).t()[::3]\n"
        "many[5, 5], many[6, 6] = float('nan'), float('inf')\n"
        "good = many[many.isfinite()]\n"
        "said = (f'min {good.min():.6g}, max {good.max():.6g}, mean '\n"
        "        f'{good.mean(dtype=torch.float64):.6g}, norm '\n"
        "        f'{good.double().norm():.6g}, 1 nan, 1 inf')"
    )
    assert cluster["said"][0] in cluster.inspect("many")[0]


# -- any value -------------------------------------------------------------------------


def define(cluster: Cluster, seeds: list[int]) -> None:
    """Put a value of each seed on every rank, and check that the table has them."""
    cluster.execute(
        "from tests.clusters import odd_values\n"
        f"odd_values.define(globals(), {seeds!r})"
    )
    rows = described(cluster, "v_*")
    is_shown = f"[odd_values.is_shown(globals()[f'v_{{s}}']) for s in {seeds!r}]"
    shown = [s for s, is_so in zip(seeds, cluster[is_shown][0], strict=True) if is_so]
    assert sorted(rows) == sorted(f"v_{seed}" for seed in shown)


def test_random_values_do_no_harm(cluster: Cluster):
    seeds = list(range(SEED, SEED + 100))
    with kept_alive(cluster):
        define(cluster, seeds)
        cluster.execute("odd_values.remove_files()")


def test_looks_at_random_values_do_not_change_how_a_cell_ends(cluster: Cluster):
    seeds = list(range(SEED, SEED + 40))
    code = (
        "import time\nprint(1)\ngo = False\n"
        "while not go:\n    if rank: time.sleep(0.01)\nprint(2)"
    )
    with kept_alive(cluster):
        define(cluster, seeds)
        with ended_by(cluster, code, "globals().update(go=True)") as results:
            for seed in seeds:
                cluster.look(f"v_{seed}")
                cluster.compare(f"v_{seed}")
            cluster.variables("v_*")
        cluster.execute("odd_values.remove_files()")
    (result,) = results
    assert [result[rank].stdout for rank in range(4)] == ["1\n2\n"] * 4
    assert [result[rank].outputs for rank in range(4)] == [[]] * 4


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_thousand_random_values_do_no_harm(cluster: Cluster):
    for begin in range(SEED, SEED + 2000, 50):
        seeds = list(range(begin, begin + 50))
        with kept_alive(cluster, replaced=1):
            define(cluster, seeds)
            for seed in seeds:
                for look in (cluster.inspect, cluster.compare, cluster.pull):
                    with contextlib.suppress(NbdistError):
                        look(f"v_{seed}", timeout_s=1.0)
                assert cluster.died() == {}, seed
            cluster.execute(
                f"for s in {seeds!r}:\n"
                "    try: nbdist.check_replicas(globals()[f'v_{s}'])\n"
                "    except BaseException as error: pass"
            )
            if begin % 500 == SEED % 500:
                cluster.replace([1])
            cluster.execute("odd_values.remove_files()")
        cluster.run(odd_values.forget, seeds)
