"""When each tier looks, against a list of steps that is written down or counted one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from palingenesis import MonitorConfig
from palingenesis.tiers.schedule import Schedule

EVERY_ONE = {"check_every": 1, "logging_steps": 1, "tier2_every": 1, "tier3_every": 1}


def schedule(first: int | None = 1, max_steps: int | None = None, **options: Any) -> Schedule:
    made = Schedule(MonitorConfig(**options), max_steps)
    if first is not None:
        made.begin(first)
    return made


def steps(due: Callable[[int], bool], last: int, start: int = 1) -> list[int]:
    return [step for step in range(start, last + 1) if due(step)]


def test_every_cadence_counts_by_itself() -> None:
    when = schedule(check_every=5, logging_steps=3, tier2_every=4, tier3_every=6)
    assert steps(when.check, 20) == [5, 10, 15, 20]
    assert steps(when.first_tier, 20) == [3, 6, 9, 12, 15, 18]
    assert steps(when.second_tier, 20) == [4, 8, 12, 16, 20]
    assert steps(when.third_tier, 20) == [1, 6, 12, 18]
    assert steps(when.watches_update, 20) == [1, 6, 12, 18]
    # The gradients of the step before a look at directions are compared with.
    assert steps(when.needs_norms, 20) == [1, 3, 4, 6, 7, 8, 11, 12, 15, 16, 18, 19, 20]
    # Tier 1 has rows of its own; what an update did is seen a step later.
    assert steps(when.ranks_meet, 20) == [1, 2, 4, 5, 6, 7, 8, 10, 12, 13, 15, 16, 18, 19, 20]


def test_every_cadence_one() -> None:
    when = schedule(**EVERY_ONE)
    every = list(range(1, 8))
    for due in (
        when.check, when.first_tier, when.second_tier, when.third_tier, when.watches_update,
        when.needs_norms, when.ranks_meet,
    ):  # fmt: skip
        assert steps(due, 7) == every
    assert not when.missed_third_tier(1) and not when.missed_third_tier(7)


def test_before_the_first_step_nothing_is_first() -> None:
    when = schedule(None, tier3_every=4)
    assert steps(when.third_tier, 8) == [4, 8]
    assert not when.missed_third_tier(3)


def test_a_run_that_goes_on_is_looked_at_where_it_does() -> None:
    when = schedule(1234, tier3_every=100)
    assert steps(when.third_tier, 1500, start=1234) == [1234, 1300, 1400, 1500]
    assert steps(when.watches_update, 1500, start=1234) == [1234, 1300, 1400, 1500]
    assert when.at_end is None


@pytest.mark.parametrize(
    ("first", "max_steps", "at_end"),
    [
        (1, 50, 50),
        (1, 99, 99),
        (1, 100, None),  # that is a regular look
        (1, 101, None),
        (1, 2, 2),
        (1, 1, None),  # that is the first look
        (101, 150, 150),
        (101, 250, None),
        (100, 150, None),  # step 100 was a regular look
        (1, None, None),
    ],
)
def test_a_short_run_is_looked_at_once_more(first: int, max_steps: int | None, at_end: int | None) -> None:
    when = schedule(first, max_steps, tier3_every=100)
    assert when.at_end == at_end
    last = max_steps or 150
    looks = {first, *([at_end] if at_end else []), *(100 * i for i in range(1, 4))}
    assert steps(when.third_tier, last, start=first) == sorted(s for s in looks if first <= s <= last)
    # An end that was announced is not made up for.
    assert not when.missed_third_tier(last) or max_steps is None


def test_the_last_update_that_can_be_seen_is_the_one_before_the_last_step() -> None:
    when = schedule(1, 50, tier3_every=100)
    assert steps(when.watches_update, 50) == [1, 49]
    # What it did is read at step 50, where ranks meet for it.
    assert steps(when.ranks_meet, 12) == [1, 2, 10]
    assert when.ranks_meet(50)


@pytest.mark.parametrize(
    ("first", "last", "missed"),
    [
        (1, 1, False),  # the only step was looked at
        (1, 2, True),
        (1, 99, True),
        (1, 100, False),
        (1, 150, False),
        (101, 199, True),
        (101, 200, False),
        (150, 199, True),
        (150, 201, False),
        (100, 150, False),
    ],
)
def test_an_end_that_was_not_announced(first: int, last: int, missed: bool) -> None:
    assert schedule(first, tier3_every=100).missed_third_tier(last) is missed


@pytest.mark.parametrize("max_steps", [None, 7, 23, 24, 40])
@pytest.mark.parametrize("first", [1, 5, 13])
@pytest.mark.parametrize(("check", "second", "third"), [(1, 1, 1), (5, 4, 6), (50, 3, 100), (7, 1, 9)])
def test_ranks_meet_wherever_one_has_something_that_the_others_wait_for(
    max_steps: int | None, first: int, check: int, second: int, third: int
) -> None:
    when = schedule(first, max_steps, check_every=check, tier2_every=second, tier3_every=third)
    for step in range(first, 60):
        has = when.second_tier(step) or when.third_tier(step) or when.check(step)
        has |= step > first and when.watches_update(step - 1)
        assert when.ranks_meet(step) == has, step
        if when.third_tier(step) or when.second_tier(step) or when.second_tier(step + 1):
            assert when.needs_norms(step)
