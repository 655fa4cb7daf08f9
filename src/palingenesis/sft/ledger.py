"""What the steps of a run add up to: sums over tokens, on the device until a row is due."""

from __future__ import annotations

from typing import NamedTuple

import torch

from palingenesis.describe import rank_and_world_size
from palingenesis.sft.objectives import ObjectiveValue

# Batches have fingerprints below this, and so has their sum, which is modulo this.
FINGERPRINTS = 1 << 48
# They are added up in two halves: sums of whole ones would not stay exact in double precision.
_HALF = 1 << 24

# A table's columns are those of :class:`StepSums`, the fingerprint as two; this rank's own are the last.
_COLUMNS, _OWN = 8, 6


class StepSums(NamedTuple):
    """Sums over the loss-bearing tokens of one optimizer step, of all ranks but for the last two."""

    loss: float
    ce: float
    gate: float
    tokens: float
    fingerprint: int
    #: Loss-bearing tokens of this rank, and all of its tokens.
    own_tokens: float
    own_all: float

    def mean(self, total: float) -> float:
        """A sum by loss-bearing token; NaN if there is none."""
        return total / self.tokens if self.tokens else float("nan")


class Ledger:
    """Adds up micro-batches to steps, and steps to what a row tells.

    Args:
        device: where the sums are.
    """

    def __init__(self, device: torch.device) -> None:
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._device = device
        self._open = self._nothing()
        self._closed: dict[int, torch.Tensor] = {}
        _, self._ranks = rank_and_world_size()

    def _nothing(self) -> torch.Tensor:
        return torch.zeros(_COLUMNS, dtype=self._dtype, device=self._device)

    def add(
        self, value: ObjectiveValue, fingerprint: torch.Tensor | None, all_tokens: torch.Tensor | int
    ) -> None:
        """Add one micro-batch to the step under way. Nothing waits for the device."""
        tokens = value.tokens
        halves = (None, None) if fingerprint is None else (fingerprint % _HALF, fingerprint // _HALF)
        sums = (value.loss_sum.detach(), value.ce_sum, value.gate_sum)
        parts = [*sums, tokens, *halves, tokens, all_tokens]
        for place, part in enumerate(parts):
            if part is not None:
                self._open[place] += part.sum() if isinstance(part, torch.Tensor) else part

    def end_step(self, step: int) -> None:
        """The step under way was this one."""
        self._closed[step], self._open = self._open, self._nothing()

    def take(self) -> dict[int, StepSums]:
        """The steps since the last call, added over ranks: one all-reduce and one read. All ranks call it."""
        if not self._closed:
            return {}
        steps, self._closed = self._closed, {}
        table = torch.stack(list(steps.values()))
        own = table[:, _OWN:].clone()
        if self._ranks > 1:
            torch.distributed.all_reduce(table)
        table[:, _OWN:] = own
        return {step: _sums(row) for step, row in zip(steps, table.tolist(), strict=True)}


def _sums(row: list[float]) -> StepSums:
    loss, ce, gate, tokens, low, high, own_tokens, own_all = row
    fingerprint = (int(high) * _HALF + int(low)) % FINGERPRINTS
    return StepSums(loss, ce, gate, tokens, fingerprint, own_tokens, own_all)


def fingerprint_text(total: int) -> str | None:
    """A step's fingerprint, 12 hexadecimal digits; ``None`` if batches carry none."""
    return f"{total:012x}" if total else None


def total_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over ranks, in place."""
    _, ranks = rank_and_world_size()
    if ranks > 1:
        torch.distributed.all_reduce(values)
    return values
