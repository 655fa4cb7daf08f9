"""What a family of signals found at one step, decoded on the host."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Values:
    """Numbers by metric name.

    Args:
        scalars: full names to values, such as ``health/grad_cosine_sim``.
        layers: names without the layer (``health/stable_rank``) to one value a layer or block.
        unavailable: names to the reason why a number that belongs here could not be had, in words.
    """

    scalars: dict[str, float] = field(default_factory=dict)
    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """One flat row: a value of a layer stands under ``<name>/<layer>``."""
        row = dict(self.scalars)
        for name, values in self.layers.items():
            row |= {f"{name}/{layer}": value for layer, value in values.items()}
        return row
