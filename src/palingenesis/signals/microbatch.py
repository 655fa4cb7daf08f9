"""Squared norms of each micro-batch's own gradient, seen by hooks while ``backward`` runs.

``.grad`` holds the running sum of an accumulation; a hook on the parameter sees what one backward pass is
about to add, once, a tied parameter's uses already summed. Hooks are registered for the steps that need them
only, change nothing, and are no part of what ``deepcopy``, ``pickle`` or ``torch.save`` copy.

Nobody says where a micro-batch begins: a parameter heard again begins the next. What was heard before in the
same backward pass (the head of another task, which the micro-batch before had no use for) is moved over.

Not seen: sharded parameters under ``fully_shard``, whose hooks do not fire; and what looks like a micro-batch
without being one: a second ``backward`` over the same data, or a layer used in several segments of reentrant
checkpointing. Give :meth:`MicroBatchNorms.collect` the number of micro-batches, if it is known.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from palingenesis.layers import Layers
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.sharding import local, shard_weight, to_device

# Called with a unit's index and its part of the gradient, while that still exists.
Listener = Callable[[int, torch.Tensor], None]

# How many small parameters are summed up, of which one at least should have a gradient in every step.
PROBES = 4

# Of a hook that fires outside of a backward pass that the engine numbers, as under compiled autograd.
_NO_PASS = -1


@dataclass(frozen=True)
class MicroBatches:
    """What the hooks of one optimizer step heard.

    Args:
        count: micro-batches.
        squares: on each device ``[count]``, fp64: squared norms of what each micro-batch added, over the
            units there. They add up over devices, and over ranks that hold different shards.
        units: on each device ``[units there]``, in the order of ``Layers``: squared norms added up over
            micro-batches; the squares of the gradient's norms if there was one.
        heard: indices of the units that had a gradient.
        probe: the sum of what one small parameter was given, and that parameter, whose ``.grad`` should be
            the same: what is not was clipped, averaged over ranks, or freed.
    """

    count: int
    squares: dict[torch.device, torch.Tensor]
    units: dict[torch.device, torch.Tensor]
    heard: frozenset[int]
    probe: tuple[nn.Parameter, torch.Tensor] | None


class MicroBatchNorms:
    """Listens to the gradients of the steps it is armed for.

    Args:
        layers: the units whose gradients count.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._hooks: list[Any] = []
        # On several devices backward runs in several threads.
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        # Of the current micro-batch: each parameter's backward pass and the norms of its units.
        self._heard: dict[nn.Parameter, tuple[int, torch.Tensor]] = {}
        self._squares: dict[torch.device, list[torch.Tensor]] = {}
        self._units: dict[torch.device, torch.Tensor] = {}
        self._count = 0
        self._ever: set[nn.Parameter] = set()
        # Of the smallest parameters, the sums of their gradients.
        self._probes: dict[nn.Parameter, torch.Tensor | None] = {}
        self._failure: Exception | None = None

    @property
    def armed(self) -> bool:
        return bool(self._hooks)

    def arm(self, listener: Listener | None = None) -> None:
        """Begin to listen: before the first backward pass of an optimizer step.

        Args:
            listener: called with every gradient, such as ``GradientCosine.feed``.
        """
        self.disarm()
        self._forget()
        self._plan()
        for parameter in self._by_parameter:
            if parameter.requires_grad:
                hear = functools.partial(self._hear, parameter, listener)
                self._hooks.append(parameter.register_hook(hear))

    def _plan(self) -> None:
        """Which units each parameter has, where they stand among those on its device, and what they count."""
        self._by_parameter: dict[nn.Parameter, list[int]] = {}
        self._members: dict[torch.device, list[int]] = {}
        for i, unit in enumerate(self._layers.units):
            self._by_parameter.setdefault(unit.parameter, []).append(i)
            self._members.setdefault(unit.parameter.device, []).append(i)
        real = (p for p in self._by_parameter if p.numel() and p.is_floating_point())
        smallest = sorted(real, key=lambda p: p.numel())
        self._probes = dict.fromkeys(smallest[:PROBES])
        self._weights = {}
        if self._layers.together:
            units = self._layers.units
            for device, members in self._members.items():
                weights = [shard_weight(units[i].parameter, units[i].holders) for i in members]
                self._weights[device] = to_device(weights, device)

    def disarm(self) -> None:
        """Stop listening; what was heard stays until it is collected."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hear(self, parameter: nn.Parameter, listener: Listener | None, gradient: torch.Tensor) -> None:
        if self._failure is not None:
            return
        try:
            with torch.no_grad(), self._lock:
                self._take(parameter, listener, gradient.detach())
        except Exception as failure:  # noqa: BLE001 - raised by collect(): it must not end the backward pass
            self._failure = failure

    def _take(self, parameter: nn.Parameter, listener: Listener | None, gradient: torch.Tensor) -> None:
        here = torch._C._current_graph_task_id()
        if parameter in self._heard:
            self._next_micro_batch(here)
        gradient = local(gradient)
        units = self._by_parameter[parameter]
        parts = []
        for i in units:
            part = self._layers.units[i].part
            parts.append(gradient if part is None else part.of(gradient))
        self._heard[parameter] = (here, gradient_norms(parts, gradient.device))
        self._ever.add(parameter)
        if parameter in self._probes and gradient.layout is torch.strided:
            before = self._probes[parameter]
            wide = torch.float32 if gradient.device.type == "mps" else torch.float64
            self._probes[parameter] = gradient.to(wide, copy=True) if before is None else before + gradient
        if listener is not None:
            for i, one in zip(units, parts, strict=True):
                listener(i, one)

    def _next_micro_batch(self, here: int) -> None:
        """Close the micro-batch, without what the backward pass that begins the next has brought already."""
        early = {p: (n, norms) for p, (n, norms) in self._heard.items() if n == here and here != _NO_PASS}
        if len(early) == len(self._heard):
            early = {}  # a parameter heard twice in one pass: nothing tells the halves apart
        self._heard = {p: found for p, found in self._heard.items() if p not in early}
        self._close_micro_batch()
        self._heard = early

    def _close_micro_batch(self) -> None:
        for device, members in self._members.items():
            row = self._row(device, members)
            squares = row.square_()
            if device in self._weights:
                squares = squares * self._weights[device]
            self._squares.setdefault(device, []).append(squares.sum())
            before = self._units.get(device)
            self._units[device] = squares if before is None else before + squares
        self._count += 1
        self._heard = {}

    def _row(self, device: torch.device, members: list[int]) -> torch.Tensor:
        """``[units on the device]``: the norms of the current micro-batch, 0 of what was not heard."""
        dtype = torch.float32 if device.type == "mps" else torch.float64
        found: dict[int, torch.Tensor] = {}
        for parameter, (_, norms) in self._heard.items():
            if norms.device == device:
                found.update(zip(self._by_parameter[parameter], norms.unbind(), strict=True))
        zero = torch.zeros((), dtype=dtype, device=device)
        return torch.stack([found.get(i, zero) for i in members])

    @torch.no_grad()
    def collect(self, expected: int | None = None, scale: torch.Tensor | None = None) -> MicroBatches | None:
        """Stop listening and hand over what was heard; nothing is read on the host.

        Args:
            expected: how many micro-batches there were, if that is known.
            scale: loss scale that the gradients carried.

        Returns:
            ``None`` if no hook fired, or if the number of micro-batches is not the expected one.
        """
        self.disarm()
        failure = self._failure
        if failure is None and self._heard:
            self._close_micro_batch()
        count, squares, units = self._count, self._squares, self._units
        heard = frozenset(i for parameter in self._ever for i in self._by_parameter[parameter])
        probes = [(parameter, total) for parameter, total in self._probes.items() if total is not None]
        self._forget()
        if failure is not None:
            raise failure
        if count == 0 or (expected is not None and count != expected):
            return None
        stacked = {device: torch.stack(values) for device, values in squares.items()}
        if scale is not None:
            for device, values in (*stacked.items(), *units.items()):
                values.div_(scale.to(device, non_blocking=True).square())
            probes = [(one, total / scale.to(total.device, non_blocking=True)) for one, total in probes]
        probe = next(((one, total) for one, total in probes if one.grad is not None), None)
        return MicroBatches(count, stacked, units, heard, probe)
