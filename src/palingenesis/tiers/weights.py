"""Tier 3: the weights. Norms, spectrum, drift, adapters, and what one optimizer step does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import UninitializedParameter

from palingenesis.layers import Layers, peel
from palingenesis.signals.cosine import Norms
from palingenesis.signals.drift import Drift, Mode
from palingenesis.signals.lora import Adapters
from palingenesis.signals.sharding import local
from palingenesis.signals.spectrum import Spectrum
from palingenesis.signals.updates import Updates
from palingenesis.signals.values import Values
from palingenesis.signals.weights import (
    OUTSIDE,
    Floats,
    WeightNorms,
    matrices,
    outside_of_blocks,
    packed,
    unpacked,
)

RANK, DRIFT = "health/stable_rank", "health/weight_drift"

# Share of the stable rank of a random matrix below which one has learned something.
RANDOM = 0.8

_START_UNKNOWN = "the weights that training began with are not known"


class WeightTier:
    """Everything that is told of the weights.

    Args:
        model: the model.
        layers: its watched layers.
        drift: how the first weights are remembered.
        optimizers: those that step it.
    """

    def __init__(self, model: nn.Module, layers: Layers, drift: Mode, optimizers: Sequence[Any]) -> None:
        self._model, self._optimizers = model, optimizers
        parameters = [p for p in model.parameters() if not isinstance(p, UninitializedParameter)]
        model_bytes = sum(local(parameter.detach()).nbytes for parameter in parameters)
        self._adapters = Adapters(model)
        own = layers.without(self._adapters.parameters)
        self.drift = Drift(own, drift, model_bytes=model_bytes)
        # Why there is no drift, where the first weights cannot be had any more.
        self.no_drift: str | None = None
        self._plan(layers, own)

    def _plan(self, layers: Layers, own: Layers) -> None:
        self.layers, self._own = layers, own
        self._norms, self._spectrum = WeightNorms(layers), Spectrum(own, self._model)
        self._outside = outside_of_blocks(layers, self._model)
        self.updates = Updates(layers, self._optimizers, width=self.drift.width)
        self._scale: torch.Tensor | None = None

    def follow(self, layers: Layers) -> None:
        """Go on with changed layers; what is new begins now."""
        self._adapters = Adapters(self._model)
        own = layers.without(self._adapters.parameters)
        if self.no_drift is None:
            self.drift.follow(own)
        else:
            self.drift = Drift(own, "off")
        self._plan(layers, own)

    def without_start(self, reason: str = _START_UNKNOWN) -> None:
        """There is no drift: where training began cannot be known."""
        self.no_drift = reason
        self.drift = Drift(self._own, "off")
        self.updates = Updates(self.layers, self._optimizers, width=self.drift.width)

    def leave(self) -> None:
        """This rank looks at the weights no more; the others need not wait for it."""
        self._spectrum.leave()

    # -- on the devices ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take today's weights for those that training began with, where they are not known."""
        if self.no_drift is None:
            self.drift.begin()
            self.updates.width = self.drift.width  # which what was read may have changed

    def gradients(self, norms: Norms | None) -> dict[str, torch.Tensor]:
        """Squared gradient norms of the units, for ``gw_ratio``: sums over ranks."""
        if norms is None:
            return {}
        places: dict[torch.device, list[int]] = {}
        for i, unit in enumerate(self.layers.units):
            places.setdefault(unit.parameter.device, []).append(i)
        squares: dict[int, torch.Tensor] = {}
        for device, members in places.items():
            if device in norms:
                squares |= zip(members, norms[device].square().unbind(), strict=True)
        return packed("gradients/square", squares, self.layers)

    def present(self, absent: NDArray[np.bool_] | None) -> dict[str, torch.Tensor]:
        """Which units have a gradient: on the host, a sum over ranks.

        Args:
            absent: those that had none, where ``.grad`` does not tell.
        """
        if absent is None:
            there = [float(unit.parameter.grad is not None) for unit in self.layers.units]
        else:
            there = (~absent).astype(float).tolist()
        return {"gradients/there": torch.tensor(there, dtype=torch.float64, device="cpu")}

    def norms(self) -> dict[str, torch.Tensor]:
        self._norms.norms = {}  # of the last look: where this one fails, they are nobody's
        return self._norms.compute()

    def spectrum(self) -> dict[str, torch.Tensor]:
        # Norms go by the index of the unit, which is another one without the adapters' own parameters.
        known = {self.layers.units[i].label: norm for i, norm in self._norms.norms.items()}
        units = enumerate(self._own.units)
        return self._spectrum.compute({i: known[unit.label] for i, unit in units if unit.label in known})

    def drifted(self) -> dict[str, torch.Tensor]:
        return self.drift.compute(keep=True)

    def adapters(self) -> dict[str, torch.Tensor]:
        return self._adapters.compute()

    def arm_update(self, step: int, scale: torch.Tensor | None, *, looked: bool) -> None:
        """Remember the weights before a step.

        Args:
            step: the step about to be made.
            scale: the loss scale, which tells afterwards whether the step was skipped.
            looked: the weights were looked at just now: their norms and sketches need not be made again.
        """
        self._scale = None if scale is None else scale.detach().clone()
        sketches = self.drift.hand_over()
        self.updates.arm(step, self._norms.norms if looked else None, sketches if looked else None)

    def updated(self, step: int, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """What the step before changed."""
        found = self.updates.compute(step)
        before, self._scale = self._scale, None
        if found and before is not None and scale is not None:
            found["scales"] = torch.stack([before.reshape(()), scale.detach().reshape(())])
        return found

    # -- on the host -------------------------------------------------------------------------------------

    def is_key(self, layer: str) -> bool:
        """Whether a layer's stable rank counts: not those of embeddings and output heads."""
        return layer not in self._outside and not OUTSIDE.search(layer)

    def fresh(self, ranks: Mapping[str, float]) -> frozenset[str]:
        """Layers that start at random weights: their stable ranks are those of random matrices.

        Of independent elements σ_max is about √m + √n standard deviations (Bai and Yin 1988), and the stable
        rank mn/(√m + √n)²; whatever a matrix has learned adds large singular values and takes from that.

        Args:
            ranks: stable ranks by layer, from before training.
        """
        shares: dict[str, float] = {}
        for matrix in matrices(self._own, self._model):
            m, n = matrix.sides()
            layer = matrix.unit.layer
            if layer in ranks:
                share = ranks[layer] * (math.sqrt(m) + math.sqrt(n)) ** 2 / (m * n)
                shares[layer] = max(share, shares.get(layer, 0.0))
        if shares:
            most = float(np.median(list(shares.values()))) >= RANDOM
        else:  # how transformers marks what `from_pretrained` returns
            most = not getattr(getattr(peel(self._model), "config", None), "_name_or_path", "")
        # Of a layer without a matrix nothing is known: a small head is most likely new, others are as most.
        return frozenset(
            layer
            for layer in self._own.names
            if (shares[layer] >= RANDOM if layer in shares else most or not self.is_key(layer))
        )

    def decode(self, arrays: Mapping[str, Floats]) -> list[Values]:
        """What a look at the weights found."""
        families = {key.split("/")[0] for key in arrays}
        parts: list[Values] = []
        if "weights" in families:
            parts.append(self._norms.decode(arrays, *self._layer_norms(arrays)))
            if self.no_drift:
                parts.append(Values(unavailable={DRIFT: self.no_drift}))
        if "spectrum" in families:
            parts.append(self._spectrum.decode(arrays))
        if "drift" in families:
            parts.append(self.drift.decode(arrays))
        if "lora" in families or ("weights" in families and self._adapters.parameters):
            parts.append(self._adapters.decode(arrays))
        if "updates" in families:
            scales = arrays.get("scales")
            skipped = scales is not None and bool(scales[1] < scales[0])
            parts.append(self.updates.decode(arrays, skipped=skipped))
        return parts

    def _layer_norms(self, arrays: Mapping[str, Floats]) -> tuple[Floats | None, NDArray[np.bool_] | None]:
        """Each layer's gradient norm, and which had no gradient at all."""
        if "gradients/there" not in arrays or "gradients/square/0" not in arrays:
            return None, None
        owner, size = np.array(self.layers.owner, dtype=np.int64), len(self.layers.names)
        squares = np.bincount(owner, unpacked("gradients/square", arrays, self.layers), size)
        there = np.bincount(owner, arrays["gradients/there"], size)
        return np.sqrt(squares), there == 0

    def ends(self, layers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Smallest, largest and mean over layers, those with adapters and those without together."""
        found: dict[str, float] = {}
        drifts = list(layers.get(DRIFT, {}).values())
        if drifts:
            found |= {f"{DRIFT}_max": float(np.max(drifts)), f"{DRIFT}_mean": float(np.mean(drifts))}
        ranks = [rank for layer, rank in layers.get(RANK, {}).items() if self.is_key(layer)]
        if ranks:
            found |= {f"{RANK}_min": float(np.min(ranks)), f"{RANK}_mean": float(np.mean(ranks))}
        return found
