"""A log that grows, is rotated, cut, written anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from palingenesis.errors import RunLogError
from palingenesis.runlogs.follow import Follower
from palingenesis.runlogs.read import read_log


def rows(first: int, last: int) -> str:
    return "".join(f"step={s} loss={3 - s / 100:.4f} lr=1.00e-05\n" for s in range(first, last + 1))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_log_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("")
    follower = Follower(path)
    assert follower.read() is None
    append(path, "loading the model\n")
    assert follower.read() is None
    append(path, rows(1, 3))
    log = follower.read()
    assert log is not None and log.rows == 3
    assert follower.read() is log
    append(path, "step=4 loss=2.9")
    assert follower.read() is log or follower.read().rows == 3  # type: ignore[union-attr]
    append(path, "600 lr=1.00e-05\n" + rows(5, 9))
    log, whole = follower.read(), read_log(path)
    assert log is not None and log.rows == whole.rows == 9 and log.lines == whole.lines
    assert log.column("train/loss").value.tolist() == whole.column("train/loss").value.tolist()
    assert log.modified == pytest.approx(path.stat().st_mtime)


def test_a_log_that_is_rotated_away(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(rows(1, 5))
    follower = Follower(path)
    follower.read()
    append(path, rows(6, 7))  # not seen before it is moved
    path.rename(tmp_path / "log.1")
    assert follower.read().last_step == 7  # type: ignore[union-attr]
    path.write_text(rows(8, 12))
    log = follower.read()
    assert log is not None and log.live("train/loss").step.tolist() == list(range(1, 13)) and not log.restarts


@pytest.mark.parametrize("last", [3, 30])
def test_a_log_that_is_written_anew(last: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first run\n" + rows(1, 9))
    follower = Follower(path)
    follower.read()
    path.write_text("second run\n" + rows(1, last))
    log = follower.read()
    assert log is not None and log.live("train/loss").step.tolist() == list(range(1, last + 1))
    assert len(log.restarts) == 1


def test_documents_and_folders_are_read_again_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text('{"log_history": [\n{"step": 1, "loss": 3.0}\n]}')
    for follower in (Follower(path), Follower(tmp_path)):
        path.write_text('{"log_history": [\n{"step": 1, "loss": 3.0}\n]}')
        assert follower.read().rows == 1  # type: ignore[union-attr]
        path.write_text('{"log_history": [\n{"step": 1, "loss": 3.0},\n{"step": 2, "loss": 2.0}\n]}')
        assert follower.read().rows == 2  # type: ignore[union-attr]
        path.write_text('{"log_history": [\n{"step": 1, "lo')  # in the middle of being written
        assert follower.read() is not None


def test_a_file_that_never_was(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="there is no"):
        Follower(tmp_path / "nothing").read()


def test_stdin_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import sys

    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as waiting:

        class Stdin:
            buffer = waiting

            @staticmethod
            def fileno() -> int:
                return reader

        monkeypatch.setattr(sys, "stdin", Stdin())
        with Follower("-") as follower:
            assert follower.read() is None and not follower.closed
            os.write(writer, rows(1, 5).encode())
            assert follower.read().rows == 5 and not follower.closed  # type: ignore[union-attr]
            os.write(writer, rows(6, 7).rstrip("\n").encode())
            os.close(writer)
            assert follower.read().rows == 7 and follower.closed  # type: ignore[union-attr]
