"""Every way of touching the events is found, and the first line of it named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.record.runs import COMPLETED, INFO, alarm, record

from palingenesis.record.verify import verify
from palingenesis.record.writer import RecordWriter

EVENTS = 8


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record(tmp_path / "run", *(alarm(100 + n) for n in range(EVENTS - 1)))


def change(run: Path, how: Callable[[list[bytes]], object]) -> None:
    path = run / "events.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1]
    how(lines)
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def rehash(line: bytes, **changes: object) -> bytes:
    """What a forger does who knows how a line is hashed."""
    event = {**json.loads(line), **changes}
    del event["hash"]
    text = json.dumps(event, separators=(",", ":"), ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**event, "hash": digest}, separators=(",", ":"), ensure_ascii=False).encode()


def swap(lines: list[bytes]) -> None:
    lines[3], lines[4] = lines[4], lines[3]


def put(index: int, text: Callable[[bytes], bytes]) -> Callable[[list[bytes]], None]:
    def how(lines: list[bytes]) -> None:
        lines[index] = text(lines[index])

    return how


def test_an_untouched_run_is_intact(run: Path) -> None:
    assert verify(run)[:4] == (True, None, None, EVENTS)


@pytest.mark.parametrize(
    ("how", "line", "problem"),
    [
        (put(3, lambda text: text.replace(b"-4.5", b"-4.6")), 4, "was altered"),
        (put(3, lambda text: text.replace(b"-4.5", b"-4.50")), 4, "was altered"),
        (put(3, lambda text: text.replace(b",", b", ", 1)), 4, "was altered"),
        (put(3, lambda text: text[:40]), 4, "no whole event any more"),
        (put(3, lambda text: b""), 4, "no whole event any more"),
        (put(3, lambda text: text[:-3] + bytes([text[-3] ^ 1]) + text[-2:]), 4, "was altered"),
        (put(3, lambda text: rehash(text, step=7)), 4, "was altered"),
        (put(EVENTS - 1, lambda text: rehash(text, step=7)), EVENTS, "not the last one of run.json"),
        (put(0, lambda text: rehash(text, prev="1" * 64)), 1, "does not begin a chain"),
        (lambda lines: lines.pop(3), 4, "event 4 is missing"),
        (lambda lines: lines.__delitem__(slice(3, 6)), 4, "events 4 to 6 are missing"),
        (lambda lines: lines.pop(0), 1, "event 1 is missing"),
        (lambda lines: lines.pop(), EVENTS, "is missing: run.json counts 8 events, 7 are whole"),
        (lambda lines: lines.clear(), 1, "is missing"),
        (swap, 4, "was reordered"),
        (lambda lines: lines.insert(4, lines[2]), 5, "was put in"),
        (
            lambda lines: lines.append(rehash(lines[-1], seq=9, prev=json.loads(lines[-1])["hash"])),
            9,
            "added",
        ),
    ],
)
def test_tampering_is_found(run: Path, how: Callable[[list[bytes]], object], line: int, problem: str) -> None:
    change(run, how)
    result = verify(run)
    assert not result.ok
    assert result.line == line
    assert problem in str(result.problem)


def test_every_single_byte_counts(run: Path) -> None:
    path = run / "events.jsonl"
    data = path.read_bytes()
    for position in range(0, len(data), 17):
        flipped = bytearray(data)
        flipped[position] ^= 1
        path.write_bytes(bytes(flipped))
        result = verify(run)
        assert not result.ok, position
        assert abs((result.line or 0) - 1 - data.count(b"\n", 0, position)) <= 1


def test_a_torn_last_line_of_a_killed_run_is_named_and_is_no_tampering(tmp_path: Path) -> None:
    run = record(tmp_path / "run", alarm(100), end=None)
    assert verify(run).ok
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"seq":3')
    result = verify(run)
    assert (result.ok, result.line, result.events) == (False, 3, 2)
    assert "torn" in str(result.problem)
    assert "readers leave it out" in str(result.problem)
    RecordWriter(run, INFO, resume=True).close(COMPLETED)
    assert verify(run).ok


def test_half_a_line_cut_off_a_run_that_ended_is_a_missing_line(run: Path) -> None:
    data = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(data[:-20])
    result = verify(run)
    assert (result.ok, result.line) == (False, EVENTS)
    assert "is torn: run.json counts 8 events, 7 are whole" in str(result.problem)


def test_events_that_are_gone_altogether_are_a_problem(run: Path) -> None:
    (run / "events.jsonl").unlink()
    assert verify(run)[:4] == (False, "events.jsonl is missing", None, 0)
