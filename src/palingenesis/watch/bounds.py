"""Bounds that a number must not cross: stable rank, norm ratio, drift, entropy. One event an episode.

A number may have been beyond its bound before training began (a pretrained model may hold a matrix of stable
rank 2). That is told once, as information; a warning follows when the number gets worse by ``warning_margin``
of where it started. One that started at exactly 0 or infinity cannot get worse, and is never warned of.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from palingenesis.config import MonitorConfig
from palingenesis.events import Event
from palingenesis.watch.limits import Bound, Line, bounds

# Where more numbers than this cross (or are back within) one bound at one step, one event tells of all.
MOST_EVENTS = 5

# What a layer that started at random weights does is ordinary if it has gone at most so many times as far as
# the median of the other such layers.
APART = 5.0


class _Seen(NamedTuple):
    """One reading of one number, with what it was judged by."""

    metric: str
    layer: str | None
    value: float
    line: Line
    start: float | None
    since: int


class BoundsWatch:
    """Which numbers are beyond their bounds.

    Args:
        config: the bounds.

    What training does to random weights as a matter of course is warned of once, marked as ``ordinary``, and
    is no finding about the run.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self._worse = config.warning_margin
        # Layers that started at random weights; known after the first look.
        self.fresh: frozenset[str] = frozenset()
        # Numbers that are beyond their bounds as a matter of course, and bounds of which that was told.
        self._ordinary: set[str] = set()
        self._told: set[str] = set()
        self._bounds = {bound.name: bound for bound in bounds(config)}
        self._by_metric = {bound.metric: bound for bound in self._bounds.values()}
        self._prefixes = [bound for bound in self._bounds.values() if bound.metric.endswith("/")]
        # By metric: what it was before training (None: not known), since when it is beyond its bound, and how
        # many episodes are over.
        self._starts: dict[str, float | None] = {}
        self._active: dict[str, int] = {}
        self._over: dict[str, int] = {}
        # Bounds whose next readings are of weights that an earlier part of the run has trained.
        self._trained: set[str] = set()

    @property
    def active(self) -> int:
        """How many numbers are beyond their bounds now, but for those for which that is ordinary."""
        return len(self._active.keys() - self._ordinary)

    def _bound(self, metric: str) -> Bound | None:
        named = self._by_metric.get(metric)
        if named is not None:
            return named
        return next((bound for bound in self._prefixes if metric.startswith(bound.metric)), None)

    # -- judging -----------------------------------------------------------------------------------------

    def check(
        self,
        step: int,
        values: Mapping[str, float],
        errors: Mapping[str, float] | None = None,
    ) -> list[Event]:
        """Judge the numbers of one step.

        Args:
            step: theirs.
            values: by full metric name (``health/stable_rank/<layer>``); what has no bound is passed over,
                and so is NaN, which is another watch's.
            errors: standard errors, by the same names; a number without one is taken for exact.
        """
        readings: dict[str, dict[str, float]] = {}
        for metric, value in values.items():
            bound = self._bound(metric)
            if bound is not None and not math.isnan(value):
                readings.setdefault(bound.name, {})[metric] = float(value)
        events: list[Event] = []
        for name, found in readings.items():
            events += self._check(step, self._bounds[name], found, errors or {})
        return events

    def _check(
        self,
        step: int,
        bound: Bound,
        found: Mapping[str, float],
        errors: Mapping[str, float],
    ) -> list[Event]:
        trained = bound.name in self._trained
        self._trained.discard(bound.name)
        at_start: list[_Seen] = []
        crossed: list[_Seen] = []
        cleared: list[_Seen] = []
        usual: list[_Seen] = []
        for metric, value in found.items():
            new = metric not in self._starts
            if new:
                self._starts[metric] = bound.start if trained or bound.start is not None else value
            start, error = self._starts[metric], errors.get(metric, 0.0)
            error = math.inf if math.isnan(error) else error  # it tells nothing then
            line = bound.line(start, self._worse, self._over.get(metric, 0))
            since = self._active.get(metric)
            layer = bound.layer(metric)
            seen = _Seen(metric, layer, value, line, start, step if since is None else since)
            beyond = bound.beyond(value, line.limit, error)
            ordinary = (beyond or metric in self._ordinary) and self._is_ordinary(bound, metric, found)
            if since is not None and bound.back(value, line, error):
                del self._active[metric]
                self._over[metric] = self._over.get(metric, 0) + 1
                if metric not in self._ordinary:
                    cleared.append(seen)
                self._ordinary.discard(metric)
            elif since is not None:
                if metric in self._ordinary and not ordinary:
                    self._ordinary.discard(metric)
                    crossed.append(seen)
            elif beyond:
                self._active[metric] = step
                if ordinary:
                    self._ordinary.add(metric)
                (usual if ordinary else crossed).append(seen)
            elif new and start is not None and bound.beyond(start, bound.limit):
                at_start.append(seen)
        events = [_at_start(step, bound, _worst_first(bound, at_start), self._worse)] if at_start else []
        events += [_crossed(step, bound, told, self._worse) for told in _told(bound, crossed)]
        if usual and bound.name not in self._told:
            self._told.add(bound.name)
            events.append(_ordinary(step, bound, _worst_first(bound, usual), self._worse))
        return events + [_cleared(step, bound, told) for told in _told(bound, cleared)]

    def _is_ordinary(self, bound: Bound, metric: str, found: Mapping[str, float]) -> bool:
        """Whether a layer started at random weights and has not gone much further than its likes have."""
        if not bound.of_learned or bound.layer(metric) not in self.fresh:
            return False
        others = [
            bound.change(value, self._starts.get(other, value))
            for other, value in found.items()
            if other != metric and bound.layer(other) in self.fresh
        ]
        own = bound.change(found[metric], self._starts[metric])
        return not others or own <= APART * statistics.median(others)

    # -- going on after a resume -------------------------------------------------------------------------

    def learn(self, first: Mapping[str, float], events: Sequence[Event]) -> None:
        """Go on where the record of an earlier part of the run ends, with its starts and open episodes.

        A number that the record does not know was read for the first time after training had begun: no start
        is known for it, and its bound holds as it is. (A layer that appears later still has its own start.)

        Args:
            first: the first value that the record holds of each metric, from before any resume; others than
                bounded ones may be among them.
            events: the record's, in its order; those of steps that are run again left out or ``superseded``.
        """
        starts: dict[str, float | None] = {m: v for m, v in first.items() if not math.isnan(v)}
        active: dict[str, int] = {}
        over: dict[str, int] = {}
        ordinary: set[str] = set()
        for event in events:
            if event.superseded or not event.event.startswith("bound_"):
                continue
            told = metrics_of(event)
            if event.event == "bound_at_start":
                starts |= {metric: float(event.values[metric]) for metric in told}
            elif event.event == "bound_crossed":
                active |= dict.fromkeys(told, event.step)
                ordinary = ordinary | set(told) if event.ordinary else ordinary - set(told)
                if event.ordinary:
                    self._told.add(event.diagnosis)
                if len(told) == 1 or event.baseline is None:
                    starts |= dict.fromkeys(told, event.baseline)
            elif event.event == "bound_cleared":
                for metric in told:
                    active.pop(metric, None)
                    over[metric] = over.get(metric, 0) + 1
        for metric, value in starts.items():
            bound = self._bound(metric)
            if bound is not None:
                self._starts[metric] = value if bound.start is None else bound.start
        self._active = {metric: since for metric, since in active.items() if self._bound(metric) is not None}
        self._over = {metric: count for metric, count in over.items() if self._bound(metric) is not None}
        self._ordinary = ordinary & self._active.keys()
        self._trained = set(self._bounds)

    def state_dict(self) -> dict[str, Any]:
        return {
            "starts": dict(self._starts),
            "active": dict(self._active),
            "over": dict(self._over),
            "trained": sorted(self._trained),
            "ordinary": sorted(self._ordinary),
            "told": sorted(self._told),
            "fresh": sorted(self.fresh),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else. Nothing has been changed then.
        """
        starts = {metric: _start(value) for metric, value in self._known(state["starts"]).items()}
        active = {metric: _count(value) for metric, value in self._known(state["active"]).items()}
        over = {metric: _count(value) for metric, value in self._known(state["over"]).items()}
        trained, ordinary, told, fresh = (
            _names(state[name]) for name in ("trained", "ordinary", "told", "fresh")
        )
        self._starts, self._active, self._over = starts, active, over
        self._trained, self._told = trained & set(self._bounds), told
        self._ordinary, self.fresh = ordinary & active.keys(), frozenset(fresh)

    def _known(self, table: Any) -> dict[str, Any]:
        if not isinstance(table, Mapping):
            raise TypeError(f"a table by metric was expected, not {type(table).__name__}")
        for metric in table:
            if not isinstance(metric, str) or self._bound(metric) is None:
                raise ValueError(f"no number called {metric!r} has a bound")
        return dict(table)


def metrics_of(event: Event) -> list[str]:
    """The numbers that a ``bound_…`` event is about."""
    return [str(metric) for metric in event.values or ([event.metric] if event.metric else [])]


def _names(value: Any) -> set[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"a list of names was expected, not {value!r}")
    return set(value)


def _start(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a number was expected, not {value!r}")
    if math.isnan(value):
        raise ValueError("a number cannot have started at NaN")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a step or a count was expected, not {value!r}")
    if value < 0:
        raise ValueError(f"a step or a count cannot be {value}")
    return value


# -- events ----------------------------------------------------------------------------------------------


def _worst_first(bound: Bound, seen: list[_Seen]) -> list[_Seen]:
    return sorted(seen, key=lambda one: one.value if bound.low else -one.value)


def _told(bound: Bound, seen: list[_Seen]) -> list[list[_Seen]]:
    """What each event tells of: one number, or all of them where they are many."""
    ordered = _worst_first(bound, seen)
    return [ordered] if len(ordered) > MOST_EVENTS else [[one] for one in ordered]


def _fields(bound: Bound, told: list[_Seen], limit: float) -> dict[str, Any]:
    worst = told[0]
    fields = {
        "diagnosis": bound.name,
        "metric": worst.metric,
        "layer": worst.layer,
        "value": worst.value,
        "limit": limit,
        "baseline": worst.start,
    }
    return fields | ({"values": {one.metric: one.value for one in told}} if len(told) > 1 else {})


def _at_start(step: int, bound: Bound, told: list[_Seen], worse: float) -> Event:
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    text = f"{_against(bound, told[0], bound.limit)} at the start already{more}"
    text += f": no warning unless it gets {worse:.0%} worse"
    fields = _fields(bound, told, bound.limit) | {"values": {one.metric: one.value for one in told}}
    return Event("bound_at_start", step, "info", text, fields)


def _crossed(step: int, bound: Bound, told: list[_Seen], worse: float) -> Event:
    text, fields = _crossing(bound, told, worse)
    return Event("bound_crossed", step, "warning", f"{text}; {bound.advice}", fields)


def _ordinary(step: int, bound: Bound, told: list[_Seen], worse: float) -> Event:
    text, fields = _crossing(bound, told, worse)
    why = "ordinary for layers that started at random weights: not counted, and not told again"
    return Event("bound_crossed", step, "warning", f"{text}; {why}", {**fields, "ordinary": True})


def _crossing(bound: Bound, told: list[_Seen], worse: float) -> tuple[str, dict[str, Any]]:
    worst = told[0]
    text = _against(bound, worst, worst.line.limit)
    if worst.start is not None and bound.start is None:
        if bound.beyond(worst.start, bound.limit):
            text += f", more than {worse:.0%} worse than the {_number(worst.start)} it started from"
        else:
            text += f", from {_number(worst.start)} at the start"
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return f"{text}{more}", _fields(bound, told, worst.line.limit)


def _cleared(step: int, bound: Bound, told: list[_Seen]) -> Event:
    nearest = told[0]
    since = min(one.since for one in told)
    value, limit = _apart(nearest.value, nearest.line.limit)
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    text = f"{_where(nearest)}{bound.what} {value}{bound.unit} is back within its bound of {limit}{more}"
    fields = _fields(bound, told, nearest.line.limit) | {"since": since}
    return Event("bound_cleared", step, "info", f"{text}, after it was beyond since step {since}", fields)


def _against(bound: Bound, seen: _Seen, limit: float) -> str:
    value, shown = _apart(seen.value, limit)
    way = "below" if bound.low else "above"
    return f"{_where(seen)}{bound.what} {value}{bound.unit} is {way} {shown}"


def _where(seen: _Seen) -> str:
    return f"{seen.layer}: " if seen.layer else ""


def _apart(value: float, limit: float) -> tuple[str, str]:
    """Both with as few digits as show that they differ."""
    digits = next((n for n in range(3, 17) if f"{value:.{n}g}" != f"{limit:.{n}g}"), 17)
    return _number(value, digits), _number(limit, digits)


def _number(value: float, digits: int = 3) -> str:
    return "infinite" if math.isinf(value) else f"{value:.{digits}g}"
