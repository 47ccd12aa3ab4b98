"""Shared memory without a name, and semaphores in it, in two processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import pytest

from nbdist.collectives.sync import semaphore
from nbdist.collectives.sync.shared_segment import Segment

SIZE = 4096
PEER = """
import ctypes, sys
from nbdist.collectives.sync import semaphore
from nbdist.collectives.sync.shared_segment import Segment
memory = Segment.open(sys.argv[1], 4096).memory
memory[1024:1029] = b"hello"
semaphore.post(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
"""


def address_of(segment: Segment) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(segment.memory))


def test_another_process_maps_the_segment_and_posts() -> None:
    segment = Segment.create(SIZE)
    semaphore.initialise(address_of(segment))
    subprocess.run([sys.executable, "-c", PEER, segment.address], check=True)
    assert semaphore.wait(address_of(segment), 10.0)
    assert segment.memory[1024:1029] == b"hello"
    assert semaphore.try_wait(address_of(segment)) == -1


def test_a_segment_cannot_be_opened_after_its_file_is_closed() -> None:
    segment = Segment.create(SIZE)
    address = segment.address
    segment.close_file()
    segment.close_file()
    with pytest.raises(OSError, match="fd"):
        Segment.open(address, SIZE)
    segment.memory[0] = 1  # the mapping stays


def test_a_segment_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    segment = Segment.create(SIZE)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="cannot mmap an empty file"):
        Segment.create(0)
    with pytest.raises(PermissionError, match="not shared memory of this user"):
        Segment.open(segment.address, SIZE + 1)
    assert os.listdir("/proc/self/fd") == before
    segment.close_file()
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1


def test_a_wait_without_a_post_times_out() -> None:
    segment = Segment.create(SIZE)
    semaphore.initialise(address_of(segment))
    start = time.monotonic()
    assert not semaphore.wait(address_of(segment), 0.05)
    assert time.monotonic() - start > 0.03


def test_a_process_without_a_launcher_leaves_no_file_of_mpi() -> None:
    program = (
        "import os\n"
        "from nbdist.collectives import Group\n"
        "from mpi4py import MPI\n"
        "assert Group(MPI.COMM_WORLD).size == 1\n"
        "assert 'OMPI_MCA_btl' not in os.environ\n"
        "found = {line.split()[-1] for line in open('/proc/self/maps')}\n"
        "print(*[path for path in found if path.startswith('/dev/shm/')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"
