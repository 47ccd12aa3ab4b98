"""The flight recorder: both implementations write what the notebook reads."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.collectives.flight_recorder import PythonCallLog, PythonRecorder
from nbdist.collectives.transports.native import find_compiled
from nbdist.ipc import flight_record
from nbdist.ipc.flight_record import FlightRecord, RecordedCall
from tests.seed import SEED

ROOT = Path(__file__).parents[2]
MEMBERS = (0, 1, 2, 5)
TEXT = flight_record.call_text("all_reduce", "sum", None, "float32", "cpu", (4,))
WRITES = "compiled", "python"
WRITER = """
import sys
from pathlib import Path
from tests.collectives.test_flight_recorder import logs, text_of
log = logs(Path(sys.argv[1]), sys.argv[2])
print("begun", flush=True)
while True:
    number = log.sequence + 1
    log.end(log.begin(text_of(number), number), number % 2 == 0)
"""
KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from nbdist.collectives import flight_recorder
from nbdist.ipc.flight_record import ENTRY
from tests.collectives.test_flight_recorder import TEXT, logs

class Dies:
    size = ENTRY.size
    def pack_into(self, memory, at, *values):
        whole = ENTRY.pack(*values)
        memory[at : at + 100] = whole[:100]
        os.kill(os.getpid(), signal.SIGKILL)

log = logs(Path(sys.argv[1]), "python")
for _ in range(1001):
    log.end(log.begin(TEXT, 7), True)
flight_recorder.ENTRY = Dies()
log.begin(TEXT, 7)
"""


def logs(folder: Path, way: str, **identity: Any) -> Any:
    """A log that writes to the record of `rank3` in a folder."""
    descriptor = flight_record.create(folder, "rank3-2")
    native = find_compiled()
    if way == "compiled" and native is None:
        pytest.skip("needs the compiled module")
    recorder: Any = PythonRecorder if way == "python" else native.Recorder
    kind: Any = PythonCallLog if way == "python" else native.CallLog
    made = {"group": 4, "generation": 2, "rank": 5} | identity
    members = flight_record.members_text(made.get("members", MEMBERS))
    try:
        recorded = recorder(descriptor, flight_record.CALLS)
    finally:
        os.close(descriptor)
    return kind(recorded, made["group"], made["generation"], made["rank"], members)


def text_of(number: int) -> bytes:
    """The text of the writer's call of this number. Its length varies."""
    return flight_record.call_text(
        "all_reduce", "x" * (number % 50), None, "float32", "cpu", (number,)
    )


@pytest.fixture(autouse=True)
def _private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)


@pytest.fixture(params=WRITES)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return logs(tmp_path, request.param)


def read(folder: Path) -> FlightRecord:
    (record,) = flight_record.read_folder(folder)
    return record


def test_a_call_is_read_as_it_was_written(log: Any, tmp_path: Path) -> None:
    ticket = log.begin(TEXT, 2**62)
    log.locate(ticket, 7, 4)
    record = read(tmp_path)
    assert (record.name, record.joined, record.pid) == ("rank3-2", (3, 2), os.getpid())
    (call,) = record.calls
    assert (call.group, call.generation, call.rank) == (4, 2, 5)
    assert call.members == MEMBERS
    assert call.description == "all_reduce(sum, float32, (4,))"
    assert (call.sequence, call.fingerprint) == (1, 2**62)
    assert (call.state, call.location) == ("running", "In[7] line 4")
    assert call.scheduled_ns == call.started_ns > call.ended_ns == 0
    log.end(ticket, True)
    (call,) = read(tmp_path).calls
    assert call.state == "done"
    assert call.ended_ns >= call.started_ns


def test_a_call_may_be_scheduled_and_may_fail(log: Any, tmp_path: Path) -> None:
    first, second = log.schedule(TEXT, 1), log.schedule(TEXT, 2)
    assert log.sequence == 0
    log.start(first)
    log.end(first, False)
    assert log.sequence == 1
    states = [(call.state, call.sequence) for call in read(tmp_path).calls]
    assert states == [("failed", 1), ("scheduled", 0)]
    log.start(second)
    assert read(tmp_path).calls[1].sequence == log.sequence == 2


def test_a_message_has_the_world_rank_of_its_peer(log: Any, tmp_path: Path) -> None:
    kind = flight_record.call_text("send", None, 3, "float32", "cpu", ())
    log.message(kind, 1, 17)
    (call,) = read(tmp_path).calls
    assert call.description == "send(to=5, float32, ())"
    assert (call.sequence, call.is_message, log.sequence) == (17, True, 0)


def test_the_last_thousand_calls_are_kept(log: Any, tmp_path: Path) -> None:
    for number in range(1, flight_record.CALLS + 1):
        log.end(log.begin(TEXT, number), True)
    assert not read(tmp_path).has_wrapped
    assert len(read(tmp_path).calls) == flight_record.CALLS
    for number in range(flight_record.CALLS + 1, 2500):
        log.end(log.begin(TEXT, number), True)
    record = read(tmp_path)
    numbers = [call.fingerprint for call in record.calls]
    assert numbers == list(range(1500, 2500))
    assert [call.sequence for call in record.calls] == numbers
    assert record.has_wrapped
    assert record.torn == 0


def test_a_call_under_way_is_not_overwritten(log: Any, tmp_path: Path) -> None:
    blocked = log.begin(TEXT, 1)
    ended = log.begin(TEXT, 2)
    log.end(ended, True)
    for _ in range(3000):
        log.end(log.begin(TEXT, 3), True)
    first = read(tmp_path).calls[0]
    assert (first.sequence, first.state) == (1, "running")
    log.end(ended, False)  # its entry has another call's, which stays as it is
    states = {call.state for call in read(tmp_path).calls[1:]}
    assert states == {"done"}
    log.end(blocked, True)
    assert read(tmp_path).calls[0].state == "done"


def test_calls_that_never_end_do_not_stop_the_recorder(
    log: Any, tmp_path: Path
) -> None:
    for number in range(1, 3001):
        log.begin(TEXT, number)
    numbers = [call.fingerprint for call in read(tmp_path).calls]
    assert numbers[-1] == 3000
    assert len(numbers) == flight_record.CALLS


def test_a_long_shape_is_cut(log: Any, tmp_path: Path) -> None:
    shape = tuple(range(1000, 1100))
    text = flight_record.call_text("all_gather", None, None, "int64", "cpu", shape)
    log.begin(text, 5)
    (call,) = read(tmp_path).calls
    assert call.operation == "all_gather"
    assert call.shape.startswith("(1000, 1001, ")
    assert call.shape.endswith("...")


def test_both_implementations_write_the_same(tmp_path: Path) -> None:
    calls: list[list[RecordedCall]] = []
    for way in WRITES:
        folder = tmp_path / way
        folder.mkdir(mode=0o700)
        log = logs(folder, way)
        for number in range(2003):
            ticket = log.schedule(text_of(number), number)
            if number % 5:
                log.start(ticket)
                log.locate(ticket, number, -1)
            if number % 7:
                log.end(ticket, number % 3 == 0)
        timeless = {"scheduled_ns": 0, "started_ns": 0, "ended_ns": 0}
        calls.append(
            [
                RecordedCall(**(vars(call) | timeless))  # type: ignore[arg-type]
                for call in read(folder).calls
            ]
        )
    assert calls[0] == calls[1]
    assert len(calls[0]) == flight_record.CALLS


@contextmanager
def writer(folder: Path, way: str) -> Iterator[subprocess.Popen[str]]:
    """A process that writes calls without a pause, until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), way],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with closing(process.stdout):
        try:
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()
            process.wait(30)


def check_whole(record: FlightRecord) -> None:
    """Check that each call consists of one call's fields."""
    for call in record.calls:
        number = call.fingerprint
        assert call.sequence == number
        assert (call.shape, call.reduce_op) == (f"({number},)", "x" * (number % 50))
        assert call.state in ("running", ("failed", "done")[number % 2 == 0])


@pytest.mark.parametrize("way", WRITES)
def test_a_record_that_is_being_written_is_read_whole(tmp_path: Path, way: str) -> None:
    with writer(tmp_path, way) as process:
        last = 0
        while last < 20 * flight_record.CALLS:
            record = read(tmp_path)
            check_whole(record)
            assert len(record.calls) + record.torn <= flight_record.CALLS
            last = max([last, *(call.sequence for call in record.calls)])
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        record = read(tmp_path)
        check_whole(record)
        assert record.torn <= 1


def test_a_call_that_was_being_written_at_the_death_is_not_read(
    tmp_path: Path,
) -> None:
    died = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert died.returncode == -signal.SIGKILL
    record = read(tmp_path)
    assert record.torn == 1
    assert [call.sequence for call in record.calls] == list(range(3, 1002))


def test_a_file_that_is_no_record_is_skipped(tmp_path: Path) -> None:
    logs(tmp_path, "python").begin(TEXT, 1)
    (tmp_path / "rank0.flight").write_bytes(b"short")
    os.truncate(tmp_path / "rank0.flight", flight_record.RECORD_BYTES)
    (tmp_path / "rank1.flight").write_bytes(b"short")
    public = tmp_path / "rank2.flight"
    public.write_bytes((tmp_path / "rank3-2.flight").read_bytes())
    public.chmod(0o666)
    assert read(tmp_path).name == "rank3-2"


def test_a_child_does_not_write_to_its_parents_record(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from nbdist.collectives import flight_recorder\n"
        "flight_recorder.record_in(Path(sys.argv[1]), 'rank0')\n"
        "log = flight_recorder.open_log(0, 0, 0, [0])\n"
        "if os.fork() == 0:\n"
        "    child = flight_recorder.open_log(0, 0, 0, [0])\n"
        "    child.begin(b'\\tbarrier', 1)\n"
        "    os._exit(child.sequence)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 1\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=60,
    )
    assert read(tmp_path).calls == ()


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("kind", ["stride", "any"])
def test_a_group_with_many_members_is_recorded(
    way: str, kind: str, tmp_path: Path
) -> None:
    """With as many as the entry has room for, and the whole of the call."""
    draw = random.Random(SEED)
    members = tuple(
        range(0, 5000, draw.randint(2, 9))
        if kind == "stride"
        else draw.sample(range(5000), draw.randint(60, 500))
    )
    log = logs(tmp_path, way, members=members)
    send = flight_record.call_text("send", None, len(members) - 1, "float32", "cpu", ())
    log.schedule(TEXT, 0)
    log.schedule(send, 0)
    both, sent = read(tmp_path).calls
    assert members[: len(both.members)] == both.members
    assert both.description == "all_reduce(sum, float32, (4,))"
    if kind == "stride":
        assert both.members == members
        assert sent.root == members[-1]
    else:
        assert 10 < len(both.members) < len(members)
        assert sent.root is None


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=90, unique=True), st.booleans()
)
@settings(max_examples=100)
def test_the_members_of_a_group_are_read_as_they_were_written(
    members: list[int], in_order: bool
) -> None:
    members = sorted(members) if in_order else members
    text = flight_record.members_text(members)
    assert len(text) <= flight_record.MEMBERS_BYTES
    found = flight_record._members(text.decode())
    assert found == tuple(members[: len(found)])
    left = len(members) - len(found)
    assert text.endswith(b"+%d" % left) if left else b"+" not in text


def test_the_text_of_members() -> None:
    assert flight_record.members_text([0, 1, 2, 5]) == b"0-2,5"
    assert flight_record.members_text([0, 10, 20, 30]) == b"0-30:10"
