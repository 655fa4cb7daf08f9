"""Looks: what is due at a step is read by the families of ``signals/``, on the devices, and sent on its way.

Every family looks by itself: what goes wrong in one leaves the others whole. What ranks have to tell one
another travels like the rest, and is joined on the host (``company.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from palingenesis.config import MonitorConfig
from palingenesis.layers import Layers
from palingenesis.scaling import Scaler
from palingenesis.signals.cosine import GradientCosine, Norms
from palingenesis.signals.memory import Memory
from palingenesis.signals.microbatch import MicroBatches
from palingenesis.signals.packet import Packet
from palingenesis.signals.ranks import RankGradients
from palingenesis.signals.replicas import Replicas
from palingenesis.signals.tape import StepTape, TapeCut
from palingenesis.tiers.company import Company
from palingenesis.tiers.hearing import Hearing
from palingenesis.tiers.noise import Noise
from palingenesis.tiers.outputs import Outputs, Row
from palingenesis.tiers.schedule import Schedule
from palingenesis.tiers.weights import WeightTier

Found = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Look:
    """What was found at a step, on its way to the host.

    Args:
        step: the step.
        packet: the numbers.
        losses: of the steps since the last look, without what is still on a device.
        rows: which steps the rows of ``outputs`` are of.
        looked: tier 3 looked at the weights.
        asks: the other ranks look too, and are asked what they found.
    """

    step: int
    packet: Packet
    losses: TapeCut
    rows: list[Row]
    looked: bool
    asks: bool = True


class Tiers:
    """The families of all tiers.

    Args:
        model: the model.
        layers: its watched layers.
        config: cadences and options.
        optimizers: those that step it.
        scaler: the gradient scaler, if there is one.
        schedule: when what is due.
        failed: told of what went wrong, and in which family.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        config: MonitorConfig,
        optimizers: Sequence[Any],
        scaler: Scaler,
        schedule: Schedule,
        failed: Callable[[Exception, str], None],
    ) -> None:
        self._model, self._config, self._scaler, self._failed = model, config, scaler, failed
        self.schedule = schedule
        self.company = Company(repr((layers.names, config.model_dump())))
        self.outputs = Outputs(config, ranks=self.company.size)
        self.noise = Noise(self.company.size)
        self.weights = WeightTier(model, layers, config.drift, optimizers)
        self._losses = StepTape(max(config.logging_steps, config.tier2_every, config.check_every))
        self._follow(layers)

    def _follow(self, layers: Layers) -> None:
        self.layers = layers
        self.cosine, self.memory = GradientCosine(layers), Memory(layers)
        self.hearing = Hearing(
            layers,
            self.cosine,
            self.schedule,
            noise=self._config.noise_scale,
            ranks=self.company.size,
        )
        self.replicas = Replicas(layers)
        self.own = RankGradients(layers, self._model, self._config.rank_factor)

    def follow(self, layers: Layers) -> None:
        """Go on with changed layers; what two steps were to be compared over is begun anew."""
        released = self.hearing.released
        self.stop()
        self.weights.follow(layers)
        self._follow(layers)
        self.hearing.released = released

    @property
    def noise_wanted(self) -> bool:
        """Whether the noise scale is to be told."""
        return self._config.noise_scale

    @property
    def released(self) -> bool:
        """Whether gradients are freed inside ``backward``, and read by hooks."""
        return self.hearing.released

    def expect_released(self, step: int) -> None:
        """Gradients are known to be freed inside ``backward``, from the coming step on."""
        self.hearing.released = True
        # When step() comes, the first update has been made.
        self._part("drift", self.weights.begin)
        self._listen(step)

    @property
    def _with_others(self) -> bool:
        return self.company.met and not self.company.alone

    @property
    def reads_model(self) -> bool:
        """Whether this rank reads gradients and weights for the tiers: not where rank 0 has the same."""
        return self.company.rank == 0 or self.layers.together

    # -- a step ------------------------------------------------------------------------------------------

    def hear(self, step: int) -> MicroBatches | None:
        """What the hooks heard of the step that ends; they are gone then."""
        found: list[MicroBatches | None] = []
        self._part(
            "micro-batches",
            lambda: found.append(self.hearing.heard(step, self._scaler.scale, with_others=self._with_others)),
        )
        return found[0] if found else None

    def note_loss(self, step: int, loss: torch.Tensor | float) -> None:
        """Remember a step's loss."""
        self._losses.note(step, loss)

    def look(self, step: int, norms: Norms | None, heard: MicroBatches | None) -> Look | None:
        """Read what is due, and arm what needs the next step too.

        Args:
            step: the optimizer step, its gradients still there and its update still to come.
            norms: of the step's gradients, by device, without the loss scale, if they were read.
            heard: by the hooks.
        """
        if self.schedule.first is None:
            self.schedule.begin(step)
        schedule, found = self.schedule, dict[str, torch.Tensor]()
        logged, second = schedule.first_tier(step), schedule.second_tier(step)
        if second:
            found |= self._part("noise", lambda: self._parts(heard, norms))
            found |= self._part("memory", self.memory.compute)
        if self.reads_model:
            found |= self._directions(step, norms)
            found |= self._weights(step, norms, heard)
        if schedule.third_tier(step) and self.company.size > 1:
            found |= self._part("replicas", self.replicas.compute)
            found |= self._part("ranks", self.own.compute)
        needed = second or schedule.second_tier(step + 1)
        self._part("outputs", lambda: self.outputs.end_step(step, logged=logged, needed=needed))
        meets = schedule.ranks_meet(step)
        self._listen(step + 1)
        if not meets and not (logged and self.company.alone):
            return None
        return self._send(step, found, always=meets and not self.company.alone)

    def look_at_end(self, step: int) -> Look | None:
        """A last look at the weights of a run that has had none since its start."""
        if not self.reads_model or self.layers.together or not self.layers.units:
            return None
        found = self._look_at_weights(step, None, None)
        if self.company.alone:
            return self._send(step, found)
        # Of the tokens since the last look the other ranks would have to tell theirs.
        return Look(step, Packet(found), TapeCut({}, {}), [], looked=True, asks=False)

    def rest(self, step: int) -> Look | None:
        """What was gathered since the last look, when nothing comes after it; other ranks are not asked."""
        return self._send(step, {}) if self.company.alone else None

    def stop(self) -> None:
        """Take all hooks off the model."""
        self.hearing.stop()
        self.own.disarm()

    def leave(self) -> None:
        """Nothing is looked at any more; other ranks need not wait for this one."""
        self.stop()
        self.weights.leave()
        self.company.leave()

    # -- parts of a look ---------------------------------------------------------------------------------

    def _part(self, name: str, read: Callable[[], Mapping[str, torch.Tensor] | None]) -> Found:
        """What one family found; nothing if it failed."""
        try:
            return dict(read() or {})
        except Exception as error:  # noqa: BLE001 - the monitor's failure must not end the run
            self._failed(error, name)
            return {}

    def _parts(self, heard: MicroBatches | None, norms: Norms | None) -> Found:
        return self.noise.compute(heard, self.outputs, norms, self._scaler.still_in_gradients)

    def _directions(self, step: int, norms: Norms | None) -> Found:
        scale = self._scaler.scale if self.released else self._scaler.still_in_gradients
        next_too = self.schedule.second_tier(step + 1)
        if self.schedule.second_tier(step):
            return self._part("cosine", lambda: self.cosine.compute(step, norms, scale, keep=next_too))
        if next_too:
            self._part("cosine", lambda: self.cosine.arm(step, norms, scale))
        return {}

    def _weights(self, step: int, norms: Norms | None, heard: MicroBatches | None) -> Found:
        weights, scale = self.weights, self._scaler.scale
        found = self._part("updates", lambda: weights.updated(step, scale))
        looked = self.schedule.third_tier(step)
        if looked:
            found |= self._look_at_weights(step, norms, heard)
        if self.schedule.watches_update(step):
            self._part("updates", lambda: weights.arm_update(step, scale, looked=looked))
        return found

    def _look_at_weights(self, step: int, norms: Norms | None, heard: MicroBatches | None) -> Found:
        weights, absent = self.weights, self.hearing.absent(heard)
        found: Found = {}
        if step == self.schedule.first:
            self._part("drift", weights.begin)
        found |= self._part("weights", weights.norms)
        found |= self._part("gradients", lambda: {**weights.gradients(norms), **weights.present(absent)})
        found |= self._part("spectrum", weights.spectrum)
        found |= self._part("drift", weights.drifted)
        return found | self._part("adapters", weights.adapters)

    def _listen(self, step: int) -> None:
        """Put hooks on the model for the step to come, where it needs them."""
        with_others = self._with_others
        self._part("micro-batches", lambda: self.hearing.listen(step, with_others=with_others))
        if self.schedule.third_tier(step) and with_others and not self.layers.together:
            self._part("ranks", self.own.arm)

    def _send(self, step: int, found: Found, *, always: bool = False) -> Look | None:
        outputs, rows = self.outputs.take()
        found |= outputs
        if self._losses.buffer is not None:
            found["losses"] = self._losses.buffer
        losses = self._losses.take()
        if not (always or found or losses.host):
            return None
        looked = "weights/square/0" in found
        return Look(step, Packet(found), losses, rows, looked)
