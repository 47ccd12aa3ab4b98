"""Run all that needs a GPU on this machine, and write one file for a report.

    python tests/gpu_report.py [--out out/gpu-report.md] [--quick]

The tests come first, in the order that finds most first, then the benchmarks. A part
that fails or exceeds its time does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUMMARY_LETTERS = 120
ENDING_S = 30.0
"""How long pytest has for its report, when the time of its part is over."""
FAULTS = (
    "tests/simgpu/test_gpu_faults.py",
    "tests/simgpu/test_uneven_nccl_on_gpus.py",
    "tests/simgpu/test_ddp_on_gpus.py",
    "tests/simgpu/test_random_faults_on_gpus.py",
)
SHOWN_LETTERS = 20_000
"""The end of a part's output that the report has."""


@dataclass(frozen=True)
class Part:
    """One command of the report."""

    title: str
    command: tuple[str, ...]
    minutes: float
    """The time after which the command is ended."""


def pytest_of(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", "-ra", *arguments)


def python_of(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


TESTS = [
    Part(
        "Operations on GPUs that ranks share: CUDA IPC and staged",
        pytest_of("-m", "gpu and not gpu_real", "tests/collectives/test_gpu.py"),
        30,
    ),
    Part(
        "Clusters: a GPU for each rank, deaths",
        pytest_of(
            *("-m", "gpu", "tests/clusters/test_gpu_devices.py"),
            "tests/clusters/test_gpu_death.py",
        ),
        15,
    ),
    Part("DDP, FSDP2 and messages", pytest_of("-m", "gpu", "tests/process_group"), 20),
    Part("Faults of a rank, in our transports and in NCCL", pytest_of(*FAULTS), 20),
    Part(
        "Other tests on a GPU",
        pytest_of(
            *("-m", "gpu and not gpu_real", "tests"),
            "--ignore=tests/collectives/test_gpu.py",
            "--ignore=tests/clusters/test_gpu_devices.py",
            "--ignore=tests/clusters/test_gpu_death.py",
            "--ignore=tests/process_group",
            *(f"--ignore={each}" for each in FAULTS),
        ),
        20,
    ),
    Part("What only a real GPU can show", pytest_of("-m", "gpu_real", "tests"), 15),
]
BENCHMARKS = [
    Part(
        "All-reduce: nbdist, CUDA IPC, staged, gloo, NCCL",
        python_of("benchmarks/collectives.py", "--ranks", "2", "4"),
        20,
    ),
    Part(
        "A training step with DDP: nbdist, gloo, NCCL",
        python_of("-m", "benchmarks.ddp", "--device", "cuda"),
        10,
    ),
]
MACHINE = [
    Part("GPUs", ("nvidia-smi",), 1),
    Part("How the GPUs are connected", ("nvidia-smi", "topo", "-m"), 1),
    Part("torch", python_of("-m", "torch.utils.collect_env"), 2),
    Part("This checkout", ("git", "log", "-1", "--format=%H %cd"), 1),
]


@dataclass(frozen=True)
class Outcome:
    """How a part has ended."""

    part: Part
    status: str
    """"passed", or what went wrong."""
    seconds: float
    output: str

    @property
    def summary(self) -> str:
        """The last line of the output, such as pytest's counts."""
        lines = self.output.strip().splitlines()
        return lines[-1].strip("= ")[:SUMMARY_LETTERS] if lines else ""


def run(part: Part) -> Outcome:
    """Run a part's command."""
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            return Outcome(part, f"not started: {error}", 0.0, "")
        status = _status(process, part.minutes)
        output.seek(0)
        text = output.read().decode(errors="replace")
        return Outcome(part, status, time.monotonic() - begun, text)


def _status(process: subprocess.Popen[bytes], minutes: float) -> str:
    """Wait for a command. After its time it is interrupted, so that pytest reports."""
    try:
        code = process.wait(minutes * 60)
        return "passed" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return f"ended after {minutes:g} minutes"


def report(outcomes: Sequence[Outcome]) -> str:
    """The file's text: a table of all parts, then the output of each."""
    lines = [
        "# nbdist on GPUs",
        "",
        f"{platform.platform()}, Python {platform.python_version()}",
        "",
        "| part | | time | last line |",
        "| --- | --- | ---: | --- |",
    ]
    for each in outcomes:
        summary = each.summary.replace("|", "\\|")
        lines.append(
            f"| {each.part.title} | {each.status} | {each.seconds:.0f} s | {summary} |"
        )
    for each in outcomes:
        lines += ["", f"## {each.part.title}", "", *_shown(each)]
    return "\n".join(lines) + "\n"


def _shown(outcome: Outcome) -> Iterator[str]:
    text = outcome.output.strip()
    yield f"`{' '.join(outcome.part.command)}`: {outcome.status}"
    yield ""
    yield "```"
    if len(text) > SHOWN_LETTERS:
        yield f"({len(text) - SHOWN_LETTERS} characters before this are left out)"
    yield text[-SHOWN_LETTERS:]
    yield "```"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-report.md")
    parser.add_argument("--quick", action="store_true", help="leave the benchmarks out")
    options = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        print("there is no nvidia-smi: this needs a machine with NVIDIA's driver")
        return 2
    parts = [*MACHINE, *TESTS, *([] if options.quick else BENCHMARKS)]
    outcomes = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        print(f"{part.title} ...", flush=True)
        outcomes.append(run(part))
        print(f"    {outcomes[-1].status}: {outcomes[-1].summary}", flush=True)
        options.out.write_text(report(outcomes), encoding="utf-8")
    print(f"attach {options.out} to a report")
    return int(any(each.status != "passed" for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
