"""One word on a run: each of them, in its order, from the record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.record.runs import COMPLETED, INFO, LAYERS, alarm, info, record, started

from palingenesis.events import Event
from palingenesis.record.reader import load_run
from palingenesis.record.verdict import WORDS, judge, lacking
from palingenesis.record.writer import RecordWriter

CRITICAL = Event("nonfinite", 60, "critical", "the loss is NaN", {"source": "loss", "layers": ["head"]})
FAILED = Event("monitor_error", 70, "warning", "the monitor failed", {"error": "KeyError: 'x'"})
UNREAD = Event("signal_unavailable", 0, "info", "2 layers are not read", {"signal": "gradient_norm"})
CRASH = {"reason": "exception", "error": "RuntimeError: CUDA out of\n memory", "steps": 80}
CRASHED = Event("run_ended", 80, "warning", "ended with an exception", CRASH)


CASES: list[tuple[str, list[Event], tuple[int, int, int], dict[str, Any] | None, str]] = [
    ("CRITICAL", [alarm(50), CRITICAL], (4, 4, 0), None, "step 60: the loss is NaN"),
    ("NOT MONITORED", [alarm(50), FAILED], (4, 4, 0), None, "none of the 4 checks saw a gradient"),
    ("NOT MONITORED", [], (1, 1, 0), COMPLETED, "the only check saw no gradient"),
    ("PARTLY MONITORED", [alarm(50)], (4, 1, 3), None, "1 of 4 checks saw no gradient"),
    ("PARTLY MONITORED", [FAILED], (4, 0, 3), COMPLETED, "step 70: the monitor failed"),
    ("PARTLY MONITORED", [UNREAD], (4, 0, 3), COMPLETED, "2 layers are not read"),
    ("NOT MONITORED", [UNREAD], (4, 4, 0), COMPLETED, "2 layers are not read"),
    ("WARNING", [alarm(50)], (4, 0, 3), None, "step 50: blocks.0 is vanishing"),
    (
        "WARNING",
        [alarm(90), alarm(50)],
        (4, 0, 0),
        COMPLETED,
        "step 50: blocks.0 is vanishing (and 1 more)",
    ),
    ("WARNING", [alarm(50)], (4, 0, 3), CRASH, "then ended with RuntimeError: CUDA out of memory"),
    ("INTERRUPTED", [started()], (4, 0, 3), None, "no end"),
    ("INTERRUPTED", [CRASHED], (4, 0, 3), CRASH, "RuntimeError: CUDA out of memory after 80 steps"),
    ("UNKNOWN", [started()], (0, 0, 0), COMPLETED, "no check was made: the run ended after 100 steps"),
    ("UNKNOWN", [started()], (4, 0, 0), COMPLETED, "still warming up"),
    ("HEALTHY", [started()], (4, 0, 3), COMPLETED, "4 checks in 100 steps, and nothing rang"),
]


@pytest.mark.parametrize(("word", "events", "counts", "end", "fact"), CASES)
def test_the_verdict(
    word: str, events: list[Event], counts: tuple[int, int, int], end: dict[str, Any] | None, fact: str
) -> None:
    verdict = judge(events, *counts, end)
    assert verdict.word == word
    assert fact in verdict.sentence
    assert "\n" not in verdict.sentence


def test_every_word_is_tried_above() -> None:
    assert {case[0] for case in CASES} == set(WORDS)


def test_an_incident_tells_more_than_its_alarms() -> None:
    incident = Event(
        "incident", 50, "warning", "3 layers", {"layers": ["head", "blocks.0", "embed"], "origin": "head"}
    )
    sentence = judge([alarm(50), alarm(50, "head"), incident], 4, 0, 3, COMPLETED).sentence
    assert sentence == "step 50: 3 layers (and 2 more)"


def test_a_very_long_exception_is_shortened() -> None:
    sentence = judge([], 4, 0, 3, {**CRASH, "error": "ValueError: " + "x" * 5000}).sentence
    assert len(sentence) < 300


@pytest.mark.parametrize(
    ("norms", "word"),
    [
        ([[1.0, 2.0, 3.0]] * 3, "HEALTHY"),
        ([[None, 0.0, 0.0]] * 3, "NOT MONITORED"),
        ([[None] * 3, [1.0, None, 0.0], [1.0] * 3], "PARTLY MONITORED"),
        ([[float("nan"), None, None]] * 3, "HEALTHY"),  # a gradient was seen; that it is NaN is an event
        ([], "UNKNOWN"),
    ],
)
def test_the_verdict_comes_from_the_rows_on_disk(tmp_path: Path, norms: list[list[Any]], word: str) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    writer.event(started())
    for number, row in enumerate(norms, 1):
        writer.check(50 * number, 3, LAYERS, row)
    writer.close({**COMPLETED, "counts": {"checks": 99, "checks_without_gradients": 0}})
    assert load_run(tmp_path / "run").verdict == word


def test_a_killed_run_is_interrupted_and_a_warning_is_still_a_warning(tmp_path: Path) -> None:
    assert load_run(record(tmp_path / "a", end=None)).verdict == "INTERRUPTED"
    assert load_run(record(tmp_path / "b", alarm(60), end=None)).verdict == "WARNING"


def test_an_end_that_is_no_object_is_no_end(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text[: text.index('"end"')] + '"end": 5}')
    assert load_run(folder).verdict == "INTERRUPTED"


def lines_kept(folder: Path, how_many: int) -> None:
    path = folder / "events.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:how_many]))


@pytest.mark.parametrize("kept", [None, 0, 1, 2])
def test_a_verdict_never_claims_more_than_the_record_holds(tmp_path: Path, kept: int | None) -> None:
    folder = record(tmp_path / "run", info(60), alarm(80))
    if kept is None:
        (folder / "events.jsonl").unlink()
    else:
        lines_kept(folder, kept)
    run = load_run(folder)
    assert run.verdict == "UNKNOWN"
    assert f"{3 - (kept or 0)} of 3 events" in run.verdict_sentence
    assert "pgs verify" in run.verdict_sentence
    assert "\n" not in run.verdict_sentence


def test_an_event_taken_out_of_the_middle_or_unreadable_is_missing(tmp_path: Path) -> None:
    for number, line in enumerate((b"", b'{"seq":\n')):
        folder = record(tmp_path / str(number), alarm(60), info(80))
        path = folder / "events.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(lines[0] + line + lines[2])
        run = load_run(folder)
        assert run.verdict == "UNKNOWN"
        assert "1 of 3 events is missing" in run.verdict_sentence


def test_events_of_another_run_are_not_this_ones(tmp_path: Path) -> None:
    folder, other = record(tmp_path / "run", alarm(60)), record(tmp_path / "other", info(60))
    (folder / "events.jsonl").write_bytes((other / "events.jsonl").read_bytes())
    run = load_run(folder)
    assert run.verdict == "UNKNOWN"
    assert "not the ones that the run ended with" in run.verdict_sentence


def test_worse_verdicts_keep_their_word_and_say_what_is_missing(tmp_path: Path) -> None:
    warned = record(tmp_path / "warned", alarm(60), info(80))
    lines_kept(warned, 2)
    assert load_run(warned).verdict == "WARNING"
    assert load_run(warned).verdict_sentence == (
        "step 60: blocks.0 is vanishing; 1 of 3 events is missing from the record: run `pgs verify` on it"
    )
    killed = record(tmp_path / "killed", info(60), alarm(80), end=None)
    path = killed / "events.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[2:]))
    assert load_run(killed).verdict == "WARNING"
    assert "2 of 3 events are missing" in load_run(killed).verdict_sentence
    path.write_bytes(b"")
    assert load_run(killed).verdict == "INTERRUPTED"
    assert "its beginning is missing" in load_run(killed).verdict_sentence


def test_a_whole_record_lacks_nothing(tmp_path: Path) -> None:
    for folder in (record(tmp_path / "a", alarm(60)), record(tmp_path / "b", end=None)):
        run = load_run(folder)
        assert lacking(run.events, run.info["end"]) is None


@pytest.mark.parametrize(
    ("judged", "config", "word"),
    [
        ([0, 0, 3], {}, "UNKNOWN"),
        ([0, 3, 3], {}, "HEALTHY"),
        ([0, 3, 3], {"consecutive": 3}, "UNKNOWN"),
        ([0, 0, 3], {"consecutive": 1}, "HEALTHY"),
        ([0, 3, 3], {"consecutive": "many"}, "HEALTHY"),
        ([0, 3, 3], None, "HEALTHY"),
    ],
)
def test_healthy_needs_as_many_judged_checks_as_an_alarm_does(
    tmp_path: Path, judged: list[int], config: dict[str, Any] | None, word: str
) -> None:
    writer = RecordWriter(tmp_path / "run", {**INFO, "config": config})
    writer.event(started())
    for number, layers in enumerate(judged, 1):
        writer.check(50 * number, layers, LAYERS, [1.0, 2.0, 3.0])
    writer.close(COMPLETED)
    run = load_run(tmp_path / "run")
    assert run.verdict == word
    if word == "UNKNOWN":
        assert "no alarm could have fired" in run.verdict_sentence
