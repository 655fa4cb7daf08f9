"""Ranks that stand apart from the others: by their own gradients, or by weights that should be replicas.

A rank whose own gradient of a layer is far from the other ranks' is a warning, once an episode of that rank
and layer. Replicas that differ are critical, once an episode: from then on the ranks train different models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from palingenesis.events import Event

# Looks in a row without a rank's layer among the outliers before its episode is over: a rank whose norms lie
# about the factor at which they are named would otherwise ring at every other look.
CALM_LOOKS = 2

# Where more ranks than this stand apart (or are back) at one step, one event tells of all.
MOST_EVENTS = 5

# How many ranks a message names.
NAMED = 8


class Outlier(Protocol):
    """A rank whose own gradient of a layer is far from the others', as ``signals.ranks`` finds them."""

    @property
    def layer(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def norm(self) -> float: ...
    @property
    def others(self) -> float: ...


class Divergence(Protocol):
    """A parameter whose replicas differ on these ranks, as ``signals.replicas`` finds them."""

    @property
    def layer(self) -> str: ...
    @property
    def parameter(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def spread(self) -> float: ...


class _Place(NamedTuple):
    rank: int
    layer: str


class _Episode(NamedTuple):
    since: int
    calm: int = 0  # looks in a row without it


class RankWatch:
    """Which ranks stand apart now."""

    def __init__(self) -> None:
        self._apart: dict[_Place, _Episode] = {}
        self._diverged = False

    @property
    def active(self) -> int:
        """How many layers of ranks stand apart now."""
        return len(self._apart)

    def check_gradients(self, step: int, outliers: Sequence[Outlier]) -> list[Event]:
        """Judge one look at the ranks' own gradients.

        Args:
            step: its step.
            outliers: all that it found, the worst first; none if no rank stands apart.
        """
        found = {_Place(one.rank, one.layer): one for one in outliers}
        new = [place for place in found if place not in self._apart]
        over: dict[_Place, int] = {}
        for place, episode in list(self._apart.items()):
            calm = 0 if place in found else episode.calm + 1
            self._apart[place] = episode._replace(calm=calm)
            if calm >= CALM_LOOKS:
                over[place] = self._apart.pop(place).since
        self._apart |= {place: _Episode(step) for place in new}
        told = [_outlier(step, places, found[places[0]]) for places in _by_rank(new)]
        return told + [_back(step, places, min(over[p] for p in places)) for places in _by_rank(list(over))]

    def check_replicas(self, step: int, divergences: Sequence[Divergence]) -> list[Event]:
        """Judge one comparison of replicas. A new episode begins only after all were the same again.

        Args:
            step: its step.
            divergences: all that it found, in forward order; none if all replicas are the same.
        """
        before, self._diverged = self._diverged, bool(divergences)
        return [_divergence(step, divergences)] if self._diverged and not before else []

    def state_dict(self) -> dict[str, Any]:
        apart = [[*place, *episode] for place, episode in self._apart.items()]
        return {"apart": apart, "diverged": self._diverged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else. Nothing has been changed then.
        """
        apart, diverged = state["apart"], state["diverged"]
        if not isinstance(apart, list) or not isinstance(diverged, bool):
            raise TypeError("a list of episodes and a truth value were expected")
        episodes = {}
        for rank, layer, since, calm in apart:
            numbers = (rank, since, calm)
            if not isinstance(layer, str) or any(type(number) is not int for number in numbers):
                raise TypeError(
                    f"rank, layer, step and count were expected, not {[rank, layer, since, calm]!r}"
                )
            if min(numbers) < 0:
                raise ValueError(f"no rank, step or count is negative: {list(numbers)}")
            episodes[_Place(rank, layer)] = _Episode(since, calm)
        self._apart, self._diverged = episodes, diverged


def _by_rank(places: list[_Place]) -> list[list[_Place]]:
    """What each event tells of: one rank, or all of them where they are many."""
    ranks: dict[int, list[_Place]] = {}
    for place in places:
        ranks.setdefault(place.rank, []).append(place)
    return [places] if len(ranks) > MOST_EVENTS else list(ranks.values())


def _outlier(step: int, places: list[_Place], worst: Outlier) -> Event:
    text = (
        f"rank {worst.rank}: its own gradient of {worst.layer} {_compared(worst.norm, worst.others)}"
        f"{_more(places)}; look at the data of {_whose(places)}"
    )
    fields = {"value": worst.norm, "baseline": worst.others}
    return Event("rank_outlier", step, "warning", text, _fields(places) | fields)


def _compared(norm: float, others: float) -> str:
    if not math.isfinite(norm):
        return f"is not finite, where the other ranks' norm is {others:.3g}"
    way = "below" if norm < others else "above"
    ratio = max(norm, others) / min(norm, others) if min(norm, others) > 0 else math.inf
    return f"has norm {norm:.3g}, {ratio:,.0f} times {way} the other ranks' {others:.3g}"


def _back(step: int, places: list[_Place], since: int) -> Event:
    rank, layer = places[0]
    text = (
        f"rank {rank}: its own gradient of {layer} is like the other ranks' again{_more(places)}, "
        f"after it stood apart since step {since}"
    )
    return Event("rank_outlier_cleared", step, "info", text, _fields(places) | {"since": since})


def _more(places: list[_Place]) -> str:
    """How many others an event tells of, in words."""
    ranks, layers = len({place.rank for place in places}) - 1, len(places) - 1
    if ranks:
        return f" (and {ranks} more ranks)"
    return f" (and {layers} more of its layers)" if layers else ""


def _whose(places: list[_Place]) -> str:
    ranks = sorted({place.rank for place in places})
    return "this rank" if len(ranks) == 1 else _ranks(ranks)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:NAMED]))}{more}"


def _fields(places: list[_Place]) -> dict[str, Any]:
    return {
        "rank": places[0].rank,
        "layer": places[0].layer,
        "outliers": [[rank, layer] for rank, layer in places],
    }


def _divergence(step: int, divergences: Sequence[Divergence]) -> Event:
    first = divergences[0]
    more = f" (and {len(divergences) - 1} more)" if len(divergences) > 1 else ""
    norms = f"norms differ by {first.spread:.2g} of the largest" if first.spread else "norms are the same"
    if not math.isfinite(first.spread):
        norms = "not all norms are finite"
    text = (
        f"{first.layer}: replicas of {first.parameter}{more} differ: {_ranks(first.ranks)} "
        f"{'holds' if len(first.ranks) == 1 else 'hold'} other values than the rest ({norms}); "
        "the ranks train different models from here on: stop, and start all from one checkpoint"
    )
    fields = {
        "layer": first.layer,
        "parameter": first.parameter,
        "ranks": list(first.ranks),
        "value": first.spread,
        "parameters": [one.parameter for one in divergences],
    }
    return Event("replica_divergence", step, "critical", text, fields)
