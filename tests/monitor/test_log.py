"""Numbers of the training loop's own in the rows of the record, and rows handed on as they are written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from palingenesis import Monitor, MonitorConfig, load_run
from palingenesis.errors import ConfigError, MonitorClosedError

CADENCE = {"check_every": 5, "tier2_every": 4, "tier3_every": 6}


class Loop:
    """A small real training loop. Data follow from the number of the step alone."""

    def __init__(self, out: Path | None, *, config: dict[str, Any] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: dict[int, float] = {}
        self.told: list[dict[str, Any]] = []
        options = {"on_row": self.told.append, **options}
        self.monitor = Monitor(
            self.model, self.optimizer, out, config=MonitorConfig(**(config or CADENCE)), **options
        )

    def step(self) -> int:
        step = self.monitor.global_step + 1
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = (self.model(data) - data[:, :8]).square().mean()
        loss.backward()
        loss = loss.detach()
        self.monitor.step(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[step] = float(loss)
        return step

    def steps(self, count: int, *, log: bool = True, **values: Any) -> None:
        for _ in range(count):
            step = self.step()
            if log:
                self.monitor.log({"train/loss": self.losses[step], "own/step": 10 * step, **values})


def rows(run: Path) -> list[dict[str, Any]]:
    """Strict JSON: anything else is refused."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def steps_of(found: list[dict[str, Any]]) -> list[int]:
    return [row["train/global_step"] for row in found]


def errors(loop: Loop) -> list[str]:
    return [event.message for event in loop.monitor.events if event.event == "monitor_error"]


def test_own_numbers_are_in_the_rows_of_their_steps(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.steps(23)
    loop.monitor.close()
    found = rows(tmp_path)
    assert steps_of(found) == list(range(1, 24)) and not errors(loop)
    for row in found:
        step = row["train/global_step"]
        assert row["own/step"] == 10 * step and row["train/loss"] == loop.losses[step]
        assert isinstance(row["time"], float)
    # What the monitor finds is in the same rows.
    assert [row["train/global_step"] for row in found if "train/grad_norm_raw" in row] == [5, 10, 15, 20]
    assert [row["train/global_step"] for row in found if "health/grad_cosine_sim" in row] == [
        4,
        8,
        12,
        16,
        20,
    ]
    assert load_run(tmp_path).verify().ok


def test_own_numbers_hold_against_the_monitors(tmp_path: Path) -> None:
    loop = Loop(tmp_path, config={**CADENCE, "check_every": 1})
    loop.monitor.log({})  # else the first row would not wait
    for _ in range(6):
        step = loop.step()
        loop.monitor.log(
            {"train/loss": 100.0 + step, "train/lr": 7.0, "train/grad_norm_raw": -1.0, "time": 1.0}
        )
    loop.monitor.close()
    for row in rows(tmp_path):
        assert row["train/loss"] == 100.0 + row["train/global_step"]
        assert (row["train/lr"], row["train/grad_norm_raw"], row["time"]) == (7.0, -1.0, 1.0)


def test_a_row_is_on_disk_when_its_step_is_logged(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for step in range(1, 13):
        loop.step()
        assert steps_of(rows(tmp_path)) == list(range(1, step)) if step > 1 else True
        loop.monitor.log({"own/x": step})
        # Looks at the weights and checks may be under way; on the CPU they have arrived.
        assert steps_of(rows(tmp_path)) == steps_of(loop.told) == list(range(1, step + 1))
    loop.monitor.close()


def test_rows_wait_for_log(tmp_path: Path) -> None:
    """Logging every fourth step: the rows between are whole too, and written with it."""
    loop = Loop(tmp_path)
    for step in range(1, 19):
        loop.step()
        if step % 4 == 0:
            loop.monitor.log({"own/x": step})
            assert steps_of(loop.told) == list(range(1, step + 1))
        elif step > 4:
            assert steps_of(loop.told)[-1] == 4 * (step // 4)
    loop.monitor.close()
    found = rows(tmp_path)
    assert steps_of(found) == list(range(1, 19))  # what waited is not lost at the end
    assert [row["train/global_step"] for row in found if "own/x" in row] == [4, 8, 12, 16]
    # The check of step 5 came before its row went out, so its row has the numbers of both.
    assert found[4]["train/loss"] == pytest.approx(loop.losses[5])


def test_several_calls_for_a_step_and_a_late_one(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    loop.step()
    loop.monitor.log({"own/x": 1}, step=1)
    loop.monitor.log({"own/x": 2, "own/y": 2}, step=2)
    loop.monitor.log({"own/x": 3}, step=2)  # written already: a row is written once
    loop.step()
    loop.monitor.close()
    found = rows(tmp_path)
    assert [(row["train/global_step"], row.get("own/x"), row.get("own/y")) for row in found] == [
        (1, 1, None),
        (2, 2, 2),
        (3, None, None),
    ]


def test_a_step_to_come_waits_for_its_turn(tmp_path: Path) -> None:
    """A number for step 9 logged at step 2 must not close the rows between."""
    loop = Loop(tmp_path)
    loop.steps(2)
    loop.monitor.log({"own/early": 1}, step=9)
    loop.monitor.log({"own/never": 1}, step=50)
    loop.steps(10)
    loop.monitor.close()
    found = rows(tmp_path)
    assert [row.get("own/step") for row in found] == [10 * step for step in range(1, 13)]
    assert [row["train/global_step"] for row in found if "own/early" in row] == [9]
    assert not [row for row in found if "own/never" in row]  # there was no such step


def test_before_the_first_step_there_is_no_row(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.monitor.log({})
    loop.monitor.log({"own/x": 1}, step=0)
    assert loop.told == []
    # From here on rows wait.
    loop.step()
    assert loop.told == []
    loop.monitor.log({"own/x": 2})
    assert [(row["train/global_step"], row["own/x"]) for row in loop.told] == [(1, 2)]
    loop.monitor.close()


def test_nothing_is_lost_at_the_end(tmp_path: Path) -> None:
    loop = Loop(tmp_path, config={**CADENCE, "check_every": 50})
    loop.monitor.log({})
    for _ in range(7):
        loop.step()
    assert loop.told == []
    loop.monitor.close()
    assert steps_of(rows(tmp_path)) == steps_of(loop.told) == list(range(1, 8))
    for row in rows(tmp_path):
        assert row["train/loss"] == pytest.approx(loop.losses[row["train/global_step"]])


def test_nothing_is_lost_when_the_loop_fails(tmp_path: Path) -> None:
    loop = Loop(tmp_path)

    def train() -> None:
        with loop.monitor:
            loop.steps(3)
            loop.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert steps_of(rows(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(math.nan), "NaN"),
        ("a word", "a word"),
        (None, None),
        (True, True),
        (2**60, 2**60),
    ],
    ids=str,
)
def test_anything_is_written_as_strict_json(tmp_path: Path, value: Any, written: Any) -> None:
    loop = Loop(tmp_path)
    loop.steps(2, own__x=value)
    loop.monitor.close()
    assert [row["own__x"] for row in rows(tmp_path)] == [written] * 2
    assert not errors(loop)
    # The metric reads back as the number that it was.
    if written == "NaN":
        assert math.isnan(load_run(tmp_path).metrics["own__x"][0])


def test_after_close_there_is_nothing_to_add_to(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.steps(2)
    loop.monitor.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(MonitorClosedError, match="log"):
        loop.monitor.log({"own/x": 1})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_what_cannot_be_taken_ends_no_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.steps(2)
    loop.monitor.log(3)  # type: ignore[arg-type]
    loop.monitor.log({"own/x": 1}, step="two")  # type: ignore[arg-type]
    loop.steps(4)
    loop.monitor.close()
    assert len(errors(loop)) == 1
    assert [row.get("own/step") for row in rows(tmp_path)] == [10, 20, 30, 40, 50, 60]


# -- on_row ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [False, True])
def test_rows_are_handed_on_as_they_are_written(tmp_path: Path, log: bool) -> None:
    loop = Loop(tmp_path)
    loop.steps(17, log=log)
    loop.monitor.close()
    assert json.loads(json.dumps(loop.told)) == rows(tmp_path)
    assert steps_of(loop.told) == list(range(1, 18))


def test_without_a_record_rows_are_handed_on_too() -> None:
    loop = Loop(None)
    loop.steps(7)
    loop.monitor.close()
    assert [row["own/step"] for row in loop.told] == [10 * step for step in range(1, 8)]


def test_a_row_is_on_disk_before_it_is_handed_on(tmp_path: Path) -> None:
    seen: list[bool] = []
    loop = Loop(
        tmp_path, on_row=lambda row: seen.append(steps_of(rows(tmp_path))[-1] >= row["train/global_step"])
    )
    loop.steps(6)
    assert seen == [True] * 6
    loop.monitor.close()


def test_on_row_that_raises_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    calls: list[int] = []

    def fail(row: dict[str, Any]) -> None:
        calls.append(row["train/global_step"])
        raise OSError("the tracker is away")

    loop = Loop(tmp_path, on_row=fail)
    loop.steps(12)
    loop.monitor.close()
    assert calls == [1]
    (told,) = errors(loop)
    assert "on_row" in told and "the tracker is away" in told
    assert [row["own/step"] for row in rows(tmp_path)] == [10 * step for step in range(1, 13)]
    assert load_run(tmp_path).verify().ok


def test_on_row_must_be_callable() -> None:
    with pytest.raises(ConfigError, match="on_row"):
        Loop(None, on_row=3)


def test_with_on_row_the_log_has_no_line_for_each_reading(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="palingenesis")
    for on_row in (None, lambda row: None):
        caplog.clear()
        loop = Loop(None, on_row=on_row)
        loop.steps(8)
        loop.monitor.close()
        lines = [one for one in caplog.messages if one.startswith("step=")]
        assert bool(lines) == (on_row is None)
        assert caplog.messages  # of events


# -- going on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_state", [False, True])
@pytest.mark.parametrize("log_first", [False, True])
def test_a_resumed_run_goes_on_with_the_rows(tmp_path: Path, by_state: bool, log_first: bool) -> None:
    first = Loop(tmp_path)
    first.steps(8)
    state = first.monitor.state_dict()
    first.steps(3)
    first.monitor.close()
    second = Loop(tmp_path, resume=True)
    if by_state:
        second.monitor.load_state_dict(state)
    if log_first:
        second.monitor.log({"own/too_late": 1})  # of a step that was written before
        assert second.told == []
    second.steps(6)
    second.monitor.close()
    last = 14 if by_state else 17
    assert steps_of(second.told) == list(range(9 if by_state else 12, last + 1))
    run = load_run(tmp_path)
    assert run.metrics["step"].tolist() == list(range(1, last + 1))
    assert run.metrics["own/step"].tolist() == [10 * step for step in range(1, last + 1)]
    assert "own/too_late" not in run.metrics
    assert run.verify().ok and not errors(second)


def test_the_same_monitor_going_back_waits_again(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.steps(4)
    state = loop.monitor.state_dict()
    loop.steps(6)
    loop.told.clear()
    loop.monitor.load_state_dict(state)
    loop.steps(6)
    assert [(row["train/global_step"], row["own/step"]) for row in loop.told] == [
        (step, 10 * step) for step in range(5, 11)
    ]
    loop.monitor.close()


def test_start_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path, start_step=700)
    loop.monitor.log({"own/x": 1})
    loop.monitor.log({"own/x": 1}, step=0)
    loop.steps(3)
    loop.monitor.close()
    assert steps_of(rows(tmp_path)) == [701, 702, 703]


def test_weights_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """Whether rows are logged, handed on, or nothing is watched at all."""

    def fail(row: dict[str, Any]) -> None:
        raise OSError

    loops = [
        Loop(tmp_path / "a", on_row=None),
        Loop(tmp_path / "b"),
        Loop(tmp_path / "c", on_row=fail),
        Loop(None, config={"check_every": 1000}, on_row=None),
    ]
    for number, loop in enumerate(loops):
        loop.steps(15, log=number in (1, 2), own__x=math.nan)
        loop.monitor.close()
    assert loops[0].losses[15] < 0.9 * loops[0].losses[1]  # it learns
    for loop in loops[1:]:
        assert loop.losses == loops[0].losses
        for name, value in loop.model.state_dict().items():
            assert torch.equal(value, loops[0].model.state_dict()[name]), name


def test_rows_with_own_numbers_do_not_wait_for_checks(tmp_path: Path) -> None:
    """Losses between checks would come with the next one; the loop's own are there at once."""
    loop = Loop(tmp_path, config={"check_every": 50, "logging_steps": 10})
    loop.steps(25)
    assert [row["train/loss"] for row in rows(tmp_path)] == [loop.losses[step] for step in range(1, 26)]
    loop.monitor.close()
    assert steps_of(rows(tmp_path)) == list(range(1, 26))
