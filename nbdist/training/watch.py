"""Finds the first value of a training that is not finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nbdist.errors import NotFinite, UsageError
from nbdist.telemetry import internal_metrics
from nbdist.training.validation import whole_number

__all__ = ["Watch", "watch"]

INFINITE = float("inf")
COMPILED = "OptimizedModule"
"""The class of a compiled module, whose parts run without their hooks."""


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    gradients: bool = True,
    infinities: bool = True,
) -> Watch:
    """Raise an error that names the first value of a training that is NaN or infinite.

    In a step that is checked, these values are read once, on their device: each
    parameter before the forward, the output of each module, and each gradient when this
    rank has computed it, before DDP reduces it. Gradients that FSDP2 has reduced are
    read when an optimizer steps. A step is a forward of the model in training mode.
    There is no synchronisation with a GPU: the results of a step are looked at in a
    later forward, or by `Watch.check`.

    A rank calls it for itself, and sends nothing. A second watch of a model ends the
    first one.

    Args:
        model: the module whose forward is a step; also a DDP module, or one that is
            sharded by FSDP2. Of a compiled module, the outputs of its parts are not
            checked.
        every: number of steps from one check to the next.
        gradients: whether gradients are checked.
        infinities: whether an infinite value counts. Masks have such values, and
            gradients that `torch.amp.GradScaler` has scaled may have them.

    Returns:
        The watch. Its `close`, or the end of its `with` block, ends it.

    Raises:
        UsageError: the model is no module.
        NotFinite: not by this call, but by a later forward.
    """
    whole_number("every", every, 1)
    if not isinstance(model, nn.Module):
        raise UsageError(f"watch() needs a torch.nn.Module, got {model!r}")
    earlier = _watches.get(model, lambda: None)()
    if earlier is not None:
        earlier.close()
    started = Watch(model, every, gradients, infinities)
    _watches[model] = ref(started)
    return started


@dataclass(eq=False)
class _Step:
    """The values that were read in one step, in the order of their computation."""

    number: int
    values: list[tuple[str, tuple[Tensor, Tensor]]] = field(default_factory=list)
    """The name of each value, with its minimum and maximum; NaN if it has a NaN. One
    list, because an interrupt could leave two of different lengths."""
    streams: set[torch.cuda.Stream] = field(default_factory=set)
    """The streams that compute these."""


@dataclass(frozen=True, eq=False)
class _Copy:
    """The bounds of a step, on their way to the host."""

    number: int
    """The number of the step."""
    names: list[str]
    """The names of its values."""
    parts: list[tuple[list[int], Tensor]]
    """Some of the values, and their bounds in host memory, of shape (n, 2)."""
    events: list[torch.cuda.Event]

    @property
    def is_done(self) -> bool:
        return all(event.query() for event in self.events)

    def magnitudes(self) -> list[float]:
        """The largest magnitude in each value, as soon as all have arrived."""
        for event in self.events:
            event.synchronize()
        magnitudes = [0.0] * len(self.names)
        for indices, bounds in self.parts:
            largest = bounds.abs().amax(dim=1).tolist()
            for index, magnitude in zip(indices, largest, strict=True):
                magnitudes[index] = magnitude
        return magnitudes


class Watch:
    """A watch of `nbdist.watch`."""

    def __init__(
        self, model: nn.Module, every: int, gradients: bool, infinities: bool
    ) -> None:
        self._model = model
        self._every = every
        self._infinities = infinities
        self._number = 0
        self._finite_at = 0
        """The last step that was found to be finite; 0 for none."""
        self._step: _Step | None = None
        """The step that runs, if it is checked."""
        self._last: Tensor | None = None
        """The output that was read last."""
        self._unread: dict[str, nn.Parameter] = {}
        """The parameters whose gradients were not read in the step that runs."""
        self._copies: deque[_Copy] = deque()
        self._parameters = [
            (f"parameter {name}", p)
            for name, p in model.named_parameters()
            if p.is_floating_point() or p.is_complex()
        ]
        self._hooks = list(self._add_hooks(gradients))

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.check()
        finally:
            self.close()

    def check(self) -> None:
        """Look at all steps so far, and wait for their results.

        Raises:
            NotFinite: A value was not finite.
        """
        self._end_step()
        while self._copies:
            self._look_at(self._copies.popleft())

    def close(self) -> None:
        """End the watch. A second close does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._step = self._last = None
        self._unread.clear()
        self._copies.clear()

    # -- hooks ---------------------------------------------------------------------

    def _add_hooks(self, gradients: bool) -> Iterator[RemovableHandle]:
        yield self._model.register_forward_pre_hook(self._begin_step)
        is_compiled = type(self._model).__name__ == COMPILED
        for name, module in self._model.named_modules():
            if name and is_compiled:
                continue
            what = f"the output of {name or 'the model'} ({type(module).__name__})"
            yield module.register_forward_hook(self._reader_of_output(what))
        if not gradients:
            return
        # torch keeps this hook for all optimizers, and a parameter's hooks are hidden
        # from the garbage collector: neither keeps the watch alive.
        yield register_optimizer_step_pre_hook(_weakly(self._read_unread))
        for name, parameter in self._parameters:
            if parameter.requires_grad:
                hook = _weakly(self._read_gradient, name)
                yield parameter.register_post_accumulate_grad_hook(hook)

    def _begin_step(self, _model: nn.Module, _inputs: object) -> None:
        if _is_capturing():  # the last step's results cannot be read now
            return
        self._end_step()
        if not (self._model.training and torch.is_grad_enabled()):
            return
        while self._copies and self._copies[0].is_done:
            self._look_at(self._copies.popleft())
        self._number += 1
        if self._number % self._every:
            return
        self._step = _Step(self._number)
        self._unread = dict(self._parameters)
        for name, parameter in self._parameters:
            self._read(name, parameter)

    def _reader_of_output(
        self, what: str
    ) -> Callable[[nn.Module, object, object], None]:
        def read_output(_module: nn.Module, _inputs: object, output: object) -> None:
            if self._step is not None and torch.is_grad_enabled():
                for tensor in _tensors_in(output):
                    if tensor is not self._last:  # a container's is its last module's
                        self._last = tensor
                        self._read(what, tensor)

        return read_output

    def _read_unread(self, *_arguments: object) -> None:
        for name, parameter in list(self._unread.items()):
            self._read_gradient(name, parameter)

    def _read_gradient(self, name: str, parameter: Tensor) -> None:
        if self._step is not None and parameter.grad is not None:
            self._unread.pop(name, None)
            self._read(f"the gradient of {name}", parameter.grad)

    @torch.no_grad()
    def _read(self, what: str, tensor: Tensor) -> None:
        """Note a value of the step that runs, if it can be infinite."""
        value = getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor
        inexact = value.is_floating_point() or value.is_complex()
        if _is_capturing():  # there is no value yet
            return
        if not inexact or value.layout != torch.strided or not value.numel():
            return
        if value.element_size() == 1:  # torch has no arithmetic for 8-bit floats
            return
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        assert self._step is not None
        if value.is_cuda:
            self._step.streams.add(torch.cuda.current_stream(value.device))
        self._step.values.append((what, torch.aminmax(value)))

    # -- results -------------------------------------------------------------------

    def _end_step(self) -> None:
        """Send the bounds of the step that ran to the host."""
        step, self._step, self._last = self._step, None, None
        if step is None:
            return
        for stream in step.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, (_name, (low, _high)) in enumerate(step.values):
            alike.setdefault((low.device, low.dtype), []).append(index)
        parts, events = [], []
        for (device, _dtype), indices in alike.items():
            ends = [end for index in indices for end in step.values[index][1]]
            bounds = torch.stack(ends).view(-1, 2)
            if device.type == "cuda":
                host = torch.empty_like(bounds, device="cpu", pin_memory=True)
                with torch.cuda.device(device):
                    bounds = host.copy_(bounds, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                events.append(event)
            parts.append((indices, bounds))
        names = [name for name, _ in step.values]
        self._copies.append(_Copy(step.number, names, parts, events))

    def _look_at(self, copy: _Copy) -> None:
        """
        Raises:
            NotFinite: A value of the step was not finite.
        """
        bad = [
            (name, magnitude)
            for name, magnitude in zip(copy.names, copy.magnitudes(), strict=True)
            if magnitude != magnitude or (self._infinities and magnitude == INFINITE)
        ]
        if not bad:
            self._finite_at = copy.number
            return
        self.close()
        found = _description(bad)
        internal_metrics.mark("nan", found)  # the monitor has steps of its own
        raise NotFinite(_report(copy.number, found, self._finite_at))


_watches: WeakKeyDictionary[nn.Module, ref[Watch]] = WeakKeyDictionary()
"""The last watch of each model, which the model's hooks keep alive."""


def _is_capturing() -> bool:
    """Whether this thread captures a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _weakly(method: Callable[..., None], *first: object) -> Callable[..., None]:
    """A hook that calls a method while its object lives.

    Args:
        first: The method's arguments before those of the hook.
    """
    known = WeakMethod(method)

    def hook(*arguments: object) -> None:
        found = known()
        if found is not None:
            found(*first, *arguments)

    return hook


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a module's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors_in(each)


def _description(bad: list[tuple[str, float]]) -> str:
    (name, magnitude), *others = bad
    kind = "infinite values" if magnitude == INFINITE else "NaNs"
    text = f"{name} has {kind}"
    if others:
        text += f", the first of {len(bad)} such values; the next is {others[0][0]}"
    return text


def _report(number: int, found: str, finite_at: int) -> str:
    text = f"step {number}: {found}"
    if finite_at == number - 1:
        return text
    before = (
        f"step {finite_at} was finite" if finite_at else "no step was checked before"
    )
    return f"{text}. {before}: use every=1 for the exact step"
