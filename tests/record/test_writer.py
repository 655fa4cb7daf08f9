"""What lands on disk, and when."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.record.runs import COMPLETED, INFO, LAYERS, alarm, info, kill, record, started, write_check

from palingenesis.errors import RecordBusyError, RecordError, RecordExistsError
from palingenesis.events import Event
from palingenesis.record.reader import load_run
from palingenesis.record.verify import verify
from palingenesis.record.writer import RecordWriter


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_a_run_leaves_the_files_of_the_record(tmp_path: Path) -> None:
    folder = record(tmp_path / "deep" / "run", alarm(100))
    assert sorted(path.name for path in folder.iterdir()) == [
        "events.jsonl",
        "layers.jsonl",
        "metrics.jsonl",
        "run.json",
    ]
    run = json.loads((folder / "run.json").read_text("utf-8"))
    assert run["record_version"] == 1
    assert run["name"] == "a run"
    assert run["resumed_from"] == []
    events = lines(folder / "events.jsonl")
    assert run["end"]["events"] == len(events) == 2
    assert run["end"]["last_hash"] == events[-1]["hash"]


def test_an_event_line_has_its_keys_in_order_and_carries_the_chain(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    first = writer.event(started())
    second = writer.event(alarm(100))
    writer.close(COMPLETED)
    on_disk = lines(tmp_path / "run" / "events.jsonl")
    head = ["seq", "time", "step", "event", "severity", "message"]
    assert list(on_disk[1]) == [*head, "layer", "diagnosis", "value", "baseline", "sigma", "prev", "hash"]
    assert (first.seq, second.seq) == (1, 2)
    assert first.prev == "0" * 64
    assert second.prev == first.hash
    assert second.layer == "blocks.0"
    without = {key: value for key, value in on_disk[1].items() if key != "hash"}
    text = json.dumps(without, separators=(",", ":"), ensure_ascii=False)
    assert on_disk[1]["hash"] == second.hash == hashlib.sha256(text.encode()).hexdigest()


def test_warnings_are_on_disk_at_once_and_the_rest_at_the_next_check(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    events = tmp_path / "run" / "events.jsonl"
    writer.event(started())
    writer.metrics({"train/global_step": 1})
    assert events.read_bytes() == b""
    writer.event(alarm(1))
    assert len(lines(events)) == 2
    writer.event(info(2))
    assert len(lines(events)) == 2
    write_check(writer, 50)
    assert len(lines(events)) == 3
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 2
    writer.close(COMPLETED)


def test_the_events_of_one_moment_go_to_the_disk_together(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    stamped = writer.events([started(), alarm(50), alarm(50, "head")])
    assert [event.seq for event in stamped] == [1, 2, 3]
    assert len(lines(tmp_path / "run" / "events.jsonl")) == 3
    assert writer.events([]) == []
    writer.close(COMPLETED)


def test_a_check_writes_a_header_when_the_layers_change(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    writer.check(50, 0, ["a", "b"], [1.23456789, None])
    writer.check(100, 1, ["a", "b"], [math.nan, np.float32(0.5)])
    writer.check(150, 2, ["a", "c"], [0.0, math.inf])
    writer.close(COMPLETED)
    assert lines(tmp_path / "run" / "layers.jsonl") == [
        {"layers": ["a", "b"]},
        {"step": 50, "judged": 0, "norm": [1.234568, None]},
        {"step": 100, "judged": 1, "norm": ["NaN", 0.5]},
        {"layers": ["a", "c"]},
        {"step": 150, "judged": 2, "norm": [0, "Infinity"]},
    ]
    with pytest.raises(RecordError, match="closed"):
        writer.flush()


def test_a_check_with_a_norm_too_few_is_refused(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    with pytest.raises(RecordError, match="2 layers came with 1 norms"):
        writer.check(50, 0, ["a", "b"], [1.0])
    kill(writer)


def test_run_json_can_be_changed_on_the_way(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    writer.update_info(gradients="clipped")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["gradients"] == "clipped"
    writer.close(COMPLETED)
    writer.close({"reason": "exception"})  # says nothing the second time
    assert load_run(tmp_path / "run").info["end"]["reason"] == "completed"


def test_many_rows_without_a_check_do_not_pile_up_in_memory(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    for step in range(1, 3001):
        writer.metrics({"train/global_step": step, "train/loss": 1.0})
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 50_000
    writer.close(COMPLETED)
    assert len(load_run(tmp_path / "run").metrics.step) == 3000


def test_a_row_costs_microseconds(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    row = {"train/global_step": 1, "time": 1.0, "train/loss": 1.0, "train/lr": 1e-3}
    start = time.process_time()
    for _ in range(2000):
        writer.metrics(row)
    assert (time.process_time() - start) / 2000 < 100e-6
    writer.close(COMPLETED)


def test_threads_write_whole_lines_and_a_whole_chain(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    threads = [threading.Thread(target=lambda: [writer.event(info(n)) for n in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close(COMPLETED)
    assert verify(tmp_path / "run")[:4] == (True, None, None, 200)


# ---------------------------------------------------------------------- folders that are taken


def test_a_second_run_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    before = (folder / "events.jsonl").read_bytes()
    with pytest.raises(RecordExistsError, match=r"holds the run 'a run' .*resume=True.*overwrite=True"):
        RecordWriter(folder, INFO)
    assert (folder / "events.jsonl").read_bytes() == before
    assert not (folder / ".lock").exists()


def test_a_run_without_a_name_is_refused_without_one(tmp_path: Path) -> None:
    RecordWriter(tmp_path / "run", {**INFO, "name": None}).close(COMPLETED)
    with pytest.raises(RecordExistsError, match=r"already holds the run \(started 2") as caught:
        RecordWriter(tmp_path / "run", INFO)
    assert "None" not in str(caught.value)


def test_overwrite_removes_the_old_run_and_nothing_else(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", alarm(100))
    (folder / "notes.txt").write_text("mine")
    (folder / "report.html").write_text("old")
    writer = RecordWriter(folder, INFO, overwrite=True)
    assert not writer.resumed
    writer.event(started())
    writer.close(COMPLETED)
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "report.html").exists()
    assert len(load_run(folder).events) == 1


def test_a_folder_with_other_files_in_it_is_fine(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "events.jsonl").touch()
    RecordWriter(tmp_path, INFO).close(COMPLETED)
    assert load_run(tmp_path).info["end"]["events"] == 0


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="exclude each other"):
        RecordWriter(tmp_path, INFO, resume=True, overwrite=True)


def test_another_writer_of_the_same_process_is_refused(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(RecordBusyError, match="another monitor is writing"):
            RecordWriter(tmp_path / "run", INFO, **options)
    writer.event(started())
    writer.close(COMPLETED)
    assert verify(tmp_path / "run").ok


# ---------------------------------------------------------------------- resuming


def test_resume_continues_the_record(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", alarm(100))
    first = load_run(folder)
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"seq":3,"time":"20')
    with (folder / "layers.jsonl").open("ab") as file:
        file.write(b'{"step":150,"ju')
    writer = RecordWriter(folder, {**INFO, "name": None, "versions": {"torch": "9"}}, resume=True)
    assert writer.resumed
    assert writer.last_step == 100
    assert load_run(folder).info["end"] is None
    writer.event(Event("run_resumed", 100, "info", "resumed", {"from_step": 100}))
    write_check(writer, 150)
    writer.close({**COMPLETED, "steps": 150})
    run = load_run(folder)
    assert run.verify()[:4] == (True, None, None, 3)
    assert [event.seq for event in run.events] == [1, 2, 3]
    assert [run.info[key] for key in ("run_id", "start", "name")] == [
        first.info[key] for key in ("run_id", "start", "name")
    ]
    assert run.info["versions"] == {"torch": "9"}
    assert run.info["resumed_from"] == [100]
    assert run.layers.step.tolist() == [50, 100, 150]
    assert run.problems == []


def test_resume_without_a_run_starts_one(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "new", INFO, resume=True)
    assert not writer.resumed
    assert writer.last_step == 0
    writer.close(COMPLETED)


def test_resume_after_resume(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    for from_step in (100, 90):
        writer = RecordWriter(folder, INFO, resume=True)
        writer.event(Event("run_resumed", from_step, "info", "resumed", {"from_step": from_step}))
        write_check(writer, from_step + 50)
        kill(writer)
    run = load_run(folder)
    assert run.info["resumed_from"] == [100, 90]
    assert run.layers.step.tolist() == [50, 140]
    assert run.verify().ok


def test_a_run_with_a_damaged_run_json_is_not_resumed(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    (folder / "run.json").write_text("{")
    with pytest.raises(RecordError, match=r"cannot be resumed: run\.json cannot be read as JSON"):
        RecordWriter(folder, INFO, resume=True)


def test_steps_that_were_run_again_supersede_the_old_ones(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    writer = RecordWriter(folder, INFO)
    writer.event(started())
    for step in (50, 100, 150):
        write_check(writer, step, norms=[1.0, 1.0, 1.0])
    writer.event(Event("nonfinite", 150, "critical", "the loss is NaN", {"source": "loss"}))
    writer.close({**COMPLETED, "reason": "exception", "error": "ValueError: NaN"})
    assert load_run(folder).verdict == "CRITICAL"

    writer = RecordWriter(folder, INFO, resume=True)
    writer.event(Event("run_resumed", 100, "info", "resumed from step 100", {"from_step": 100}))
    # A check at a coarser rhythm: no later row has the old row's step, and still it is superseded.
    write_check(writer, 200, norms=[2.0, 2.0, 2.0])
    writer.close({**COMPLETED, "steps": 200})
    run = load_run(folder)
    assert run.metrics["step"].tolist() == [50, 100, 200]
    assert run.layers["embed"].tolist() == [1.0, 1.0, 2.0]
    assert [bool(event.superseded) for event in run.events] == [False, True, False]
    assert run.verdict == "HEALTHY"
    assert "1 bad event of steps that were run again" in run.verdict_sentence
    assert run.verify().ok


def test_layers_keep_their_names_when_a_resumed_run_has_others(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", checks=1)
    writer = RecordWriter(folder, INFO, resume=True)
    writer.check(100, 2, ["head", "new"], [7.0, 8.0])
    writer.close(COMPLETED)
    layers = load_run(folder).layers
    assert list(layers) == [*LAYERS, "new"]
    assert layers["head"].tolist() == [3.0, 7.0]
    assert np.isnan(layers["embed"][1])
    assert not layers.absent("embed")[1]
