"""Metrics and layers are sealed at the end of a run, and verify holds them against it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tests.record.runs import COMPLETED, INFO, alarm, kill, record, started, write_check

from palingenesis.events import Event
from palingenesis.record.reader import load_run
from palingenesis.record.verify import in_words, verify
from palingenesis.record.writer import RecordWriter


def sealed(folder: Path, *, checks: int = 3, resume_from: int | None = None, end: bool = True) -> Path:
    """A run as a monitor writes it: its last event holds what metrics and layers came to."""
    writer = RecordWriter(folder, INFO, resume=resume_from is not None)
    first = started() if resume_from is None else resumed(resume_from)
    writer.event(first)
    begin = (resume_from or 0) // 50
    for check in range(begin + 1, begin + checks + 1):
        write_check(writer, 50 * check)
    if end:
        close(writer, 50 * (begin + checks))
    else:
        kill(writer)
    return folder


def resumed(step: int) -> Event:
    return Event("run_resumed", step, "info", "resumed", {"from_step": step})


def close(writer: RecordWriter, step: int) -> None:
    fields = {"reason": "completed", "error": None, "steps": step, **writer.seal()}
    writer.event(Event("run_ended", step, "info", "the run ended", fields))
    writer.close({**COMPLETED, "steps": step})


def test_a_seal_is_of_what_is_on_disk(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    assert writer.seal()["metrics_bytes"] == 0
    write_check(writer, 50)
    writer.metrics({"train/global_step": 51, "train/loss": 1.0})
    seal = writer.seal()
    for name in ("metrics", "layers"):
        data = (tmp_path / "run" / f"{name}.jsonl").read_bytes()
        assert len(data) == seal[f"{name}_bytes"] > 0
        assert hashlib.sha256(data).hexdigest() == seal[f"{name}_sha256"]
    assert data.count(b"\n") == 2
    writer.close(COMPLETED)


def test_a_seal_that_cannot_be_made_is_empty_and_raises_nothing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    write_check(writer, 50)
    (tmp_path / "run" / "layers.jsonl").unlink()
    assert writer.seal() == {}
    write_check(writer, 100)
    assert writer.failure is not None
    assert writer.seal() == {}
    kill(writer)


def test_an_untouched_run_is_covered_to_its_end(tmp_path: Path) -> None:
    result = verify(sealed(tmp_path / "run"))
    assert (result.ok, result.events, result.sealed_step) == (True, 2, 150)
    assert in_words(result) == (
        "intact: 2 events, each as it was written; metrics and layers as they were at the end"
    )


@pytest.mark.parametrize("name", ["metrics.jsonl", "layers.jsonl"])
@pytest.mark.parametrize(
    ("how", "problem"),
    [
        (lambda data: data.replace(b"50", b"51", 1), "was altered"),
        (lambda data: data[:-30], "was cut short"),
        (lambda data: b"", "was cut short"),
        (lambda data: data + data.splitlines(keepends=True)[-1], "was added to"),
        (lambda data: data + b'{"step', "was added to"),
        (None, "is missing"),
    ],
)
def test_a_file_that_is_not_as_it_was_is_named(tmp_path: Path, name: str, how: object, problem: str) -> None:
    path = sealed(tmp_path / "run") / name
    if how is None:
        path.unlink()
    else:
        path.write_bytes(how(path.read_bytes()))  # type: ignore[operator]
    result = verify(tmp_path / "run")
    assert not result.ok
    assert str(result.problem).startswith(f"{name} {problem}")
    assert (result.line, result.events) == (None, 2)
    assert in_words(result) == f"not intact: {result.problem}"
    assert load_run(tmp_path / "run").verify() == result


def test_a_run_without_an_end_is_not_covered_and_says_so(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", alarm(60), end=None)
    assert in_words(verify(folder)) == (
        "intact: 2 events, each as it was written (metrics and layers are not covered: the run has no end)"
    )


def test_an_end_without_a_seal_is_not_covered_and_says_so(tmp_path: Path) -> None:
    ended = Event("run_ended", 100, "info", "ended", {"reason": "completed"})
    result = verify(record(tmp_path / "run", ended))
    assert result.ok
    assert "(metrics and layers are not covered: the end of the run holds no digest of them)" in in_words(
        result
    )


def test_every_end_of_a_resumed_run_is_checked(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "run")
    sealed(folder, resume_from=150)
    assert verify(folder)[:4] == (True, None, None, 4)
    path = folder / "layers.jsonl"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"step":50', b'"step":51', 1))
    assert str(verify(folder).problem) == (
        "layers.jsonl was altered: what stood in it at the end at step 150 is not there any more"
    )
    path.write_bytes(data.replace(b'"step":200', b'"step":201', 1))
    assert "at step 300" in str(verify(folder).problem)


def test_a_resumed_run_without_an_end_is_covered_to_the_one_before(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "run")
    sealed(folder, resume_from=150, end=False)
    result = verify(folder)
    assert (result.ok, result.sealed_step) == (True, 150)
    assert in_words(result) == (
        "intact: 3 events, each as it was written; metrics and layers as they were at step 150, "
        "and what came after is not covered"
    )


def test_a_seal_that_is_no_seal_is_not_trusted(tmp_path: Path) -> None:
    odd = {"metrics_bytes": "many", "metrics_sha256": 5, "layers_bytes": -1, "layers_sha256": ""}
    result = verify(record(tmp_path / "run", Event("run_ended", 100, "info", "ended", odd)))
    assert (result.ok, result.sealed_step) == (True, None)
