"""What CUDA does, asked of the simulated one: `python cuda_cases.py CASE`.

Each case is a process of its own, which prints what `test_cuda.py` expects. The faults
are made by `simgpu_break_context`, or as a program makes them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable

import torch

LONG = 100_000_000
"""Clock ticks: some 0.05 s."""
ILLEGAL_ADDRESS = 700
CAPTURE_LOST = "CUDA error: operation failed due to a previous error during capture"


def streams_are_not_ordered() -> bool:
    """Work on two streams overtakes work on the other one."""
    late = torch.zeros(5, device="cuda")
    torch.cuda._sleep(LONG)
    late.add_(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        seen = late.clone()
        torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    return not torch.equal(seen, late)


def events_order_streams() -> bool:
    side, done = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    begun = torch.cuda.Event(enable_timing=True)
    tensor = torch.zeros(5, device="cuda")
    begun.record()
    torch.cuda._sleep(LONG)
    tensor.add_(1)
    done.record()
    was_busy = not done.query()
    with torch.cuda.stream(side):
        side.wait_event(done)
        doubled = tensor * 2
    side.synchronize()
    took_ms = begun.elapsed_time(done)
    return was_busy and done.query() and bool((doubled == 2).all()) and took_ms > 30


def a_wait_is_for_the_record_before_it() -> bool:
    """Also if the event is recorded again, and that record is reached first."""
    late, event = torch.zeros(5, device="cuda"), torch.cuda.Event()
    side = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda._sleep(LONG)
    late.add_(1)
    event.record()
    side[0].wait_event(event)
    event.record(side[1])
    with torch.cuda.stream(side[0]):
        doubled = late * 2
    torch.cuda.synchronize()
    return bool((doubled == 2).all())


def a_launch_does_not_wait() -> bool:
    tensor = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * LONG)
    tensor.add_(1).mul_(3)
    ends = torch.stack(torch.aminmax(torch.cat([tensor, tensor * 2])))
    done = torch.cuda.Event()
    done.record()
    is_done = done.query()
    found = tensor.nonzero().numel()  # its shape depends on the values
    return not is_done and (ends.tolist(), found) == ([3, 6], 1000)


def a_pinned_copy_does_not_wait() -> bool:
    device = torch.ones(1000, device="cuda")
    host = torch.zeros(1000).pin_memory()
    torch.cuda._sleep(4 * LONG)
    host.copy_(device, non_blocking=True)
    early = host.clone()
    torch.cuda.synchronize()
    pageable = torch.zeros(1000)
    torch.cuda._sleep(LONG)
    pageable.copy_(device, non_blocking=True)
    return bool((early != 1).all() and (host == 1).all() and (pageable == 1).all())


def the_host_cannot_read_device_memory() -> None:
    print("before", flush=True)
    ctypes.string_at(torch.ones(5, device="cuda").data_ptr(), 4)


def new_memory_is_not_zero() -> bool:
    return bool(torch.empty(1000, device="cuda", dtype=torch.uint8).bool().any())


def an_assertion_is_sticky() -> str:
    tensor = torch.zeros(3, device="cuda")
    tensor[torch.tensor([9], device="cuda")] = 1
    found = []
    for _ in range(2):
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
    try:
        torch.ones(3, device="cuda")
    except RuntimeError as error:
        found.append(str(error).splitlines()[0])
    return "; ".join(sorted(set(found)))


def a_broken_context_drops_its_work() -> str:
    torch.ones(3, device="cuda")
    torch.cuda._sleep(10_000 * LONG)
    event = torch.cuda.Event()
    event.record()
    ctypes.CDLL(None).simgpu_break_context(0, ILLEGAL_ADDRESS)
    for call in (event.query, torch.cuda.synchronize, event.synchronize):
        try:
            call()
        except RuntimeError as error:
            if "illegal memory access" in str(error):
                continue
        return f"{call} was not refused"
    return "refused"


def a_forked_child_cannot_use_cuda() -> str:
    torch.cuda.init()
    torch._C._cuda_getDeviceCount()
    torch.ones(3, device="cuda")
    child = os.fork()
    if child == 0:
        count = ctypes.c_int()
        error = ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(count))
        os._exit(error)
    return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def an_exit_drops_the_queued_work() -> bool:
    """No kernel runs while Python and the libraries are taken down."""
    host = torch.zeros(1000).pin_memory()
    device = torch.ones(1000, device="cuda")
    torch.cuda._sleep(4 * LONG)
    host.copy_(device, non_blocking=True)
    atexit._run_exitfuncs()
    time.sleep(0.6)
    return bool((host == 0).all())


def a_graph_repeats_its_work() -> bool:
    """What is captured does not run, and runs at each launch; streams may fork."""
    tensor, other = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other.copy_(tensor)
        torch.cuda.current_stream().wait_stream(side)
    was_idle = bool((tensor == 0).all())
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return was_idle and bool((tensor == 2).all() and (other == 2).all())


def a_call_of_another_thread_invalidates_a_capture() -> str:
    """Unless its thread, or the capture, has a mode that permits it."""
    done = torch.cuda.Event()
    done.record()
    calls: list[Callable[[], object]] = [
        done.query,
        done.synchronize,
        torch.cuda.Stream().synchronize,
        torch.cuda.Stream().query,
        lambda: ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), 512),
    ]
    found = Counter[str]()
    for call in calls:
        for mode in ("global", "thread_local", "relaxed"):
            for relaxes in (False, True):
                found[f"{mode} {relaxes} {_captured(call, mode, relaxes)}"] += 1
    lost = f"global False {CAPTURE_LOST}"
    kept = len(calls) * 5
    return f"{found.pop(lost)} lost, {found.total() == kept} {set(map(_end, found))}"


def _end(text: str) -> str:
    return text.split()[-1]


def _captured(call: Callable[[], object], mode: str, relaxes: bool) -> str:
    """How a capture ends beside which another thread makes a call."""

    def run() -> None:
        if relaxes:
            relaxed = ctypes.c_int(2)
            ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
        with contextlib.suppress(RuntimeError):
            call()

    tensor = torch.zeros(5, device="cuda")
    beside = threading.Thread(target=run)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            tensor.add_(1)
            beside.start()
            beside.join()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "kept"


def a_captured_event_cannot_be_waited_for() -> str:
    """Nor can its stream or device, whatever the mode of the thread."""
    event, tensor = torch.cuda.Event(), torch.zeros(5, device="cuda")
    found = []
    for call in (event.query, event.synchronize, torch.cuda.synchronize):
        with (
            contextlib.suppress(RuntimeError),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"),
        ):
            tensor.add_(1)
            event.record()
            try:
                call()
            except RuntimeError as error:
                found.append(str(error).splitlines()[0])
    return "; ".join(dict.fromkeys(found))


def memory_ends() -> str:
    """A GPU of 1 GiB, of which a context takes 300 MiB."""
    held = [torch.empty(500 << 20, dtype=torch.uint8, device="cuda")]
    try:
        held.append(torch.empty(500 << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        held.clear()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return f"{free >> 20} of {total >> 20}"
    return "no error"


def segments_grow_without_a_warning() -> bool:
    """The allocator asks NVML for the card's fabric before it reserves addresses."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return bool((torch.ones(1_000_000, device="cuda") == 1).all())


def devices() -> str:
    names = [
        f"{torch.cuda.get_device_properties(index).uuid}"
        for index in range(torch.cuda.device_count())
    ]
    access = (
        torch.cuda.can_device_access_peer(0, 1) if torch.cuda.device_count() > 1 else ""
    )
    return f"{len(set(names))} {access}".strip()


def tensors_move_between_devices() -> bool:
    one = torch.arange(100_000.0, device="cuda:0")
    torch.cuda._sleep(LONG)
    one.add_(1)
    other = one.to("cuda:1", non_blocking=True)
    part = one.view(100, 1000).t()[3].to("cuda:1")
    torch.cuda.synchronize(1)
    expected = torch.arange(100_000.0) + 1
    return torch.equal(other.cpu(), expected) and torch.equal(
        part.cpu(), expected.view(100, 1000).t()[3]
    )


def lists_are_copied_to_the_host() -> bool:
    sources = [torch.arange(5.0, device="cuda"), torch.ones(2, 3, device="cuda").t()]
    targets = [torch.zeros(5), torch.zeros(3, 2)]
    torch.cuda._sleep(LONG)
    sources[0].add_(1)
    torch._foreach_copy_(targets, sources)
    return all(map(torch.equal, targets, [torch.arange(5.0) + 1, torch.ones(3, 2)]))


def mixed_devices_are_refused() -> str:
    try:
        torch.ones(3, device="cuda") + torch.ones(3)
    except RuntimeError as error:
        return str(error).partition(",")[0]
    return "no error"


def sparse_tensors() -> bool:
    dense = torch.eye(4, device="cuda") * 3
    sparse = dense.to_sparse()
    total = (sparse + sparse).coalesce()
    twice = torch.sparse_coo_tensor([[1, 1], [2, 2]], [1.0, 4.0], (4, 4)).cuda()
    product = torch.sparse.mm(sparse, torch.ones(4, 2, device="cuda"))
    return (
        torch.equal(total.to_dense(), 2 * dense)
        and twice.coalesce().values().tolist() == [5.0]
        and bool((product == 3).all())
    )


if __name__ == "__main__":
    print(globals()[sys.argv[1]]())
