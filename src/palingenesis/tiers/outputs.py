"""Tokens and entropy of every step, as one row of numbers that stays on its device until it is sent.

A row is made where something is due. Rows wait until they are sent together: at each logging step where this
process is alone, and where ranks meet at the steps at which they do.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from palingenesis.config import MonitorConfig
from palingenesis.signals.entropy import Entropy
from palingenesis.signals.noise_scale import Batch
from palingenesis.signals.sharding import local
from palingenesis.signals.tokens import Tokens
from palingenesis.signals.values import Values

# What a row holds. The sums of ``Tokens`` (4) are of all steps since the last row that had them, those of
# ``Entropy`` (3) of the row's step; each is preceded by a 1 if there are any. ``step_tokens`` and
# ``sequences`` are of the step. ``print`` tells ranks with the same data from one another.
_COUNTED, _TOKENS, _SEEN, _ENTROPY, _STEP_TOKENS, _SEQUENCES, _PRINT = 0, 1, 5, 6, 9, 10, 11
WIDTH = 12

# What a micro-batch's mean loss counts for in the step's: a number, or its share of the tokens.
Weight = float | Literal["tokens"]
UNTOLD, BY_TOKENS = -1.0, -2.0

# Odd, so that no label's change is lost; large, so that sums of different labels differ.
_FACTOR, _MODULUS = 0x9E3779B1, (1 << 31) - 1


class Row(NamedTuple):
    """One step's row, and what is known of it without the device."""

    step: int
    numbers: torch.Tensor
    logged: bool
    unavailable: dict[str, str]


class Outputs:
    """What a training loop tells of its batches and outputs.

    Args:
        config: cadences and options.
        ranks: how many there are; several may hold the same data.
    """

    def __init__(self, config: MonitorConfig, *, ranks: int) -> None:
        self._config, self._ranks = config, ranks
        self.tokens, self.entropy = Tokens(), Entropy(config.entropy_positions)
        self._weights: list[Weight | None] = []
        self._print: torch.Tensor | None = None
        self._rows: list[Row] = []

    # -- on the devices ----------------------------------------------------------------------------------

    @torch.no_grad()
    def batch(
        self,
        labels: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        *,
        shifted: bool,
        weight: Weight | None,
    ) -> None:
        """Count one micro-batch; see ``Monitor.batch``."""
        self.tokens.batch(labels, attention_mask, shifted=shifted)
        self._weights.append(weight)
        if labels is not None and self._ranks > 1:
            flat = local(labels).reshape(-1).long()
            places = torch.arange(1, flat.numel() + 1, device=flat.device)
            found = ((flat + 101) * (places * _FACTOR % _MODULUS) % _MODULUS).sum() % _MODULUS
            before = self._print
            self._print = found if before is None else before.to(found.device) * 31 % _MODULUS + found

    @property
    def weights(self) -> list[float]:
        """What each micro-batch of the step counts for: ``UNTOLD`` where the loop does not say, and
        ``BY_TOKENS`` where it is the share of the tokens."""
        return [
            UNTOLD if weight is None else BY_TOKENS if weight == "tokens" else float(weight)
            for weight in self._weights
        ]

    def end_step(self, step: int, *, logged: bool, needed: bool) -> None:
        """Make the step's row if it is due, and begin the next step.

        Args:
            step: the step that ends.
            logged: tier 1 looks at it.
            needed: its batch size is needed, for the noise scale.
        """
        entropy = self.entropy.compute() if logged and self._config.rl_readiness else {}
        unavailable = {}
        if logged and self._config.rl_readiness and not entropy:
            unavailable = self.entropy.decode({}).unavailable
        tokens = self.tokens.compute() if logged else {}
        if tokens or entropy or unavailable or self._ranks > 1 or (needed and self.tokens.micro_batches):
            self._rows.append(
                Row(step, self._row(tokens.get("tokens"), entropy.get("entropy")), logged, unavailable)
            )
        self.tokens.end_step()
        self.entropy.end_step()
        self._weights, self._print = [], None

    def _row(self, tokens: torch.Tensor | None, entropy: torch.Tensor | None) -> torch.Tensor:
        step_tokens = self.tokens.step_tokens
        known = [one for one in (tokens, entropy, step_tokens, self._print) if one is not None]
        device = known[0].device if known else torch.device("cpu")
        dtype = torch.float32 if device.type == "mps" else torch.float64
        row = torch.zeros(WIDTH, dtype=dtype, device=device)
        if tokens is not None:
            row[_COUNTED].fill_(1.0)
            row[_TOKENS:_SEEN].copy_(tokens, non_blocking=True)
        if entropy is not None:
            row[_SEEN].fill_(1.0)
            row[_ENTROPY:_STEP_TOKENS].copy_(entropy, non_blocking=True)
        if step_tokens is not None:
            row[_STEP_TOKENS].copy_(step_tokens, non_blocking=True)
            row[_SEQUENCES].fill_(float(sum(one.rows for one in self.tokens.micro_batches)))
        if self._print is not None:
            row[_PRINT].copy_(self._print, non_blocking=True)
        return row

    def take(self) -> tuple[dict[str, torch.Tensor], list[Row]]:
        """The rows since the last call, ``[rows, WIDTH]``, to be sent."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}, []
        device = rows[-1].numbers.device
        numbers = [row.numbers.to(device, non_blocking=True) for row in rows]
        return {"outputs": torch.stack(numbers)}, rows

    # -- on the host -------------------------------------------------------------------------------------

    def decode(self, row: Row, table: NDArray[np.float64]) -> tuple[Values, Batch | None]:
        """What a step's row says, and the size of the step's batch.

        Args:
            row: which step.
            table: ``[ranks, WIDTH]``.
        """
        own = _of_different_data(table)
        sums = own.sum(axis=0)
        batch = Batch(sums[_STEP_TOKENS], sums[_SEQUENCES]) if sums[_STEP_TOKENS] else None
        scalars: dict[str, float] = {}
        unavailable = dict(row.unavailable)
        if row.logged and own[:, _COUNTED].all():
            found = self.tokens.decode({"tokens": sums[_TOKENS:_SEEN]})
            scalars |= found.scalars
            unavailable |= found.unavailable
        if row.logged and own[:, _SEEN].all():
            found = self.entropy.decode({"entropy": sums[_ENTROPY:_STEP_TOKENS]})
            scalars |= found.scalars
            unavailable |= found.unavailable
        return Values(scalars, unavailable=unavailable), batch


def _of_different_data(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rows of ranks that do not hold the same data as another, as under tensor parallelism."""
    prints = table[:, _PRINT]
    _, first = np.unique(prints, return_index=True)
    known = np.flatnonzero(prints == 0)  # of those without labels nothing is known
    return table[np.union1d(first, known)]
