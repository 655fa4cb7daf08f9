"""What numbers must not cross, and where each is back within its bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from palingenesis.config import MonitorConfig

# A number has to come back by this share of its bound before an episode is over. More than the relative error
# of what is measured (of the drift's sketch up to 10%, of a stable rank 1%), so that no episode begins and
# ends by error alone.
BACK_MARGIN = 0.1

# A number that crosses its bound again and again is noisier than its error says (one batch's entropy is not
# the next one's): after each episode the next one asks for twice the margin, up to this much.
MOST_MARGIN = 0.8

# Standard errors that a number which has one must lie beyond its bound to cross it, and within to be back:
# by chance that happens to one reading in 44.
ERRORS = 2.0


class Line(NamedTuple):
    """Where one number's bound is, and where it is back within it."""

    limit: float
    back: float


@dataclass(frozen=True)
class Bound:
    """What a number must not cross.

    Args:
        name: the ``diagnosis`` of its events.
        metric: the full name of the number; where it is one a layer, what comes before the layer's name.
        limit: the bound itself is still within.
        low: too small is bad, not too large.
        what: what messages call the number.
        unit: what they put after it.
        advice: what to do.
        of_learned: crossing it means that what a layer knew is lost; one that starts at random weights
            crosses it as a matter of course.
        start: what the number is before training by its definition; ``None`` where the first reading tells.
    """

    name: str
    metric: str
    limit: float
    low: bool
    what: str
    unit: str
    advice: str
    of_learned: bool = False
    start: float | None = None

    def _room(self, value: float, limit: float) -> float:
        """How far within a limit the value lies; negative beyond it."""
        return value - limit if self.low else limit - value

    def beyond(self, value: float, limit: float, error: float = 0.0) -> bool:
        return self._room(value, limit) < -ERRORS * error

    def back(self, value: float, line: Line, error: float = 0.0) -> bool:
        return self._room(value, line.back) >= 0 and self._room(value, line.limit) >= ERRORS * error

    def line(self, start: float | None, worse: float, episodes: int = 0) -> Line:
        """The line for a number that was ``start`` before training.

        Args:
            start: ``None`` where that is not known.
            worse: share of ``start`` by which a number that was beyond the bound then must get worse.
            episodes: how many the number has had that are over.
        """
        way = 1 if self.low else -1
        margin = way * min(BACK_MARGIN * 2 ** min(episodes, 8), MOST_MARGIN)
        if start is None or not self.beyond(start, self.limit):
            return Line(self.limit, self.limit * (1 + margin))
        limit = start * (1 - way * worse)
        back = limit * (1 + margin)
        # Where it started is good enough, however small the margins are.
        return Line(limit, min(back, start) if self.low else max(back, start))

    def change(self, value: float, start: float | None) -> float:
        """How far a number has gone the bad way since training began."""
        if self.start is not None or start is None:
            return value if not self.low else math.inf
        if self.low:
            return start / value if value else math.inf
        return value / start if start else math.inf

    def layer(self, metric: str) -> str | None:
        """The layer that a metric is of, if it is one a layer."""
        return metric.removeprefix(self.metric) if self.metric.endswith("/") else None


def bounds(config: MonitorConfig) -> tuple[Bound, ...]:
    """The bounds of a configuration."""
    return (
        Bound(
            name="stable_rank",
            metric="health/stable_rank/",
            limit=config.stable_rank_floor,
            low=True,
            what="stable rank",
            unit="",
            advice="the matrix is collapsing towards rank one: lower the learning rate",
            of_learned=True,
        ),
        Bound(
            name="norm_imbalance",
            metric="health/weight_norm_ratio",
            limit=config.imbalance_ceiling,
            low=False,
            what="weight norm ratio",
            unit=" (largest to smallest of like-named matrices)",
            advice="one block has grown or shrunk away from the others: compare health/weight_norm by block",
        ),
        Bound(
            name="weight_drift",
            metric="health/weight_drift/",
            limit=config.drift_ceiling,
            low=False,
            what="weight drift",
            unit=" of the norm before training",
            advice="what the model knew before may be lost: lower the learning rate or train for fewer steps",
            of_learned=True,
            start=0.0,
        ),
        Bound(
            name="output_entropy",
            metric="health/output_entropy",
            limit=config.rl_entropy_floor,
            low=True,
            what="output entropy",
            unit=" nats",
            advice="the model has become too sure: stop earlier if reinforcement learning is to follow",
        ),
    )
