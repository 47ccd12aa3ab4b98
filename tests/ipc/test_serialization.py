"""A value is equal to the original after serialization. No cluster needed."""

from __future__ import annotations

import pickle
import traceback
import warnings
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbdist.ipc import serialization, shm_payload

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [
    value
    for name, value in sorted(vars(torch).items())
    if isinstance(value, torch.dtype) and name == str(value).removeprefix("torch.")
]


def usable(dtype: torch.dtype) -> bool:
    """Whether this torch can make, compare and view a CPU tensor of this dtype."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # half-precision complex is experimental
            tensor = torch.zeros(2, dtype=dtype)
            tensor.view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return not tensor.is_quantized


def sent(value: object) -> object:
    return serialization.loads(
        [bytearray(frame) for frame in serialization.dumps(value)]
    )


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(actual: object, expected: torch.Tensor) -> None:
    assert type(actual) is type(expected)
    assert isinstance(actual, torch.Tensor)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.requires_grad == expected.requires_grad
    assert octets(actual) == octets(expected)


def test_there_are_dtypes_to_test():
    assert len([dtype for dtype in DTYPES if usable(dtype)]) >= 14


@pytest.mark.parametrize("dtype", [d for d in DTYPES if usable(d)], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_makes_the_round_trip(
    dtype: torch.dtype, shape: tuple[int, ...]
):
    count = int(np.prod(shape)) * torch.zeros(1, dtype=dtype).element_size()
    raw = torch.arange(count, dtype=torch.uint8) % 2
    assert_same(sent(raw.view(dtype).reshape(shape)), raw.view(dtype).reshape(shape))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6).T,
        torch.arange(24.0)[::3],
        torch.arange(4.0).expand(5, 4),
        torch.zeros(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
    ],
    ids=["transposed", "strided", "expanded", "grad", "parameter", "frozen", "conj"],
)
def test_every_layout_and_kind_makes_the_round_trip(tensor: torch.Tensor):
    assert_same(sent(tensor), tensor.resolve_conj())


def test_the_result_of_a_computation_is_sent_without_its_graph():
    result = torch.ones(2, requires_grad=True) * 3
    assert_same(sent(result), result)


def test_tensors_that_torch_pickles_make_the_round_trip():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(sent(sparse).to_dense(), torch.eye(3))  # type: ignore[attr-defined]
    meta = sent(torch.empty(3, 4, device="meta"))
    assert isinstance(meta, torch.Tensor)
    assert meta.is_meta
    assert meta.shape == (3, 4)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3), np.arange(6.0)[::2], np.asfortranarray(np.eye(3)),
        np.array(3.5), np.zeros((0, 4), dtype=np.float16), np.array(["a", "bc"]),
        np.array([b"x"]), np.array([1, "two", None], dtype=object), np.zeros(2, bool),
        np.array(["2020-01-01"], "M8[D]"), np.array([(1, 2.0)], "i8,f8"),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)  # fmt: skip
def test_arrays_make_the_round_trip(array: np.ndarray):
    received = sent(array)
    assert isinstance(received, np.ndarray)
    assert received.dtype == array.dtype
    np.testing.assert_array_equal(received, array)
    assert received.flags.writeable


def test_nested_containers_keep_their_structure_and_identity():
    shared = torch.arange(3)
    value = {"a": [shared, (shared, None)], 5: {"b": np.ones(2)}, "c": {1, 2}}
    received = sent(value)
    assert isinstance(received, dict)
    assert received["a"][0] is received["a"][1][0]
    assert torch.equal(received["a"][0], shared)
    assert received["c"] == {1, 2}


def test_modules_and_functions_are_pickled_by_value():
    model = sent(torch.nn.Linear(2, 3))
    assert isinstance(model, torch.nn.Linear)
    offset = 4
    assert sent(lambda x: x + offset)(3) == 7  # type: ignore[operator]


@pytest.fixture
def code_without_file_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has cloudpickle drop the file names of code, as its version 3.1.3 does."""
    table = cloudpickle.Pickler.dispatch_table
    reduce = table[CodeType]
    monkeypatch.setitem(
        table, CodeType, lambda code: reduce(code.replace(co_filename="<dynamic>"))
    )


@pytest.mark.usefixtures("code_without_file_names")
@pytest.mark.parametrize("whole", [False, True], ids=["in frames", "whole"])
def test_functions_keep_their_files_and_lines(whole: bool):
    class Loader:
        def fail(self) -> None:
            [0][1]

    def outer() -> None:
        (lambda: Loader().fail())()

    if whole:
        received: Any = pickle.loads(serialization.dumps_whole(outer))
    else:
        received = sent(outer)
    with pytest.raises(IndexError) as raised:
        received()
    frames = traceback.extract_tb(raised.value.__traceback__)[1:]
    assert [frame.filename for frame in frames] == [__file__] * 3
    assert [frame.line for frame in frames] == [
        "(lambda: Loader().fail())()",
        "(lambda: Loader().fail())()",
        "[0][1]",
    ]


def test_elements_are_not_in_the_pickle_stream():
    for value in (torch.zeros(100_000), np.zeros(100_000), [torch.zeros(100_000)]):
        stream, *buffers = serialization.dumps(value)
        assert len(stream) < 2000
        assert sum(memoryview(buffer).nbytes for buffer in buffers) >= 400_000


def test_dumping_does_not_copy_a_contiguous_tensor():
    tensor = torch.zeros(1000)
    buffer = np.frombuffer(serialization.dumps(tensor)[1], dtype=np.float32)
    tensor[0] = 5
    assert buffer[0] == 5


def test_a_value_that_cannot_be_pickled_raises():
    with pytest.raises((TypeError, pickle.PicklingError)):
        serialization.dumps(iter_of_a_file())


def iter_of_a_file() -> object:
    return (line for line in ())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_plain_values_make_the_round_trip(value: object):
    assert sent(value) == value


@pytest.mark.parametrize("size", [10, 5_000_000])
def test_each_receiver_has_its_own_copy_of_a_shipment(size: int, tmp_path: Path):
    run_dir = tmp_path / f"nbdist-{tmp_path.name}"
    run_dir.mkdir(mode=0o700)
    shipment = shm_payload.load(serialization.dumps(torch.zeros(size)), run_dir)
    try:
        assert (shipment.path is not None) == (size > 1000)
        first, second = shm_payload.unload(shipment), shm_payload.unload(shipment)
    finally:
        shm_payload.discard(shipment)
    first += 1
    assert second.sum() == 0
    assert first.sum() == size
    assert shipment.path is None or not Path(shipment.path).exists()


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(4.0)[::4], torch.arange(6)[3::3], torch.tensor([1 + 2j]).conj().imag],
    ids=["strided", "offset", "negated"],
)
def test_one_element_with_a_stride_makes_the_round_trip(tensor: torch.Tensor):
    received = sent(tensor)
    assert isinstance(received, torch.Tensor)
    assert (received.dtype, received.tolist()) == (tensor.dtype, tensor.tolist())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_makes_the_round_trip():
    received = sent(torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]))
    assert isinstance(received, torch.Tensor)
    assert [part.tolist() for part in received.unbind()] == [[1.0] * 2, [0.0] * 3]


def test_the_stream_of_a_value_is_closed_when_it_has_been_pickled():
    frames = serialization.dumps({"x": [1, 2]})
    assert isinstance(frames[0], bytes)
    assert serialization.loads(frames) == {"x": [1, 2]}
