"""The rows of a run: what its steps say under ``train/``, and evaluations under ``eval/``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palingenesis.sft.flops import Flops
from palingenesis.sft.ledger import StepSums, fingerprint_text

# How far torch's clipping stays below the largest norm (``clip_grad_norm_`` adds it to the norm).
_CLIP_EPSILON = 1e-6


@dataclass
class _Lap:
    """Steps since the last row; loss-bearing tokens of this rank and of all; all tokens of this rank."""

    steps: int = 0
    own: float = 0.0
    everyone: float = 0.0
    own_all: float = 0.0

    def add(self, sums: StepSums) -> None:
        self.steps += 1
        self.own += sums.own_tokens
        self.everyone += sums.tokens
        self.own_all += sums.own_all


class RowMaker:
    """Makes rows from sums. Knows no trainer, no device and no file.

    Args:
        plain: the objective is the cross-entropy itself.
        max_grad_norm: above which gradients are clipped; 0 for never.
        steps_per_epoch: may be a fraction.
        tokens_before: loss-bearing tokens of all ranks before this process began.
        flops: for the share of the device's peak, where that is known.
    """

    def __init__(
        self,
        *,
        plain: bool,
        max_grad_norm: float,
        steps_per_epoch: float,
        tokens_before: float = 0.0,
        flops: Flops | None = None,
    ) -> None:
        self._plain, self._max_grad_norm = plain, max_grad_norm
        self._steps_per_epoch, self._flops = steps_per_epoch, flops
        self._own_tokens, self._lap = 0.0, _Lap()
        self.tokens_of_all = tokens_before
        #: The newest step's cross-entropy, to compare evaluations with.
        self.ce: float | None = None

    def losses(self, sums: StepSums) -> dict[str, Any]:
        """What the sums of a step say of its loss, and which batch it was."""
        loss, ce = sums.mean(sums.loss), sums.mean(sums.ce)
        self.ce = ce
        row: dict[str, Any] = {"train/loss": loss}
        if not self._plain:
            row |= {"train/ce_loss": ce, "train/token_gate": sums.mean(sums.gate)}
        row["train/ppl"] = exp(ce)
        fingerprint = fingerprint_text(sums.fingerprint)
        return row if fingerprint is None else row | {"train/batch": fingerprint}

    def step(
        self,
        step: int,
        taken: Mapping[int, StepSums],
        logs: Mapping[str, float],
        seconds: float,
    ) -> dict[int, dict[str, Any]]:
        """The rows of the steps since the last call; the last one's has everything.

        Args:
            step: the last step.
            taken: the sums of these steps.
            logs: ``grad_norm`` before clipping and ``learning_rate``.
            seconds: of training, since the last call.
        """
        rows = {one: self.losses(sums) for one, sums in taken.items()}
        for sums in taken.values():
            self.count(sums)
        lap, self._lap = self._lap, _Lap()
        row = rows.setdefault(step, {})
        row |= {
            "train/lr": logs["learning_rate"],
            "train/tokens_per_sec": lap.own / seconds,
            "train/tokens_per_sec_global": lap.everyone / seconds,
            "train/tokens_total": self._own_tokens,
            "train/tokens_total_all": self.tokens_of_all,
            "train/step_time_s": seconds / max(lap.steps, 1),
            "train/epoch": step / self._steps_per_epoch,
        }
        if "grad_norm" in logs:
            raw = logs["grad_norm"]
            row |= {"train/grad_norm": self.clipped(raw), "train/grad_norm_raw": raw}
        if self._flops is not None:
            row["train/mfu"] = self._flops.of_peak(lap.own_all / seconds)
        return rows

    def count(self, sums: StepSums) -> None:
        """Count a step's tokens."""
        self._lap.add(sums)
        self._own_tokens += sums.own_tokens
        self.tokens_of_all += sums.tokens

    def clipped(self, raw: float) -> float:
        """The norm of the gradient as the optimizer gets it, from that before clipping."""
        if self._max_grad_norm <= 0:
            return raw
        factor = self._max_grad_norm / (raw + _CLIP_EPSILON)
        return raw * factor if not factor >= 1 else raw  # NaN stays NaN

    def evaluation(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """``eval/…`` from what the trainer has as ``eval_…``, and the gap to training."""
        row = {f"eval/{name.removeprefix('eval_')}": value for name, value in metrics.items()}
        return row if self.ce is None else row | {"eval/gap": row["eval/loss"] - self.ce}


def exp(value: float) -> float:
    """``e`` to a power; infinite where that is beyond double precision."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
