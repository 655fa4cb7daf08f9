"""Which rows of a record a tracker is to have, and which run it is to have them in."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
from tests.trackers.fakes import recorded, row

from palingenesis.events import Event
from palingenesis.record.reader import load_run
from palingenesis.trackers import Journal, identify


def resumed(folder: Path, from_step: int, steps: int) -> None:
    """A run in the folder that went on from a step, and then made some more."""
    writer = recorded(folder, 0, resume=True)
    writer.event(Event("run_resumed", from_step, "info", "resumed", {"from_step": from_step}))
    for step in range(from_step + 1, from_step + steps + 1):
        writer.metrics({**row(step), "train/loss": -1.0})
    writer.close({})


def test_rows_are_those_that_the_reader_counts(tmp_path: Path) -> None:
    recorded(tmp_path, 30).close({})
    resumed(tmp_path, from_step=20, steps=15)
    resumed(tmp_path, from_step=10, steps=12)

    rows = list(Journal(tmp_path).rows())

    run = load_run(tmp_path)
    assert [found.step for found in rows] == run.metrics["step"].tolist()
    assert [found.values["train/loss"] for found in rows] == run.metrics["train/loss"].tolist()
    assert [found.step for found in rows] == list(range(1, 23))


def test_this_process_is_cut_where_it_began_before_the_record_says_so(tmp_path: Path) -> None:
    recorded(tmp_path, 30).close({})
    journal = Journal(tmp_path, resumed_from=20)
    writer = recorded(tmp_path, 0, resume=True)
    writer.metrics(row(21))
    writer.flush()

    assert [found.step for found in journal.rows()] == list(range(1, 22))
    writer.close({})


def test_torn_and_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    recorded(tmp_path, 2).close({})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        path.read_bytes()
        + b"not json\n[1]\n"
        + b'{"train/global_step":3,"time":5.0,"a":"NaN","b":"-Infinity","c":"text","d":null}\n'
        + b'{"train/global_step":4,'
    )
    journal = Journal(tmp_path)

    *_, last = journal.rows()

    assert (last.step, last.time, set(last.values)) == (3, 5.0, {"a", "b"})
    assert math.isnan(last.values["a"]) and last.values["b"] == -math.inf
    assert journal.unreadable == 2


def test_a_folder_without_a_record_has_no_rows(tmp_path: Path) -> None:
    assert list(Journal(tmp_path / "none", resumed_from=3).rows()) == []


def test_a_resumed_run_keeps_its_id_and_a_fresh_start_gets_another(tmp_path: Path) -> None:
    recorded(tmp_path, 1).close({})
    first = identify(tmp_path, resume=False, project="p", name="n")
    recorded(tmp_path, 1, resume=True).close({})
    assert identify(tmp_path, resume=True, project="other", name="other") == first

    recorded(tmp_path, 1, overwrite=True).close({})
    second = identify(tmp_path, resume=False, project="p", name="n")
    assert second.run_id != first.run_id

    assert json.loads((tmp_path / "tracker_run_id.json").read_text())["run_id"] == second.run_id


def test_the_id_of_a_run_that_was_replaced_is_not_taken_up(tmp_path: Path) -> None:
    """Overwritten without trackers: the file there is of the old run."""
    recorded(tmp_path, 1).close({})
    first = identify(tmp_path, resume=False)
    recorded(tmp_path, 1, overwrite=True).close({})

    assert identify(tmp_path, resume=True).run_id != first.run_id


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"run_id": "", "project": "p", "name": "n"}'])
def test_a_damaged_identity_is_told_and_replaced(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tracker_run_id.json").write_text(content)

    found = identify(tmp_path, resume=True)

    assert found.name == tmp_path.name and found.project == "palingenesis"
    assert "the trackers get a new run" in caplog.text
    assert identify(tmp_path, resume=True) == found


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    with caplog.at_level(logging.WARNING):
        assert identify(tmp_path / "file", resume=False).run_id

    assert "cannot be written" in caplog.text
