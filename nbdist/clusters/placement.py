"""Assigns devices to ranks, from a configuration and a description of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nbdist.clusters.hosts.gpu import Gpu, visibility
from nbdist.clusters.hosts.machine import Host
from nbdist.config import ClusterConfig
from nbdist.errors import UsageError
from nbdist.ipc.device_assignment import DeviceAssignment
from nbdist.ipc.resources import memory_cap, memory_fraction

__all__ = ["assign_devices"]

DEFAULT_CPU_RANKS = 4
RANKS_PER_CORE = 8
"""The most ranks that share a core. `--oversubscribe` allows more."""
RANK_BYTES = 250_000_000
"""Estimated memory of a rank without large user data. With the CPU build of torch 2.13
the PSS of each of four ranks was 186 MB when idle, and 262 MB after a step with DDP."""

CONTEXT_BYTES = 512 * 2**20
"""Estimated memory that CUDA takes on a GPU for each process, beside torch's."""
SMALLEST_SHARE = 0.01
"""Smallest part of a GPU's memory that a rank gets by default."""


def assign_devices(
    config: ClusterConfig, host: Host, before: Sequence[DeviceAssignment] = ()
) -> list[DeviceAssignment]:
    """The device assignments of the ranks that are added on a host, in rank order.

    This is a pure function: it reads nothing but its arguments.

    Args:
        config: The options of the start. `n` counts the ranks of the host that run and
            those that are added.
        host: The host of the ranks.
        before: The assignments of the ranks that run on the host. Their GPUs and their
            memory are in use.

    Raises:
        UsageError: The host has too few GPUs or cores or too little memory, or an
            option is invalid. The message says which options would work.
    """
    n = None if config.n is None else _positive("-n", config.n)
    if config.device not in ("auto", "cuda", "cpu"):
        raise UsageError(
            f"--device {config.device!r} is not known: expected auto, cuda or cpu"
        )
    on_gpu = _on_gpu(config, host)
    per_gpu = _ranks_per_gpu(config, on_gpu)
    if n is None:
        n = len(host.gpus) * per_gpu if on_gpu else min(DEFAULT_CPU_RANKS, host.cores)
    more = n - len(before)
    gpus: Sequence[Gpu | None] = [None] * more
    if on_gpu:
        gpus = _free_gpus(host.gpus, before, per_gpu, more)
        if len(gpus) < more:
            raise UsageError(_too_many(n, len(host.gpus), per_gpu))
        _check_compute_modes(gpus, before)
        _check_caps(config, host.gpus, per_gpu, n)
    if not config.oversubscribe:
        _check_host(n, len(before), host)
    threads = (
        max(1, host.cores // n)
        if config.threads is None
        else _positive("--threads", config.threads)
    )
    assignments = []
    for rank, gpu in enumerate(gpus, len(before)):
        visible = _visible(gpu, host.gpus, shared=per_gpu > 1)
        assignments.append(
            DeviceAssignment(
                rank=rank,
                host=host.name,
                gpu_uuid=gpu.uuid if gpu else None,
                visible_gpus=tuple(each.uuid for each in visible),
                visibility=visibility(visible, of=host.gpus),
                gpu_name=gpu.name if gpu else "CPU",
                shares_gpu=per_gpu > 1,
                memory_cap=_cap(config, gpu, per_gpu),
                threads=threads,
            )
        )
    return assignments


def _free_gpus(
    gpus: Sequence[Gpu], before: Sequence[DeviceAssignment], per_gpu: int, more: int
) -> list[Gpu]:
    """The GPU of each rank that is added; fewer if there is no room for all.

    The fewest GPUs are used that have room, and their ranks are spread evenly.
    Neighbouring ranks share a GPU, so that few steps of a ring cross GPUs.
    """
    load = Counter(each.gpu_uuid for each in before)
    ranks = sum(load[gpu.uuid] for gpu in gpus) + more
    in_use_first = sorted(gpus, key=lambda gpu: load[gpu.uuid] == 0)
    used = in_use_first[: -(-ranks // per_gpu)]
    chosen: Counter[Gpu] = Counter()
    for _ in range(more):
        gpu = min(used, key=lambda gpu: load[gpu.uuid] + chosen[gpu])
        if load[gpu.uuid] + chosen[gpu] >= per_gpu:
            break
        chosen[gpu] += 1
    return [gpu for gpu in gpus for _ in range(chosen[gpu])]


def _visible(gpu: Gpu | None, gpus: Sequence[Gpu], *, shared: bool) -> Sequence[Gpu]:
    """The GPUs that a rank on a GPU sees.

    A rank with a GPU of its own sees all of them, as under torchrun, so that
    `cuda:{local_rank}` is its own. A rank that shares a GPU sees this one alone, as
    `cuda:0`, and so does a rank on a MIG device, of which CUDA shows a process one.
    """
    if gpu is None:
        return ()
    if shared or any(each.is_mig for each in gpus):
        return (gpu,)
    return gpus


def _positive(option: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{option} {value!r}: expected a whole number, 1 or more")
    return value


def _on_gpu(config: ClusterConfig, host: Host) -> bool:
    if config.device == "cuda" and not host.gpus:
        raise UsageError(
            f"--device cuda, but {host.why_no_gpu} on {host.name}: use --device cpu"
        )
    for option, value in (
        ("--ranks-per-gpu", config.ranks_per_gpu),
        ("--gpu-memory", config.gpu_memory),
    ):
        if value is not None and (config.device == "cpu" or not host.gpus):
            why = "--device cpu" if config.device == "cpu" else host.why_no_gpu
            raise UsageError(f"{option} {value} needs a GPU ({why}): leave it out")
    return config.device != "cpu" and bool(host.gpus)


def _check_host(n: int, running: int, host: Host) -> None:
    """Check the estimated use of the host's cores and memory.

    Raises:
        UsageError: The host has too little for `n` ranks.
    """
    most, why = host.cores * RANKS_PER_CORE, []
    if n > most:
        cores = f"{host.cores} core{'s' if host.cores > 1 else ''}"
        why.append(f"more than {RANKS_PER_CORE} would share each of the {cores}")
    needed, left = (n - running) * RANK_BYTES, host.memory_available
    if left is not None and needed > left:
        why.append(
            f"they need about {needed / 1e9:.1f} GB to start ({RANK_BYTES / 1e6:g} MB "
            f"each), and {left / 1e9:.1f} GB are available"
        )
        most = min(most, running + left // RANK_BYTES)
    if why:
        raise UsageError(
            f"-n {n} ranks are too many for {host.name}: {', and '.join(why)}. Lower n "
            f"to {max(1, most)}, or add --oversubscribe to start them nevertheless"
        )


def _ranks_per_gpu(config: ClusterConfig, on_gpu: bool) -> int:
    if config.ranks_per_gpu is None or not on_gpu:
        return 1
    return _positive("--ranks-per-gpu", config.ranks_per_gpu)


def _too_many(n: int, gpus: int, per_gpu: int) -> str:
    needed = -(-n // gpus)
    return (
        f"-n {n} ranks do not fit on {gpus} GPU{'s' if gpus > 1 else ''} with "
        f"{per_gpu} per GPU: add --ranks-per-gpu {needed} to share, or lower n to "
        f"{gpus * per_gpu}"
    )


def _cap(config: ClusterConfig, gpu: Gpu | None, per_gpu: int) -> float | int | None:
    if gpu is None:
        return None
    if config.gpu_memory is not None:
        return memory_cap(config.gpu_memory, gpu.memory)
    if per_gpu == 1 or gpu.memory is None:
        return None
    return max(1.0 / per_gpu - CONTEXT_BYTES / gpu.memory, SMALLEST_SHARE)


def _check_compute_modes(
    gpus: Sequence[Gpu], before: Sequence[DeviceAssignment]
) -> None:
    """Check that each GPU lets as many processes use it as there are ranks on it.

    Args:
        gpus: The GPU of each rank that is added.
        before: The assignments of the ranks that run.
    """
    ranks = Counter([*(each.gpu_uuid for each in before), *(gpu.uuid for gpu in gpus)])
    for gpu in gpus:
        if gpu.most_processes is None or ranks[gpu.uuid] <= gpu.most_processes:
            continue
        mode, instead = "prohibited", "leave it out of CUDA_VISIBLE_DEVICES"
        if gpu.most_processes:
            mode, instead = "exclusive process", "start MPS"
        ranks_on_it = ranks[gpu.uuid]
        raise UsageError(
            f"{gpu.name} ({gpu.uuid}) has the compute mode {mode!r}, and "
            f"{ranks_on_it} rank{'s' if ranks_on_it > 1 else ''} would use it: set the "
            f"default mode with `nvidia-smi -c 0` as root, or {instead}"
        )


def _check_caps(
    config: ClusterConfig, gpus: Sequence[Gpu], per_gpu: int, n: int
) -> None:
    if config.gpu_memory is None:
        return
    used = -(-n // per_gpu)
    sharing = -(-n // used)
    for gpu in gpus[:used]:
        fraction = memory_fraction(config.gpu_memory, gpu.memory)
        if fraction * sharing > 1.0 + 1e-9:
            whole = "memory" if gpu.memory is None else f"{gpu.memory / 2**30:.1f} GiB"
            raise UsageError(
                f"--gpu-memory {config.gpu_memory} for each of {sharing} ranks is "
                f"{fraction * sharing:.2f} times the {whole} of "
                f"{gpu.name}: at most {1 / sharing:.3g} each"
            )
