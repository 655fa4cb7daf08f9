"""Every layer's gradient norm at a check, and at every step for the guard.

Where parameters are sharded, each rank's norms are of its shards. They wait on a shelf for the check, whose
one all-reduce makes every step's norms global; only then does the guard fold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from palingenesis.errors import LayerError
from palingenesis.layers import Layers, Unit, is_sharded
from palingenesis.signals.guard import ROWS, Guard
from palingenesis.signals.meeting import ranks_and_own
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.packet import Packet
from palingenesis.signals.sharding import MOST_ROWS, JointNorms, RootWeights, local_gradients
from palingenesis.watch.reading import Between, Bools, CheckReading, Floats, Presence


class _OnDevice:
    """The units whose gradients lie on one device, and their guard."""

    def __init__(self, device: torch.device, members: list[tuple[int, Unit]], *, shards: bool) -> None:
        self.device = device
        self.members = np.array([i for i, _ in members], dtype=np.int64)
        self._units = [unit for _, unit in members]
        self._weights = RootWeights(self._units, device) if shards else None
        self.norms: torch.Tensor | None = None
        self.guard: Guard | None = None

    @property
    def moved(self) -> bool:
        """Whether the model went to another device since (``model.to`` keeps the parameters' identity)."""
        return self._units[0].parameter.device != self.device

    def look(self, scale: torch.Tensor | None) -> torch.Tensor:
        """The norms of whole gradients; of shards, each times the root of its ``shard_weight``."""
        gradients: list[torch.Tensor | None] = []
        for unit in self._units:
            gradient = unit.parameter.grad
            if gradient is not None and unit.part is not None:
                gradient = unit.part.of(gradient)
            gradients.append(gradient)
        if self._weights is None:
            self.norms = gradient_norms(gradients, self.device)
        else:
            self.norms = gradient_norms(local_gradients(gradients), self.device) * self._weights.of(gradients)
        if scale is not None:
            self.norms = self.norms / scale.to(self.device, non_blocking=True)
        return self.norms


@dataclass(frozen=True)
class PendingCheck:
    """A check on its way to the host. ``absent`` and ``frozen`` are known already, one entry a unit.

    ``members`` are the units of each device, in the order of the packet's names. Where ranks are
    ``together``, which gradients are absent on all of them arrives with the packet.
    """

    step: int
    members: tuple[NDArray[np.int64], ...]
    absent: Bools
    frozen: Bools
    guarded_steps: int
    packet: Packet


class GradientReader:
    """Reads the gradients of a model's watched layers.

    Args:
        layers: what to read; where some are sharded, as ``meeting.agree`` returned them.
        guard: fold every step's norms, so that what comes and goes between two checks is seen.
        interval: steps between two checks.

    Raises:
        LayerError: sharded parameters that the ranks have not agreed on.
    """

    def __init__(self, layers: Layers, *, guard: bool, interval: int = MOST_ROWS) -> None:
        sharded = any(is_sharded(unit.parameter) for unit in layers.units)
        if sharded and not layers.together and ranks_and_own()[0] > 1:
            raise LayerError("these layers are sharded: pass what signals.meeting.agree makes of them")
        self.layers = layers
        self._devices = self._by_device()
        self._with_guard = guard
        self._looked = 0
        self._joint = JointNorms(layers, guard=guard, interval=interval) if layers.together else None
        self._owner = np.array(layers.owner, dtype=np.int64)
        # Units are grouped by layer, so each layer is a slice that `reduceat` can reduce.
        self._starts = np.flatnonzero(np.diff(self._owner, prepend=-1))

    def _by_device(self) -> list[_OnDevice]:
        by_device: dict[torch.device, list[tuple[int, Unit]]] = {}
        for i, unit in enumerate(self.layers.units):
            by_device.setdefault(unit.parameter.device, []).append((i, unit))
        shards = self.layers.together
        return [_OnDevice(device, members, shards=shards) for device, members in by_device.items()]

    @torch.no_grad()
    def look(
        self,
        step: int,
        scale: torch.Tensor | None = None,
        known: Mapping[torch.device, torch.Tensor] | None = None,
    ) -> None:
        """Fold one step's norms into the guard; nothing is read on the host.

        Args:
            step: the optimizer step.
            scale: loss scale that the gradients still carry.
            known: norms of gradients that are gone already, without the loss scale, as ``norms`` gives them.
        """
        if any(device.moved for device in self._devices):
            self._devices = self._by_device()
        self._looked = step
        if self._joint is not None:
            self._joint.begin(step)
        for device in self._devices:
            if known is None:
                norms = device.look(scale)
            else:
                norms = device.norms = known[device.device]
            if self._joint is not None:
                self._joint.put(device.members, norms)
            elif self._with_guard:
                if device.guard is None:
                    device.guard = Guard(len(device.members), norms)
                device.guard.fold(step, norms)
        if self._joint is not None:
            self._joint.end()

    def norms(self, step: int) -> dict[torch.device, torch.Tensor] | None:
        """Each device's norms, in the order of its units, if ``step`` was looked at; left on the devices.

        Of shards each is this rank's, times the root of its ``shard_weight``: squares add up over ranks.
        """
        if self._looked != step:
            return None
        return {device.device: device.norms for device in self._devices if device.norms is not None}

    def total_norm(self) -> torch.Tensor | None:
        """Norm over everything last looked at, on the device; ``None`` before, or with several devices.

        Of sharded layers it is known at checks only.
        """
        norms = self._devices[0].norms if len(self._devices) == 1 else None
        if self._joint is not None:
            norms = self._joint.norms
        if norms is None:
            return None
        total: torch.Tensor = torch.linalg.vector_norm(norms)
        return total

    def send(
        self,
        step: int,
        extra: Mapping[str, torch.Tensor],
        *,
        absent: Bools | None = None,
        last: bool = False,
    ) -> PendingCheck:
        """Send the norms last looked at, and what the guard folded, on their way to the host.

        Args:
            step: the step that was looked at.
            extra: other tensors to take along.
            absent: units that had no gradient, where that cannot be seen any more.
            last: nothing comes after it. Other ranks may have stopped elsewhere, so none is waited for: what
                sharded layers did since the last check stays unknown.
        """
        units = self.layers.units
        if absent is None:
            absent = np.array([unit.parameter.grad is None for unit in units], dtype=bool)
        frozen = np.array([not unit.parameter.requires_grad for unit in units], dtype=bool)
        tensors = dict(extra)
        members: tuple[NDArray[np.int64], ...] = (np.arange(len(units)),)
        if self._joint is None:
            guarded = self._add_own(tensors)
            members = tuple(device.members for device in self._devices)
        elif last:
            guarded = 0
            self._joint.leave()
        else:
            guarded = self._joint.add(tensors, absent)
        packet = Packet(tensors)
        for part in (*self._devices, self._joint):
            if part is not None and part.guard is not None:
                part.guard.reset()
        return PendingCheck(step, members, absent, frozen, guarded, packet)

    def _add_own(self, tensors: dict[str, torch.Tensor]) -> int:
        """Add what this process knows by itself; how many steps the guard saw."""
        guarded = 0
        for i, device in enumerate(self._devices):
            if device.norms is None:
                continue
            tensors[f"norms/{i}"] = device.norms
            if device.guard is not None:
                tensors[f"guard/{i}"] = device.guard.values
                guarded = device.guard.steps
        return guarded

    def decode(self, check: PendingCheck, arrays: dict[str, Floats]) -> CheckReading:
        """The reading of a check whose numbers have arrived.

        Raises:
            LayerError: a rank could not read its shards at some step of the interval.
        """
        if "complete" in arrays and arrays["complete"] < ranks_and_own()[0]:
            raise LayerError("some rank could not read the gradients of its shards since the last check")
        absent = arrays["holding"] == 0 if "holding" in arrays else check.absent
        size = len(self.layers.units)
        norms = np.zeros(size)
        guard = np.zeros((len(ROWS), size))
        for i, members in enumerate(check.members):
            if f"norms/{i}" in arrays:
                norms[members] = arrays[f"norms/{i}"]
            if f"guard/{i}" in arrays:
                guard[:, members] = arrays[f"guard/{i}"]
        if size == 0:
            empty, none = np.zeros(0), np.zeros(0, dtype=bool)
            return CheckReading(check.step, empty, none, none, Presence.of_check_only(check.step, none))
        layer_norm = self._layer_norms(norms)
        # A gradient of None that was there earlier in the interval still shows in the guard's folds.
        now, layer_now = norms != 0, layer_norm != 0
        units = Presence.of_check_only(check.step, now)
        layers = Presence.of_check_only(check.step, layer_now)
        between = None
        if check.guarded_steps:
            peak, peak_step, first, present, last = guard
            units = Presence(now, check.guarded_steps, present, last)
            layers = Presence(layer_now, check.guarded_steps, self._most(present), self._most(last))
            between = self._between(check.guarded_steps, peak, peak_step, first)
        return CheckReading(
            check.step,
            layer_norm,
            np.logical_and.reduceat(absent, self._starts),
            np.logical_and.reduceat(check.frozen, self._starts),
            layers,
            units,
            between,
        )

    def _most(self, values: Floats) -> Floats:
        return np.maximum.reduceat(values, self._starts)

    def _layer_norms(self, norms: Floats) -> Floats:
        """Root of the sum of squares over each layer's units, scaled so that no square leaves fp64."""
        largest = self._most(norms)
        scale = np.where(np.isfinite(largest) & (largest > 0), largest, 1.0)
        with np.errstate(invalid="ignore", over="ignore"):
            squares = np.add.reduceat((norms / scale[self._owner]) ** 2, self._starts)
        return np.sqrt(squares) * scale

    def _between(self, steps: int, peak: Floats, peak_step: Floats, first: Floats) -> Between:
        """The layers' peaks: those of their loudest units, a lower bound that is off by √units at most."""
        layer_peak = self._most(peak)
        loudest = peak == layer_peak[self._owner]
        at = self._most(np.where(loudest, peak_step, 0.0))
        never = np.inf
        earliest = np.minimum.reduceat(np.where(first > 0, first, never), self._starts)
        return Between(steps, layer_peak, at, np.where(np.isfinite(earliest), earliest, 0.0))
