"""A tracker that raises, hangs for ever or comes back: training does not wait, and no row is lost."""

from __future__ import annotations

import logging
import math
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
from tests.trackers.fakes import IDENTITY, QUICK, Fake, Switch, recorded, row, until, values

from palingenesis.trackers import Journal, Worker, close_all
from palingenesis.trackers.sync import sync


def worker(tracker: Fake, folder: Path | None = None, resumed_from: int | None = None) -> Worker:
    journal = None if folder is None else Journal(folder, resumed_from)
    return Worker(tracker, IDENTITY, {}, journal, QUICK)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_rows_arrive_in_order_and_the_run_is_closed() -> None:
    fake = Fake()
    given = worker(fake)
    for step in range(1, 11):
        given.log(step, values(step))
        until(lambda: len(fake.rows) == step)  # noqa: B023

    assert given.close()
    assert fake.rows == [(step, values(step)) for step in range(1, 11)]
    assert fake.opened == [IDENTITY.run_id]
    assert fake.closed == 1


def test_numbers_of_every_kind_pass_and_texts_do_not() -> None:
    fake = Fake()
    given = worker(fake)
    given.log(
        1,
        {
            "train/global_step": 1,
            "time": 12.5,
            "numpy": np.float32(0.5),
            "int": 3,
            "yes": True,
            "inf": "Infinity",
            "nan": math.nan,
            "text": "abc",
            "none": None,
        },
    )
    assert given.close()

    ((step, found),) = fake.rows
    assert step == 1 and fake.times == [12.5]
    assert math.isnan(found.pop("nan"))
    assert found == {"numpy": 0.5, "int": 3.0, "yes": 1.0, "inf": math.inf}


def test_a_row_may_be_changed_after_it_was_given() -> None:
    switch = Switch("hang")
    fake = Fake(switch)
    given = worker(fake)
    mine = {"a": 1.0}
    given.log(1, mine)
    mine["a"] = 2.0
    switch.off()

    assert given.close()
    assert fake.rows == [(1, {"a": 1.0})]


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_step_does_not_wait_for_a_broken_backend(how: str, tmp_path: Path) -> None:
    switch = Switch(how)
    writer = recorded(tmp_path, 0)
    given = worker(Fake(switch), tmp_path)
    taken = []
    for step in range(1, 3001):
        writer.metrics(row(step))
        start = time.perf_counter()
        given.log(step, values(step))
        taken.append(time.perf_counter() - start)
    start = time.perf_counter()
    given.close(timeout=0.05)
    closing = time.perf_counter() - start
    switch.off()
    writer.close({"reason": "completed"})

    # Of a busy machine the slowest of a hundred calls says less than all others.
    assert statistics.quantiles(taken, n=100)[-1] < 1e-3
    assert closing < 1.0
    assert [found.step for found in Journal(tmp_path).rows()] == list(range(1, 3001))


def test_what_was_missed_comes_when_the_backend_answers_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    switch = Switch("raise", on=False)
    fake = Fake(switch)
    writer = recorded(tmp_path, 0)
    given = worker(fake, tmp_path)
    for step in range(1, 401):  # far more than the queue's 16
        if step == 5:
            until(lambda: len(fake.rows) == 4)
            switch.on()
        if step == 390:
            writer.flush()
            until(lambda: switch.calls > 10)  # many tries, one warning
            switch.off()
            until(lambda: fake.steps[-1:] == [389])
        writer.metrics(row(step))
        given.log(step, values(step))

    assert given.close()
    assert fake.rows == [(step, values(step)) for step in range(1, 401)]
    assert [text for text in warnings(caplog) if "fake" in text] == [
        "tracker fake: ConnectionError: no route to host; training goes on, rows wait in the record and "
        "it is tried again"
    ]
    assert "tracker fake answers again and has every row up to now" in caplog.text


def test_a_backend_that_hangs_and_comes_back_gets_every_row_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    switch = Switch("hang", on=False)
    fake = Fake(switch)
    writer = recorded(tmp_path, 0)
    given = worker(fake, tmp_path)
    for step in range(1, 201):
        writer.metrics(row(step))
        if step == 3:
            until(lambda: len(fake.rows) == 2)
            switch.on()
        given.log(step, values(step))
    writer.flush()
    until(lambda: "no answer for" in caplog.text)
    assert fake.steps == [1, 2]
    switch.off()

    assert given.close()
    assert fake.rows == [(step, values(step)) for step in range(1, 201)]


def test_rows_that_fell_out_of_the_queue_before_the_record_wrote_them_are_waited_for(tmp_path: Path) -> None:
    switch = Switch("hang")
    fake = Fake(switch)
    writer = recorded(tmp_path, 0)
    given = worker(fake, tmp_path)
    for step in range(1, 101):
        writer.metrics(row(step))
        given.log(step, values(step))
    switch.off()
    time.sleep(0.05)
    assert fake.steps == []
    writer.flush()
    until(lambda: len(fake.rows) == 100)

    assert given.close()
    assert fake.rows == [(step, values(step)) for step in range(1, 101)]


def test_rows_that_the_record_never_wrote_leave_no_gap_behind(tmp_path: Path) -> None:
    switch = Switch("hang")
    fake = Fake(switch)
    writer = recorded(tmp_path, 10)
    given = worker(fake, tmp_path)
    for step in range(11, 101):
        given.log(step, values(step))
    switch.off()

    assert not given.close()
    assert fake.steps == list(range(1, 11))
    writer.close({})


def test_after_a_hang_for_ever_sync_brings_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    switch = Switch("hang", on=False)
    fake = Fake(switch)
    writer = recorded(tmp_path, 0)
    given = worker(fake, tmp_path)
    for step in range(1, 101):
        if step == 51:
            until(lambda: len(fake.rows) == 50)
            switch.on()
        writer.metrics(row(step))
        writer.flush()
        given.log(step, values(step))
    assert not given.close(timeout=0.05)
    writer.close({"reason": "completed"})

    assert f"'pgs sync {tmp_path} --to fake' sends what is missing" in caplog.text
    later = Fake()
    later.rows = list(fake.rows)
    done = sync(tmp_path, "fake", tracker=later)
    assert (done.sent, done.already) == (50, 50)
    assert later.rows == [(step, values(step)) for step in range(1, 101)]
    assert later.times == [1000.0 + step for step in range(51, 101)]
    switch.off()


def test_a_backend_that_never_opens_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    switch = Switch("raise")
    given = worker(Fake(switch), tmp_path)
    given.log(1, values(1))
    until(lambda: switch.calls > 5)

    assert not given.close()
    assert len(warnings(caplog)) == 2  # that it fails, and at the end that rows are missing


def test_a_backend_that_answers_again_at_the_very_end_is_tried_once_more(tmp_path: Path) -> None:
    switch = Switch("raise")
    fake = Fake(switch)
    recorded(tmp_path, 30).close({})
    given = worker(fake, tmp_path)
    given.log(31, values(31))
    until(lambda: switch.calls > 1)
    switch.off()

    assert given.close()
    assert fake.steps == list(range(1, 32))


def test_without_a_record_the_queue_still_bridges_a_short_outage() -> None:
    switch = Switch("raise")
    fake = Fake(switch)
    given = worker(fake)
    for step in range(1, 11):
        given.log(step, values(step))
    until(lambda: switch.calls > 3)
    switch.off()

    assert given.close()
    assert fake.steps == list(range(1, 11))


@pytest.mark.parametrize("with_record", [True, False])
def test_a_row_that_the_backend_refuses_does_not_hold_up_the_others(
    with_record: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(step: int) -> None:
        if step == 4:
            raise ValueError("I do not like this row")

    fake = Fake(refuse)
    recorded(tmp_path, 10).close({})
    given = worker(fake, tmp_path if with_record else None)
    for step in range(1, 11):
        given.log(step, values(step))

    assert not given.close()
    assert fake.steps == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert "fake refuses the row of step 4, and takes others" in caplog.text


def test_an_outage_is_not_taken_for_a_row_that_is_refused(tmp_path: Path) -> None:
    """Failing at ``log`` alone, often enough for rows to be passed over."""
    down = True
    tried: list[int] = []

    def fail(step: int) -> None:
        tried.append(step)
        if step >= 4 and down:
            raise OSError("disk full")

    fake = Fake(fail)
    recorded(tmp_path, 10).close({})
    given = worker(fake, tmp_path)
    for step in range(1, 11):
        given.log(step, values(step))
    until(lambda: len(tried) > 60)
    down = False

    assert given.close()
    assert fake.steps == list(range(1, 11))


def test_steps_run_again_after_a_crash_do_not_appear_twice(tmp_path: Path) -> None:
    """Killed at step 30 of which the backend has 25, resumed from a checkpoint at 20."""
    fake = Fake()
    fake.rows = [(step, values(step)) for step in range(1, 26)]
    recorded(tmp_path, 30).close({})
    given = worker(fake, tmp_path, resumed_from=20)
    writer = recorded(tmp_path, 0, resume=True)
    for step in range(21, 41):
        writer.metrics({**row(step), "train/loss": -1.0 / step})
        given.log(step, {"train/loss": -1.0 / step})
    writer.close({})

    assert given.close()
    assert fake.steps == list(range(1, 41))
    # What was lost of the first run and run again is the second run's.
    assert fake.rows[25:] == [(step, {"train/loss": -1.0 / step}) for step in range(26, 41)]


def test_several_rows_of_one_step_with_other_metrics_all_pass() -> None:
    fake = Fake()
    given = worker(fake)
    given.log(1, {"train/loss": 1.0})
    given.log(1, {"eval/loss": 2.0})
    given.log(1, {"train/loss": 1.0, "eval/ppl": 3.0})

    assert given.close()
    assert fake.rows == [(1, {"train/loss": 1.0}), (1, {"eval/loss": 2.0}), (1, {"eval/ppl": 3.0})]


def test_closing_several_takes_as_long_as_one(tmp_path: Path) -> None:
    switches = [Switch("hang") for _ in range(4)]
    good = Fake()
    group = [*(worker(Fake(switch)) for switch in switches), worker(good)]
    for each in group:
        each.log(1, values(1))
    start = time.perf_counter()
    complete = close_all(group, timeout=0.3)
    taken = time.perf_counter() - start
    for switch in switches:
        switch.off()

    assert not complete
    assert 0.2 < taken < 1.0
    assert good.steps == [1]


def test_a_thread_outlives_what_should_end_it() -> None:
    """A library that calls ``sys.exit`` ends neither the run nor the tracker."""
    left = 2

    def leave(step: int) -> None:
        nonlocal left
        if step and left:
            left -= 1
            raise SystemExit(1)

    fake = Fake(leave)
    given = worker(fake)
    given.log(1, values(1))
    until(lambda: bool(fake.rows))

    assert given.close()
    assert fake.steps == [1]
