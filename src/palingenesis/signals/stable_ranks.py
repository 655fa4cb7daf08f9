"""Which stable rank a layer has, given how well the largest eigenvalues of its matrices are known."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from palingenesis.layers import Layers
from palingenesis.signals.weights import Floats


def stable_ranks(
    layers: Layers,
    values: Floats,
    residuals: Floats,
    *,
    own: Collection[int],
    refused: Mapping[str, str],
    tolerance: float,
) -> tuple[dict[str, float], dict[str, str]]:
    """The layers' stable ranks, and why others have none.

    Args:
        layers: whose.
        values: of each unit 1/stable rank, ``[units]``; 0 for a matrix of zeros, or none at all.
        residuals: of each unit how far from an eigenvalue that may be, ``[units]``.
        own: units that are matrices, on this rank.
        refused: layers that were not read, and why.
        tolerance: the largest residual relative to the value with which it counts as known.
    """
    ranks: dict[str, float] = {}
    missing = dict(refused)
    zero: set[str] = set()
    for i, unit in enumerate(layers.units):
        value, residual = float(values[i]), float(residuals[i])
        if i not in own and value == 0:
            continue  # no matrix
        if not math.isfinite(value):
            ranks[unit.layer] = math.nan
        elif value == 0:
            zero.add(unit.layer)
        elif residual <= tolerance * value:
            ranks[unit.layer] = float(np.minimum(ranks.get(unit.layer, math.inf), 1 / value))
        else:
            missing[unit.layer] = f"σ is known to {50 * residual / value:.1f}% so far: more at the next call"
    # Of a layer's matrices, one that is not known may be the smallest; one of zeros has no rank.
    ranks = {layer: rank for layer, rank in ranks.items() if layer not in missing}
    return ranks, {layer: "every element is zero" for layer in zero if layer not in ranks} | missing
