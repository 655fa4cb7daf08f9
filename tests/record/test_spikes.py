"""Files in ``spikes/``: what is written is read, and what no longer counts is left out."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.record.runs import COMPLETED, INFO, started, write_check

from palingenesis import load_run
from palingenesis.errors import RecordError
from palingenesis.events import Event
from palingenesis.record.spikes import (
    SPIKES_FOLDER,
    MicroBatch,
    Sample,
    Spike,
    read_spikes,
    write_spike,
)
from palingenesis.record.writer import RecordWriter

SAMPLES = (
    Sample(7, "chats", 12, 40, 9, (1, 2, 3), "a question", {"score": 0.5}),
    Sample(8, tokens=5, first_tokens=(4,)),
)
SPIKE = Spike(
    step=12,
    event="loss_spike",
    severity="warning",
    message="the loss jumped",
    loss=9.5,
    baseline=2.0,
    time="2026-01-01T00:00:01.000+00:00",
    ranks=2,
    batch="00ff00ff00ff",
    microbatches=(MicroBatch(SAMPLES, 4.5, 3, {"input_ids": (5, 40)}), MicroBatch((), math.inf)),
    before=(MicroBatch(SAMPLES[:1]),),
    notes=("something is not known",),
)


def spike(step: int, **changes: Any) -> Spike:
    return dataclasses.replace(SPIKE, step=step, **changes)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = write_spike(tmp_path, SPIKE)
    assert file == tmp_path / "spikes" / "step_12.json"
    assert read_spikes(tmp_path) == [SPIKE]
    assert SPIKE.samples == SAMPLES and SPIKE.samples_before == SAMPLES[:1]
    json.loads(file.read_text("utf-8"), parse_constant=pytest.fail)  # strict: no bare NaN or Infinity
    assert [one.name for one in file.parent.iterdir()] == ["step_12.json"]


def test_a_loss_that_is_no_number_comes_back_as_such(tmp_path: Path) -> None:
    write_spike(tmp_path, spike(3, loss=math.nan, baseline=None))
    (found,) = read_spikes(tmp_path)
    assert found.loss is not None and math.isnan(found.loss)
    assert found.baseline is None


def test_they_come_in_the_order_of_steps_and_ranks(tmp_path: Path) -> None:
    for step, rank in ((100, 1), (9, 0), (100, 0), (20, 3)):
        write_spike(tmp_path, spike(step, rank=rank))
    assert [(one.step, one.rank) for one in read_spikes(tmp_path)] == [(9, 0), (20, 3), (100, 0), (100, 1)]
    assert (tmp_path / "spikes" / "step_20-rank_3.json").is_file()


def test_a_folder_without_any_has_none(tmp_path: Path) -> None:
    assert read_spikes(tmp_path) == []
    assert read_spikes(tmp_path / "nowhere") == []


def test_files_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    write_spike(tmp_path, SPIKE)
    folder = tmp_path / SPIKES_FOLDER
    (folder / "step_1.json").write_text('{"step": 1, "event"')
    (folder / "step_2.json").write_text("[]")
    (folder / "step_3.json").write_bytes(b"\xff\x00")
    (folder / "step_4.json").write_text('{"step": "4"}')
    (folder / "notes.json").write_text('{"step": 5}')
    odd = '{"step": 6, "microbatches": 3, "before": [1, {"samples": "x", "shapes": 2}], "loss": "many"}'
    (folder / "step_6.json").write_text(odd)
    found = read_spikes(tmp_path)
    assert [one.step for one in found] == [6, 12]
    assert found[0].samples == () and found[0].loss is not None and math.isnan(found[0].loss)


def test_steps_that_a_resumed_run_did_again_do_not_count(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, INFO)
    writer.event(started())
    write_spike(tmp_path, spike(12))
    write_spike(tmp_path, spike(30))
    writer.close(COMPLETED)
    again = RecordWriter(tmp_path, INFO, resume=True)
    again.event(Event("run_resumed", 20, "info", "goes on", {"from_step": 20}))
    assert [one.step for one in read_spikes(tmp_path)] == [12]
    write_spike(tmp_path, spike(25, time="9999-01-01T00:00:00.000+00:00"))
    assert [one.step for one in read_spikes(tmp_path)] == [12, 25]
    write_check(again, 50)
    again.close(COMPLETED)


def test_replacing_a_run_removes_its_spikes_and_nothing_else(tmp_path: Path) -> None:
    RecordWriter(tmp_path, INFO).close(COMPLETED)
    write_spike(tmp_path, SPIKE)
    (tmp_path / SPIKES_FOLDER / "mine.txt").write_text("kept")
    RecordWriter(tmp_path, INFO, overwrite=True).close(COMPLETED)
    assert [one.name for one in (tmp_path / SPIKES_FOLDER).iterdir()] == ["mine.txt"]
    (tmp_path / SPIKES_FOLDER / "mine.txt").unlink()
    RecordWriter(tmp_path, INFO, overwrite=True).close(COMPLETED)
    assert not (tmp_path / SPIKES_FOLDER).exists()


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spike(tmp_path, SPIKE)

    def refused(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(RecordError, match=r"spikes in .* cannot be read: Permission denied"):
        read_spikes(tmp_path)


def test_names_say_where_a_sample_is() -> None:
    assert SAMPLES[0].name == "chats row 12"
    assert SAMPLES[1].name == "data set index 8"
    assert Sample(source="chats").name == "chats"
    assert Sample(row=3).name == "data row 3"


def test_the_training_configuration_is_read(tmp_path: Path) -> None:
    training = {"by": "pgs train", "learning_rate": 1e-4, "options": {"train.seed": 1}}
    RecordWriter(tmp_path / "a", {**INFO, "training": training}).close(COMPLETED)
    RecordWriter(tmp_path / "b", INFO).close(COMPLETED)
    RecordWriter(tmp_path / "c", {**INFO, "training": [1]}).close(COMPLETED)
    assert load_run(tmp_path / "a").training == training
    assert load_run(tmp_path / "b").training == load_run(tmp_path / "c").training == {}


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    write_spike(tmp_path, SPIKE)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from palingenesis.record.spikes import read_spikes\n"
        f"assert read_spikes({str(tmp_path)!r})[0].step == 12"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
