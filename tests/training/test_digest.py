"""Digests: equal for values that are equal bit for bit, and for no others."""

from __future__ import annotations

import collections
import copy
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from nbdist.training.digest import combined, device_hash, digests_of
from nbdist.training.leaves import Deadline, TooSlow, leaves_of

OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


def digest(value: object) -> bytes:
    """The digest of a value that can be compared as a whole."""
    leaves = leaves_of("v", value)
    digests = digests_of(leaves)
    assert [each for each in digests if isinstance(each, str)] == []
    return combined(leaves, digests)


def reason(value: object) -> str:
    """Why a value cannot be compared."""
    reasons = [d for d in digests_of(leaves_of("v", value)) if isinstance(d, str)]
    assert reasons
    return reasons[0]


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Settings:
    lr: float = 0.1
    milestones: list[int] = field(default_factory=lambda: [1, 2])


class Other(Settings):
    pass


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def values() -> dict[str, Any]:
    model, optimizer = trained()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "float": torch.randn(3, 5),
        "bfloat16": torch.randn(7).bfloat16(),
        "float8": torch.randn(9).to(torch.float8_e5m2),
        "complex": torch.randn(4, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "uint64": torch.arange(3).to(torch.uint64),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.0),
        "nan": torch.full((3,), float("nan")),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.arange(9.0)[1::3],
        "conjugated": torch.tensor([1 + 2j, 3]).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "array": np.arange(6.0).reshape(2, 3).T,
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "record": np.array(
            [("a", 1)], dtype=np.dtype([("n", "U3"), ("v", "i8")], align=True)
        ),
        "objects": np.array([1, "x", None], dtype=object),
        "masked": np.ma.masked_equal([1, 2, 3], 2),
        "frame": pd.DataFrame(
            {
                "a": [1.0, np.nan],
                "b": ["x", None],
                "c": pd.Categorical(["u", "v"]),
                "d": pd.date_range("2020", periods=2, tz="UTC"),
                "e": pd.array([1, None], dtype="Int64"),
            }
        ),
        "nested": {"a": [1, (2.0, "x", None)], 3: {"b": [b"y", True]}},
        "mixed": [1, 2.5, "x", float("nan")],
        "large": [2**70, -1],
        "set": {1, "a", (2.0, None)},
        "tuple": Pair([1.0], {"k": 2}),
        "settings": Settings(),
        "deque": collections.deque([1, 2], maxlen=3),
        "defaultdict": collections.defaultdict(list, {"k": [1, "a"]}),
        "generator": np.random.default_rng(0),
        "random": random.Random(0),
        "sampler": torch.utils.data.DistributedSampler([1, 2, 3], 2, 0),
        "loader": torch.utils.data.DataLoader([1, 2, 3]),
    }


def test_a_copy_has_the_same_digest():
    for name, value in values().items():
        assert digest(value) == digest(copy.deepcopy(value)), name
        assert digest([value, 1]) != digest([value, 2]), name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (float("nan"), OTHER_NAN),
        (1, True),
        (1, 1.0),
        ("1", b"1"),
        ("1", 1),
        ([0, 0], [0.0, 0.0]),
        ([], ()),
        ([], {}),
        ([1, 2], (1, 2)),
        ([1], [1, 1]),
        ([[1], [2]], [[1, 2], []]),
        ([0.0, 1], [-0.0, 1]),
        ([float("nan"), "a"], [OTHER_NAN, "a"]),
        ({"a": 1}, {"a": 1, "b": None}),
        ({1: 2}, {"1": 2}),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor([1.0, 2]), torch.tensor([2.0, 1])),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
        (torch.empty(0), torch.empty(0, 1)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.array(["a"]), np.array(["b"])),
        (Settings(), Other()),
        (Settings(), Settings(milestones=[1, 3])),
        (pd.Series([1, 2]), pd.Series([1, 2], index=[1, 0])),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]})),
        (nn.Linear(2, 2).eval(), nn.Linear(2, 2).train()),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())),
    ],
)
def test_values_that_differ_have_different_digests(one: object, other: object):
    assert digest(one) != digest(other)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_matrix_by_rows_is_compared():
    matrix = torch.eye(3).to_sparse_csr()
    assert digest(matrix) == digest(matrix.clone())
    assert digest(matrix) != digest(
        torch.diag(torch.tensor([1.0, 1, 2])).to_sparse_csr()
    )


def test_the_order_of_a_dict_and_of_a_set_does_not_matter():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({str(i) for i in range(99)}) == digest(
        {str(i) for i in reversed(range(99))}
    )


def test_the_layout_in_memory_does_not_matter():
    matrix = torch.randn(4, 6)
    assert digest(matrix.t()) == digest(matrix.t().contiguous())
    images = torch.randn(2, 3, 4, 4)
    assert digest(images) == digest(images.to(memory_format=torch.channels_last))
    assert digest(matrix[1:, 1:]) == digest(matrix[1:, 1:].clone())


def test_a_value_that_holds_itself_has_a_digest():
    def cyclic(last: int) -> list[object]:
        value: list[object] = [1, "a", [last, []]]
        value.append(value)
        return value

    assert digest(cyclic(1)) == digest(cyclic(1))
    assert digest(cyclic(1)) != digest(cyclic(2))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ((i for i in range(3)), "generator"),
        (lambda: 1, "defined in a cell"),
        (torch.empty(2, device="meta"), "no values"),
        (np.longdouble(1), "unused bits"),
        ({(i for i in "a"): 1}, "generator"),
        (nn.LazyLinear(3), "no values yet"),
    ],
)
def test_what_cannot_be_compared_says_why(value: object, why: str):
    assert why in reason(value)


def test_a_deeply_nested_list_is_not_compared():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert "nested too deeply" in reason(deep)
    while deep:  # or its deletion overflows the stack
        deep = deep.pop()  # type: ignore[assignment]


class Shared:
    """An object with two references."""

    def __init__(self, left: object, right: object) -> None:
        self.left, self.right = left, right


def shared_pairs(depth: int, value: object, *, copies: bool = False) -> object:
    """Pairs of pairs that are one object; 2^depth paths lead to the value."""
    pair = Shared(value, value)
    for _ in range(depth):
        pair = Shared(pair, copy.deepcopy(pair) if copies else pair)
    return pair


def test_objects_that_share_their_parts_are_compared_soon():
    pairs = shared_pairs(40, 1.0)
    assert len(leaves_of("pairs", pairs)) < 1000
    assert digest(pairs) == digest(shared_pairs(40, 1.0))
    assert digest(pairs) != digest(shared_pairs(40, 2.0))
    # Small objects are equal whether or not they are one.
    small = [shared_pairs(3, 1.0, copies=copies) for copies in (False, True)]
    assert digest(small[0]) == digest(small[1])


def test_looking_neither_keeps_nor_locks_a_tensor():
    tensor = torch.ones(1000)
    digest(tensor)
    tensor.untyped_storage().resize_(0)  # as FSDP does between steps
    assert tensor.untyped_storage().nbytes() == 0


def test_a_deadline_ends_a_digest():
    deadline = Deadline(0.0)
    with pytest.raises(TooSlow):
        digests_of(leaves_of("v", list(range(3))), deadline)
    with pytest.raises(TooSlow, match=r"0\.05 s"):
        leaves_of("v", [[i, []] for i in range(10**6)], Deadline(0.05))


# -- the hash on devices, which runs on a CPU tensor too -------------------------------


def hashed(tensor: torch.Tensor) -> int:
    return int(device_hash(tensor))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("size", [1, 3, 8, 1001])
def test_each_flipped_bit_changes_the_hash_of_a_device(dtype: torch.dtype, size: int):
    tensor = torch.randn(size).to(dtype)
    before = hashed(tensor)
    assert hashed(tensor.clone()) == before
    octets = tensor.view(torch.uint8)
    rng = random.Random(size)
    for _ in range(50):
        place, bit = rng.randrange(octets.numel()), 1 << rng.randrange(8)
        octets[place] ^= bit
        assert hashed(tensor) != before
        octets[place] ^= bit
    assert hashed(tensor) == before


def test_the_hash_of_a_device_sees_order_and_signs(monkeypatch: pytest.MonkeyPatch):
    tensor = torch.randn(5000, dtype=torch.float64)
    hashes = {
        hashed(tensor),
        hashed(-tensor),
        hashed(tensor.flip(0)),
        hashed(tensor.roll(1)),
        hashed(torch.zeros(2)),
        hashed(-torch.zeros(2)),
        hashed(torch.zeros(0)),
    }
    assert len(hashes) == 7
    whole = hashed(tensor)
    monkeypatch.setattr("nbdist.training.digest.DEVICE_BLOCK_BYTES", 1024)
    assert hashed(tensor) == whole
    assert hashed(torch.cat([torch.zeros(1), tensor.float()])[1:]) == hashed(
        tensor.float()
    )


def test_a_digest_takes_less_than_a_sort():
    tensor = torch.randn(5_000_000)

    def seconds(action: Callable[[], object]) -> float:
        """Those of this process, without the time in which others have the cores."""
        begin = time.process_time()
        action()
        return time.process_time() - begin

    assert seconds(lambda: digest(tensor)) < seconds(tensor.sort)


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        (nn.Dropout(0.1), nn.Dropout(0.9), "v (options)"),
        (nn.BatchNorm1d(2), nn.BatchNorm1d(2, eps=1e-3), "v (options)"),
        (nn.BatchNorm1d(2), nn.BatchNorm1d(2, momentum=None), "v (options)"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1)),
            nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.2)),
            "v.1 (options)",
        ),
        (nn.MaxPool2d(2, stride=(1, 2)), nn.MaxPool2d(2, stride=(2, 1)), "v (options)"),
    ],
)
def test_modules_differ_in_their_plain_attributes(
    one: nn.Module, other: nn.Module, where: str
) -> None:
    other.load_state_dict(one.state_dict())
    leaves = [
        {each.name: each.content for each in leaves_of("v", module)}
        for module in (one, other)
    ]
    differing = [name for name in leaves[0] if leaves[0][name] is not leaves[1][name]]
    assert where in differing
    assert leaves[0][where] != leaves[1][where]
    assert digest(one) != digest(other)


def test_what_replicas_know_of_their_rank_and_its_code_is_left_out() -> None:
    class Mine(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank, self.device, self.rate = rank, torch.device("cpu"), 0.5

        @property
        def never(self) -> int:
            raise AssertionError

    assert digest(Mine(0)) == digest(Mine(1))
    named = [Mine(0), Mine(0)]
    for local_rank, each in enumerate(named):
        each.device, each.local_rank = f"cuda:{local_rank}", local_rank
    assert digest(named[0]) == digest(named[1])
    texts = [leaf.content for leaf in leaves_of("v", Mine(0))]
    assert texts[1] == b"rate=0.5"
