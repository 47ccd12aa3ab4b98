"""Device assignments: the device, memory and threads of each rank.

The notebook writes the assignments of all ranks to `assignments.json` in the cluster's
run folder. A rank reads its assignment and applies it before it imports torch or MPI.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nbdist.ipc.atomic_files import write_atomically

__all__ = ["DeviceAssignment", "write_assignments"]

FILE_NAME = "assignments.json"


@dataclass(frozen=True)
class DeviceAssignment:
    """The device, memory and threads that one rank may use."""

    rank: int
    host: str
    gpu_uuid: str | None
    """NVML's UUID of the GPU or MIG device; None for a rank on the CPU."""
    visible_gpus: tuple[str, ...]
    """UUIDs of the GPUs that the rank's process sees, in CUDA's order."""
    gpu_name: str
    """"CPU" for a rank on the CPU."""
    shares_gpu: bool
    memory_fraction: float | None
    """The most of the GPU's memory that this rank may use, as a fraction; None for no
    limit."""
    threads: int
    """torch's intra-op threads."""

    @property
    def gpu_index(self) -> int | None:
        """CUDA's number of the GPU in the rank's process; None on the CPU."""
        if self.gpu_uuid is None:
            return None
        return self.visible_gpus.index(self.gpu_uuid)

    @classmethod
    def read(cls, run_dir: Path, rank: int) -> DeviceAssignment:
        """Read the assignment of a rank, which `write_assignments` has written."""
        records = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
        record = records[rank]
        return cls(**{**record, "visible_gpus": tuple(record["visible_gpus"])})

    def apply(self) -> None:
        """Set the GPUs that CUDA sees, and limit the thread pools.

        This must be called before torch is imported.
        """
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.visible_gpus)
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        os.environ["MKL_NUM_THREADS"] = str(self.threads)


def write_assignments(run_dir: Path, assignments: Sequence[DeviceAssignment]) -> None:
    """Write the assignments of all ranks, in rank order, to the cluster's folder."""
    text = json.dumps([asdict(each) for each in assignments])
    write_atomically(
        run_dir / FILE_NAME,
        lambda file: file.write(text.encode()),
        mode=0o600,
        durable=False,
    )
