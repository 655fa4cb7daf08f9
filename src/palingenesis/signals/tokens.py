"""How many tokens a step has, how many of them bear loss, and how many are padding.

``health/token_efficiency`` is loss-bearing tokens / all tokens, padding included, over the last 100 readings:
a ratio of sums, so each reading weighs by its tokens. ``health/padding_pct`` is the share of tokens that the
attention mask hides, in percent, of the same readings; it is absent where no mask is seen, as in batches
packed without padding. Both are exact counts.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from palingenesis.signals.entropy import IGNORED
from palingenesis.signals.logit_rows import local_part
from palingenesis.signals.values import Values

EFFICIENCY, PADDING = "health/token_efficiency", "health/padding_pct"

WINDOW = 100

_NO_LABELS = "no labels were seen: call batch(labels=...) for every micro-batch"


class MicroBatch(NamedTuple):
    """One micro-batch: its loss-bearing tokens, still on their device (0-d, int64), and its rows."""

    loss_tokens: torch.Tensor
    rows: int


class Tokens:
    """Counts every micro-batch on its device; nothing is read on the host.

    ``compute`` returns one key, ``tokens``, of four *linear sums* over the steps since the last call, which
    ranks with different data add: loss-bearing tokens, all tokens, hidden tokens, tokens with a mask. Ranks
    that hold parts of the same sequences add too; ranks with the same data must not be added.
    """

    def __init__(self) -> None:
        self.micro_batches: list[MicroBatch] = []
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._window: deque[NDArray[np.float64]] = deque(maxlen=WINDOW)

    @torch.no_grad()
    def batch(
        self,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        shifted: bool = False,
    ) -> None:
        """Count one micro-batch.

        Args:
            labels: ``[..., T]``; −100 bears no loss. Without them nothing is counted. Of one dimension and
                ``shifted`` they are one class for each example.
            attention_mask: ``[B, T]``, 0 where padding is. Of any other rank it says nothing about padding.
            shifted: labels are targets as they stand. By default the first label of a row is nobody's
                target, as in every causal language model.
        """
        if labels is None:
            return
        labels, mask = local_part(labels), None if attention_mask is None else local_part(attention_mask)
        targets = labels if shifted or not labels.dim() else labels[..., 1:]
        bearing = (targets != IGNORED).sum()
        rows = labels.shape[0] if labels.dim() > 1 else labels.numel() if shifted else 1
        self.micro_batches.append(MicroBatch(bearing, rows))
        hidden, with_mask = torch.zeros_like(bearing), 0
        if mask is not None and mask.dim() == 2:
            hidden, with_mask = (mask == 0).sum().to(bearing.device, non_blocking=True), mask.numel()
        counts = torch.stack(
            [
                bearing,
                torch.full_like(bearing, labels.numel()),
                hidden,
                torch.full_like(bearing, with_mask),
            ]
        )
        before = self._sums.get(labels.device)
        self._sums[labels.device] = counts if before is None else before + counts

    @property
    def step_tokens(self) -> torch.Tensor | None:
        """Loss-bearing tokens of the step so far, 0-d int64 on the first micro-batch's device."""
        if not self.micro_batches:
            return None
        first = self.micro_batches[0].loss_tokens
        counts = [one.loss_tokens.to(first.device, non_blocking=True) for one in self.micro_batches]
        return torch.stack(counts).sum()

    def end_step(self) -> None:
        """The next micro-batch belongs to another step. Call it once an optimizer step."""
        self.micro_batches = []

    def compute(self) -> dict[str, torch.Tensor]:
        """The sums since the last call; empty if there was no micro-batch with labels."""
        sums, self._sums = list(self._sums.values()), {}
        if not sums:
            return {}
        total = sums[0]
        for others in sums[1:]:
            total = total + others.to(total.device, non_blocking=True)
        return {"tokens": total.to(torch.float32 if total.device.type == "mps" else torch.float64)}

    def decode(self, arrays: dict[str, NDArray[np.float64]]) -> Values:
        """Ratios over the window that ends with these sums."""
        if "tokens" not in arrays:
            return Values(unavailable={EFFICIENCY: _NO_LABELS, PADDING: _NO_LABELS})
        self._window.append(arrays["tokens"])
        bearing, every, hidden, with_mask = np.sum(self._window, axis=0).tolist()
        scalars, unavailable = {}, {}
        if every:
            scalars[EFFICIENCY] = bearing / every
        else:
            unavailable[EFFICIENCY] = "the labels are empty"
        if with_mask:
            scalars[PADDING] = 100.0 * hidden / with_mask
        else:
            unavailable[PADDING] = "no attention mask of shape [batch, tokens] was seen"
        return Values(scalars, unavailable=unavailable)

    def state_dict(self) -> dict[str, Any]:
        return {"window": [sums.tolist() for sums in self._window]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = (np.asarray(row, dtype=np.float64).reshape(4) for row in state["window"])
        self._window = deque(rows, maxlen=WINDOW)
