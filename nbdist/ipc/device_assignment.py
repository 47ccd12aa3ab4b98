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
from nbdist.ipc.host_sockets import ADDRESS, INTERFACE

__all__ = ["DeviceAssignment", "read_text", "write_assignments", "write_text"]

FILE_NAME = "assignments.json"


@dataclass(frozen=True)
class DeviceAssignment:
    """The device, memory and threads that one rank may use."""

    rank: int
    host: str
    gpu_uuid: str | None
    """UUID of the GPU or MIG device; None for a rank on the CPU."""
    visible_gpus: tuple[str, ...]
    """UUIDs of the GPUs that the rank's process sees, in torch's order."""
    visibility: dict[str, str]
    """The environment variable by which it sees these GPUs alone."""
    gpu_name: str
    """"CPU" for a rank on the CPU."""
    shares_gpu: bool
    memory_cap: float | int | None
    """The most of the GPU's memory that this rank may use: a float is a fraction, an
    int bytes; None for no limit."""
    threads: int
    """torch's intra-op threads."""
    address: str = ""
    """The host's address in the network of the ranks; "" if there is one host."""
    interface: str = ""
    """The interface with that address."""

    @property
    def gpu_index(self) -> int | None:
        """torch's number of the GPU in the rank's process; None on the CPU."""
        if self.gpu_uuid is None:
            return None
        return self.visible_gpus.index(self.gpu_uuid)

    def memory_fraction(self, total: int) -> float | None:
        """The most of the GPU's memory that this rank may use, as a fraction.

        Args:
            total: The bytes of the GPU, as CUDA counts them. The driver's count, which
                the notebook has, also includes what the driver keeps.
        """
        if isinstance(self.memory_cap, int):
            return min(1.0, self.memory_cap / total)
        return self.memory_cap

    @classmethod
    def read(cls, run_dir: Path, rank: int) -> DeviceAssignment:
        """Read the assignment of a rank, which `write_assignments` has written."""
        return cls.read_all(run_dir)[rank]

    @classmethod
    def read_all(cls, run_dir: Path) -> list[DeviceAssignment]:
        """Read the assignments of all ranks, in rank order."""
        return [
            cls(**{**record, "visible_gpus": tuple(record["visible_gpus"])})
            for record in json.loads(read_text(run_dir))
        ]

    def apply(self) -> None:
        """Set the GPUs that torch sees and the address, and limit the thread pools.

        This must be called before torch is imported, and before MPI starts.
        """
        os.environ.update(self.visibility)
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        os.environ["MKL_NUM_THREADS"] = str(self.threads)
        if self.address:
            of_network = {
                ADDRESS: self.address,
                INTERFACE: self.interface,
                # mpiexec was started for others if this host had no rank then.
                "OMPI_MCA_btl": "self,tcp",
                "OMPI_MCA_btl_tcp_if_include": self.interface,
            }
            os.environ.update(of_network)


def write_assignments(run_dir: Path, assignments: Sequence[DeviceAssignment]) -> None:
    """Write the assignments of all ranks, in rank order, to the cluster's folder."""
    write_text(run_dir, json.dumps([asdict(each) for each in assignments]))


def read_text(run_dir: Path) -> str:
    """What `write_assignments` has written."""
    return (run_dir / FILE_NAME).read_text(encoding="utf-8")


def write_text(run_dir: Path, text: str) -> None:
    """Write what `read_text` has read on another host."""
    write_atomically(
        run_dir / FILE_NAME,
        lambda file: file.write(text.encode()),
        mode=0o600,
        durable=False,
    )
