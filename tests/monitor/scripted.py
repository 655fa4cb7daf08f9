"""A model whose gradients a test writes by hand, one number a layer and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from palingenesis import Event, Monitor

NORMALS = (1e-4, 1e-2, 1.0, 100.0)


class Scripted:
    """Four layers ``a`` to ``d`` whose gradient norms are set, monitored without a record by default.

    Args:
        normals: each layer's ordinary gradient norm.
        noise: standard deviation of the log₁₀ norm around it.
        options: of the monitor.
    """

    def __init__(self, normals: Sequence[float] = NORMALS, noise: float = 0.05, **options: Any) -> None:
        self.model = nn.ModuleDict({chr(97 + i): nn.Linear(3, 2, bias=False) for i in range(len(normals))})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.normals, self.noise = list(normals), noise
        self.random = torch.Generator().manual_seed(0)
        self.seen: list[Event] = []
        options = {"out": None, "check_every": 1, **options}
        self.monitor = Monitor(self.model, self.optimizer, on_event=self.seen.append, **options)

    def step(self, loss: Any = None, *, every: float = 1.0, **factors: float | None) -> None:
        """One optimizer step.

        Args:
            loss: passed on.
            every: factor on all layers' norms.
            factors: a factor on one layer's norm; ``None`` for no gradient at all.
        """
        for i, (name, layer) in enumerate(self.model.items()):
            factor = factors.get(name, 1.0)
            if factor is None:
                layer.weight.grad = None
                continue
            noise = 10 ** (self.noise * float(torch.randn((), generator=self.random)))
            norm = self.normals[i] * noise * factor * every
            layer.weight.grad = torch.full((2, 3), norm / math.sqrt(6))
        self.monitor.step(loss)

    def steps(self, count: int, loss: Callable[[int], Any] | Any = None, **given: Any) -> None:
        for i in range(count):
            self.step(loss(i) if callable(loss) else loss, **given)

    def events(self, *names: str) -> list[Event]:
        return [event for event in self.seen if event.event in names]

    @property
    def alarms(self) -> list[Event]:
        return self.events("alarm")
