"""Deliberate faults in the CUDA code, each of which a test must catch.

`make simgpu-mutants` applies each to a copy of the repository, runs the test on
simulated GPUs, and prints which faults were caught. A fault is a text that is replaced;
`test_mutants.py` fails when the text is no longer there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("nbdist", "tests", "pyproject.toml", "conftest.py")
CASES = "tests/collectives/test_gpu.py::test_case_on_a_shared_gpu"
OWN = "tests/collectives/test_gpu.py::test_case_on_gpus_of_their_own"
CONTRACT = "tests/collectives/test_gpu.py::test_contract_on_a_shared_gpu"
MACHINES = "tests/simgpu/test_machines.py::test_machine"
LIMIT_S = 400.0


@dataclass(frozen=True)
class Mutant:
    """A fault, and the tests of which one must fail with it."""

    name: str
    """The fault in words."""
    file: str
    """The file, below `nbdist/`."""
    old: str
    """A text that occurs once in the file."""
    new: str
    """What replaces it."""
    tests: Sequence[str]
    """The tests, as pytest takes them."""
    cards: int = 1
    """Number of GPUs."""

    def apply(self, root: Path) -> None:
        """Put the fault into a copy of the repository.

        Raises:
            ValueError: The file has the text not once.
        """
        path = root / "nbdist" / self.file
        text = path.read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: nbdist/{self.file} has the text {count} times instead "
                f"of once; write the fault for the new code:\n{self.old}"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


EVENTS = "collectives/sync/cuda_events.py"
PEERS = "collectives/sync/cuda_peers.py"
COPIES = "collectives/transports/copy_pipeline.py"
IPC = "collectives/transports/cuda_ipc.py"
NCCL = "collectives/transports/nccl.py"
PREFETCH = "training/data/device_prefetch.py"

MUTANTS = [
    # -- the order of the ranks' GPUs --------------------------------------------------
    Mutant(
        "peers' events are not waited for",
        EVENTS,
        "for events in (self._mine, *self._theirs):",
        "for events in (self._mine,):",
        [f"{CASES}[ipc-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "the own event is not waited for",
        EVENTS,
        "for events in (self._mine, *self._theirs):",
        "for events in self._theirs:",
        [f"{CASES}[ipc-calls_on_many_streams]"],
    ),
    Mutant(
        "the event is recorded on the default stream",
        EVENTS,
        "self._mine[self._step & 1].record(self._stream)",
        "self._mine[self._step & 1].record(torch.cuda.default_stream())",
        [f"{CASES}[ipc-a_stream_of_the_users]"],
    ),
    Mutant(
        "the other step's event is queried",
        EVENTS,
        "await_device(events[self._step & 1].query, self._check)",
        "await_device(events[1 - self._step & 1].query, self._check)",
        [f"{CASES}[ipc-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "without events, a call does not follow the last call's stream",
        EVENTS,
        "current.wait_stream(self._stream)  # the last step's reads come first",
        "pass",
        [f"{MACHINES}[events that cannot be opened]"],
    ),
    Mutant(
        "without events, the host does not wait before the barrier",
        EVENTS,
        "        super().before()\n        settle(self._check)",
        "        super().before()",
        [f"{MACHINES}[events that cannot be opened]"],
    ),
    Mutant(
        "an asynchronous call does not follow the caller's stream",
        EVENTS,
        "            side.wait_event(ready)\n",
        "",
        [f"{CASES}[ipc-asynchronous_calls]"],
    ),
    Mutant(
        "an asynchronous call ends before its work",
        EVENTS,
        "                body()\n                settle(check)",
        "                body()",
        [f"{CASES}[ipc-asynchronous_calls]", f"{CASES}[staged-asynchronous_calls]"],
    ),
    Mutant(
        "the host settles another stream",
        EVENTS,
        "done.record(torch.cuda.current_stream())",
        "done.record(torch.cuda.Stream())",
        [f"{MACHINES}[events that cannot be opened]"],
    ),
    # -- CUDA IPC ----------------------------------------------------------------------
    Mutant(
        "the event is recorded after the barrier",
        IPC,
        "        self._order.before()\n        super()._pass(first)\n",
        "        super()._pass(first)\n        self._order.before()\n",
        [f"{CASES}[ipc-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "nothing orders the GPUs after the barrier",
        IPC,
        "        self._order.after()\n",
        "",
        [f"{CASES}[ipc-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "each step uses the same slot",
        IPC,
        "return self._steps & 1",
        "return 0",
        [f"{CONTRACT}[2-ipc]", f"{CASES}[ipc-long_runs_of_small_calls]"],
    ),
    Mutant(
        "the slot's number is not that of the step",
        IPC,
        "        self._steps += 1\n",
        "        self._steps += self._barrier.rank + 1\n",
        [f"{CASES}[ipc-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "memory that reads other data is used",
        PEERS,
        "return all(swap(right))  # all ranks have read",
        "return all(swap(True))",
        [f"{MACHINES}[memory that reads other data]"],
    ),
    Mutant(
        "events that lie are used",
        PEERS,
        "return not (any(swap(late)) or early)",
        "return not any(swap(late))",
        [f"{MACHINES}[events that lie]"],
    ),
    Mutant(
        "memory that nobody has opened is kept",
        PEERS,
        "                _withdraw(ticket)\n",
        "                pass\n",
        [
            "tests/collectives/test_gpu.py::"
            "test_memory_that_a_rank_cannot_open_is_released"
        ],
    ),
    # -- staging -----------------------------------------------------------------------
    Mutant(
        "a buffer is filled before it was stored",
        COPIES,
        "            stored()  # the copy to the GPU must not read the next piece\n",
        "            pass\n",
        [f"{CASES}[staged-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "a piece is moved before it was fetched",
        COPIES,
        "        for done in self._fetching:\n            done()\n",
        "",
        [f"{CASES}[staged-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "the copies do not follow the caller's stream",
        COPIES,
        "                side.wait_stream(current)\n",
        "                pass\n",
        [f"{CASES}[staged-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "the caller's stream does not follow the copies",
        COPIES,
        "                self._current.wait_stream(side)\n",
        "                pass\n",
        [f"{CASES}[staged-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "a copy counts as done when it begins",
        COPIES,
        "        with torch.cuda.stream(stream):\n"
        "            target.copy_(source, non_blocking=True)\n"
        "        done = stream.record_event()\n",
        "        done = stream.record_event()\n"
        "        with torch.cuda.stream(stream):\n"
        "            target.copy_(source, non_blocking=True)\n",
        [f"{CASES}[staged-work_queued_before_and_after_is_ordered]"],
    ),
    Mutant(
        "one buffer for all pieces",
        COPIES,
        "_BUFFERS = 3\n",
        "_BUFFERS = 1\n",
        [f"{CASES}[staged-work_queued_before_and_after_is_ordered]"],
    ),
    # -- NCCL --------------------------------------------------------------------------
    Mutant(
        "the current stream does not wait for NCCL's",
        NCCL,
        "        work.wait()\n",
        "",
        [f"{OWN}[nccl-work_queued_before_and_after_is_ordered]"],
        cards=2,
    ),
    Mutant(
        "NCCL loses NaNs",
        NCCL,
        '            output.masked_fill_(lost.bool(), float("nan"))\n',
        "            pass\n",
        ["tests/collectives/test_gpu.py::test_contract_on_gpus_of_their_own[2-nccl]"],
        cards=2,
    ),
    # -- messages ----------------------------------------------------------------------
    Mutant(
        "a message is sent before it is computed",
        "collectives/mailbox.py",
        "            settle(self._hooks.check)  # MPI ignores streams\n",
        "",
        ["tests/simgpu/test_machines.py::test_case[late_messages]"],
    ),
    Mutant(
        "a received message is used before it is on the GPU",
        "collectives/mailbox.py",
        "            torch.cuda.current_stream(gpu).synchronize()\n",
        "            pass\n",
        ["tests/simgpu/test_machines.py::test_case[messages_on_two_streams]"],
    ),
    # -- batches and metrics -----------------------------------------------------------
    Mutant(
        "a batch is used before it is copied",
        PREFETCH,
        "    current.wait_event(ready)\n",
        "",
        ["tests/simgpu/test_machines.py::test_case[batches_are_complete]"],
    ),
    Mutant(
        "a batch's memory is given to the next batch",
        PREFETCH,
        "            tensor.record_stream(current)\n",
        "            pass\n",
        ["tests/simgpu/test_machines.py::test_case[batches_stay_as_they_are]"],
    ),
    Mutant(
        "a logged value is read before it is copied",
        "telemetry/scalars.py",
        "            self._ready.synchronize()\n",
        "            pass\n",
        [
            "tests/telemetry/test_recorder.py::"
            "test_a_cuda_scalar_is_copied_without_synchronising"
        ],
    ),
    # -- devices -----------------------------------------------------------------------
    Mutant(
        "an asynchronous call uses the device of the thread",
        "collectives/group.py",
        "current = torch.cuda.device(gpu) if gpu is not None else _nowhere",
        "current = _nowhere",
        [
            "tests/simgpu/test_machines.py::test_case_on_two_gpus[another_current_device]"
        ],
        cards=2,
    ),
    Mutant(
        "values are pushed to the first GPU",
        "engine/rpc_server.py",
        "        torch.cuda.set_device(device)\n",
        "        pass\n",
        ["tests/cluster/test_gpu_devices.py"],
        cards=2,
    ),
]


def copy_of_repository(folder: Path) -> Path:
    """A copy of what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder)
    return folder


def is_caught(mutant: Mutant, out: Path, seed: int) -> tuple[bool, str]:
    """Whether a test fails with the fault, and the last line of its output."""
    with tempfile.TemporaryDirectory(prefix="nbm") as made:
        root = copy_of_repository(Path(made))
        mutant.apply(root)
        environment = {
            **os.environ,
            "SIMGPU_COUNT": str(mutant.cards),
            "SIMGPU_SEED": str(seed),
            "PYTHONPATH": str(root),
        }
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        run = str(root / "tests" / "simgpu" / "run.sh")
        process = subprocess.Popen(
            [run, str(out.resolve()), *pytest, *mutant.tests],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output = process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            return True, "it hangs"
        code = process.returncode
        if code not in (0, 1):
            raise RuntimeError(f"{mutant.name}: pytest ended with {code}:\n{output}")
        last = output.strip().splitlines()[-1]
        if "skipped" in last and "passed" not in last and "failed" not in last:
            raise RuntimeError(f"{mutant.name}: its tests were skipped:\n{output}")
        return code == 1, last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder of build.sh")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="part of the faults' names")
    given = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if given.only in mutant.name]
    missed = []
    for mutant in chosen:
        begun = time.monotonic()
        for seed in given.seeds:
            caught, why = is_caught(mutant, given.out, seed)
            if caught:
                break
        else:
            missed.append(mutant.name)
        word = "caught" if caught else "MISSED"
        taken_s = time.monotonic() - begun
        print(
            f"{word}  {mutant.name} (seed {seed}, {taken_s:.0f} s: {why})", flush=True
        )
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught", flush=True)
    print(*(f"    missed: {name}" for name in missed), sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
