"""Damaged logs: no crash, a table that holds together, and the same table whichever way lines are read."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runlogs.damage import damaged

from palingenesis.errors import PalingenesisError
from palingenesis.runlogs import text as text_module
from palingenesis.runlogs.read import read_log
from palingenesis.runlogs.table import RunLog
from palingenesis.runlogs.text import TextLog


def read_bytes(data: bytes) -> RunLog | None:
    """What ``read_log`` says of these bytes; nothing where it refuses them, in one line."""

    class Stdin:
        buffer = io.BytesIO(data)

    before, sys.stdin = sys.stdin, Stdin()  # type: ignore[assignment]
    try:
        return read_log("-")
    except PalingenesisError as error:
        one_line(error)
        return None
    finally:
        sys.stdin = before


def one_line(error: PalingenesisError) -> None:
    assert "\n" not in str(error)


def check(log: RunLog) -> None:
    """Whoever reads the table finds it as it is documented."""
    for column in log.columns.values():
        assert len(column.row) == len(column.step) == len(column.value) > 0
        assert column.row[0] >= 0 and column.row[-1] < log.rows and np.all(np.diff(column.row) > 0)
        assert np.all(np.isfinite(column.step)) and np.all(column.step >= 0)
    for name in log.columns:
        log.live(name)
    training = log.live("train/loss")
    if training and log.processes == 1 and not log.step_inferred:
        assert log.last_step is not None
    assert all(
        0 < restart.row < log.rows and restart.to_step <= restart.from_step for restart in log.restarts
    )
    assert all(event.line >= 0 and event.text for event in log.events)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_damaged_logs_are_read_or_refused(seed: int) -> None:
    log = read_bytes(damaged(seed))
    if log is not None:
        check(log)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.binary(max_size=3000) | st.text(max_size=2000).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_anything_is_read_or_refused(data: bytes) -> None:
    log = read_bytes(data)
    if log is not None:
        check(log)


class _NotFast:
    """No lines are read together."""

    def __new__(cls, *given: object, **named: object) -> None:  # type: ignore[misc]
        return None


def in_pieces(data: bytes, size: int) -> TextLog:
    log = TextLog("log")
    for place in range(0, len(data), size):
        log.feed(data[place : place + size])
    log.finish()
    return log


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([700, 5000, 40_000]))
def test_lines_read_together_give_what_lines_read_one_by_one_give(seed: int, size: int) -> None:
    data = damaged(seed)
    # So that there is something to learn from, and something to use it on.
    data = data + b"\n" + data + b"\n" + data
    together = in_pieces(data, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "FastReader", _NotFast)
        single = in_pieces(data, 300)
    assert together.known == single.known
    if not single.known:
        return
    one, other = together.table(), single.table()
    assert (one.format, one.rows, one.lines, one.unread) == (
        other.format,
        other.rows,
        other.lines,
        other.unread,
    )
    assert one.columns.keys() == other.columns.keys() and one.events == other.events
    for name, column in one.columns.items():
        for mine, theirs in zip(column, other.columns[name], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


def test_a_damaged_file_of_a_tracker_is_read_or_refused(tmp_path: Path) -> None:
    """TensorBoard's, wandb's and SQLite's first bytes, and then anything."""
    rng = np.random.default_rng(0)
    starts = [
        b"SQLite format 3\x00",
        b":W&B\xe6\xbe\x00",
        b"\x18" + bytes(7) + b"abcd\x09aaaaaaaa\x1a\x0dbrain.Event:2",
    ]
    for case in range(90):
        path = tmp_path / "file"
        path.write_bytes(
            starts[case % 3] + rng.integers(0, 256, int(rng.integers(0, 900)), np.uint8).tobytes()
        )
        try:
            check(read_log(path))
        except PalingenesisError as error:
            one_line(error)
