"""Kills, full disks, vanished folders, other processes: tried for real."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.record.runs import COMPLETED, INFO, alarm, info, kill, python, record, started, write_check

from palingenesis.errors import RecordBusyError, RecordError
from palingenesis.record import writer as writer_module
from palingenesis.record.reader import load_run
from palingenesis.record.verify import verify
from palingenesis.record.writer import RecordWriter

ROOT = Path(__file__).parent.parent.parent

ENDLESS = """
import sys
from tests.record.runs import *
writer = RecordWriter(sys.argv[1], INFO)
writer.event(started())
writer.flush()
print("writing", flush=True)
step = 0
while True:
    step += 50
    write_check(writer, step)
    writer.event(alarm(step) if step % 400 == 0 else info(step, "x" * 3000))
"""

DISK = """
import logging, resource, signal, sys
from tests.record.runs import *

class Seen(logging.Handler):
    messages = []
    def emit(self, entry):
        self.messages.append((entry.levelname, entry.getMessage()))
logging.getLogger("palingenesis").addHandler(Seen())
logging.getLogger("palingenesis").setLevel("INFO")

# A file that may not grow past the limit is refused as on a full disk: in the middle of a line.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def space(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
def whole(folder):
    return all(not (folder / name).read_bytes() or (folder / name).read_bytes().endswith(b"\\n")
               for name in ("events.jsonl", "metrics.jsonl", "layers.jsonl"))
"""

FULL_THEN_FREE = (
    DISK
    + """
folder = Path(sys.argv[1])
writer = RecordWriter(folder, INFO)
writer.event(started())
space(4000)
for step in range(50, 5001, 50):
    write_check(writer, step)
    writer.event(alarm(step))
    assert whole(folder), "half a line was left on a full disk"
assert "File too large" in writer.failure, writer.failure
space(resource.RLIM_INFINITY)
write_check(writer, 5050)
assert writer.failure is None
writer.close(COMPLETED)
print(Seen.messages)
levels = [level for level, text in Seen.messages]
assert levels == ["WARNING", "INFO"], Seen.messages
"""
)

FULL_BEYOND_THE_BOUND = (
    DISK
    + """
import palingenesis.record.writer as module
module.QUEUE_LIMIT = 20_000
folder = Path(sys.argv[1])
writer = RecordWriter(folder, INFO)
writer.event(started())
space(4000)
stamped = []
for step in range(50, 10001, 50):
    writer.check(step, 3, ["a" * 100, "b"] if step < 5000 else ["c", "d"], [1.0, 2.0])
    stamped.append(writer.event(alarm(step)).seq is not None)
assert stamped[0] and not stamped[-1]
space(resource.RLIM_INFINITY)
writer.check(10050, 3, ["c", "d"], [3.0, 4.0])
assert writer.failure is None
writer.close(COMPLETED)
"""
)

FULL_TO_THE_END = (
    DISK
    + """
writer = RecordWriter(sys.argv[1], INFO)
writer.event(started())
space(4000)
for step in range(50, 5001, 50):
    writer.event(alarm(step))
writer.close(COMPLETED)
assert writer.failure
"""
)

unix_only = pytest.mark.skipif(sys.platform == "win32", reason="needs setrlimit and kill")


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


@unix_only
@pytest.mark.parametrize("wait", [0.05, 0.11, 0.2])
def test_kill_9_loses_no_line_that_was_written(tmp_path: Path, wait: float) -> None:
    folder = tmp_path / "run"
    process = start(ENDLESS, folder)
    with pytest.raises(RecordBusyError):
        RecordWriter(folder, INFO, resume=True)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = load_run(folder)
    assert run.problems == []
    assert run.verdict in ("WARNING", "INTERRUPTED")
    assert run.info["end"] is None
    result = run.verify()
    assert result.ok or "torn" in str(result.problem)
    assert result.events == len(run.events) >= 1

    writer = RecordWriter(folder, INFO, resume=True)
    writer.event(started())
    writer.close(COMPLETED)
    assert verify(folder)[:4] == (True, None, None, result.events + 1)


@unix_only
def test_another_process_that_writes_keeps_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(ENDLESS, folder)
    try:
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(RecordBusyError, match="another monitor is writing"):
                RecordWriter(folder, INFO, **options)
        assert load_run(folder).events  # reading is allowed
    finally:
        process.kill()
        process.communicate()


@unix_only
def test_a_full_disk_costs_a_warning_and_nothing_else(tmp_path: Path) -> None:
    done = python(FULL_THEN_FREE, tmp_path / "run", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    assert run.verify()[:4] == (True, None, None, 101)
    assert run.layers.step.tolist() == [50.0 * n for n in range(1, 102)]
    assert run.metrics.step.tolist() == [50.0 * n for n in range(1, 102)]
    assert run.problems == []


@unix_only
def test_what_a_full_queue_drops_is_told_in_the_record(tmp_path: Path) -> None:
    done = python(FULL_BEYOND_THE_BOUND, tmp_path / "run", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    assert run.verify().ok
    assert run.verdict == "PARTLY MONITORED"
    (lost,) = [event for event in run.events if event.event == "monitor_error"]
    assert "events" in lost.error
    assert lost.where == "record"
    # No row stands under names of other layers, although the header in between was dropped.
    assert run.problems == []
    assert run.layers["d"][-1] == 4.0
    assert run.layers["b"][0] == 2.0


@unix_only
def test_a_record_that_lacks_lines_has_no_end(tmp_path: Path) -> None:
    done = python(FULL_TO_THE_END, tmp_path / "run", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    assert run.info["end"] is None
    assert run.verify().ok


@unix_only
def test_a_removed_folder_is_not_made_again_and_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    writer.event(started())
    writer.flush()
    shutil.rmtree(tmp_path / "run")
    with caplog.at_level(logging.WARNING, "palingenesis"):
        for step in (50, 100):
            write_check(writer, step)
            writer.event(alarm(step))
        writer.update_info(gradients="raw")
        writer.close(COMPLETED)
    assert not (tmp_path / "run").exists()
    assert writer.failure
    assert len(caplog.records) == 1


@unix_only
def test_a_folder_that_comes_back_is_written_again(tmp_path: Path) -> None:
    folder, away = tmp_path / "run", tmp_path / "away"
    writer = RecordWriter(folder, INFO)
    writer.event(started())
    write_check(writer, 50)
    # As a share that is mounted again: the same content under other inodes, the lock file gone.
    shutil.copytree(folder, away)
    (away / ".lock").unlink(missing_ok=True)
    shutil.rmtree(folder)
    writer.event(alarm(60))
    assert writer.failure
    shutil.move(away, folder)
    write_check(writer, 100)
    assert writer.failure is None
    with pytest.raises(RecordBusyError):
        RecordWriter(folder, INFO, resume=True)
    writer.close(COMPLETED)
    run = load_run(folder)
    assert run.verify()[:4] == (True, None, None, 2)
    assert run.layers.step.tolist() == [50, 100]


@unix_only
def test_a_folder_that_another_run_took_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    writer = RecordWriter(folder, INFO)
    writer.event(started())
    writer.flush()
    shutil.rmtree(folder)
    record(folder, alarm(7))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for step in (50, 100):
        write_check(writer, step)
        writer.event(alarm(step))
    writer.close(COMPLETED)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


FORK = """
import gc, os, sys
from tests.record.runs import *
from palingenesis.errors import RecordBusyError
writer = RecordWriter(sys.argv[1], INFO)
writer.event(started())
child = os.fork()
if child == 0:
    del writer
    gc.collect()
    sys.exit(0)
os.waitpid(child, 0)
try:
    RecordWriter(sys.argv[1], INFO, resume=True)
except RecordBusyError:
    writer.close(COMPLETED)
else:
    sys.exit("the child freed the folder")
"""


@unix_only
def test_a_forked_child_that_ends_neither_writes_nor_frees_the_folder(tmp_path: Path) -> None:
    done = python(FORK, tmp_path / "run", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert verify(tmp_path / "run")[:4] == (True, None, None, 1)


def test_a_folder_below_a_file_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match=r"^run folder .* cannot be written: .*folder you may write to$"):
        RecordWriter(tmp_path / "file" / "run", INFO)
    with pytest.raises(RecordError, match="cannot be written"):
        RecordWriter(tmp_path / "file", INFO)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_an_error_in_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(RecordError, match="cannot be written: Permission denied"):
        RecordWriter(tmp_path, INFO)
    tmp_path.chmod(0o755)


def test_an_interrupt_in_the_middle_of_a_write_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RecordWriter(tmp_path / "run", INFO)
    writer.event(started())
    real = writer._events._file

    class Interrupting:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def write(self, data: bytes) -> int:
            real.write(data)
            raise KeyboardInterrupt

    monkeypatch.setattr(writer._events, "_file", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        writer.event(alarm(50))
    monkeypatch.setattr(writer._events, "_file", real)
    writer.event(info(60))
    writer.close(COMPLETED)
    assert verify(tmp_path / "run")[:4] == (True, None, None, 3)


def test_the_bound_is_on_bytes_and_only_while_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "QUEUE_LIMIT", 10)
    writer = RecordWriter(tmp_path / "run", INFO)
    assert writer.event(started()).seq == 1
    assert writer.event(info(50)).seq == 2
    kill(writer)
