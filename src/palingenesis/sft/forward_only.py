"""Forward passes that no backward pass follows, after which the model is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def forward_only(model: torch.nn.Module, *, training: bool = False) -> Iterator[None]:
    """No gradients, in evaluation mode or, with ``training``, in training mode; at the end sharded again."""
    import torch

    # One by one: frozen parts may be in evaluation mode while the rest trains.
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.train(training)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for module, mode in modes:
            module.training = mode
            # Sharded by FSDP2, some stay whole after a forward pass until the backward pass that never comes.
            if callable(reshard := getattr(module, "reshard", None)):
                reshard()
