"""Mixed precision's gradient scaler, asked without waiting for the device.

``GradScaler`` has no public way to tell whether ``unscale_`` was called this step, nor its scale without a
host read; the private attributes read here have had these names since torch 1.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Scaler:
    """What the monitor needs of a ``GradScaler``.

    Args:
        scaler: a ``torch.amp.GradScaler``, or ``None``.
        optimizers: those it steps.
    """

    def __init__(self, scaler: Any, optimizers: Sequence[Any]) -> None:
        self._scaler, self._optimizers = scaler, optimizers

    @property
    def scale(self) -> torch.Tensor | None:
        """The loss scale, on its device; ``None`` without a scaler, or before its first use."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        scale: torch.Tensor | None = self._scaler._scale
        return scale

    @property
    def still_in_gradients(self) -> torch.Tensor | None:
        """The scale that the gradients still carry, or ``None`` when ``unscale_`` was called."""
        scale = self.scale
        if scale is None:
            return None
        states = self._scaler._per_optimizer_states
        stages = [states[id(o)]["stage"].name for o in self._optimizers if id(o) in states]
        return None if "UNSCALED" in stages or "STEPPED" in stages else scale
