"""Rows that wait: in order, each once, and never too many."""

from __future__ import annotations

from palingenesis.tiers.rows import Rows


def test_what_comes_for_a_step_is_one_row() -> None:
    rows = Rows(10)
    rows.add(3, {"train/loss": 2.0})
    rows.add(2, {"train/loss": 1.0})
    rows.add(3, {"health/grad_cosine_sim": 0.5, "train/loss": 2.5})
    assert len(rows) == 2
    assert rows.take(3) == [
        {"train/global_step": 2, "train/loss": 1.0},
        {"train/global_step": 3, "train/loss": 2.5, "health/grad_cosine_sim": 0.5},
    ]
    assert len(rows) == 0 and rows.take(3) == []


def test_more_rows_wait_for_a_loop_that_has_its_own() -> None:
    rows = Rows(3, 5)
    for step in range(1, 5):
        rows.add(step, {"x": step})
    assert len(rows) == 3
    rows.add_own(5, {"y": 5})
    rows.add(6, {"x": 6})
    assert len(rows) == 5
    rows.add(7, {"x": 7})
    assert [row["train/global_step"] for row in rows.take(9)] == [3, 4, 5, 6, 7]


def test_rows_after_the_step_wait() -> None:
    rows = Rows(10)
    for step in (1, 2, 5):
        rows.add(step, {"x": step})
    assert [row["train/global_step"] for row in rows.take(4)] == [1, 2]
    assert [row["train/global_step"] for row in rows.take(4)] == []
    assert [row["train/global_step"] for row in rows.take(5)] == [5]


def test_a_row_that_was_handed_out_does_not_come_again() -> None:
    rows = Rows(10)
    rows.add(1, {"x": 1})
    rows.take(2)
    rows.add(1, {"y": 1})
    rows.add(2, {"y": 2})  # there was no row of it, but it was asked for
    rows.add(3, {"y": 3})
    assert rows.take(9) == [{"train/global_step": 3, "y": 3}]
    rows.take(4)  # an earlier step does not open what is closed
    rows.add(9, {"y": 9})
    assert len(rows) == 0


def test_the_oldest_are_dropped() -> None:
    rows = Rows(3)
    for step in (5, 1, 4, 2, 3):
        rows.add(step, {"x": step})
    assert [row["x"] for row in rows.take(9)] == [3, 4, 5]


def test_going_back_to_an_earlier_step() -> None:
    rows = Rows(10)
    rows.add(7, {"x": 7})
    rows.take(7)
    rows.add(8, {"x": 8})
    rows.restart(4)
    assert len(rows) == 0
    rows.add(4, {"x": 4})
    rows.add(5, {"x": 5})
    assert rows.take(8) == [{"train/global_step": 5, "x": 5}]


def test_what_the_loop_says_holds_whichever_comes_first() -> None:
    rows = Rows(10)
    rows.add(1, {"train/loss": 1.0, "train/lr": 0.1})
    rows.add_own(1, {"train/loss": 2.0})
    rows.add_own(2, {"train/loss": 4.0, "own/x": 1})
    rows.add_own(2, {"own/x": 2})
    rows.add(2, {"train/loss": 3.0})
    assert rows.take(2) == [
        {"train/global_step": 1, "train/loss": 2.0, "train/lr": 0.1},
        {"train/global_step": 2, "train/loss": 4.0, "own/x": 2},
    ]


def test_what_the_loop_says_alone_is_a_row() -> None:
    rows = Rows(10)
    rows.add_own(2, {})
    rows.add_own(3, {"own/x": 1})
    assert len(rows) == 2
    assert rows.take(3) == [{"train/global_step": 2}, {"train/global_step": 3, "own/x": 1}]


def test_what_the_loop_says_too_late_is_dropped() -> None:
    rows = Rows(10)
    rows.add(1, {"x": 1})
    rows.take(3)
    rows.add_own(1, {"own/x": 1})
    rows.add_own(3, {"own/x": 3})
    rows.add_own(4, {"own/x": 4})
    assert rows.take(9) == [{"train/global_step": 4, "own/x": 4}]


def test_what_the_loop_says_is_dropped_with_its_row() -> None:
    rows = Rows(2)
    for step in (1, 2, 3):
        rows.add_own(step, {"own/x": step})
    assert len(rows) == 2
    rows.add(1, {"x": 1})  # makes a row of step 1 again, which is the oldest
    assert rows.take(9) == [
        {"train/global_step": 2, "own/x": 2},
        {"train/global_step": 3, "own/x": 3},
    ]
    assert not rows._own


def test_a_restart_forgets_what_the_loop_said() -> None:
    rows = Rows(10)
    rows.add_own(7, {"own/x": 7})
    rows.restart(4)
    rows.add(7, {"x": 7})
    rows.add_own(4, {"own/x": 4})
    assert rows.take(9) == [{"train/global_step": 7, "x": 7}]
