"""Bounds on single numbers: one warning an episode, and what was so before training is no warning."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.record.runs import COMPLETED, INFO

from palingenesis import Event, MonitorConfig, load_run
from palingenesis.record.writer import RecordWriter
from palingenesis.watch.bounds import MOST_EVENTS, BoundsWatch
from palingenesis.watch.limits import BACK_MARGIN, bounds

CONFIG = MonitorConfig()
BY_NAME = {bound.name: bound for bound in bounds(CONFIG)}
RANK, RATIO = "health/stable_rank/", "health/weight_norm_ratio"
DRIFT, ENTROPY = "health/weight_drift/h.3", "health/output_entropy"
# Of each bound: a number that is fine, one beyond it, and one more than a third worse than that.
CASES = {
    "stable_rank": (f"{RANK}h.0.up", 5.0, 2.0, 1.3),
    "norm_imbalance": (RATIO, 3.0, 120.0, 161.0),
    "weight_drift": (DRIFT, 0.1, 0.6, 0.81),
    "output_entropy": (ENTROPY, 2.0, 0.9, 0.59),
}
STARTING = [name for name in CASES if name != "weight_drift"]  # drift starts at 0 by its definition


class Told:
    """A watch on one number, given one value after another: the first is what it was before training."""

    def __init__(self, name: str, start: float | None = None, **options: Any) -> None:
        self.metric = CASES[name][0]
        self.watch = BoundsWatch(MonitorConfig(**options))
        self.step = 0
        self.events: list[Event] = []
        if start is not None:
            self(start)

    def __call__(self, *values: float, error: float = 0.0) -> list[str]:
        found = []
        for value in values:
            self.step += 1
            found += self.watch.check(self.step, {self.metric: value}, {self.metric: error})
        self.events += found
        return [f"{event.event}@{event.step}" for event in found]

    @property
    def last(self) -> Event:
        return self.events[-1]


def kinds(events: Sequence[Event]) -> list[tuple[str, str | None]]:
    return [(event.event, event.layer) for event in events]


def read_back(events: Sequence[Event], rows: Sequence[Mapping[str, float]], folder: Path) -> Any:
    """First values and events as a record gives them back."""
    writer = RecordWriter(folder, INFO)
    writer.event(Event("run_started", 0, "info", "started", {"record_version": 1}))
    for step, row in enumerate(rows, 1):
        writer.metrics({"train/global_step": step, **row})
    writer.events(list(events))
    writer.close(COMPLETED)
    run = load_run(folder)
    columns = {name: run.metrics[name] for name in run.metrics}
    known = {name: column[~np.isnan(column)] for name, column in columns.items()}
    return {name: float(column[0]) for name, column in known.items() if len(column)}, run.events


# -- episodes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_one_warning_an_episode_and_it_is_cleared(name: str) -> None:
    metric, fine, bad, worse = CASES[name]
    start = 0.0 if name == "weight_drift" else fine
    told = Told(name, start=start)
    assert told.events == []
    assert told(fine, bad, worse, bad) == ["bound_crossed@3"]
    event = told.last
    assert (event.severity, event.diagnosis, event.metric) == ("warning", name, metric)
    assert (event.value, event.limit, event.baseline) == (bad, BY_NAME[name].limit, start)
    assert told.watch.active == 1
    assert told(fine, fine) == ["bound_cleared@6"]
    assert (told.last.severity, told.last.since, told.last.value) == ("info", 3, fine)
    assert (told.last.diagnosis, told.last.metric) == (name, metric)
    assert told.watch.active == 0
    assert told(bad, fine) == ["bound_crossed@8", "bound_cleared@9"]


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_bound_is_not_beyond_it(name: str) -> None:
    limit = BY_NAME[name].limit
    assert Told(name)(limit, limit) == []
    way = -1 if BY_NAME[name].low else 1
    told = Told(name, start=CASES[name][1])
    assert told(math.nextafter(limit, way * math.inf)) == ["bound_crossed@2"]


@pytest.mark.parametrize("name", CASES)
def test_an_episode_ends_only_when_the_number_is_back_by_a_margin(name: str) -> None:
    _, fine, bad, _ = CASES[name]
    limit = BY_NAME[name].limit
    way = 1 if BY_NAME[name].low else -1
    told = Told(name, start=fine)
    told(bad)
    within, back = limit * (1 + way * 0.09), limit * (1 + way * 0.1)
    assert told(*[within, bad] * 10) == []
    assert told(limit, within) == []
    assert told.watch.active == 1
    assert told(back) == ["bound_cleared@25"]
    assert told(within, limit) == []


def test_the_first_warning_does_not_wait() -> None:
    assert Told("stable_rank", start=9.0)(2.999999) == ["bound_crossed@2"]


def test_nan_is_not_judged() -> None:
    assert Told("weight_drift", start=0.0)(math.nan) == []
    told = Told("stable_rank", start=math.nan)
    assert told(9.0) == []  # the start, which NaN is not
    assert told(2.0, math.nan) == ["bound_crossed@3"]
    assert (told.last.baseline, told.watch.active) == (9.0, 1)


def test_an_infinite_ratio_is_beyond_any_bound() -> None:
    told = Told("norm_imbalance", start=2.0)
    assert told(math.inf) == ["bound_crossed@2"]
    assert "weight norm ratio infinite" in told.last.message
    assert told(math.inf, 50.0) == ["bound_cleared@4"]


# -- before training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STARTING)
def test_what_was_so_before_training_is_information(name: str) -> None:
    metric, fine, bad, worse = CASES[name]
    told = Told(name, start=bad)
    (event,) = told.events
    assert (event.event, event.severity, event.diagnosis) == ("bound_at_start", "info", name)
    assert (event.metric, event.value, event.values) == (metric, bad, {metric: bad})
    assert "at the start" in event.message
    assert told.watch.active == 0
    assert told(bad, bad, fine, bad) == []
    assert told(worse) == ["bound_crossed@6"]
    assert (told.last.severity, told.last.baseline) == ("warning", bad)
    assert "33% worse" in told.last.message
    assert told(bad) == ["bound_cleared@7"]


@pytest.mark.parametrize("name", STARTING)
def test_only_a_third_more_is_worse(name: str) -> None:
    bad = CASES[name][2]
    told = Told(name, start=bad)
    way = -1 if BY_NAME[name].low else 1
    assert told(bad * (1 + way * 0.33)) == []
    assert told(bad * (1 + way * 0.34)) == ["bound_crossed@3"]


def test_back_where_it_started_is_good_enough_with_any_margin() -> None:
    told = Told("stable_rank", start=2.0, warning_margin=0.05)
    assert told(1.89, 1.95, 1.99) == ["bound_crossed@2"]
    assert told(2.0) == ["bound_cleared@5"]


@pytest.mark.parametrize(("name", "start"), [("output_entropy", 0.0), ("norm_imbalance", math.inf)])
def test_a_number_that_cannot_get_worse_is_no_warning(name: str, start: float) -> None:
    told = Told(name, start=start)
    assert kinds(told.events) == [("bound_at_start", None)]
    assert told(start, start, CASES[name][1], start) == []
    assert told.watch.active == 0


def test_drift_starts_at_zero_whenever_it_is_first_read() -> None:
    told = Told("weight_drift")
    assert told(0.6) == ["bound_crossed@1"]
    assert told.last.baseline == 0.0
    assert "start" not in told.last.message


def test_a_late_first_reading_is_the_start() -> None:
    watch = BoundsWatch(CONFIG)
    assert watch.check(10, {ENTROPY: 3.0}) == []
    (event,) = watch.check(200, {f"{RANK}late": 2.0, ENTROPY: 3.0})
    assert kinds([event]) == [("bound_at_start", "late")]
    assert watch.check(300, {f"{RANK}late": 1.5}) == []
    (event,) = watch.check(400, {f"{RANK}late": 1.3})
    assert (event.event, event.baseline) == ("bound_crossed", 2.0)


def test_one_event_at_the_start_lists_all_of_one_bound() -> None:
    values = {f"{RANK}h.{i}": 2.5 - i / 2 for i in range(3)} | {f"{RANK}fine": 9.0}
    rank, entropy = BoundsWatch(CONFIG).check(1, values | {ENTROPY: 0.5, DRIFT: 0.0})
    assert rank.values == {f"{RANK}h.2": 1.5, f"{RANK}h.1": 2.0, f"{RANK}h.0": 2.5}
    assert (rank.layer, rank.value, rank.limit) == ("h.2", 1.5, 3.0)
    assert rank.message == (
        "h.2: stable rank 1.5 is below 3 at the start already (and 2 more): no warning unless it gets 33% "
        "worse"
    )
    assert (entropy.event, entropy.values) == ("bound_at_start", {ENTROPY: 0.5})


# -- standard errors ---------------------------------------------------------------------------------------


def test_a_number_with_an_error_crosses_and_clears_by_two_of_them() -> None:
    told = Told("output_entropy", start=2.0)
    assert told(0.9, 0.81, error=0.1) == []
    assert told(0.79, error=0.1) == ["bound_crossed@4"]
    assert told(0.99, 1.0, 1.15, 1.19, error=0.1) == []
    assert told(1.21, error=0.1) == ["bound_cleared@9"]
    # The margin holds too.
    told = Told("output_entropy", start=2.0)
    told(0.5)
    assert told(1.05, 1.09, error=0.01) == []
    assert told(1.1, error=0.01) == ["bound_cleared@5"]


def test_of_an_unknown_error_nothing_follows() -> None:
    told = Told("output_entropy", start=2.0)
    assert told(0.1, error=math.nan) == []
    assert told(0.1, error=math.inf) == []
    told(0.1)
    assert told(3.0, error=math.nan) == []
    assert told(3.0) == ["bound_cleared@6"]


def test_a_noisy_number_at_its_bound_does_not_flap() -> None:
    """400 readings around the bound with the noise that their error says."""
    random = np.random.default_rng(0)
    told = Told("output_entropy", start=2.0)
    found = told(*(1.0 + 0.05 * random.standard_normal(400)), error=0.05)
    assert len(found) <= 400 // 44 + 1
    told = Told("stable_rank", start=5.0)
    assert told(*(3.0 * (1 + 0.02 * random.standard_normal(400)))) == ["bound_crossed@2"]


@pytest.mark.parametrize("name", CASES)
def test_a_number_that_comes_back_often_has_to_come_back_further(name: str) -> None:
    limit = BY_NAME[name].limit
    way = 1 if BY_NAME[name].low else -1
    told = Told(name, start=0.0 if name == "weight_drift" else CASES[name][1])
    for margin in (0.1, 0.2, 0.4, 0.8, 0.8, 0.8):
        assert len(told(limit * (1 - way * 0.01))) == 1
        assert told(limit * (1 + way * (margin - 0.01))) == []
        assert len(told(limit * (1 + way * (margin + 0.01)))) == 1


def test_noise_that_no_error_tells_rings_a_few_times_at_most() -> None:
    """The entropy of batches that differ by 10%, falling through its floor over 1,000 steps.

    With a margin that does not grow it rings more than 30 times.
    """
    for seed in range(5):
        random = np.random.default_rng(seed)
        told = Told("output_entropy")
        mean = np.linspace(1.5, 0.5, 1000)
        found = told(*(mean * (1 + 0.1 * random.standard_normal(1000))))
        assert sum(event.startswith("bound_crossed") for event in found) <= 5
        assert told.watch.active == 1


# -- what is told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "values", "message"),
    [
        (
            f"{RANK}h.0.up",
            (9.0, 1.5),
            "h.0.up: stable rank 1.5 is below 3, from 9 at the start; the matrix is collapsing towards rank "
            "one: lower the learning rate",
        ),
        (
            f"{RANK}h.0.up",
            (2.0, 1.2),
            "h.0.up: stable rank 1.2 is below 1.33, more than 33% worse than the 2 it started from; the "
            "matrix is collapsing towards rank one: lower the learning rate",
        ),
        (
            DRIFT,
            (0.0, 0.625),
            "h.3: weight drift 0.625 of the norm before training is above 0.5; what the model knew before "
            "may be lost: lower the learning rate or train for fewer steps",
        ),
        (
            ENTROPY,
            (2.0, 0.25),
            "output entropy 0.25 nats is below 1, from 2 at the start; the model has become too sure: stop "
            "earlier if reinforcement learning is to follow",
        ),
        (
            RATIO,
            (2.0, 120.0),
            "weight norm ratio 120 (largest to smallest of like-named matrices) is above 100, from 2 at the "
            "start; one block has grown or shrunk away from the others: compare health/weight_norm by block",
        ),
    ],
)
def test_the_message(metric: str, values: tuple[float, float], message: str) -> None:
    watch = BoundsWatch(CONFIG)
    events = [*watch.check(1, {metric: values[0]}), *watch.check(2, {metric: values[1]})]
    assert events[-1].message == message
    assert events[-1].layer == (metric.split("/", 2)[2] if metric.count("/") > 1 else None)


def test_a_value_is_never_said_to_be_beyond_itself() -> None:
    told = Told("stable_rank", start=9.0)
    told(2.9996)
    assert "stable rank 2.9996 is below 3," in told.last.message


def test_the_layer_of_a_maximum_is_named_where_it_is_known() -> None:
    watch = BoundsWatch(CONFIG)
    (event,) = watch.check(1, {DRIFT: 0.7})
    assert event.layer == "h.3"
    assert event.message.startswith("h.3: weight drift 0.7")


def of(metric: str, **values: float) -> dict[str, float]:
    return {f"{metric}/{layer}": value for layer, value in values.items()}


def fresh_watch() -> BoundsWatch:
    """Four layers that started at random weights, and one that did not."""
    watch = BoundsWatch(CONFIG)
    watch.fresh = frozenset("abcd")
    watch.check(1, of("health/stable_rank", a=9.0, b=9.0, c=9.0, d=9.0, e=9.0) | {ENTROPY: 3.0})
    watch.check(1, of("health/weight_drift", a=0.0, b=0.0, c=0.0, d=0.0, e=0.0))
    return watch


def test_what_training_does_to_random_weights_anyway_is_warned_of_once_as_ordinary() -> None:
    watch = fresh_watch()
    ranks, entropy = watch.check(2, of("health/stable_rank", a=2.9, b=2.5, c=3.5, d=3.5) | {ENTROPY: 0.6})
    assert [event.severity for event in (ranks, entropy)] == ["warning"] * 2
    assert ranks.ordinary and not entropy.ordinary
    assert "ordinary" in ranks.message and set(ranks.values) == of("health/stable_rank", a=0, b=0).keys()
    assert watch.active == 1  # the entropy
    assert watch.check(3, of("health/stable_rank", a=2.9, b=2.5, c=2.9, d=2.9)) == []
    (drift,) = watch.check(3, of("health/weight_drift", a=0.6, b=0.5, c=0.4, d=0.4))
    assert drift.ordinary and drift.diagnosis == "weight_drift"
    assert watch.check(4, of("health/weight_drift", a=0.1, b=0.1, c=0.1, d=0.1)) == []
    assert watch.active == 1


def test_one_layer_that_goes_much_further_than_its_likes_is_a_finding() -> None:
    watch = fresh_watch()
    (rank,) = watch.check(2, of("health/stable_rank", a=1.1, b=8.5, c=8.8, d=8.9))
    assert rank.layer == "a" and not rank.ordinary
    (drift,) = watch.check(2, of("health/weight_drift", a=0.05, b=0.9, c=0.06, d=0.05))
    assert drift.layer == "b" and not drift.ordinary
    assert watch.active == 2


def test_what_was_ordinary_and_gets_out_of_hand_is_told() -> None:
    watch = fresh_watch()
    watch.check(2, of("health/weight_drift", a=0.6, b=0.6, c=0.6, d=0.6))
    (event,) = watch.check(3, of("health/weight_drift", a=9.0, b=0.7, c=0.7, d=0.7))
    assert event.layer == "a" and not event.ordinary and watch.active == 1
    (event,) = watch.check(4, of("health/weight_drift", a=0.1, b=0.7, c=0.7, d=0.7))
    assert event.event == "bound_cleared" and watch.active == 0


def test_a_layer_that_had_learned_is_told_beside_ones_that_had_not() -> None:
    watch = fresh_watch()
    told = watch.check(2, of("health/weight_drift", a=0.6, b=0.6, c=0.6, d=0.6, e=0.6))
    assert [(event.layer, bool(event.ordinary)) for event in told] == [("e", False), ("a", True)]


@pytest.mark.parametrize(("other", "ordinary"), [(0.2, True), (0.01, False), (None, True)])
def test_a_random_layer_against_the_only_other_one_or_none(other: float | None, ordinary: bool) -> None:
    watch = BoundsWatch(CONFIG)
    watch.fresh = frozenset("ab")
    others = {} if other is None else of("health/weight_drift", b=other)
    (event,) = watch.check(1, of("health/weight_drift", a=0.6) | others)
    assert bool(event.ordinary) is ordinary


def test_what_is_ordinary_stays_so_after_a_resume() -> None:
    before = fresh_watch()
    told = before.check(2, of("health/weight_drift", a=0.6, b=0.6, c=0.6, d=0.6))
    for way in ("state", "record"):
        watch = BoundsWatch(CONFIG)
        if way == "state":
            watch.load_state_dict(before.state_dict())
        else:
            watch.learn({}, told)
            watch.fresh = before.fresh
        assert watch.active == 0
        assert watch.check(3, of("health/weight_drift", a=0.7, b=0.7, c=0.7, d=0.7)) == []


def test_layers_have_episodes_of_their_own() -> None:
    watch = BoundsWatch(CONFIG)
    a, b = f"{RANK}a", f"{RANK}b"
    assert kinds(watch.check(1, {a: 9.0, b: 2.0})) == [("bound_at_start", "b")]
    assert kinds(watch.check(2, {a: 2.0, b: 1.9})) == [("bound_crossed", "a")]
    assert kinds(watch.check(3, {a: 2.0, b: 1.2})) == [("bound_crossed", "b")]
    assert watch.active == 2
    assert kinds(watch.check(4, {a: 9.0, b: 1.2})) == [("bound_cleared", "a")]
    assert watch.active == 1


@pytest.mark.parametrize("many", [MOST_EVENTS, MOST_EVENTS + 1, 300])
def test_many_at_once_are_one_event_that_counts_as_many(many: int) -> None:
    watch = BoundsWatch(CONFIG)
    names = [f"{RANK}h.{i}" for i in range(many)]
    watch.check(1, dict.fromkeys(names, 9.0) | {f"{RANK}apart": 9.0})
    values = {name: 2.9 - i / 1000 for i, name in enumerate(names)}
    events = watch.check(2, values | {f"{RANK}apart": 9.0})
    assert watch.active == many
    last = f"h.{many - 1}"
    assert events[0].layer == last  # the worst first
    if many <= MOST_EVENTS:
        assert len(events) == many
        assert all(event.values is None for event in events)
    else:
        (event,) = events
        assert event.values == values
        assert f"(and {many - 1} more)" in event.message
    assert watch.check(3, values) == []
    events = watch.check(4, dict.fromkeys(names, 9.0))
    assert len(events) == (many if many <= MOST_EVENTS else 1)
    assert {event.event for event in events} == {"bound_cleared"}
    assert watch.active == 0


def test_what_has_no_bound_is_passed_over() -> None:
    watch = BoundsWatch(CONFIG)
    others = {"health/stable_rank_min": 0.1, "health/weight_drift_max": 9.0, "train/loss": -math.inf}
    assert watch.check(1, others) == []
    assert watch.state_dict()["starts"] == {}


def test_thresholds_are_options() -> None:
    options = {
        "stable_rank_floor": 10,
        "imbalance_ceiling": 2,
        "drift_ceiling": 0.01,
        "rl_entropy_floor": 3,
        "warning_margin": 0.5,
    }
    starts = {"stable_rank": 11.0, "norm_imbalance": 1.0, "weight_drift": 0.0, "output_entropy": 4.0}
    for name, value in zip(CASES, (9.0, 2.5, 0.02, 2.5), strict=True):
        assert Told(name, start=starts[name], **options)(value) == ["bound_crossed@2"], name
    assert Told("stable_rank", start=2.0, **options)(1.1, 0.9) == ["bound_crossed@3"]


def test_the_margin_is_wider_than_the_error_of_what_is_measured() -> None:
    assert BACK_MARGIN >= 0.1  # the drift's sketch: up to 10%


# -- a resumed run -----------------------------------------------------------------------------------------

RESUMED = [
    {f"{RANK}a": 9.0, f"{RANK}b": 2.0, RATIO: math.inf, ENTROPY: 2.0, DRIFT: 0.0},
    {f"{RANK}a": 2.5, f"{RANK}b": 1.9, RATIO: math.inf, ENTROPY: 0.5, DRIFT: 0.6},
    {f"{RANK}a": 2.4, f"{RANK}b": 1.8, RATIO: math.inf, ENTROPY: 2.0, DRIFT: 0.7},
]


def first_part(folder: Path) -> tuple[BoundsWatch, dict[str, float], list[Event]]:
    watch, events = BoundsWatch(CONFIG), []
    for step, row in enumerate(RESUMED, 1):
        events += watch.check(step, row)
    first, recorded = read_back(events, RESUMED, folder)
    return watch, first, recorded


def test_nothing_rings_twice_after_a_resume(tmp_path: Path) -> None:
    before, first, events = first_part(tmp_path / "run")
    watch = BoundsWatch(CONFIG)
    watch.learn(first, events)
    assert watch.active == before.active == 2
    assert watch.check(4, RESUMED[2]) == []
    assert watch.active == 2
    assert watch.state_dict()["over"] == before.state_dict()["over"] == {ENTROPY: 1}
    cleared = watch.check(5, {f"{RANK}a": 9.0, DRIFT: 0.1})
    assert [(event.event, event.since) for event in cleared] == [("bound_cleared", 2)] * 2
    assert cleared[0].baseline == 9.0
    (event,) = watch.check(6, {f"{RANK}b": 1.3})
    assert (event.event, event.baseline) == ("bound_crossed", 2.0)
    (event,) = watch.check(7, {ENTROPY: 0.9})
    assert (event.event, event.baseline) == ("bound_crossed", 2.0)


def test_events_alone_tell_what_was_so_at_the_start(tmp_path: Path) -> None:
    _, _, events = first_part(tmp_path / "run")
    watch = BoundsWatch(CONFIG)
    watch.learn({}, events)
    assert watch.check(4, RESUMED[2]) == []
    assert watch.state_dict()["starts"] == RESUMED[0]


def test_many_that_crossed_at_once_are_learned_too(tmp_path: Path) -> None:
    rows = [{f"{RANK}{i}": value for i in range(9)} for value in (9.0, 2.0)]
    before = BoundsWatch(CONFIG)
    events = [event for step, row in enumerate(rows, 1) for event in before.check(step, row)]
    first, recorded = read_back(events, rows, tmp_path / "run")
    watch = BoundsWatch(CONFIG)
    watch.learn(first, recorded)
    assert watch.active == 9
    assert watch.state_dict()["starts"] == before.state_dict()["starts"]
    (event,) = watch.check(3, rows[0])
    watch = BoundsWatch(CONFIG)
    watch.learn(first, [*recorded, event])
    assert watch.active == 0


def test_trained_weights_are_never_before_training() -> None:
    watch = BoundsWatch(CONFIG)
    watch.learn({ENTROPY: 2.0}, [])
    (event,) = watch.check(101, {f"{RANK}a": 2.0, f"{RANK}b": 9.0})
    assert (event.event, event.layer, event.baseline) == ("bound_crossed", "a", None)
    assert "start" not in event.message
    # A layer that appears later on is not one of them.
    assert kinds(watch.check(201, {f"{RANK}a": 2.0, f"{RANK}late": 2.0})) == [("bound_at_start", "late")]
    # Nor does a second resume take the first value of the record for a start.
    again = BoundsWatch(CONFIG)
    again.learn({f"{RANK}a": 2.0}, [event])
    assert again.check(301, {f"{RANK}a": 2.9}) == []
    assert kinds(again.check(302, {f"{RANK}a": 3.31})) == [("bound_cleared", "a")]


def test_what_is_run_again_is_not_learned() -> None:
    before = BoundsWatch(CONFIG)
    before.check(1, {f"{RANK}a": 9.0})
    (event,) = before.check(2, {f"{RANK}a": 2.0})
    overtaken = Event(
        event.event, event.step, event.severity, event.message, {**event.fields, "superseded": True}
    )
    watch = BoundsWatch(CONFIG)
    watch.learn({f"{RANK}a": 9.0}, [overtaken])
    assert watch.active == 0
    assert kinds(watch.check(2, {f"{RANK}a": 2.0})) == [("bound_crossed", "a")]


def test_the_state_goes_round_as_json() -> None:
    told = Told("stable_rank", start=2.0)
    told(1.2, 2.0, 1.2)
    told.watch.learn({}, told.events)
    told.watch.check(4, {RATIO: math.inf})
    again = BoundsWatch(CONFIG)
    state = told.watch.state_dict()
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.state_dict() == state
    assert again.active == 2
    assert again.check(5, {told.metric: 1.2}) == []
    (event,) = again.check(6, {told.metric: 1.9})
    assert (event.event, event.since) == ("bound_cleared", 4)


GOOD = {
    "starts": {ENTROPY: 2.0},
    "active": {ENTROPY: 3},
    "over": {ENTROPY: 1},
    **{name: [] for name in ("trained", "ordinary", "told", "fresh")},
}


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        "starts",
        {},
        {"starts": {}, "active": {}, "over": {}},
        GOOD | {"starts": None},
        GOOD | {"starts": [1.0]},
        GOOD | {"starts": {ENTROPY: "2"}},
        GOOD | {"starts": {ENTROPY: True}},
        GOOD | {"starts": {ENTROPY: math.nan}},
        GOOD | {"starts": {"health/nonsense": 1.0}},
        GOOD | {"starts": {1: 1.0}},
        GOOD | {"active": {ENTROPY: 1.5}},
        GOOD | {"active": {ENTROPY: None}},
        GOOD | {"active": {ENTROPY: -1}},
        GOOD | {"active": 7},
        GOOD | {"over": {ENTROPY: 0.5}},
        GOOD | {"over": None},
        GOOD | {"trained": "stable_rank"},
        GOOD | {"trained": [1]},
        GOOD | {"trained": None},
    ],
)
def test_a_state_that_is_none_changes_nothing(junk: Any) -> None:
    told = Told("stable_rank", start=9.0)
    told(2.0)
    before = told.watch.state_dict()
    with pytest.raises((KeyError, TypeError, ValueError)):
        told.watch.load_state_dict(junk)
    assert told.watch.state_dict() == before
    assert told(2.0) == []
    told.watch.load_state_dict(GOOD)
    assert told.watch.active == 1
