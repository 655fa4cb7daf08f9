"""Hooks on the parameters, for the few steps that need to hear gradients while ``backward`` runs.

Two things need it: the noise scale, which compares the micro-batches of one step, and gradients that are
freed inside ``backward`` (an optimizer that steps there), of which nothing is left when ``step`` is called.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from palingenesis.layers import Layers
from palingenesis.signals.cosine import GradientCosine, Norms
from palingenesis.signals.microbatch import MicroBatches, MicroBatchNorms
from palingenesis.tiers.schedule import Schedule

# Where a step turned out to be one micro-batch on one rank, there is nothing to compare: of so many looks,
# one listens again.
ASK_AGAIN = 10


class Hearing:
    """Arms hooks for the coming step where they are needed, and collects what they heard.

    Args:
        layers: whose gradients.
        cosine: is fed with gradients that are freed.
        schedule: when they are needed.
        noise: the noise scale is wanted.
        ranks: how many there are.
    """

    def __init__(
        self, layers: Layers, cosine: GradientCosine, schedule: Schedule, *, noise: bool, ranks: int
    ) -> None:
        self._layers, self._cosine, self._schedule, self._ranks = layers, cosine, schedule, ranks
        # Under fully_shard hooks do not fire, and gradients of micro-batches stay out of `.grad`.
        self._noise = noise and not layers.together
        self._hooks = MicroBatchNorms(layers)
        self._step: int | None = None
        self._lonely = 0
        # Gradients are freed inside backward: every look has to be by hooks.
        self.released = False
        # Of a step that is listened to: the parameter heard first, and whether its gradient was gone when the
        # others' came. Whether a step that left none was ever listened to.
        self._first: torch.nn.Parameter | None = None
        self._gone = self._feeds = self._asked = False

    def listen(self, step: int, *, with_others: bool) -> None:
        """Listen to a step that begins, if something needs it.

        Args:
            step: the step.
            with_others: other ranks compare theirs.
        """
        schedule = self._schedule
        feeds = self.released and (schedule.second_tier(step) or schedule.second_tier(step + 1))
        looks = schedule.check(step) or schedule.third_tier(step) or schedule.first is None
        if self.released:
            listens = feeds or looks
        else:
            listens = self._doubts() or self._compares(step, with_others=with_others)
        if not listens:
            return
        self._feeds, self._first, self._gone = feeds, None, False
        if feeds:
            self._cosine.listen(step)
        self._hooks.arm(self._take)
        self._step = step

    def _doubts(self) -> bool:
        """Whether the step that ends has left no gradient at all: once it is asked where they are."""
        return not self._asked and all(unit.parameter.grad is None for unit in self._layers.units)

    def _take(self, unit: int, gradient: torch.Tensor) -> None:
        """Called with each gradient while ``backward`` runs."""
        parameter = self._layers.units[unit].parameter
        if self._first is None:
            self._first = parameter
        elif self._first is not parameter:
            self._gone |= self._first.grad is None
        if self._feeds:
            self._cosine.feed(unit, gradient)

    def _compares(self, step: int, *, with_others: bool) -> bool:
        """Whether the step's micro-batches are worth comparing."""
        if not (self._noise and self._schedule.second_tier(step)):
            return False
        if self._ranks > 1:
            return with_others  # the gradient that is left is an average over all of them
        return self._lonely % ASK_AGAIN == 0

    def heard(self, step: int, scale: torch.Tensor | None, *, with_others: bool) -> MicroBatches | None:
        """What was heard of a step that was listened to; the hooks are gone then.

        Args:
            step: the step, after its last backward pass.
            scale: loss scale that the gradients carried.
            with_others: as for :meth:`listen`.
        """
        due = self._noise and self._schedule.second_tier(step)
        if self._step != step:
            self._hooks.disarm()
            self._lonely += due and self._lonely > 0 and not with_others
            return None
        self._step = None
        found = self._hooks.collect(scale=scale)
        if found is None:
            return None
        if due:
            self._lonely = self._lonely + 1 if found.count < 2 and not with_others else 0
        self._asked = True
        if self._gone and not self.released:
            # Gradients that are there until backward ends are missed by a step() in the wrong place only.
            units = self._layers.units
            self.released = all(units[i].parameter.grad is None for i in found.heard)
        self._first = None
        return found

    def norms(self, found: MicroBatches | None) -> Norms | None:
        """Each unit's gradient norm, where gradients are freed and came in one piece."""
        if found is None or not self.released or found.count != 1:
            return None
        return {device: squares.sqrt() for device, squares in found.units.items()}

    def absent(self, found: MicroBatches | None) -> NDArray[np.bool_] | None:
        """Which units had no gradient, where ``.grad`` does not tell; ``None`` where it does."""
        if found is None or not self.released:
            return None
        absent = np.ones(len(self._layers.units), dtype=bool)
        absent[list(found.heard)] = False
        return absent

    def stop(self) -> None:
        """Take the hooks off."""
        self._hooks.disarm()
        self._step = None
