"""Each rank's own gradient, before it is averaged with the others'.

The average hides what one rank does: a rank whose data is broken may send a layer gradients ten thousand
times smaller than the others', and the mean still looks healthy. Under DDP a hook on the parameter sees the
gradient before reduction. Each rank reads its own, and nobody waits for another: comparing them is for
whoever has those of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palingenesis.layers import Layers, Unit
from palingenesis.signals.meeting import ranks_and_own
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.sharding import meeting_device
from palingenesis.signals.values import Values

METRIC = "health/rank_gradient_ratio"

# How far off the others a rank's layer has to be before it is named.
FAR = 1e4

_SHARDED = "gradients of sharded parameters are reduced before any hook sees them"
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
        outliers: the worst first.
    """

    norms: NDArray[np.float64]
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
        self._size, _ = ranks_and_own()
        modules = [] if model is None else list(model.modules())
        self._ddp: list[Any] = [m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)]
        self._by_parameter: dict[nn.Parameter, list[tuple[int, Unit]]] = {}
        for i, unit in enumerate(layers.units):
            self._by_parameter.setdefault(unit.parameter, []).append((i, unit))
        self._hooks: list[Any] = []
        self._armed = False
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

    def arm(self) -> None:
        """Begin to listen: call it before the first backward pass of the optimizer step."""
        self.disarm()
        self._forget()
        if self._size == 1 or self._layers.together or not self._by_parameter:
            return
        self._armed = True
        for parameter in self._by_parameter:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(functools.partial(self._hear, parameter)))

    def disarm(self) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._armed = False

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
    def compute(self) -> dict[str, torch.Tensor]:
        """Stop listening, and hand over what this rank heard.

        Returns:
            ``ranks``, ``[units + 1]``: the norm of each unit's gradient, and 1 if some were reduced too
            early to be this rank's own. Empty if it was not armed.

        Raises:
            Exception: what went wrong in a hook.
        """
        armed, failure = self._armed, self._failure
        self.disarm()
        self._failure = None
        if failure is not None:
            raise failure
        if not armed:
            return {}
        device = meeting_device(self._layers)
        own = torch.zeros(len(self._layers.units) + 1, dtype=torch.float64, device=device)
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for parameter, norms in self._norms.items():
            by_device.setdefault(norms.device, []).append(parameter)
        for heard in by_device.values():
            places = torch.tensor([i for one in heard for i, _ in self._by_parameter[one]], device="cpu")
            found = torch.cat([self._norms[one] for one in heard])
            own[places.to(device, non_blocking=True)] = found.to(own, non_blocking=True)
        own[-1].fill_(float(self._mixed))
        self._norms = {}
        return {"ranks": own}

    def decode(self, arrays: Mapping[str, NDArray[np.float64]]) -> Values:
        """The largest ratio of a rank's layer to the others'; the rest is in ``found``.

        Args:
            arrays: what ``compute`` returned on every rank, ``[ranks, units + 1]``.
        """
        self.found = None
        if "ranks" not in arrays:
            sharded = self._size > 1 and self._layers.together
            return Values(unavailable={METRIC: _SHARDED} if sharded else {})
        table = arrays["ranks"]
        if len(table) < 2:
            return Values()
        if table[:, -1].any():
            return Values(unavailable={METRIC: _MIXED})
        starts = np.flatnonzero(np.diff(self._owner, prepend=-1))
        norms = np.sqrt(np.add.reduceat(table[:, :-1] ** 2, starts, axis=1))
        ratios, outliers = self._compare(norms)
        self.found = OwnGradients(norms, outliers)
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
