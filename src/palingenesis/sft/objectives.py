"""The training objectives, as sums over one micro-batch's per-token statistics.

Each is ``Σ gate · CE`` over the loss-bearing tokens, with a gate that is never differentiated:

============  =========================================================================================
``ce``        1
``deft``      ``p^α``, ``α = Σ_v p_v²`` (arXiv 2602.11424)
``dft``       ``p`` (arXiv 2508.05629); TRL's ``loss_type="dft"``
``info_sft``  ``w / mean(w)``, ``w = p · max(0, logit(p̄) − logit(p))`` (arXiv 2605.14967)
``cadft``     ``exp(−β · max(0, z)) · p``, ``z`` of the token's sample (arXiv 2606.11206)
============  =========================================================================================

``p`` is the probability of the target. A sample's ``z`` is its mean NLL, less the mean over samples, in
standard deviations (with ``n − 1``) of them. Means and deviations are the window's: all micro-batches of one
optimizer step on all ranks.

**Sums, not means.** The loss of the window is ``Σ loss_sum / Σ tokens`` over it, however it was cut up. The
caller divides, because only it knows the window.

**Objectives that look at the whole window.** The gates of ``info_sft`` and ``cadft`` depend on tokens in
other micro-batches (:data:`NEED_WINDOW`). If there are any, add up :func:`window_sums` of all of them, from a
first pass without gradients, and give :meth:`Window.of` that sum. Without a window, what is given is all
there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from palingenesis.errors import ConfigError
from palingenesis.sft.token_statistics import TokenStatistics

OBJECTIVES = ("ce", "deft", "dft", "info_sft", "cadft")

NEED_WINDOW = frozenset({"info_sft", "cadft"})
"""Objectives whose gates depend on all of the window's tokens."""

# Mean NLLs that differ by less than this share of their mean differ by rounding: no deviation at all.
_SAME = 1e-6


@dataclass(frozen=True)
class ObjectiveParams:
    """What can be set."""

    pbar: float = 0.93
    """``p̄`` of ``info_sft``: targets at least as likely as this have no weight. Between 0 and 1."""
    beta: float = 1.0
    """``β`` of ``cadft``: how fast weights of hard samples fall; 0 makes it ``dft``. At least 0."""

    def __post_init__(self) -> None:
        if not 0.0 < self.pbar < 1.0:
            raise ConfigError(f"pbar={self.pbar!r} cannot be used: give a probability between 0 and 1")
        if not 0.0 <= self.beta < math.inf:
            raise ConfigError(f"beta={self.beta!r} cannot be used: give a number of at least 0")


@dataclass(frozen=True)
class ObjectiveValue:
    """Sums over the loss-bearing tokens of what was given; 0-dimensional tensors on its device."""

    loss_sum: torch.Tensor
    """``Σ gate · CE``. The only one with a gradient; 0 with a gradient of zeros if no token bears loss."""
    ce_sum: torch.Tensor
    """``Σ CE``, nats."""
    gate_sum: torch.Tensor
    """``Σ gate``; for ``info_sft`` of ``w``, before it is divided by its mean (which makes every mean 1)."""
    tokens: torch.Tensor
    """How many tokens bear loss (int64)."""


@dataclass(frozen=True)
class Window:
    """What gates need to know of the whole window."""

    gate_mean: torch.Tensor
    """Mean of InfoSFT's ``w`` over tokens; 1 where that is 0 (then every gate is 0)."""
    nll_mean: torch.Tensor
    """Mean over samples of a sample's mean NLL, nats."""
    nll_std: torch.Tensor
    """Their standard deviation; 0 for one sample, or if they are the same but for rounding."""

    @classmethod
    def of(cls, sums: torch.Tensor) -> Window:
        """From :func:`window_sums`, added over micro-batches and ranks. Nothing waits for the device."""
        gates, tokens, samples, nll, squares = sums.unbind()
        gate_mean = gates / tokens.clamp(min=1)
        mean = nll / samples.clamp(min=1)
        std = ((squares - nll * mean).clamp(min=0) / (samples - 1).clamp(min=1)).sqrt()
        one = torch.ones_like(mean)
        return cls(
            gate_mean=torch.where(gate_mean > 0, gate_mean, one),
            nll_mean=mean,
            nll_std=torch.where(std > _SAME * mean.abs(), std, 0 * one),
        )


def window_sums(
    stats: TokenStatistics, params: ObjectiveParams | None = None, *, samples: torch.Tensor | None = None
) -> torch.Tensor:
    """What one micro-batch adds to the window, ``[5]``, fp64; the sum over all goes into :meth:`Window.of`.

    Args:
        stats: of the micro-batch; no gradient is needed.
        params: ``p̄``.
        samples: as in :func:`objective`.
    """
    with torch.no_grad():
        nll, bears = _sample_nll(stats, _sample_ids(stats, samples))
        weights = _information(stats, (params or ObjectiveParams()).pbar)
        parts = [weights, stats.mask, bears, nll, nll.square()]
        return torch.stack([part.sum(dtype=nll.dtype) for part in parts])


def objective(
    name: str,
    stats: TokenStatistics,
    params: ObjectiveParams | None = None,
    *,
    samples: torch.Tensor | None = None,
    window: Window | None = None,
) -> ObjectiveValue:
    """An objective over one micro-batch.

    Args:
        name: one of :data:`OBJECTIVES`.
        stats: of the micro-batch.
        params: ``p̄`` and ``β``.
        samples: which sample a position belongs to: numbers below the number of positions, of the shape of
            ``stats.mask``. By default each row is one; for packed rows see :func:`samples_of`.
        window: of the optimizer step, where it has other micro-batches or ranks.
    """
    params = params or ObjectiveParams()
    if name == "ce":
        return _sums(stats, torch.ones_like(stats.log_p))
    if name == "deft":
        return _sums(stats, (stats.collision * stats.log_p.detach()).exp())
    if name == "dft":
        return _sums(stats, stats.log_p.detach().exp())
    if name not in OBJECTIVES:
        raise ConfigError(f"there is no objective {name!r}; there are {', '.join(OBJECTIVES)}")
    window = window or Window.of(window_sums(stats, params, samples=samples))
    if name == "info_sft":
        return _sums(stats, _information(stats, params.pbar), scale=1.0 / window.gate_mean)
    return _sums(stats, _compatibility(stats, params.beta, samples, window))


def samples_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Which sample each position of packed rows belongs to: a new one wherever positions do not count on.

    Args:
        position_ids: ``[..., T]``.
    """
    new = torch.ones_like(position_ids, dtype=torch.bool)
    new[..., 1:] = position_ids[..., 1:] != position_ids[..., :-1] + 1
    return (new.reshape(-1).cumsum(0) - 1).view(position_ids.shape)


# -- parts -------------------------------------------------------------------------------------------------


def _sums(stats: TokenStatistics, gate: torch.Tensor, scale: torch.Tensor | None = None) -> ObjectiveValue:
    """Sums under a gate, which may hold anything where no loss is borne."""
    wide = _wide(stats.log_p)
    gate = torch.where(stats.mask, gate, 0.0)
    nll = torch.where(stats.mask, -stats.log_p, 0.0)
    return ObjectiveValue(
        loss_sum=((gate if scale is None else gate * scale.to(gate.dtype)) * nll).sum(),
        ce_sum=nll.detach().sum(dtype=wide),
        gate_sum=gate.sum(dtype=wide),
        tokens=stats.mask.sum(),
    )


def _information(stats: TokenStatistics, pbar: float) -> torch.Tensor:
    """``p · max(0, logit(p̄) − logit(p))``, 0 where no loss is borne; off the graph."""
    log_p = stats.log_p.detach()
    # log(1 − p), exact for p near 0; −∞ for p = 1, whose logit is then +∞ and whose weight is 0.
    logit = log_p - torch.log(-torch.expm1(log_p))
    weight = log_p.exp() * (math.log(pbar) - math.log1p(-pbar) - logit).clamp(min=0)
    return torch.where(stats.mask, weight, 0.0)


def _compatibility(
    stats: TokenStatistics, beta: float, samples: torch.Tensor | None, window: Window
) -> torch.Tensor:
    """``exp(−β · max(0, z)) · p``; off the graph."""
    ids = _sample_ids(stats, samples)
    nll, _ = _sample_nll(stats, ids)
    spread = window.nll_std > 0
    z = (nll - window.nll_mean) / torch.where(spread, window.nll_std, 1.0)
    weights = (-beta * torch.where(spread, z.clamp(min=0), 0.0)).exp()
    return weights[ids].to(stats.log_p.dtype) * stats.log_p.detach().exp()


def _sample_ids(stats: TokenStatistics, samples: torch.Tensor | None) -> torch.Tensor:
    if samples is None:
        length = stats.mask.shape[-1]
        rows = torch.arange(stats.mask.numel() // max(length, 1), device=stats.mask.device)
        return rows.view(*stats.mask.shape[:-1], 1).expand(stats.mask.shape)
    if samples.shape != stats.mask.shape:
        raise ConfigError(
            f"samples of shape {list(samples.shape)} do not fit statistics of shape {list(stats.mask.shape)}"
        )
    return samples.to(stats.mask.device)


def _sample_nll(stats: TokenStatistics, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean NLL by sample number (0 without loss-bearing tokens), and whether it has such tokens."""
    nll = torch.where(stats.mask, -stats.log_p.detach(), 0.0).to(_wide(stats.log_p)).reshape(-1)
    # As many places as there are positions: no size depends on the data.
    places = torch.zeros_like(nll)
    count = places.index_add(0, ids.reshape(-1), stats.mask.reshape(-1).to(nll.dtype))
    return places.index_add(0, ids.reshape(-1), nll) / count.clamp(min=1), count > 0


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
