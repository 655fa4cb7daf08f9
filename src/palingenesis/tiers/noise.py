"""From micro-batches, ranks and consecutive steps to the gradient noise scale.

Parts of one step are compared where there are several: micro-batches, heard by hooks, or ranks, whose hooks
hear a gradient before it is averaged. Where the whole step is one part, two consecutive steps are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from palingenesis.signals.cosine import Norms
from palingenesis.signals.cosine_sums import Products
from palingenesis.signals.microbatch import MicroBatches
from palingenesis.signals.noise_scale import Batch, NoiseScale
from palingenesis.signals.values import Values
from palingenesis.tiers.outputs import UNTOLD, Outputs

# Ranks tell one another of so many micro-batches; a step with more is not compared.
MOST = 64
_UNKNOWN = -1.0
# Steps whose batch size is remembered: the one looked at, and the one before.
_REMEMBERED = 2
# A step's gradients are taken for unclipped where what the hooks heard agrees this well.
_SAME = 1e-3
# Parts whose sizes differ by no more count alike, however their losses are joined.
_EQUAL = 0.01

PARTS = "health/gns_source"


class Noise:
    """Gathers what single steps say about the noise.

    Args:
        ranks: how many hear parts of the same step; 1 where this process is alone.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.scale = NoiseScale()
        self._batches: dict[int, Batch] = {}
        # Why the last step's parts could not be compared.
        self._why_not: str | None = None
        # The later step of the last pair.
        self._paired: int | None = None

    @torch.no_grad()
    def compute(
        self,
        heard: MicroBatches | None,
        outputs: Outputs,
        norms: Norms | None,
        still_scaled: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """What one step's parts were, to be sent: ``parts/table`` ``[4, parts]``, ``parts/whole`` ``[4]``.

        Args:
            heard: by the hooks.
            outputs: of the same step, for the parts' sizes.
            norms: of the step's gradients, without the loss scale.
            still_scaled: loss scale that ``.grad`` still carries.

        The table holds each part's squared norm, tokens, sequences and weight (``Outputs.weights``), −1 where
        unknown; the rest is how many parts there are, the inner product of the probe's ``.grad`` with what
        was heard of it, that ``.grad``'s squared norm, and the squared norm of the whole gradient.
        """
        if heard is None or norms is None or heard.probe is None or not heard.squares:
            return {}
        squares = list(heard.squares.values())
        device = squares[0].device
        total = torch.stack([one.to(device, non_blocking=True) for one in squares]).sum(0)
        size = heard.count if self._ranks == 1 else MOST
        table = total.new_full((4, size), _UNKNOWN)
        kept = min(heard.count, size)
        table[0, :kept] = total[:kept]
        sizes = outputs.tokens.micro_batches
        if len(sizes) == heard.count == len(outputs.weights):
            for part, (one, weight) in enumerate(zip(sizes[:kept], outputs.weights, strict=False)):
                table[1, part].copy_(one.loss_tokens, non_blocking=True)
                table[2, part].fill_(float(one.rows))
                table[3, part].fill_(weight)
        parameter, sums = heard.probe
        assert parameter.grad is not None
        gradient = parameter.grad.detach().to(sums)
        if still_scaled is not None:
            gradient = gradient / still_scaled.to(gradient.device, non_blocking=True)
        whole = total.new_empty(4)
        whole[0].fill_(float(heard.count))
        whole[1].copy_((gradient * sums).sum(), non_blocking=True)
        whole[2].copy_(gradient.square().sum(), non_blocking=True)
        of_all = [one.square().sum().to(device, non_blocking=True) for one in norms.values()]
        whole[3].copy_(torch.stack(of_all).sum(), non_blocking=True)
        return {"parts/table": table, "parts/whole": whole}

    # -- on the host -------------------------------------------------------------------------------------

    def note_batch(self, step: int, batch: Batch | None) -> None:
        """Remember the size of a step's batch, over all ranks."""
        if batch is not None:
            self._batches[step] = batch
        for old in [one for one in self._batches if one <= step - _REMEMBERED]:
            del self._batches[old]

    def take_parts(self, step: int, arrays: Mapping[str, NDArray[np.float64]]) -> None:
        """Take in one step's parts.

        Args:
            step: the step.
            arrays: what ``compute`` returned, ``[ranks, …]`` each.
        """
        if "parts/table" not in arrays:
            return
        tables, wholes = arrays["parts/table"], arrays["parts/whole"]
        counts, ranks = wholes[:, 0].astype(int), len(tables)
        if ranks != self._ranks or (counts > tables.shape[2]).any():
            return
        inner, of_probe, whole = wholes[:, 1].sum() / ranks, wholes[0, 2], wholes[0, 3]
        if not (0 < inner < math.inf and 0 < of_probe < math.inf):
            return  # nothing tells what was done to the gradient between its parts and here
        # The gradient that is there is the average over ranks of what was heard, but for clipping.
        factor = of_probe / inner
        if abs(factor - 1) > _SAME:
            whole = whole / factor**2
        parts = np.concatenate([table[:, :count].T for table, count in zip(tables, counts, strict=True)])
        squares, tokens, sequences, weights = parts.T
        if len(parts) < 2:
            return
        self._why_not = _why_not(tokens, weights)
        if (tokens == _UNKNOWN).any():
            self._batches.pop(step, None)  # what was told does not fit what was heard
        if self._why_not is None:
            self.scale.add_parts(
                step,
                "microbatch" if counts.max() > 1 else "rank",
                squares / ranks**2,
                float(whole),
                tokens=tokens,
                sequences=sequences,
                shares=None if (weights < 0).any() else weights / weights.sum(),
            )

    def take_consecutive(self, step: int, products: Products | None) -> None:
        """Take in what two consecutive steps have in common.

        Of pairs that have a step in common only the first is taken: both err by the noise of that step, and
        the errors are those of independent numbers.
        """
        if products is None or (self._paired is not None and step == self._paired + 1):
            return
        self._paired = step
        before, now = self._batches.get(step - 1), self._batches.get(step)
        if before is None or now is None:
            before = now = Batch()
        self.scale.add_consecutive(step, *products, before, now)

    def values(self) -> tuple[Values, dict[str, str]]:
        """The noise scale, once enough steps have told, and its labels."""
        values, labels = (Values(), {}) if self.scale.source is None else self.scale.values()
        if self._why_not is not None:
            values = Values(values.scalars, unavailable={**values.unavailable, PARTS: self._why_not})
        return values, labels


def _why_not(tokens: NDArray[np.float64], weights: NDArray[np.float64]) -> str | None:
    """Why parts cannot be compared, in words: what each counts for must be known, not guessed."""
    if (tokens == _UNKNOWN).any():
        return "micro-batches are not compared: call batch(labels=...) once before each backward"
    sizes = tokens[tokens > 0]
    equal = not sizes.size or sizes.max() <= sizes.min() * (1 + _EQUAL)
    if equal or not (weights == UNTOLD).any():
        return None
    return (
        "micro-batches of unequal size are not compared: say what each counts for, batch(weight='tokens') "
        "or a number"
    )
