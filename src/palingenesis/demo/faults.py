"""The faults that the demonstration puts into one layer of a model that trains well.

Each is a mistake that real code makes in one line and that the loss curve hides: training goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from palingenesis.demo.options import Fault
from palingenesis.errors import ConfigError

EXPLOSION = 1e4

WHAT_HAPPENS: dict[str, str] = {
    "no_gradient": "uses weight.detach() from here on, as a stray .detach() would",
    "exploding": f"has its gradient multiplied by {EXPLOSION:,.0f} from here on",
}


@dataclass(frozen=True)
class PlannedFault:
    """Which fault goes into which layer, and the last step before it does."""

    fault: Fault
    layer: str
    after_step: int


def break_layer(model: nn.Module, layer: str, fault: Fault) -> None:
    """Put ``fault`` into the linear layer called ``layer``; every other layer is left alone."""
    module = model.get_submodule(layer)
    if not isinstance(module, nn.Linear):
        raise ConfigError(f"{layer!r} is a {type(module).__name__}; a fault needs an nn.Linear: name another")
    if fault == "no_gradient":
        _detach_weight(module)
    elif fault == "exploding":
        module.weight.register_hook(lambda gradient: gradient * EXPLOSION)


def _detach_weight(module: nn.Linear) -> None:
    """What a stray ``.detach()`` around one projection does: the output stays the same, the gradient goes."""

    def forward(input: torch.Tensor) -> torch.Tensor:
        bias = None if module.bias is None else module.bias.detach()
        return functional.linear(input, module.weight.detach(), bias)

    module.forward = forward  # type: ignore[method-assign]
