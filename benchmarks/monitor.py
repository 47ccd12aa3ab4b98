"""What the monitor costs: a rank's sampling and logging, and the browser's page.

The page is JupyterLab in headless Chromium, which draws without a GPU. Needs Chromium
and the packages of `nbdist[test]`.
"""

from __future__ import annotations

import statistics
import time

from playwright.sync_api import sync_playwright

from benchmarks import report
from benchmarks.measure import Times
from nbdist import Cluster
from tests.jupyterlab_driver import CHROMIUM, CHROMIUM_OPTIONS, Lab, LabServer

RANKS = 2
SAMPLED_RANKS = (4, 8)
STEP_S = 0.01
"""Seconds of a training step. Each logs two scalars: 100 calls a second."""
STEPS = 100
ROUNDS = 30
IDLE_S = 10.0
SHOWN_RANKS = 64
POINTS = 100_000
WATCHED_S = 15.0

FEED = f"""
import math, threading, time
from nbdist.telemetry.collector import Collector
from nbdist.wire import Batch, DeviceSample, RankInfo, Sample
from nbdist.widgets.display import show

N = {SHOWN_RANKS}
collector = Collector()
collector.set_ranks(
    RankInfo(r, N, r, N, "e", f"node{{r // 8}}", r, f"cuda:{{r % 8}}",
             "GPU", None, None, 1, "x")
    for r in range(N)
)

def add(rank, number, steps, *more):
    samples = (
        Sample(rank, step, step / 20, {{"loss": math.exp(-step / 3e4) + rank / 100}})
        for step in steps
    )
    records = (*more, *samples)
    collector.receive(Batch(rank, "source", number, 0, records, None, steps[-1]))

for rank in range(N):
    add(rank, 0, range({POINTS}))
monitor = show(collector)

def feed():
    for turn in range(1, 10 * {2 * WATCHED_S:.0f}):
        begun = time.monotonic()
        for rank in range(N):
            more = []
            if turn % 10 == rank % 10:
                use = 80.0, 2**30, 2**36, 99.0, 2**29
                more = [DeviceSample(rank, time.time(), "cuda:0", *use)]
            first = {POINTS} + 10 * turn
            add(rank, turn, range(first, first + 10), *more)
        time.sleep(max(0.0, 0.1 - (time.monotonic() - begun)))

threading.Thread(target=feed, daemon=True).start()
"""
DRAWN = "Number(document.querySelector('.nbdist-monitor')?.dataset.sequence)"


def cpu_of_sampling(seconds: float, works: bool) -> float:
    """The share of a core that a rank's sampler takes, while it works or sleeps."""
    import threading
    import time

    import torch

    (thread,) = (t for t in threading.enumerate() if t.name == "nbdist-sampler")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before, begun = time.clock_gettime(clock), time.monotonic()
    a = torch.rand(256, 256)
    while time.monotonic() < begun + seconds:
        if works:
            a @ a
        else:
            time.sleep(seconds)
    return (time.clock_gettime(clock) - before) / (time.monotonic() - begun)


def training(rounds: int, steps: int, step_s: float) -> Times:
    """Seconds of a step, with and without two logged scalars, in turn."""
    import time

    import torch

    import nbdist
    from benchmarks.measure import alternate

    a, loss = torch.rand(256, 256), torch.tensor(0.5)
    begun = time.perf_counter()
    for _ in range(50):
        a @ a
    products = max(1, round(step_s / ((time.perf_counter() - begun) / 50)))

    def train(logs: bool) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            for _ in range(products):
                a @ a
            if logs:
                nbdist.log(loss=loss, lr=0.1)
        return (time.perf_counter() - begun) / steps

    variants = {"without": lambda: train(False), "with": lambda: train(True)}
    return alternate(variants, rounds)


def in_browser() -> tuple[float, float]:
    """The share of its time that the page's main thread works, and draws a second."""
    server = LabServer()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=CHROMIUM_OPTIONS
            )
            page = browser.new_page(viewport={"width": 1300, "height": 1000})
            lab = Lab(server, page)
            lab.open_notebook([FEED])
            lab.run_cell(0, 120)
            lab.wait(f"() => {DRAWN} >= 20", 60)
            page.locator(".nbdist-monitor").scroll_into_view_if_needed()
            tools = page.context.new_cdp_session(page)
            tools.send("Performance.enable")

            def metric() -> dict[str, float]:
                found = tools.send("Performance.getMetrics")["metrics"]
                return {each["name"]: each["value"] for each in found}

            before, drawn, begun = metric(), page.evaluate(DRAWN), time.monotonic()
            page.wait_for_timeout(WATCHED_S * 1000)
            after, passed = metric(), time.monotonic() - begun
            rate = (page.evaluate(DRAWN) - drawn) / passed
            lab.screenshot("benchmark-monitor")
            browser.close()
        return (after["TaskDuration"] - before["TaskDuration"]) / passed, rate
    finally:
        server.close()


def sampling(ranks: int) -> tuple[float, float]:
    """The share of a core of all ranks' samplers, while they sleep and compute."""
    with Cluster(ranks, device="cpu") as cluster:
        cluster.execute("torch.set_num_threads(1)")
        sleeping = cluster.run(cpu_of_sampling, IDLE_S, False)
        busy = cluster.run(cpu_of_sampling, IDLE_S, True)
    return sum(sleeping), sum(busy)


def main() -> None:
    sampled = {ranks: sampling(ranks) for ranks in SAMPLED_RANKS}
    with Cluster(RANKS, device="cpu") as cluster:
        cluster.execute("torch.set_num_threads(1)")
        times = cluster.run(training, ROUNDS, STEPS, STEP_S)
    ratios = [
        logged / plain
        for each in times
        for plain, logged in zip(each["without"], each["with"], strict=True)
    ]
    low, slowed, high = statistics.quantiles(ratios, n=4, method="inclusive")
    share, rate = in_browser()
    rows = [
        *(
            [
                f"sampling of a host with {ranks} ranks, which compute in a cell "
                "(or sleep in it)",
                f"{busy:.2%} of a core ({sleeping:.2%})",
            ]
            for ranks, (sleeping, busy) in sampled.items()
        ),
        [
            "a training that logs 100 times a second on each rank",
            f"{slowed - 1:+.2%} of its time ({low - 1:+.2%} to {high - 1:+.2%})",
        ],
        [
            f"the page: {SHOWN_RANKS} ranks × {POINTS:,} points, "
            f"drawn {rate:.1f} times a second",
            f"{share:.0%} of the browser's main thread",
        ],
    ]
    report.save(
        "monitor",
        {"sampled": sampled, "times": times, "page": [share, rate]},
        report.table(["what", "cost"], rows)
        + f"\n\nSampling: all ranks together in {IDLE_S:.0f} s. Training: "
        f"{RANKS} ranks, median of {ROUNDS} turns of {STEPS} steps of about "
        f"{STEP_S * 1000:.0f} ms (and the middle half of them), which log two "
        "scalars, one of them a tensor, "
        "beside turns that log nothing. The page is headless Chromium, which draws on "
        "the processor.",
    )


if __name__ == "__main__":
    main()
