"""DDP modules, which survive failures and changes of the world.

A module reduces its gradients in buckets, whose order it learns in the first step. So
all ranks begin again with new buckets: those that stay, and those that get a copy.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["continue_with", "has_open_step", "settle"]


def continue_with(group: dist.ProcessGroup, before: dist.ProcessGroup) -> None:
    """Have the DDP modules of one default group use the next one, or begin again.

    What they know of a step that was not completed is dropped. This calls no
    collective. A module with one of C++'s own hooks is left as it is.

    Args:
        group: The default group. Its size may differ.
        before: The default group before it, which was destroyed, or the same.
    """
    for module in _modules():
        if module.process_group is not before or _has_builtin_hook(module):
            continue
        module._comm_hooks = [
            (hook, _state_with(group, before, state))
            for hook, state in module._comm_hooks
        ]
        module.process_group = group
        if module.static_graph:
            # The new reducer's first backward pass reduces only if it is asked to.
            module._static_graph_delay_allreduce_enqueued = False
        module.__setstate__(module.__getstate__())  # as for a copy: with new buckets
        _register_hooks(module)


def has_open_step() -> bool:
    """Whether a backward pass of some module was not completed."""
    for module in _modules():
        try:
            module.reducer._check_reducer_finalized()
        except RuntimeError:
            return True
    return False


def settle() -> None:
    """Make DDP modules that were copied to this rank use its GPU, and their hooks.

    A copy has the number of the other rank's GPU, and a list of hooks that are not in
    use.
    """
    for module in _modules():
        if module.device_ids:
            own = module.device.index
            module.device_ids = [own]
            module.output_device = None if module.output_device is None else own
        _register_hooks(module)


def _state_with(group: dist.ProcessGroup, before: dist.ProcessGroup, state: Any) -> Any:
    """The state of a hook, with one group in the place of another."""
    if state is before:  # as allreduce_hook's
        return group
    if getattr(state, "process_group", None) is before:  # as PowerSGD's
        state.process_group = group
    return state


def _register_hooks(module: DistributedDataParallel) -> None:
    hooks, module._comm_hooks = module._comm_hooks, []
    for hook, state in hooks:
        module.register_comm_hook(state, hook)


def _modules() -> Iterator[DistributedDataParallel]:
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and "reducer" in vars(each):
            yield each


def _has_builtin_hook(module: DistributedDataParallel) -> bool:
    """Whether the module has a hook of which it keeps no list."""
    assert module.logger is not None
    texts = module.logger._get_ddp_logging_data().strs_map
    return bool(texts.get("comm_hook")) and not module._comm_hooks
