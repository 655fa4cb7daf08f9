"""Evaluation: cross-entropy by token over whole data sets, each row once, on one process or many."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from palingenesis.describe import rank_and_world_size
from palingenesis.sft.forward_only import forward_only
from palingenesis.sft.ledger import total_over_ranks
from palingenesis.sft.rows import exp
from palingenesis.sft.token_statistics import IGNORED

log = logging.getLogger("palingenesis")


class Evaluation:
    """Evaluates on several sources.

    Args:
        sources: rows with ``input_ids`` and ``labels``, by the name of their source.
        weights: what each source counts for in ``loss``, if there are several.
        collate: makes a batch of rows.
        batch_size: rows a batch.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float],
        collate: Callable[[list[Any]], dict[str, Any]],
        batch_size: int,
    ) -> None:
        self.sources = dict(sources)
        self._weights, self._collate, self._batch_size = weights, collate, batch_size
        self._told = False

    def run(
        self,
        model: torch.nn.Module,
        read: Callable[[torch.nn.Module, Mapping[str, Any]], Any],
        prepare: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> dict[str, float]:
        """Every source's loss, and the loss over all. All ranks call it.

        Args:
            model: comes back in the mode it was in.
            read: gives a batch's :class:`~palingenesis.sft.head.TokenOutput`.
            prepare: moves a batch to where the model is.

        Returns:
            ``loss`` and ``ppl``; with several sources also ``<source>/loss``. Nats.
        """
        with forward_only(model):
            sums = {name: self._sums(rows, model, read, prepare) for name, rows in self.sources.items()}
        losses = {name: float(ce / tokens) for name, (ce, tokens) in sums.items() if tokens > 0}
        loss = self._over_all(losses)
        found = {"loss": loss, "ppl": exp(loss)}
        if len(self.sources) > 1:
            found |= {f"{name}/loss": value for name, value in losses.items()}
        return found

    def _over_all(self, losses: Mapping[str, float]) -> float:
        """The mean by weight over the sources that have a loss."""
        total = sum(self._weights[name] for name in losses)
        missing = sorted(set(self.sources) - set(losses))
        if missing and not self._told:
            self._told = True
            log.warning(
                "no token of %s bears loss: eval/loss is the mean over the other sources, whose weights are "
                "taken to sum to 1",
                ", ".join(missing),
            )
        return sum(self._weights[name] * loss for name, loss in losses.items()) / total if total else math.nan

    def _sums(
        self, rows: Any, model: torch.nn.Module, read: Callable[..., Any], prepare: Callable[..., Any]
    ) -> list[float]:
        """Σ CE and Σ tokens of a source, over all ranks."""
        rank, ranks = rank_and_world_size()
        device = next(model.parameters()).device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sums = torch.zeros(2, dtype=dtype, device=device)
        share = range(rank, len(rows), ranks)
        # Sharded models gather their weights in every forward pass: all ranks make as many.
        batches = math.ceil(math.ceil(len(rows) / ranks) / self._batch_size)
        for number in range(batches):
            places = share[number * self._batch_size : (number + 1) * self._batch_size]
            batch = self._collate([rows[place] for place in places or [0]])
            if not places:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            statistics = read(model, prepare(batch)).statistics
            sums[0] -= torch.where(statistics.mask, statistics.log_p, 0.0).sum(dtype=dtype)
            sums[1] += statistics.mask.sum()
        return total_over_ranks(sums).tolist()
