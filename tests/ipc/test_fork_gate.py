"""The gate before which the ranks of a start wait for each other."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from nbdist.ipc.device_assignment import DeviceAssignment, write_assignments
from nbdist.ipc.fork_messages import ENGINE, GATE
from nbdist.ipc.fork_server import Request, _Gate
from nbdist.ipc.host_sockets import HOST


def request(size: int | None = 3, *arguments: str, module: str = ENGINE) -> Request:
    environment = {} if size is None else {"OMPI_COMM_WORLD_SIZE": str(size)}
    return Request(
        arguments=list(arguments),
        module=module,
        environment=environment,
        folder="/",
        umask=0,
        limits={},
        cores=[],
        descriptors=[0, 1, 2],
    )


def is_open(gate: _Gate) -> bool:
    """Whether a rank that waits at the gate goes on."""
    added, descriptors = gate.added_to(request(), [0, 1, 2])
    assert added.descriptors == [0, 1, 2, 3]
    assert added.environment[GATE] == "3"
    return bool(select.select([descriptors[3]], [], [], 0)[0])


def test_the_last_rank_of_a_start_opens_the_gate():
    gate = _Gate()
    for _ in range(2):
        gate.count(request())
        assert not is_open(gate)
    gate.count(request())
    assert is_open(gate)


@pytest.mark.parametrize(
    "other",
    [
        request(3, "--join", "1", "2"),
        request(3, module="the.controller"),
        request(None),  # the launcher does not tell how many start
    ],
)
def test_a_process_that_does_not_start_with_others_does_not_wait(other: Request):
    gate = _Gate()
    assert gate.added_to(other, [0, 1, 2]) == (other, [0, 1, 2])
    for _ in range(3):
        gate.count(other)
    assert not is_open(gate)


def test_the_ranks_of_other_hosts_are_not_waited_for(tmp_path: Path):
    assignments = [
        DeviceAssignment(rank, host, None, (), {}, "CPU", False, None, 1)
        for rank, host in enumerate(["a", "b", "b"])
    ]
    write_assignments(tmp_path, assignments)
    on_b = request()
    on_b.environment.update({HOST: "b", "NBDIST_RUN_DIR": str(tmp_path)})
    gate = _Gate()
    gate.count(on_b)
    assert not is_open(gate)
    gate.count(on_b)
    assert is_open(gate)
