"""Deliberate faults in the CUDA code, each of which a test must catch.

`make simgpu-mutants` applies each to a copy of the repository, runs the test on
simulated GPUs, and prints which faults were caught. A fault is a text that is replaced;
`tests/mutants/test_mutants.py` fails when the text is no longer there.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.mutants.mutant import Mutant, missed_among

CASES = "tests/simgpu/alone.py::test_case"
CONTRACT = "tests/simgpu/alone.py::test_contract"
MACHINES = "tests/simgpu/test_machines.py::test_machine"
STREAMS = "tests/simgpu/test_machines.py::test_calls_on_changing_streams"
MACHINE_CASES = "tests/simgpu/test_machines.py::test_case"
PIECES = f"{MACHINE_CASES}[many_small_pieces]"
FAULTS = (
    "tests/simgpu/test_gpu_faults.py::test_a_fault_ends_its_cell_and_names_the_rank"
)
DEVICES = "tests/clusters/test_gpu_devices.py"
UNEVEN = "tests/simgpu/test_uneven_nccl_on_gpus.py"
DRAWS = "tests/simgpu/alone.py::test_draws"
OWN_STREAMS = "tests/simgpu/test_random_streams_on_gpus.py::test_12_draws"
ON_TWO = "tests/simgpu/test_machines.py::test_case_on_two_gpus"
LOADED = "tests/simgpu/test_changes_on_gpus.py"
LIMIT_S = 400.0


EVENTS = "collectives/sync/cuda_events.py"
PEERS = "collectives/sync/cuda_peers.py"
COPIES = "collectives/transports/copy_pipeline.py"
IPC = "collectives/transports/cuda_ipc.py"
NCCL = "collectives/transports/nccl.py"
NATIVE_CALLS = "collectives/torch_backend/native_calls.py"
PREFETCH = "training/data/device_prefetch.py"
SCALARS = "telemetry/scalars.py"
WATCH = "training/watch.py"
REGIONS = "ipc/memory_regions.py"
COPIES_OF_COMMITS = "training/elastic/shared_copies.py"
GROUP = "collectives/group.py"
STAGED = "collectives/transports/staged.py"
SHARED = "collectives/transports/shared_memory.py"
SLOTS = "collectives/transports/slots.py"

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
        [f"{STREAMS}[usual]"],
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
        [f"{STREAMS}[events that cannot be opened]"],
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
        [f"{STREAMS}[usual]"],
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
        [f"{CONTRACT}[ipc]", f"{CASES}[ipc-long_runs_of_small_calls]"],
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
        [PIECES],
    ),
    Mutant(
        "a piece is moved before it was fetched",
        COPIES,
        "        for done in self._fetching:\n            done()\n",
        "",
        [PIECES],
    ),
    Mutant(
        "the copies do not follow the caller's stream",
        COPIES,
        "                side.wait_stream(current)\n",
        "                pass\n",
        [PIECES],
    ),
    Mutant(
        "the caller's stream does not follow the copies",
        COPIES,
        "                self._current.wait_stream(side)\n",
        "                pass\n",
        [PIECES],
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
        [PIECES],
    ),
    Mutant(
        "one buffer for all pieces",
        COPIES,
        "_BUFFERS = 3\n",
        "_BUFFERS = 1\n",
        [PIECES],
    ),
    # -- NCCL --------------------------------------------------------------------------
    Mutant(
        "the current stream does not wait for NCCL's",
        NCCL,
        "        work.wait()\n",
        "",
        [f"{CASES}[nccl-work_queued_before_and_after_is_ordered]"],
        cards=2,
    ),
    Mutant(
        "NCCL loses NaNs",
        NCCL,
        '            output.masked_fill_(lost.bool(), float("nan"))\n',
        "            pass\n",
        [f"{CONTRACT}[nccl]"],
        cards=2,
    ),
    Mutant(
        "the digest of NCCL's calls has no reduce-ops and roots",
        NATIVE_CALLS,
        'zlib.crc32(f"{name} {details} {size};"',
        'zlib.crc32(f"{name} {size};"',
        [f"{UNEVEN}::test_different_reductions_that_have_completed_are_an_error"],
        cards=2,
    ),
    Mutant(
        "NCCL's waiting calls are compared without their roots",
        NATIVE_CALLS,
        '            yield f"root {root}"\n',
        "            pass\n",
        [f"{UNEVEN}::test_ranks_that_call_different_collectives_are_released"],
        cards=2,
    ),
    # -- messages ----------------------------------------------------------------------
    Mutant(
        "a received message is used before it is on the GPU",
        "collectives/mailbox.py",
        "            torch.cuda.current_stream(gpu).synchronize()\n",
        "            pass\n",
        [f"{MACHINE_CASES}[messages_on_two_streams]"],
    ),
    # -- batches and metrics -----------------------------------------------------------
    Mutant(
        "a batch is used before it is copied",
        PREFETCH,
        "    torch.cuda.current_stream(device).wait_event(ready)\n",
        "",
        [f"{MACHINE_CASES}[batches_are_complete]"],
    ),
    Mutant(
        "a batch's event is recorded before its copy",
        PREFETCH,
        "        return _moved(batch, device, non_blocking=True), "
        "side.record_event()\n",
        "        ready = side.record_event()\n"
        "        return _moved(batch, device, non_blocking=True), ready\n",
        [f"{MACHINE_CASES}[batches_are_complete]"],
    ),
    Mutant(
        "a batch's memory is given to the next batch",
        PREFETCH,
        "    side.wait_stream(torch.cuda.current_stream(device))\n    with",
        "    with",
        [f"{MACHINE_CASES}[batches_stay_as_they_are]"],
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
        [f"{ON_TWO}[another_current_device]"],
        cards=2,
    ),
    Mutant(
        "the control thread uses the first GPU",
        "engine/rpc_server.py",
        "        use_gpu(device)\n",
        "        pass\n",
        [DEVICES],
        cards=2,
    ),
    Mutant(
        "a rank begins on the first GPU",
        "engine/bootstrap.py",
        "    torch.cuda.set_device(device)\n",
        "",
        [DEVICES],
        cards=2,
    ),
    Mutant(
        "autograd runs the backward of a GPU in a thread of its own",
        "engine/bootstrap.py",
        "    torch.autograd.set_multithreading_enabled(False)\n",
        "",
        [f"{FAULTS}[one GPU-loop-in DDP backward-middle]"],
    ),
    # -- the user's own streams --------------------------------------------------------
    Mutant(
        "the default stream waits for a batch",
        PREFETCH,
        "    torch.cuda.current_stream(device).wait_event(ready)\n",
        "    torch.cuda.default_stream(device).wait_event(ready)\n",
        [f"{OWN_STREAMS}[one GPU-batches]"],
        cards=2,
    ),
    Mutant(
        "a stream of the current device waits for a batch",
        PREFETCH,
        "    torch.cuda.current_stream(device).wait_event(ready)\n",
        "    torch.cuda.current_stream().wait_event(ready)\n",
        [f"{OWN_STREAMS}[a GPU each-batches]"],
        cards=2,
    ),
    Mutant(
        "a batch is copied after the default stream",
        PREFETCH,
        "    side.wait_stream(torch.cuda.current_stream(device))\n    with",
        "    side.wait_stream(torch.cuda.default_stream(device))\n    with",
        [f"{MACHINE_CASES}[batches_stay_as_they_are]"],
    ),
    Mutant(
        "a batch's side stream is on the current device",
        PREFETCH,
        "side = torch.cuda.Stream(device)",
        "side = torch.cuda.Stream()",
        [f"{ON_TWO}[a_step_does_not_wait_for_the_next_batch]"],
        cards=2,
    ),
    Mutant(
        "a logged value's event is on the default stream",
        SCALARS,
        "self._ready.record(cuda.current_stream(tensor.device))",
        "self._ready.record(cuda.default_stream(tensor.device))",
        [f"{OWN_STREAMS}[one GPU-logged]"],
        cards=2,
    ),
    Mutant(
        "a logged value's event is on the current device",
        SCALARS,
        "self._ready.record(cuda.current_stream(tensor.device))",
        "self._ready.record()",
        [f"{OWN_STREAMS}[a GPU each-logged]"],
        cards=2,
    ),
    Mutant(
        "a logged value is copied when it is read",
        SCALARS,
        'tensor.detach().to("cpu", non_blocking=True)',
        "tensor.detach()",
        [f"{OWN_STREAMS}[one GPU-logged]"],
        cards=2,
    ),
    Mutant(
        "watch reads its results before they have arrived",
        WATCH,
        "            event.synchronize()\n        magnitudes",
        "            pass\n        magnitudes",
        [f"{OWN_STREAMS}[one GPU-watched]"],
        cards=2,
    ),
    Mutant(
        "watch's event is recorded before the copy",
        WATCH,
        "                    bounds = host.copy_(bounds, non_blocking=True)\n"
        "                    event = torch.cuda.Event()\n"
        "                    event.record()\n",
        "                    event = torch.cuda.Event()\n"
        "                    event.record()\n"
        "                    bounds = host.copy_(bounds, non_blocking=True)\n",
        [f"{OWN_STREAMS}[one GPU-watched]"],
        cards=2,
    ),
    Mutant(
        "watch does not wait for the streams of the training",
        WATCH,
        "            torch.cuda.current_stream(stream.device).wait_stream(stream)\n",
        "            pass\n",
        [f"{OWN_STREAMS}[one GPU-watched]"],
        cards=2,
    ),
    Mutant(
        "watch's event is on the current device",
        WATCH,
        "with torch.cuda.device(device):",
        "if True:",
        [f"{OWN_STREAMS}[a GPU each-watched]"],
        cards=2,
    ),
    Mutant(
        "a pulled value waits for no stream",
        REGIONS,
        "            torch.cuda.synchronize(device)\n",
        "",
        [f"{OWN_STREAMS}[one GPU-pulled]"],
        cards=2,
    ),
    Mutant(
        "a pulled value waits for the current stream alone",
        REGIONS,
        "            torch.cuda.synchronize(device)\n",
        "            torch.cuda.current_stream(device).synchronize()\n",
        [f"{OWN_STREAMS}[one GPU-pulled]"],
        cards=2,
    ),
    Mutant(
        "a pulled value waits for the current device",
        REGIONS,
        "            torch.cuda.synchronize(device)\n",
        "            torch.cuda.synchronize(1 - device.index)\n",
        [f"{OWN_STREAMS}[a GPU each-pulled]"],
        cards=2,
    ),
    Mutant(
        "a commit's tensors are the live ones",
        "training/elastic/tree.py",
        "            return value.detach().clone()\n",
        "            return value.detach()\n",
        [f"{OWN_STREAMS}[one GPU-committed]"],
        cards=2,
    ),
    Mutant(
        "a commit on a GPU shares the live tensor's memory",
        COPIES_OF_COMMITS,
        "                    own.copy_(tensor)\n",
        "                    own.set_(tensor)\n",
        [f"{OWN_STREAMS}[one GPU-saved]"],
        cards=2,
    ),
    Mutant(
        "a commit on a GPU is copied on the default stream",
        COPIES_OF_COMMITS,
        "                    own.copy_(tensor)\n",
        "                    default = torch.cuda.default_stream(own.device)\n"
        "                    with torch.cuda.stream(default):\n"
        "                        own.copy_(tensor)\n",
        [f"{OWN_STREAMS}[one GPU-saved]"],
        cards=2,
    ),
    Mutant(
        "the files of a commit are copied on a stream of their own",
        COPIES_OF_COMMITS,
        "                torch._foreach_copy_(self._shared, list(tensors))",
        "                own = torch.cuda.Stream(tensors[0].device)\n"
        "                with torch.cuda.stream(own):\n"
        "                    torch._foreach_copy_(self._shared, list(tensors))",
        [f"{OWN_STREAMS}[one GPU-saved]"],
        cards=2,
    ),
    Mutant(
        "the files of a commit are copied on the default stream",
        COPIES_OF_COMMITS,
        "                torch._foreach_copy_(self._shared, list(tensors))",
        "                default = torch.cuda.default_stream(tensors[0].device)\n"
        "                with torch.cuda.stream(default):\n"
        "                    torch._foreach_copy_(self._shared, list(tensors))",
        [f"{OWN_STREAMS}[one GPU-saved]"],
        cards=2,
    ),
    # -- ranks and cards that differ ---------------------------------------------------
    Mutant(
        "each rank takes slots of its own size",
        IPC,
        "slot = min(swap(_suitable_slot()))",
        "slot = swap(_suitable_slot())[barrier.rank]",
        [f"{DRAWS}[ipc]"],
        cards=4,
    ),
    Mutant(
        "a rank reduces at once if it shares the first rank's GPU",
        IPC,
        "if len(set(gpus)) == 1:",
        "if gpus[barrier.rank] == gpus[0]:",
        [f"{DRAWS}[ipc]"],
        cards=4,
    ),
    Mutant(
        "a piece of several tensors is cut as one of one",
        STAGED,
        "return max(self._piece // parts // dtype.itemsize, 1)",
        "return max(self._piece // (parts + self._rank) // dtype.itemsize, 1)",
        [f"{DRAWS}[staged]"],
        cards=4,
    ),
    Mutant(
        "the last block of a tensor is left out",
        SHARED,
        "for step in range(len(blocks) + 2):",
        "for step in range(max(len(blocks), 2) + 1):",
        [f"{DRAWS}[ipc]"],
        cards=4,
    ),
    Mutant(
        "an uneven exchange ends with the own tensors",
        SHARED,
        "steps = -(-longest // room)",
        "steps = longest // room",
        [f"{DRAWS}[ipc]"],
        cards=4,
    ),
    Mutant(
        "the shares of a result overlap",
        SLOTS,
        "results[self._rank]\n        )",
        "results[0]\n        )",
        [f"{DRAWS}[ipc]"],
        cards=4,
    ),
    Mutant(
        "one element keeps its stride",
        "collectives/flat.py",
        "if flat.stride(0) != 1:",
        "if False:",
        [f"{DRAWS}[nccl]"],
        cards=4,
    ),
    # -- errors with work queued -------------------------------------------------------
    Mutant(
        "after an error, memory is free before the side stream is done",
        EVENTS,
        "                caller.wait_stream(side)\n",
        "                pass\n",
        [f"{DRAWS}[ipc]"],
        cards=4,
    ),
    Mutant(
        "after an error, the copies of a transfer are not waited for",
        COPIES,
        "        finally:\n            self._copier.end()\n",
        "        except ZeroDivisionError:\n            self._copier.end()\n",
        [f"{DRAWS}[staged]"],
        cards=4,
    ),
    Mutant(
        "an error does not break the group",
        GROUP,
        "        if self._error is None:\n"
        "            self._error = error\n"
        "        self._connection.barrier.leave",
        "        self._connection.barrier.leave",
        [f"{DRAWS}[ipc]"],
        cards=4,
    ),
    Mutant(
        "slots are freed while they are read",
        EVENTS,
        "                self._stream.synchronize()\n",
        "                pass\n",
        [f"{MACHINE_CASES}[results_outlive_an_aborted_group]"],
    ),
    # -- the GPU with the number 1 -----------------------------------------------------
    Mutant(
        "a tensor on another GPU is taken",
        GROUP,
        "if gpu is not None and device.index not in (None, gpu.index):",
        "if False:",
        [f"{ON_TWO}[another_current_device]"],
        cards=2,
    ),
    Mutant(
        "the group's GPU is the current device",
        GROUP,
        "with torch.cuda.device(device):",
        "with _nowhere:",
        [f"{DRAWS}[ipc]"],
        cards=4,
    ),
    Mutant(
        "a synchronous call uses the current device",
        GROUP,
        "            with torch.cuda.device(self._connection.gpu):\n",
        "            with _nowhere:\n",
        [f"{ON_TWO}[another_current_device]"],
        cards=2,
    ),
    Mutant(
        "an asynchronous call uses the stream of its thread",
        GROUP,
        "            body = for_any_thread(body, call.kind.device, self._check)\n",
        "",
        [f"{DRAWS}[ipc]"],
        cards=4,
    ),
    Mutant(
        "a saved value is loaded to the first GPU",
        "training/files.py",
        "storage.cuda(torch.cuda.current_device())",
        'storage.to(device=torch.device("cuda", 0))',
        [f"{LOADED}::test_each_rank_loads_a_saved_state_to_its_own_gpu"],
        cards=2,
    ),
    Mutant(
        "a pushed tensor is put on the first GPU",
        REGIONS,
        "octets.cuda() if on_gpu",
        'octets.to("cuda:0") if on_gpu',
        [f"{DEVICES}::test_pushed_tensors_are_on_the_rank_s_own_gpu"],
        cards=2,
    ),
    Mutant(
        "a rank's device is the first GPU",
        "training/device.py",
        'torch.device("cuda", torch.cuda.current_device())',
        'torch.device("cuda", 0)',
        [f"{OWN_STREAMS}[a GPU each-batches]"],
        cards=2,
    ),
    Mutant(
        "the monitor shows the allocator of the first GPU",
        "telemetry/probes.py",
        "torch.cuda.memory_stats_as_nested_dict(device)",
        "torch.cuda.memory_stats_as_nested_dict(0)",
        [
            "tests/simgpu/test_clusters.py::test_the_monitor_shows_the_memory_of_each_gpu"
        ],
        cards=2,
    ),
    # -- NaN and infinities in NCCL ----------------------------------------------------
    Mutant(
        "NCCL's minimum loses NaNs",
        NCCL,
        '_LOSE_NAN = frozenset({"min", "max"})',
        '_LOSE_NAN = frozenset({"max"})',
        [f"{DRAWS}[nccl]"],
        cards=4,
    ),
    Mutant(
        "NCCL's maximum loses NaNs",
        NCCL,
        '_LOSE_NAN = frozenset({"min", "max"})',
        '_LOSE_NAN = frozenset({"min"})',
        [f"{DRAWS}[nccl]"],
        cards=4,
    ),
    Mutant(
        "NCCL's reduce loses NaNs at the root",
        NCCL,
        "outputs = [numbers] if self._group.rank() == root else []",
        "outputs: list[Tensor] = []",
        [f"{DRAWS}[nccl]"],
        cards=4,
    ),
    Mutant(
        "NCCL's reduce puts NaNs into the tensors of other ranks",
        NCCL,
        "outputs = [numbers] if self._group.rank() == root else []",
        "outputs = [numbers]",
        [f"{DRAWS}[nccl]"],
        cards=4,
    ),
    Mutant(
        "NCCL's reduce_scatter loses NaNs",
        NCCL,
        "loses_nan = op in _LOSE_NAN and output.is_floating_point()",
        "loses_nan = False",
        [f"{DRAWS}[nccl]"],
        cards=4,
    ),
    Mutant(
        "only the own NaNs are kept",
        NCCL,
        "        self._queue(self._group.allreduce([lost], options))\n",
        "",
        [f"{DRAWS}[nccl]"],
        cards=4,
    ),
    Mutant(
        "infinities become NaNs",
        NCCL,
        "lost = numbers.isnan().to(torch.uint8)",
        "lost = (~numbers.isfinite()).to(torch.uint8)",
        [f"{DRAWS}[nccl]"],
        cards=4,
    ),
]


def run(
    root: Path, tests: Sequence[str], cards: int, *, out: Path, seed: int
) -> tuple[int | None, str]:
    """Run tests of a copy on simulated GPUs. See `tests.mutants.mutant.Run`.

    Args:
        root: The copy of the repository.
        tests: The tests, as pytest takes them.
        cards: Number of GPUs.
        out: The folder of build.sh.
        seed: The seed of the streams' order.
    """
    environment = {
        **os.environ,
        "SIMGPU_COUNT": str(cards),
        "SIMGPU_SEED": str(seed),
        "SIMGPU_SMALL": "1",
        "NBDIST_FORK_LAUNCHES": "1",
        "PYTHONPATH": str(root),
    }
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    program = str(root / "tests" / "simgpu" / "run.sh")
    process = subprocess.Popen(
        [program, str(out.resolve()), *pytest, *tests],
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
        return None, process.communicate()[0]
    return process.returncode, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder of build.sh")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first fault"
    )
    given = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS[given.first :]
        if any(part in mutant.name for part in given.only)
    ]
    runs = [functools.partial(run, out=given.out, seed=seed) for seed in given.seeds]
    return 1 if missed_among(chosen, runs) else 0


if __name__ == "__main__":
    sys.exit(main())
