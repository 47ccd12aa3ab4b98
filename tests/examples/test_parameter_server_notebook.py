"""The notebook with the parameter server and its slow worker."""

from __future__ import annotations

import re
from collections.abc import Callable

RAN = re.compile(
    r"\[0-3\] (\d+) updates, mean staleness ([\d.]+), most (\d+), "
    r"the fastest (\d+) steps ahead\n\[0-3\] test accuracy: ([\d.]+)%"
)


def test_the_three_update_modes_differ_as_expected(
    run_example: Callable[[str], str],
) -> None:
    printed = run_example("parameter_server")
    ways = [[float(number) for number in ran] for ran in RAN.findall(printed)]
    assert len(ways) == 3, printed
    sync, free, bounded = ways
    # Synchronous gradients are never late; asynchronous workers do many more steps.
    assert sync[1:3] == [0, 0]
    assert free[0] > 3.5 * sync[0]  # three gradients are three updates, and then more
    assert free[2] > bounded[2]
    assert free[3] > 4
    assert bounded[3] == 4
    assert bounded[2] <= 2 * (2 * 4 + 1)  # two others, from 4 behind to 4 ahead
    assert min(way[0] for way in ways) > 20
    assert sync[4] > 60  # as few updates as the slow worker makes steps
    assert free[4] > 80
    assert bounded[4] > 75
    losses = re.findall(r"^(sync|async.*): \d+ updates, the last loss", printed, re.M)
    assert losses == ["sync", "async", "async, bounded"]
