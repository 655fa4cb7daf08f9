"""The watched parameters, and what changed about them since the last check.

Layers are unfrozen, heads replaced, adapters added while a run goes on; a parameter whose ``requires_grad``
is switched off while the optimizer still holds it is kept in watch, because that is how a layer quietly
stops training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from palingenesis.errors import ConfigError
from palingenesis.events import Event
from palingenesis.layers import Layers, all_parameters, find_layers
from palingenesis.order import forward_order
from palingenesis.signals.meeting import agree
from palingenesis.watch.reading import Bools, Ints

# How many names a message shows; the event's fields hold all of them.
_NAMED = 3

# Kinds of change: what the event's field is called, and how its sentence says it.
_CHANGES = {
    "added": "added",
    "removed": "removed",
    "replaced": "replaced",
    "unfrozen": "unfrozen",
    "frozen": "frozen",
    "optimized": "now in an optimizer:",
    "not_optimized": "in no optimizer, so that nothing updates them:",
}


class _State(NamedTuple):
    """What matters about a parameter: which one it is, and whether it trains, is watched, is optimized."""

    identity: int
    trains: bool
    watched: bool
    optimized: bool


class Inventory:
    """The layers under watch.

    Args:
        model: the model.
        optimizers: those that step it; empty if none was given.
        patterns: names to watch.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], patterns: Sequence[str]) -> None:
        self._model, self._optimizers, self._patterns = model, optimizers, patterns
        self.layers: Layers = agree(find_layers(model, patterns))
        self._print = self._fingerprint()
        self._states = self._by_name()
        # id of a parameter to when the forward pass first used it, once that is known.
        self.forward_order: dict[int, int] = {}
        self._order_is_known = False

    def learn_order(self, loss: torch.Tensor) -> bool:
        """Whether the order in which layers run was learned, from a loss with its graph: once."""
        if self._order_is_known or loss.grad_fn is None:
            return False
        self._order_is_known = True
        self.forward_order = forward_order(loss)
        return True

    def order(self) -> Ints:
        """One entry a layer: its place in the forward pass, or in registration order where unknown.

        A layer that the graph did not show stands right behind the one registered before it.
        """
        places = np.full(len(self.layers.names), -1.0)
        for unit, layer in zip(self.layers.units, self.layers.owner, strict=True):
            used = self.forward_order.get(id(unit.parameter))
            if used is not None and (places[layer] < 0 or used < places[layer]):
                places[layer] = used
        for layer in range(1, len(places)):
            if places[layer] < 0:
                places[layer] = places[layer - 1]
        return np.argsort(np.argsort(places, kind="stable"), kind="stable")

    def _fingerprint(self) -> list[object]:
        """Cheap to take at every check; differs whenever any parameter is another, or trains or not."""
        marks: list[object] = []
        seen: set[int] = set()
        waiting: list[nn.Module] = [self._model]
        while waiting:  # by hand: `modules()` takes as long as reading the norms of a small model
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    marks.append((id(parameter), parameter.requires_grad, type(parameter)))
            waiting += [child for child in module._modules.values() if child is not None]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                marks += map(id, group["params"])
        return marks

    def _by_name(self) -> dict[str, _State]:
        watched = {id(parameter) for parameter in self.layers.parameters.values()}
        held = self.optimized()
        return {
            name: _State(id(p), p.requires_grad, id(p) in watched, not self._optimizers or id(p) in held)
            for name, p in all_parameters(self._model, self._patterns).items()
        }

    def optimized(self) -> set[int]:
        """Ids of the parameters that the optimizers hold."""
        return {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def not_optimized(self) -> list[str]:
        """Watched parameters that train but that no optimizer holds; none if no optimizer was given."""
        if not self._optimizers:
            return []
        held = self.optimized()
        here = {unit.name: unit.parameter for unit in self.layers.units if not unit.elsewhere}
        return [name for name, p in here.items() if p.requires_grad and id(p) not in held]

    def trained(self) -> Bools:
        """One entry a layer: some parameter of it is in an optimizer (or none was given)."""
        held = self.optimized()
        trained = np.zeros(len(self.layers.names), dtype=bool)
        for unit, layer in zip(self.layers.units, self.layers.owner, strict=True):
            # Of what other ranks hold it is not known here.
            trained[layer] |= not self._optimizers or unit.elsewhere or id(unit.parameter) in held
        return trained

    def refresh(self, step: int) -> Event | None:
        """Look again; the ``parameters_changed`` event if anything did change, else ``None``."""
        now = self._fingerprint()
        if now == self._print:
            return None
        self._print = now
        held = self.optimized()
        still = [p for p in self.layers.parameters.values() if id(p) in held]
        before = self._states
        self.layers = agree(find_layers(self._model, self._patterns, also=still, may_be_empty=True))
        self._states = self._by_name()
        changed = _differences(before, self._states)
        return _event(step, changed) if any(changed.values()) else None


def _event(step: int, changed: dict[str, list[str]]) -> Event:
    told = [f"{_CHANGES[change]} {_some(names)}" for change, names in changed.items() if names]
    return Event(
        "parameters_changed",
        step,
        "warning" if changed["not_optimized"] else "info",
        f"the model's parameters changed: {'; '.join(told)}",
        changed,
    )


def _differences(before: dict[str, _State], after: dict[str, _State]) -> dict[str, list[str]]:
    """Names by kind of change, in the model's order. What neither was nor is watched is left out."""
    changed: dict[str, list[str]] = {change: [] for change in _CHANGES}
    nothing = _State(0, trains=False, watched=False, optimized=False)
    for name in [*after, *(name for name in before if name not in after)]:
        was, now = before.get(name, nothing), after.get(name, nothing)
        if was == now or not (was.watched or now.watched):
            continue
        if name not in before:
            changed["added"].append(name)
        elif name not in after:
            changed["removed"].append(name)
        elif was.identity != now.identity:
            changed["replaced"].append(name)
        elif was.trains != now.trains:
            changed["unfrozen" if now.trains else "frozen"].append(name)
        elif was.watched != now.watched:
            changed["added" if now.watched else "removed"].append(name)
        elif now.optimized:
            changed["optimized"].append(name)
        if now.trains and not now.optimized:
            changed["not_optimized"].append(name)
    return changed


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def unwrap_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers themselves, from one, several, none, or some inside wrappers such as accelerate's.

    Raises:
        ConfigError: something else was given.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, Sequence) and not isinstance(optimizer, str):
        return [inner for one in optimizer for inner in unwrap_optimizers(one)]
    # Accelerate's wrapper is an optimizer itself; a gradient scaler knows the inner one.
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"optimizer={optimizer!r:.60} has no param_groups: pass a torch.optim.Optimizer or a list of them"
        )
    return [optimizer]
