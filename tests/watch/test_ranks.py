"""Ranks that stand apart: one warning an episode of a rank and layer; replicas that differ are critical."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import pytest

from palingenesis import Event
from palingenesis.watch.ranks import CALM_LOOKS, MOST_EVENTS, RankWatch


class Outlier(NamedTuple):
    layer: str
    rank: int
    norm: float = 1e-6
    others: float = 0.5


class Divergence(NamedTuple):
    layer: str
    parameter: str
    ranks: tuple[int, ...] = (3,)
    spread: float = 0.0


def calm(watch: RankWatch, step: int, *still: Outlier) -> list[Event]:
    """As many looks as an episode needs to end, one step each; nothing may be told before the last."""
    for early in range(CALM_LOOKS - 1):
        assert watch.check_gradients(step + early, still) == []
    return watch.check_gradients(step + CALM_LOOKS - 1, still)


# -- gradients -----------------------------------------------------------------------------------------------


def test_one_warning_an_episode_and_it_is_cleared() -> None:
    watch = RankWatch()
    assert watch.check_gradients(10, []) == []
    (event,) = watch.check_gradients(20, [Outlier("h.0", 3)])
    assert (event.event, event.severity, event.step) == ("rank_outlier", "warning", 20)
    assert (event.rank, event.layer, event.value, event.baseline) == (3, "h.0", 1e-6, 0.5)
    assert event.outliers == [[3, "h.0"]]
    assert event.message == (
        "rank 3: its own gradient of h.0 has norm 1e-06, 500,000 times below the other ranks' 0.5; look at "
        "the data of this rank"
    )
    assert watch.active == 1
    assert watch.check_gradients(30, [Outlier("h.0", 3, 1e-7)]) == []
    (event,) = calm(watch, 40)
    assert (event.event, event.severity, event.since) == ("rank_outlier_cleared", "info", 20)
    assert event.message == (
        "rank 3: its own gradient of h.0 is like the other ranks' again, after it stood apart since step 20"
    )
    assert (event.rank, event.layer, event.outliers, watch.active) == (3, "h.0", [[3, "h.0"]], 0)
    assert len(watch.check_gradients(60, [Outlier("h.0", 3)])) == 1


def test_a_rank_that_is_apart_at_every_other_look_rings_once() -> None:
    watch = RankWatch()
    found = [watch.check_gradients(step, [Outlier("h.0", 3)] if step % 2 else []) for step in range(1, 100)]
    assert sum(map(len, found)) == 1


def test_a_rank_that_is_apart_in_many_layers_is_one_event() -> None:
    watch = RankWatch()
    worst = [Outlier(f"h.{i}", 3, 10.0 ** (i - 12)) for i in range(9)]
    one, two = watch.check_gradients(10, [*worst, Outlier("h.5", 0, 1e6)])
    assert (one.rank, one.layer, one.value) == (3, "h.0", 1e-12)
    assert one.outliers == [[3, f"h.{i}"] for i in range(9)]
    assert "of h.0 has norm" in one.message and "(and 8 more of its layers)" in one.message
    assert (two.rank, two.layer) == (0, "h.5")
    assert "2,000,000 times above the other ranks' 0.5" in two.message
    assert watch.active == 10
    # Only what is new is told.
    (event,) = watch.check_gradients(20, [*worst, Outlier("head", 3), Outlier("h.5", 0, 1e6)])
    assert event.outliers == [[3, "head"]]
    (event,) = calm(watch, 30, Outlier("head", 3), Outlier("h.5", 0))
    assert event.outliers == [[3, f"h.{i}"] for i in range(9)]
    assert watch.active == 2


@pytest.mark.parametrize("many", [MOST_EVENTS, MOST_EVENTS + 1, 200])
def test_many_ranks_at_once_are_one_event(many: int) -> None:
    watch = RankWatch()
    events = watch.check_gradients(10, [Outlier("h.0", rank) for rank in range(many)])
    assert len(events) == (many if many <= MOST_EVENTS else 1)
    assert watch.active == many
    if many > MOST_EVENTS:
        assert events[0].outliers == [[rank, "h.0"] for rank in range(many)]
        assert f"(and {many - 1} more ranks)" in events[0].message
        assert len(events[0].message) < 200
    assert len(calm(watch, 20)) == len(events)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_rank_whose_gradient_is_not_finite(norm: float) -> None:
    (event,) = RankWatch().check_gradients(10, [Outlier("h.0", 3, norm)])
    assert "of h.0 is not finite, where the other ranks' norm is 0.5;" in event.message


# -- replicas ------------------------------------------------------------------------------------------------


def test_replicas_that_differ_are_critical_once() -> None:
    watch = RankWatch()
    assert watch.check_replicas(100, []) == []
    found = [Divergence("h.0", "h.0.weight", (3,), 0.25), Divergence("h.1", "h.1.weight", (2, 3))]
    (event,) = watch.check_replicas(200, found)
    assert (event.event, event.severity, event.step) == ("replica_divergence", "critical", 200)
    assert (event.layer, event.parameter, event.ranks, event.value) == ("h.0", "h.0.weight", [3], 0.25)
    assert event.parameters == ["h.0.weight", "h.1.weight"]
    assert event.message == (
        "h.0: replicas of h.0.weight (and 1 more) differ: rank 3 holds other values than the rest (norms "
        "differ by 0.25 of the largest); the ranks train different models from here on: stop, and start all "
        "from one checkpoint"
    )
    assert watch.check_replicas(300, [*found, Divergence("h.2", "h.2.weight")]) == []
    assert watch.check_replicas(400, []) == []
    assert len(watch.check_replicas(500, found)) == 1
    assert watch.active == 0  # a critical event is no warning


@pytest.mark.parametrize(
    ("ranks", "spread", "told"),
    [
        ((1, 2), 0.0, "ranks 1, 2 hold other values than the rest (norms are the same)"),
        ((1,), math.inf, "rank 1 holds other values than the rest (not all norms are finite)"),
        (tuple(range(20)), 0.5, "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more hold"),
    ],
)
def test_who_differs_and_by_how_much(ranks: tuple[int, ...], spread: float, told: str) -> None:
    (event,) = RankWatch().check_replicas(100, [Divergence("h.0", "h.0.weight", ranks, spread)])
    assert told in event.message
    assert event.ranks == list(ranks)


# -- state ---------------------------------------------------------------------------------------------------


def test_the_state_goes_round_as_json() -> None:
    watch = RankWatch()
    watch.check_gradients(10, [Outlier("h.0", 3), Outlier("h.1", 0)])
    watch.check_gradients(20, [Outlier("h.1", 0)])
    watch.check_replicas(20, [Divergence("h.0", "h.0.weight")])
    again = RankWatch()
    again.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert again.state_dict() == watch.state_dict()
    (event,) = again.check_gradients(30, [Outlier("h.1", 0)])
    assert (event.event, event.layer, event.since) == ("rank_outlier_cleared", "h.0", 10)
    assert again.check_replicas(30, [Divergence("h.0", "h.0.weight")]) == []


GOOD = {"apart": [[3, "h.0", 10, 0]], "diverged": True}


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        {},
        {"apart": []},
        GOOD | {"apart": None},
        GOOD | {"apart": [3]},
        GOOD | {"apart": [[3, "h.0", 10]]},
        GOOD | {"apart": [["h.0", 3, 10, 0]]},
        GOOD | {"apart": [[3, "h.0", 10.5, 0]]},
        GOOD | {"apart": [[True, "h.0", 10, 0]]},
        GOOD | {"apart": [[3, "h.0", 10, 0], [-1, "h.0", 10, 0]]},
        GOOD | {"diverged": "no"},
        GOOD | {"diverged": 1},
    ],
)
def test_a_state_that_is_none_changes_nothing(junk: Any) -> None:
    watch = RankWatch()
    watch.check_gradients(10, [Outlier("h.9", 1)])
    before = watch.state_dict()
    with pytest.raises((KeyError, TypeError, ValueError)):
        watch.load_state_dict(junk)
    assert watch.state_dict() == before
    watch.load_state_dict(GOOD)
    assert watch.active == 1
