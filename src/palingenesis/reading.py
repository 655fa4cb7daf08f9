"""Reading: all numbers of one step, decoded on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reading:
    """The numbers of one step.

    Args:
        step: the optimizer step.
        scalars: values by full metric name, such as ``health/grad_cosine_sim``.
        layers: values by layer or block, by metric name without it, such as ``health/stable_rank``.
        labels: words by metric name, such as ``health/gns_source``.
    """

    step: int
    scalars: Mapping[str, float]
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def flat(self) -> dict[str, float | str]:
        """One flat row: a layer's value stands under ``<name>/<layer>``."""
        row: dict[str, float | str] = {**self.scalars, **self.labels}
        for name, values in self.layers.items():
            row |= {f"{name}/{layer}": value for layer, value in values.items()}
        return row
