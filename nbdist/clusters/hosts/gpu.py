"""A GPU of a host, and how a process is made to see some of the host's GPUs only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Gpu", "visibility"]


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one MIG device of a GPU."""

    uuid: str
    name: str
    memory: int | None
    """Bytes; None if the driver does not tell."""
    hip_number: int | None = None
    """HIP's number of a GPU of AMD's, among those that `ROCR_VISIBLE_DEVICES` leaves;
    None for a GPU of NVIDIA's."""

    most_processes: int | None = None
    """The most processes that may use it at once, 0 or 1, where its compute mode limits
    them; None for no limit."""

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG device."""
        return self.uuid.startswith("MIG-")


def visibility(gpus: Sequence[Gpu], of: Sequence[Gpu]) -> dict[str, str]:
    """The environment variable that lets a process see these GPUs alone, in this order.

    Args:
        gpus: The GPUs to see; empty for none.
        of: All GPUs of the host.
    """
    if any(gpu.hip_number is not None for gpu in of):
        # HIP takes an empty list for no list.
        numbers = ",".join(str(gpu.hip_number) for gpu in gpus) or "-1"
        return {"HIP_VISIBLE_DEVICES": numbers}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus)}
