"""Looks that have arrived, made into readings. On the host; of several ranks, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from palingenesis.reading import Reading
from palingenesis.signals.losses import Losses
from palingenesis.signals.ranks import Outlier
from palingenesis.signals.replicas import Divergence
from palingenesis.signals.values import Values
from palingenesis.tiers.company import combined
from palingenesis.tiers.look import Look, Tiers

Arrays = Mapping[str, NDArray[np.float64]]

# Families of which ranks hold shares where parameters are sharded, and those of which each has its own.
SHARES = frozenset({"cosine", "weights", "gradients", "spectrum", "drift", "updates"})
EACH = frozenset({"outputs", "memory", "parts", "ranks", "replicas"})
# What is missing where a family is.
METRIC_OF = {
    "cosine": "health/grad_cosine_sim",
    "weights": "health/weight_norm",
    "gradients": "health/gw_ratio",
    "spectrum": "health/stable_rank",
    "drift": "health/weight_drift",
    "updates": "health/update_ratio",
    "outputs": "health/token_efficiency",
    "memory": "health/host_rss_gb",
    "parts": "health/gns",
    "ranks": "health/rank_gradient_ratio",
    "replicas": "health/replica_divergence",
}
# Families that are a comparison of ranks.
COMPARED = ("ranks", "replicas")

_ALONE = (
    "the other ranks do not tell theirs: make a Monitor on every rank, with the same options, and step it"
)


@dataclass
class Decoded:
    """What a look says.

    Args:
        readings: one a step, in order.
        missing: reasons why numbers are not among them, by name.
        looked: tier 3 looked at the weights.
        outliers: ranks far off the others; ``None`` if they were not compared.
        divergences: replicas that differ; ``None`` if they were not compared.
    """

    readings: list[Reading]
    missing: dict[str, str]
    looked: bool
    outliers: list[Outlier] | None = None
    divergences: list[Divergence] | None = None


@dataclass
class _Gathered:
    """Values of one step, as families tell them."""

    scalars: dict[str, float] = field(default_factory=dict)
    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    def add(self, values: Values) -> None:
        self.scalars |= values.scalars
        for name, found in values.layers.items():
            self.layers[name] = self.layers.get(name, {}) | found


class Decoder:
    """Knows what spans several looks: the windows of losses and tokens, the noise.

    Args:
        tiers: whose looks.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.losses = Losses()
        self._labels_seen = False

    def decode(self, look: Look, own: Arrays, others: list[Arrays]) -> Decoded:
        """The readings of a look.

        Args:
            look: which.
            own: what this rank found, on the host.
            others: what the other ranks found; none where this one is alone.
        """
        together = self._tiers.layers.together
        lonely = together and not others and self._tiers.company.size > 1
        if lonely:
            own = {name: array for name, array in own.items() if name.split("/")[0] not in SHARES}
        shares = SHARES if together else frozenset[str]()
        arrays, silent = combined(own, others, summed=shares, each=EACH)
        missing = {METRIC_OF[family]: _why_silent(ranks) for family, ranks in silent.items()}
        if self._tiers.company.size > 1 and not others and look.asks:
            gone = sorted(SHARES) if together else COMPARED
            missing |= dict.fromkeys((METRIC_OF[family] for family in gone), _ALONE)
        steps: dict[int, _Gathered] = {}
        for step, values in (*self._of_losses(look, own), *self._of_outputs(look, arrays, missing)):
            steps.setdefault(step, _Gathered()).add(values)
            missing |= values.unavailable
        here = steps.setdefault(look.step, _Gathered())
        for values in self._of_look(look, arrays, here.labels):
            here.add(values)
            missing |= values.unavailable
        here.scalars |= self._tiers.weights.ends(here.layers)
        found = Decoded(self._readings(steps), missing, look.looked)
        if "ranks" in arrays and self._tiers.own.found is not None:
            found.outliers = list(self._tiers.own.found.outliers)
        if "replicas" in arrays:
            found.divergences = list(self._tiers.replicas.divergences)
        return found

    def _readings(self, steps: dict[int, _Gathered]) -> list[Reading]:
        return [
            Reading(step, one.scalars, one.layers, one.labels)
            for step, one in sorted(steps.items())
            if one.scalars or one.layers
        ]

    def _of_losses(self, look: Look, own: Arrays) -> list[tuple[int, Values]]:
        found = []
        for step, loss in look.losses.values(own.get("losses")):
            self.losses.note(loss)
            if self._tiers.schedule.first_tier(step):
                found.append((step, Values({"train/loss": loss, **self.losses.values().scalars})))
        return found

    def _of_outputs(self, look: Look, arrays: Arrays, missing: dict[str, str]) -> list[tuple[int, Values]]:
        """Tokens and entropy of the steps since the last look; and their batches, for the noise scale."""
        outputs, noise = self._tiers.outputs, self._tiers.noise
        table = arrays.get("outputs")
        if table is None:
            return []
        all_there = len(table) == self._tiers.company.size
        found = []
        for place, row in enumerate(look.rows):
            values, batch = outputs.decode(row, table[:, place])
            self._labels_seen |= batch is not None or bool(values.scalars)
            noise.note_batch(row.step, batch if all_there else None)
            found.append((row.step, values))
        return found

    def _of_look(self, look: Look, arrays: Arrays, labels: dict[str, str]) -> list[Values]:
        tiers, step = self._tiers, look.step
        parts: list[Values] = []
        if "memory" in arrays:
            parts.append(self._memory(arrays["memory"]))
        if any(name.startswith("cosine/") for name in arrays):
            parts.append(tiers.cosine.decode(arrays))
        tiers.noise.take_parts(step, arrays)
        tiers.noise.take_consecutive(step, tiers.cosine.products(arrays))
        if tiers.schedule.second_tier(step):
            if tiers.noise_wanted:
                values, told = tiers.noise.values()
                parts.append(values)
                labels |= told
            if not self._labels_seen:
                parts.append(Values(unavailable=tiers.outputs.tokens.decode({}).unavailable))
        parts += tiers.weights.decode(arrays)
        if "ranks" in arrays or (look.looked and tiers.company.size > 1):
            parts.append(tiers.own.decode(dict(arrays)))
        if "replicas" in arrays:
            parts.append(tiers.replicas.decode(dict(arrays)))
        return parts

    def _memory(self, table: NDArray[np.float64]) -> Values:
        """This rank's memory; the largest of all ranks' where there are several."""
        each = [self._tiers.memory.decode({"memory": row}) for row in table]
        scalars = dict(each[0].scalars)
        if len(each) > 1:
            for name in each[0].scalars:
                values = [one.scalars[name] for one in each if name in one.scalars]
                scalars[f"{name}_max"] = max(values)
        return Values(scalars, unavailable=each[0].unavailable)


def _why_silent(ranks: list[int]) -> str:
    """Why a family is left out."""
    if not ranks:
        return "what the ranks tell does not fit together"
    return f"rank {', '.join(map(str, ranks))} could not tell its part"
