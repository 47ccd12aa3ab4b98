"""The pages of libraries that a process gives back."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone")

PROGRAM = """
import psutil, torch
from nbdist.ipc.file_pages import release_file_pages

def of_torch():
    maps = psutil.Process().memory_maps(grouped=False)
    found = [each for each in maps if "libtorch_cpu" in each.path]
    read = sum(each.rss for each in found if not each.anonymous)
    return read, sum(each.anonymous for each in found)

read, written = of_torch()
release_file_pages()
read_then, written_then = of_torch()
print(read, written, read_then, written_then)
model = torch.nn.Linear(8, 8)
model(torch.ones(2, 8)).sum().backward()
print(model.weight.grad.sum().item())
"""


def test_pages_that_were_read_are_given_back_and_written_ones_are_kept():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    sizes, total = done.stdout.splitlines()
    read, written, read_then, written_then = map(int, sizes.split())
    assert read > 10 << 20
    assert written > 0
    assert read_then < read / 4  # the rest is in regions with written pages
    assert written_then == written
    assert float(total) == 8 * 8 * 2
