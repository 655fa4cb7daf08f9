"""Each rank's own gradient, before it is averaged with the others'.

The average hides what one rank does: a rank whose data is broken may send a layer gradients ten thousand
times smaller than the others', and the mean still looks healthy. Under DDP a hook on the parameter sees the
gradient before reduction. The squared norms of the ranks' own gradients also tell the noise scale
(McCandlish et al. 2018, appendix A: E‖g_rank‖² = |G|² + tr(Σ)/n_rank).
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palingenesis.layers import Layers, Unit
from palingenesis.signals.meeting import Meeting
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.sharding import gather_over_ranks, meeting_device
from palingenesis.signals.values import Values

METRIC = "health/rank_gradient_ratio"

# How far off the others a rank's layer has to be before it is named.
FAR = 1e4

_SHARDED = "gradients of sharded parameters are reduced before any hook sees them"
_NOT_ALL = "not every rank takes part with the same parameters, so that ranks cannot be compared"
_FAILED = "a rank could not read its own gradients"
_MIXED = "gradients were reduced before the last micro-batch: accumulate them under no_sync()"


@dataclass(frozen=True)
class Outlier:
    """A rank whose own gradient of a layer is far from the other ranks'.

    Args:
        layer: the layer.
        rank: the rank; of two ranks without a history, each is named against the other.
        norm: its norm there.
        others: the other ranks' (the median over all ranks, where there are three or more).
    """

    layer: str
    rank: int
    norm: float
    others: float


@dataclass(frozen=True)
class OwnGradients:
    """What the ranks' own gradients of one optimizer step were, before reduction.

    Args:
        norms: ``[ranks, layers]``.
        squares: ``[ranks]``: squared norm over all layers, for the noise scale.
        tokens: ``[ranks]``: loss-bearing tokens (or sequences) behind each, ``None`` if one rank did not say.
        outliers: the worst first.
    """

    norms: NDArray[np.float64]
    squares: NDArray[np.float64]
    tokens: NDArray[np.float64] | None
    outliers: list[Outlier]


class RankGradients:
    """Reads each rank's own gradients, between :meth:`arm` and :meth:`compute`.

    Args:
        layers: of the same names on every rank.
        model: where to find ``DistributedDataParallel``, which knows which micro-batch is the last.
        far: how many times a rank has to be off the others to be named.
    """

    def __init__(self, layers: Layers, model: nn.Module | None = None, far: float = FAR) -> None:
        self._layers, self._far = layers, float(np.log10(far))
        self._device = meeting_device(layers)
        modules = [] if model is None else list(model.modules())
        self._ddp: list[Any] = [m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)]
        labels = repr([unit.label for unit in layers.units])
        self._meeting = Meeting("ranks", hashlib.sha256(labels.encode()).hexdigest())
        self._by_parameter: dict[nn.Parameter, list[tuple[int, Unit]]] = {}
        for i, unit in enumerate(layers.units):
            self._by_parameter.setdefault(unit.parameter, []).append((i, unit))
        self._hooks: list[Any] = []
        self._owner = np.array(layers.owner, dtype=np.int64)
        self._usual = np.full(len(layers.names), np.nan)
        self._forget()
        # The last step's, once decoded.
        self.found: OwnGradients | None = None

    def _forget(self) -> None:
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._passes: dict[nn.Parameter, int] = {}
        self._reduced: set[nn.Parameter] = set()
        self._mixed = False
        self._failure: Exception | None = None

    @property
    def unavailable(self) -> str | None:
        """Why ranks cannot be compared, if they cannot; the same on every rank."""
        if self._layers.together:
            return _SHARDED
        return None if self._meeting.of_one_mind else _NOT_ALL

    def arm(self) -> None:
        """Begin to listen: call it before the first backward pass of the optimizer step."""
        self.disarm()
        self._forget()
        if self._meeting.size == 1 or self._layers.together:
            return
        for parameter in self._by_parameter:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(functools.partial(self._hear, parameter)))

    def disarm(self) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hear(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                self._take(parameter, gradient.detach())
        except Exception as failure:  # noqa: BLE001 - raised by compute(): it must not end the backward pass
            self._failure = failure

    def _take(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        passes = self._passes.get(parameter, 0)
        self._passes[parameter] = passes + 1
        if parameter in self._reduced:
            self._mixed = True  # the average of an earlier micro-batch is in `.grad` already
            return
        if self._ddp:
            if not all(ddp.require_backward_grad_sync for ddp in self._ddp):
                return  # only gathered in `.grad`; the last micro-batch's pass will find it there
            self._reduced.add(parameter)
        # Before the first pass `.grad` is a leftover of the last optimizer step.
        if passes and parameter.grad is not None:
            gradient = parameter.grad.detach() + gradient
        units = self._by_parameter[parameter]
        parts = [unit.part.of(gradient) if unit.part is not None else gradient for _, unit in units]
        self._norms[parameter] = gradient_norms(parts, gradient.device)

    @torch.no_grad()
    def compute(self, tokens: torch.Tensor | float | None = None) -> dict[str, torch.Tensor]:
        """Stop listening, and gather: one all-gather of ``[units + 2]``.

        Args:
            tokens: loss-bearing tokens (or sequences) of this rank's part of the step.
        """
        self.disarm()
        if self.unavailable is not None:
            return {}
        own = torch.zeros(len(self._layers.units) + 2, dtype=torch.float64, device=self._device)
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for parameter, norms in self._norms.items():
            by_device.setdefault(norms.device, []).append(parameter)
        for heard in by_device.values():
            places = torch.tensor([i for one in heard for i, _ in self._by_parameter[one]], device="cpu")
            found = torch.cat([self._norms[one] for one in heard])
            own[places.to(self._device, non_blocking=True)] = found.to(own, non_blocking=True)
        if isinstance(tokens, torch.Tensor):
            own[-2].copy_(tokens.detach().reshape(()), non_blocking=True)
        else:
            own[-2].fill_(-1.0 if tokens is None else float(tokens))
        own[-1].fill_(2.0 if self._failure is not None else float(self._mixed))
        gathered = {"ranks": gather_over_ranks(own, self._device)}
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return gathered

    def decode(self, arrays: dict[str, NDArray[np.float64]]) -> Values:
        """The largest ratio of a rank's layer to the others'; the rest is in ``found``."""
        self.found = None
        if "ranks" not in arrays:
            reason = self.unavailable
            return Values(unavailable={METRIC: reason} if reason and self._meeting.size > 1 else {})
        table = arrays["ranks"]
        if table[:, -1].any():
            return Values(unavailable={METRIC: _FAILED if (table[:, -1] == 2).any() else _MIXED})
        units, tokens = table[:, :-2], table[:, -2]
        starts = np.flatnonzero(np.diff(self._owner, prepend=-1))
        squares = np.add.reduceat(units**2, starts, axis=1)
        norms = np.sqrt(squares)
        ratios, outliers = self._compare(norms)
        known = None if (tokens < 0).any() else tokens
        self.found = OwnGradients(norms, squares.sum(axis=1), known, outliers)
        return Values({METRIC: float(10**ratios)})

    def _compare(self, norms: NDArray[np.float64]) -> tuple[float, list[Outlier]]:
        """The largest distance of a rank's layer from the others', in decades, and who is too far.

        A rank on which a layer has no gradient at all is left out: not every batch touches every expert.
        """
        with np.errstate(divide="ignore"):
            logs = np.where(norms > 0, np.log10(norms), np.nan)  # of NaN, and of none, NaN; of infinity, that
        there = np.isfinite(logs)
        middle = _medians(np.where(there, logs, np.nan))
        others = np.broadcast_to(middle, logs.shape)
        if len(logs) == 2:
            others = np.where(there[::-1], logs[::-1], np.nan)
        away = np.abs(logs - others)
        away[~np.isfinite(norms) & np.isfinite(middle)] = np.inf
        far = away >= self._far
        if len(logs) == 2:
            far &= ~self._nearer_to_usual(logs, far)
        found = [
            Outlier(
                self._layers.names[layer],
                int(rank),
                float(norms[rank, layer]),
                float(10 ** others[rank, layer]),
            )
            for rank, layer in sorted(np.argwhere(far).tolist(), key=lambda at: -away[at[0], at[1]])
        ]
        calm = ~far.any(axis=0) & np.isfinite(middle)
        self._usual[calm] = middle[calm]
        known = away[~np.isnan(away)]
        return float(known.max()) if known.size else 0.0, found

    def _nearer_to_usual(self, logs: NDArray[np.float64], far: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Of two ranks far from each other, the one closer to what both used to be is not the odd one."""
        distance = np.abs(logs - self._usual)
        nearer: NDArray[np.bool_] = far & far[::-1] & (distance < distance[::-1])
        return nearer


def _medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Medians down the columns, without NaNs; NaN for columns of nothing else."""
    some = ~np.isnan(values).all(axis=0)
    found = np.full(values.shape[1], np.nan)
    found[some] = np.nanmedian(values[:, some], axis=0)
    return found
