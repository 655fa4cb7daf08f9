"""Output entropy: how sure a model is of its next token, from a sample of positions.

``health/output_entropy`` is the mean of ``H = −Σ p log p`` (nats) over the positions that bear loss in one
optimizer step. Of every observation (a micro-batch, or a chunk of one) with ``N_j`` such positions,
``m_j = min(positions, N_j)`` are drawn uniformly and without replacement; their mean entropy is ``h_j`` and
their variance ``s_j²``. The step's value is stratified sampling's (Cochran, *Sampling Techniques*, 1977,
ch. 5)::

    Σ N_j h_j / Σ N_j,    standard error  √(Σ N_j² (1 − m_j / N_j) s_j² / m_j) / Σ N_j

so every position of the step has the same weight, however unequal the micro-batches are, and the error is
zero where all positions were taken. With few positions whose entropy differs from all others the sample may
miss them, and the standard error then knows nothing of them either.

``health/entropy_trend`` is the relative change over the last 20 values: the Theil–Sen slope ``b`` (median of
all pairwise slopes) of their logarithms makes it ``e^(19 b) − 1``, −0.5 for an entropy that has halved. Five
wild values among the twenty cannot carry it away. Entropies below 1e-6 nats, where fp32 ends, count as that.
It is absent before there are 20 finite values. Its own standard error is about 0.8 times the relative
standard error of one value.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palingenesis.signals.logit_rows import Head, Logits, NotAvailable, plain_tensor
from palingenesis.signals.values import Values

NAME, ERROR, TREND = "health/output_entropy", "health/output_entropy_se", "health/entropy_trend"

TREND_VALUES = 20
SMALLEST = 1e-6
IGNORED = -100
_SEED = 0x5EED

_NOTHING_OBSERVED = (
    "no output was observed in this step: call observe_output() with logits, or with hidden states and the "
    "LM head"
)


class Entropy:
    """Gathers one optimizer step's observations on their device; nothing is read on the host.

    ``compute`` returns one key, ``entropy``, of three *linear sums* that ranks with different data add:
    ``Σ N_j h_j``, ``Σ N_j`` and ``Σ N_j² (1 − m_j / N_j) s_j² / m_j``. Ranks with the same data (tensor
    parallelism) draw the same positions, having the same seed, and must not be added.

    Args:
        positions: how many positions to draw from one observation.
        seed: of the private generators, one a device.
    """

    def __init__(self, positions: int = 64, *, seed: int = _SEED) -> None:
        self.positions = positions
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._history: deque[float] = deque(maxlen=TREND_VALUES)
        self._sums: torch.Tensor | None = None
        self._reason: str | None = None
        self._told: str | None = None

    # -- one step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe_output(
        self,
        *,
        labels: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        head: nn.Module | torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
        entropies: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        shifted: bool = False,
    ) -> None:
        """Take in one micro-batch, or one chunk of it. Give one of three things.

        Args:
            labels: ``[..., T]``; −100 bears no loss.
            logits: ``[..., T, V]``, of any float type, as they are when the loss is taken.
            hidden: ``[..., T, D]``, what goes into the LM head; with ``head``.
            head: a plain ``nn.Linear``, or its weight ``[V, D]``, with ``bias`` ``[V]``.
            scale, soft_cap: what the model does to the head's output ``z``: ``z · scale``, then
                ``soft_cap · tanh(z / soft_cap)``.
            entropies: a loss kernel's own entropies, nats, with the ``mask`` of positions that count: all
                of them are used, so the error is zero.
            shifted: the label at ``t`` is the target of position ``t`` itself. By default it is that of the
                position before, as in every causal language model; the last position is then left out, and
                outputs may lack it.

        What cannot be used makes the step's value unavailable, with the reason; nothing is raised for it.
        Recomputation in a backward pass (activation checkpointing) is not counted again.
        """
        if _in_backward():
            return
        try:
            if entropies is not None:
                if mask is None or mask.shape != entropies.shape:
                    raise NotAvailable("entropies need a mask of their own shape")
                self._add(_all_of(plain_tensor(entropies, "entropies"), plain_tensor(mask, "mask") != 0))
            elif labels is None:
                raise NotAvailable("labels are needed to know which positions bear loss")
            else:
                outputs = _outputs(logits, hidden, head, bias, scale, soft_cap)
                self._add(self._sample(outputs, bears_loss(labels, outputs.shape, shifted=shifted)))
        except NotAvailable as reason:
            self.cannot_observe(str(reason))

    def cannot_observe(self, reason: str) -> None:
        """An output of this step cannot be observed: a mean over the others would not be the step's."""
        self._reason = reason

    def _sample(self, outputs: Logits | Head, mask: torch.Tensor) -> torch.Tensor:
        """Three sums of one observation, ``[3]``. ``mask`` tells which positions bear loss."""
        mask = mask.reshape(-1).to(outputs.device, non_blocking=True)
        if not mask.numel():
            return torch.zeros(3, dtype=_sum_dtype(mask.device), device=mask.device)
        # The largest of random keys are a uniform sample without replacement. Where fewer positions count
        # than are wanted, others fill the rest and are taken out again: no size depends on the data.
        keys = torch.rand(mask.shape, device=mask.device, generator=self._generator(mask.device))
        keys, at = keys.masked_fill_(~mask, -1.0).topk(min(self.positions, mask.numel()), sorted=False)
        drawn = keys >= 0
        dtype = _sum_dtype(mask.device)
        found = torch.where(drawn, outputs.entropies(at).to(dtype), 0.0)
        there, count = mask.sum(dtype=dtype), drawn.sum(dtype=dtype)
        at_least_one = count.clamp(min=1)
        mean = found.sum() / at_least_one
        squares = torch.where(drawn, found - mean, 0.0).square().sum()
        variance = squares / (count - 1).clamp(min=1) / at_least_one
        # N² (1 − m / N), which is 0 for N = 0 too.
        return torch.stack([there * mean, there, there * (there - count) * variance])

    def _add(self, sums: torch.Tensor) -> None:
        if self._sums is None:
            self._sums = sums
        else:
            self._sums = self._sums + sums.to(self._sums.device, non_blocking=True)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def compute(self) -> dict[str, torch.Tensor]:
        """The sums of what was observed since the last :meth:`end_step`; empty if there is no value."""
        if self._reason is None and self._sums is not None:
            self._told = None
            return {"entropy": self._sums}
        self._told = self._reason or _NOTHING_OBSERVED
        return {}

    def end_step(self) -> None:
        """Forget the step's observations. Call it once a step, after ``compute`` if that is due."""
        self._sums = self._reason = None

    # -- on the host -------------------------------------------------------------------------------------

    def decode(self, arrays: dict[str, NDArray[np.float64]]) -> Values:
        """The value of one step, and the trend up to it; a non-finite value enters no trend."""
        if "entropy" not in arrays:
            return Values(unavailable={NAME: self._told or _NOTHING_OBSERVED})
        total, count, variance = (float(value) for value in arrays["entropy"])
        if count == 0:
            return Values(unavailable={NAME: "no position of this step bears loss"})
        value = total / count
        scalars = {NAME: value, ERROR: math.sqrt(variance) / count if variance >= 0 else math.nan}
        if math.isfinite(value):
            self._history.append(value)
        if len(self._history) == TREND_VALUES:
            scalars[TREND] = relative_change(self._history)
        return Values(scalars)

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self._history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._history = deque((float(value) for value in state["history"]), maxlen=TREND_VALUES)


def bears_loss(labels: torch.Tensor, positions: torch.Size, *, shifted: bool) -> torch.Tensor:
    """Which of a model's output positions bear loss.

    Args:
        labels: ``[..., T]``.
        positions: the shape of the outputs without their last dimension: ``[..., T]``, or ``[..., T − 1]``
            where labels are not shifted yet and the last output was left out.
        shifted: as in :meth:`Entropy.observe_output`.

    Returns:
        booleans of the shape ``positions``.

    Raises:
        NotAvailable: the shapes do not belong together.
    """
    targets = plain_tensor(labels, "labels")
    if not shifted and targets.dim() and targets.shape[:-1] == positions[:-1]:
        without_first = targets[..., 1:]
        if without_first.shape == positions:
            return without_first != IGNORED
        if targets.shape == positions:
            return torch.nn.functional.pad(without_first != IGNORED, (0, 1))
    elif shifted and targets.shape == positions:
        return targets != IGNORED
    raise NotAvailable(
        f"outputs at {list(positions)} positions do not fit labels of shape {list(labels.shape)}"
    )


def relative_change(values: Iterable[float]) -> float:
    """Last value over first, minus 1, on the Theil–Sen line through the logarithms; see above."""
    logs = np.log(np.maximum(np.fromiter(values, dtype=np.float64), SMALLEST))
    first, second = np.triu_indices(len(logs), 1)
    slope = np.median((logs[second] - logs[first]) / (second - first))
    return math.expm1(float(slope) * (len(logs) - 1))


def _outputs(
    logits: torch.Tensor | None,
    hidden: torch.Tensor | None,
    head: nn.Module | torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> Logits | Head:
    if logits is not None:
        return Logits(logits.detach())
    if hidden is None or head is None:
        raise NotAvailable("there are neither logits, nor hidden states with an LM head")
    return Head.of(hidden.detach(), head, bias, scale, soft_cap)


def _all_of(entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    dtype = _sum_dtype(entropies.device)
    total = torch.where(mask, entropies.to(dtype), 0.0).sum()
    return torch.stack([total, mask.sum(dtype=dtype), torch.zeros_like(total)])


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _in_backward() -> bool:
    """Whether this runs inside a backward pass, where checkpointed parts of the forward run again."""
    return bool(torch._C._current_graph_task_id() != -1)
