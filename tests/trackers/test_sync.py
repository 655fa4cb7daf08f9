"""``pgs sync``: a recorded run to a tracker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.trackers.fakes import Fake, Switch, recorded, values

from palingenesis.cli import main
from palingenesis.errors import PalingenesisError, RecordBusyError
from palingenesis.trackers.sync import sync


def test_a_run_that_no_tracker_had_is_sent_whole_and_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    recorded(tmp_path, 20).close({"reason": "completed"})
    command = ["sync", str(tmp_path), "--to", "tensorboard", "--json"]

    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    second = json.loads(capsys.readouterr().out)

    assert (first["sent"], first["already"], second["sent"], second["already"]) == (20, 0, 0, 20)
    assert first["run_id"] == second["run_id"]
    assert first["name"] == "a run"

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(first["where"])
    events.Reload()
    found = [(each.step, each.value, each.wall_time) for each in events.Scalars("train/loss")]
    assert [(step, when) for step, _, when in found] == [(step, 1000.0 + step) for step in range(1, 21)]
    assert [value for _, value, _ in found] == pytest.approx([1 / step for step in range(1, 21)], rel=1e-6)


def test_words_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    recorded(tmp_path, 3).close({})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("damaged\n")

    assert main(["sync", str(tmp_path), "--to", "tensorboard", "--project", "mine"]) == 1

    sent, damaged, where = capsys.readouterr().out.splitlines()
    assert sent == "tensorboard: 3 rows sent, 0 were there already"
    assert damaged == "left out: 1 lines of metrics.jsonl that cannot be read"
    assert "(a run) in mine: " in where


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere", "--to", "wandb"], "no run folder at nowhere"),
        (["nowhere", "--to", "comet"], "'comet'"),
        (["nowhere"], "'--to'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["sync", *arguments]) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1 and told in error


def test_a_run_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    writer = recorded(tmp_path, 3)

    with pytest.raises(RecordBusyError):
        sync(tmp_path, "fake", tracker=Fake())

    writer.close({})
    assert sync(tmp_path, "fake", tracker=Fake()).sent == 3


def test_a_tracker_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    recorded(tmp_path, 3).close({})

    with pytest.raises(
        PalingenesisError, match="fake failed after 0 rows: ConnectionError: no route to host"
    ):
        sync(tmp_path, "fake", tracker=Fake(Switch("raise")))


def test_failures_now_and_then_and_refused_rows_do_not_stop_it(tmp_path: Path) -> None:
    recorded(tmp_path, 50).close({})
    calls = 0

    def fail(step: int) -> None:
        nonlocal calls
        calls += 1
        if step in (7, 20, 50):
            raise ValueError("not this one")
        if calls % 10 == 0:
            raise ConnectionError("now and then")

    fake = Fake(fail)
    # Nothing follows the last row that could tell whether it is the row or the tracker.
    with pytest.raises(PalingenesisError, match="not this one"):
        sync(tmp_path, "fake", tracker=fake)

    assert fake.rows == [(step, values(step)) for step in range(1, 50) if step not in (7, 20)]
