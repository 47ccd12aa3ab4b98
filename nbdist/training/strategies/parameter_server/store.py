"""A server's shard: the parameters it holds, the optimizer over them, and snapshots."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat_buffers import Pack

__all__ = ["Store", "on_host"]


class Store:
    """Some of the parameters, changed by the optimizer that the user has made.

    The optimizer has all parameters; those without a gradient it leaves alone, so that
    it makes state for this shard only.

    Args:
        parameters: of the shard, on this rank.
        optimizer: over these, and maybe others.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer
        own = {id(parameter) for parameter in parameters}
        for parameter in list(optimizer.state):
            if id(parameter) not in own:
                del optimizer.state[parameter]

    @torch.no_grad()
    def apply(self, gradients: Sequence[Pack]) -> None:
        """A step with the mean of gradients, added up in the order given."""
        mean = gradients[0]
        for others in gradients[1:]:
            mean.add(others)
        mean.scale(1 / len(gradients))
        self._optimizer.zero_grad()
        mean.spill_gradients(self._parameters)
        self._optimizer.step()

    def values(self) -> list[Tensor]:
        """The parameters themselves."""
        return self._parameters

    def set_options(self, options: Sequence[dict[str, Any]]) -> None:
        """Take learning rates and the like, a dict for each parameter group."""
        for group, given in zip(self._optimizer.param_groups, options, strict=True):
            group.update(given)

    def snapshot(self) -> bytes:
        """Parameters and optimizer state, as bytes."""
        file = io.BytesIO()
        state = [self._optimizer.state.get(each, {}) for each in self._parameters]
        values = [parameter.detach() for parameter in self._parameters]
        torch.save({"values": values, "state": state}, file)
        return file.getvalue()

    @torch.no_grad()
    def restore(self, snapshot: bytes) -> None:
        """Go back to what `snapshot` gave, on this rank or another one."""
        saved = torch.load(io.BytesIO(snapshot), map_location="cpu")
        for parameter, value, state in zip(
            self._parameters, saved["values"], saved["state"], strict=True
        ):
            parameter.copy_(value)
            self._optimizer.state[parameter] = {
                name: _near(parameter, name, entry) for name, entry in state.items()
            }


def on_host(parameters: Sequence[Tensor]) -> Pack:
    """Room for a shard in host memory, where messages are sent from."""
    return Pack([torch.empty_like(each, device="cpu") for each in parameters])


def _near(parameter: Tensor, name: str, entry: Any) -> Any:
    """Optimizer state on its parameter's device; step counts stay on the CPU."""
    if isinstance(entry, Tensor) and name != "step":
        return entry.to(parameter.device)
    return entry
