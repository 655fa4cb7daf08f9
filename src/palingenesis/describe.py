"""What run.json says of a run: versions, model, optimizer, parallelism."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from palingenesis.layers import Layers, peel

# Packages whose version matters to whoever reads the run later.
_PACKAGES = ("palingenesis", "torch", "numpy", "transformers", "trl", "accelerate", "peft", "lightning")


def describe_run(model: nn.Module, layers: Layers, optimizers: Sequence[Any]) -> dict[str, Any]:
    """The facts about a run that do not change while it goes on."""
    inner = peel(model)
    parameters = [p for p in model.parameters() if not isinstance(p, UninitializedParameter)]
    rank, world_size = rank_and_world_size()
    return {
        "versions": _versions(),
        "model": {
            "class": type(inner).__name__,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "layers": len(layers.names) + len(layers.not_watched),
            "watched_layers": len(layers.names),
        },
        **describe_layers(layers),
        "optimizer": {
            "class": ", ".join(type(optimizer).__name__ for optimizer in optimizers) or None,
            "groups": sum(len(optimizer.param_groups) for optimizer in optimizers),
        },
        "parallelism": {"world_size": world_size, "rank": rank},
    }


def describe_layers(layers: Layers) -> dict[str, Any]:
    """The watched layers and the others; changes when parameters do."""
    return {
        "layers": list(layers.names),
        "not_watched": [{"layer": layer, "reason": reason} for layer, reason in layers.not_watched],
    }


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and how many there are; 0 of 1 outside torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def learning_rate(optimizers: Sequence[Any]) -> float | None:
    """The largest learning rate of any group; one that lives on an accelerator is not read."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    known = [
        float(rate)
        for rate in rates
        if isinstance(rate, int | float) or (isinstance(rate, torch.Tensor) and rate.device.type == "cpu")
    ]
    return max(known, default=None)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
