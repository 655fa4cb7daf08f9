"""A folder in, a Run out; bad folders in one line."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.record.runs import COMPLETED, INFO, alarm, info, python, record

import palingenesis
from palingenesis.errors import RecordError
from palingenesis.events import Event
from palingenesis.record.columns import metric_columns
from palingenesis.record.reader import load_run
from palingenesis.record.verify import verify
from palingenesis.record.writer import RecordWriter


def test_events_have_their_fields_as_attributes(tmp_path: Path) -> None:
    run = palingenesis.load_run(record(tmp_path / "run", alarm(100)))
    event = run.events[1]
    assert (event.event, event.step, event.severity, event.layer) == ("alarm", 100, "warning", "blocks.0")
    assert event.seq == 2
    assert event.time.endswith("+00:00")
    assert event.prev == run.events[0].hash
    assert event.incident is None


def test_non_finite_numbers_come_back_as_floats_and_texts_stay(tmp_path: Path) -> None:
    fields = {"value": math.nan, "baseline": -math.inf, "layer": "NaN", "layers": ["Infinity"]}
    text = Event("nonfinite", 2, "critical", "NaN", {"value": "NaN", "source": "loss"})
    run = load_run(record(tmp_path / "run", Event("alarm", 1, "warning", "odd", fields), text))
    assert math.isnan(run.events[1].value)
    assert run.events[1].baseline == -math.inf
    assert run.events[1].layer == "NaN"
    assert run.events[1].layers == ["Infinity"]
    assert run.events[2].value == "NaN"


def test_metrics_are_columns_whose_rows_may_differ(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    writer.metrics({"train/global_step": 1, "time": 5.0, "train/loss": 2.0})
    writer.metrics({"train/global_step": 2, "time": 6.0, "train/loss": math.nan, "train/lr": np.float32(0.5)})
    writer.metrics({"train/global_step": 3, "train/loss": math.inf})
    writer.close(COMPLETED)
    metrics = load_run(tmp_path / "run").metrics
    assert list(metrics) == ["train/global_step", "time", "train/loss", "train/lr"]
    assert "step" in metrics
    assert metrics["step"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(metrics["train/loss"], [2.0, np.nan, np.inf])
    np.testing.assert_array_equal(metrics["train/lr"], [np.nan, 0.5, np.nan])
    assert metrics["time"][2] > 1e9
    assert all(column.dtype == np.float64 for column in metrics.values())
    with pytest.raises(KeyError, match="did you mean 'train/loss'"):
        metrics["train/los"]


def test_layers_tell_an_absent_gradient_from_a_zero_one(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    writer.check(50, 0, ["a", "b"], [None, 0.0])
    writer.check(100, 2, ["a", "b"], [math.nan, 4.0])
    writer.close(COMPLETED)
    run = load_run(tmp_path / "run")
    np.testing.assert_array_equal(run.layers["a"], [np.nan, np.nan])
    np.testing.assert_array_equal(run.layers["b"], [0.0, 4.0])
    assert run.layers.absent("a").tolist() == [True, False]
    assert run.layers["step"].tolist() == [50, 100]
    assert run.layers.names == ("a", "b")
    assert run.layers.matrix.shape == (2, 2)
    assert run.judged.tolist() == [0, 2]
    assert run.checks_without_gradients == 1
    with pytest.raises(KeyError, match="no layer 'z'"):
        run.layers.absent("z")


def test_a_run_without_rows_has_empty_columns(tmp_path: Path) -> None:
    run = load_run(record(tmp_path / "run", checks=0))
    assert len(run.metrics) == len(run.layers) == 0
    assert run.layers["step"].shape == run.metrics["step"].shape == (0,)
    assert run.layers.matrix.shape == (0, 0)


def test_a_torn_last_line_is_left_out_in_silence(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", end=None)
    for name in ("events.jsonl", "metrics.jsonl", "layers.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'{"step":150,"ev')
    run = load_run(folder)
    assert [event.event for event in run.events] == ["run_started"]
    assert run.layers.step.tolist() == [50, 100]
    assert run.problems == []


def test_other_damage_is_left_out_and_named(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", info(60), info(70))
    events = (folder / "events.jsonl").read_bytes().split(b"\n")
    (folder / "events.jsonl").write_bytes(b"\n".join([events[0], b'{"seq":', b'{"seq": 3}', events[2], b""]))
    with (folder / "layers.jsonl").open("ab") as file:
        file.write(b'{"step":150,"judged":1,"norm":[1]}\n{"step":150,"judged":1,"norm":[1,"x",2]}\n[]\n\n')
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\x00\n")
    run = load_run(folder)
    assert [event.step for event in run.events] == [0, 70]
    assert run.layers.step.tolist() == [50, 100]
    told = [problem.split(" cannot")[0] for problem in run.problems]
    assert told == [
        "events.jsonl line 2",
        "events.jsonl line 3",
        "metrics.jsonl line 3",
        *(f"layers.jsonl line {n}" for n in (4, 5, 6, 7)),
    ]


def test_bare_nan_in_a_row_is_tolerated(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"train/global_step": 150, "train/loss": NaN}\n')
    run = load_run(folder)
    assert run.problems == []
    assert math.isnan(run.metrics["train/loss"][-1])


def test_a_damaged_run_json_leaves_the_events_readable(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", alarm(100))
    (folder / "run.json").write_text("{")
    run = load_run(folder)
    assert len(run.events) == 2
    assert "run.json cannot be read as JSON" in run.problems[0]
    assert not run.verify().ok


def edit(folder: Path, **changes: object) -> None:
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, **changes}))


@pytest.mark.parametrize("read", [load_run, verify])
def test_bad_folders_are_errors_in_one_line(tmp_path: Path, read: object) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").touch()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text('{"some": "thing"}')
    newer = record(tmp_path / "newer")
    edit(newer, record_version=2)
    odd = record(tmp_path / "odd")
    edit(odd, record_version="one")
    events = record(tmp_path / "events")
    (events / "run.json").unlink()
    text = (events / "events.jsonl").read_text()
    (events / "events.jsonl").write_text(text.replace('"record_version":1', '"record_version":2'))
    expected = {
        "missing": "no run folder at",
        "file": "is a file, expected a run folder",
        "empty": "is empty",
        "other": "holds no run",
        "foreign": "not of this program",
        "newer": "record version 2, this palingenesis reads up to 1",
        "odd": "record_version 'one'",
        "events": "events.jsonl in .* has record version 2",
    }
    for name, message in expected.items():
        with pytest.raises(RecordError, match=message) as caught:
            read(tmp_path / name)  # type: ignore[operator]
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)


def test_reading_and_writing_need_no_torch(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["torch"] = None
from tests.record.runs import *
from palingenesis import load_run
print(load_run(record(Path(sys.argv[1]), alarm(100))).verdict)
"""
    done = python(program, tmp_path / "run", cwd=Path(__file__).parent.parent.parent)
    assert done.stdout == "WARNING\n", done.stderr


def test_many_numbers_in_few_rows_take_little_memory(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"train/global_step": step, "train/loss": 1.0} for step in range(1, 20_001)]
    for row in rows[::100]:
        row |= {f"health/stable_rank/{layer}": float(layer) for layer in range(300)}
    tracemalloc.start()
    columns = metric_columns(rows)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8_000_000  # whole columns would take 48 MB
    assert len(columns) == 302
    ranks = columns["health/stable_rank/7"]
    assert ranks.shape == (20_000,)
    assert (~np.isnan(ranks)).sum() == 200 and ranks[100] == 7.0 and np.isnan(ranks[101])
