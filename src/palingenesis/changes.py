"""The watched parameters, and what changed about them since the last check.

Layers are unfrozen, heads replaced, adapters added while a run goes on; a parameter whose ``requires_grad``
is switched off while the optimizer still holds it is kept in watch, because that is how a layer quietly
stops training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from palingenesis.events import Event
from palingenesis.layers import Layers, find_layers
from palingenesis.watch.reading import Bools

# How many names a message shows; the event's fields hold all of them.
_NAMED = 3

_CHANGES = ("added", "removed", "replaced", "unfrozen", "frozen")


class Inventory:
    """The layers under watch.

    Args:
        model: the model.
        optimizers: those that step it; empty if none was given.
        patterns: names to watch.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], patterns: Sequence[str]) -> None:
        self._model, self._optimizers, self._patterns = model, optimizers, patterns
        self.layers: Layers = find_layers(model, patterns)
        self._print = self._fingerprint()
        self._all = self._by_name()

    def _fingerprint(self) -> list[object]:
        """Cheap to take at every check; differs whenever any parameter is another, or trains or not."""
        marks: list[object] = [
            (id(parameter), parameter.requires_grad)
            for module in self._model.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        marks += [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]
        return marks

    def _by_name(self) -> dict[str, tuple[int, bool]]:
        return {name: (id(p), p.requires_grad) for name, p in self.layers.parameters.items()}

    def optimized(self) -> set[int]:
        """Ids of the parameters that the optimizers hold."""
        return {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def trained(self) -> Bools:
        """One entry a layer: some parameter of it is in an optimizer (or none was given)."""
        held = self.optimized()
        trained = np.zeros(len(self.layers.names), dtype=bool)
        for unit, layer in zip(self.layers.units, self.layers.owner, strict=True):
            trained[layer] |= not self._optimizers or id(unit.parameter) in held
        return trained

    def not_optimized(self) -> list[str]:
        """Parameters that train but that no optimizer holds."""
        if not self._optimizers:
            return []
        held = self.optimized()
        return [name for name, p in self.layers.parameters.items() if p.requires_grad and id(p) not in held]

    def refresh(self, step: int) -> Event | None:
        """Look again; the ``parameters_changed`` event if anything did change, else ``None``."""
        now = self._fingerprint()
        if now == self._print:
            return None
        self._print = now
        held = self.optimized()
        still = [p for p in self.layers.parameters.values() if id(p) in held]
        before = self._all
        self.layers = find_layers(self._model, self._patterns, also=still)
        self._all = after = self._by_name()
        changed: dict[str, list[str]] = {change: [] for change in _CHANGES}
        changed["added"] = [name for name in after if name not in before]
        changed["removed"] = [name for name in before if name not in after]
        for name in after.keys() & before.keys():
            (was, trained), (is_now, trains) = before[name], after[name]
            if was != is_now:
                changed["replaced"].append(name)
            elif trained != trains:
                changed["unfrozen" if trains else "frozen"].append(name)
        return self._event(step, changed)

    def _event(self, step: int, changed: dict[str, list[str]]) -> Event | None:
        if not any(changed.values()):
            return None
        told = [f"{change} {_some(names)}" for change, names in changed.items() if names]
        fresh = {*changed["added"], *changed["replaced"], *changed["unfrozen"]}
        untrained = [name for name in self.not_optimized() if name in fresh]
        if untrained:
            told.append(f"but no optimizer holds {_some(untrained)}, so nothing updates them")
        return Event(
            "parameters_changed",
            step,
            "warning" if untrained else "info",
            f"the model's parameters changed: {'; '.join(told)}",
            {**changed, "not_optimized": untrained},
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def unwrap_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers themselves, from one, several, none, or one inside accelerate's wrapper."""
    if optimizer is None:
        return []
    if isinstance(optimizer, Sequence):
        return [inner for one in optimizer for inner in unwrap_optimizers(one)]
    while not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return [optimizer]
