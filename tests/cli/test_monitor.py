"""``pgs monitor`` as it is typed: one look, a line, a document, a view that follows, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.findings.runs import event, healthy_rows, write
from tests.test_house import run as run_forbidding

from palingenesis.cli import main

Capture = pytest.CaptureFixture[str]
HOUR = 3600


def line(step: int, total: int, loss: float) -> str:
    return (
        f"step {step:4d}/{total} | loss {loss:.6f} (+nanz)| norm 1.2000 (+nanz)| lr 2.14e-06 | "
        f"{500 + step % 7:.2f} ms | 40.0% bf16 MFU | {42500 + 100 * (step % 7)} tok/s\n"
    )


def log_of(
    path: Path, steps: int, total: int, loss: Callable[[int], float] = lambda step: 3 - step / 100
) -> Path:
    path.write_text("".join(line(step, total, loss(step)) for step in range(1, steps + 1)))
    return path


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return log_of(tmp_path / "main.log", 100, 200)


def test_the_specs_command(healthy: Path, capsys: Capture) -> None:
    assert main(["monitor", "--log_file", str(healthy), "--brief"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith("HEALTHY, running | step 100 of 200 (50%) | loss 2.045, falling by ")
    assert "tok/s" in out and "0.5 s a step" in out
    eta = re.search(r"ETA (\d+) s", out)  # less the seconds since the file was written
    assert eta is not None and 30 < int(eta[1]) <= 52


def test_all_of_it(healthy: Path, capsys: Capture) -> None:
    assert main(["monitor", str(healthy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"log:             {healthy} (llm.c)"
    labels = {line.split(":")[0] for line in lines if not line.startswith(" ")}
    assert {"verdict", "step", "loss", "speed", "time left", "skipped", "not finite", "last line"} <= labels
    assert lines[-1] == "monitor: nothing found"


def test_one_document(healthy: Path, capsys: Capture) -> None:
    assert main(["monitor", "--log_file", str(healthy), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["command"], document["exit_code"], document["findings"]) == ("monitor", 0, [])
    facts = document["facts"]
    assert (facts["step"], facts["total_steps"], facts["share_done"]) == (100, 200, 0.5)
    assert facts["loss"]["direction"] == "falling" and facts["loss"]["most"] < 0
    assert facts["left"]["seconds"] == pytest.approx(50, abs=20)


def test_something_wrong_is_code_1(tmp_path: Path, capsys: Capture) -> None:
    log = log_of(tmp_path / "a.log", 100, 200, lambda step: 3 - step / 100 if step < 60 else float("nan"))
    assert main(["monitor", str(log), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (finding,) = (one for one in document["findings"] if one["check"] == "status.nonfinite")
    assert finding["severity"] == "critical" and finding["since"] == 60
    assert document["facts"]["loss"]["value"] == "NaN"
    main(["monitor", str(log), "--brief"])
    assert capsys.readouterr().out.startswith("CRITICAL, running | step 100 of 200 (50%) | loss NaN")


def test_a_log_that_does_not_grow_is_stalled(healthy: Path, capsys: Capture) -> None:
    os.utime(healthy, (time.time() - HOUR,) * 2)
    assert main(["monitor", str(healthy), "--brief"]) == 1
    assert "stalled" in capsys.readouterr().out


def test_a_run_folder_and_the_log_in_it(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "good", healthy_rows(0))
    assert main(["monitor", str(tmp_path / "good"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    # No check was recorded, so that no alarm could have rung.
    assert (facts["verdict"], facts["state"], facts["step"]) == ("UNKNOWN", "ended", 600)
    alarm = event("alarm", 300, layer="blocks.0", diagnosis="no_gradient")
    write(tmp_path / "bad", healthy_rows(0), [alarm, event("replica_divergence", 400, "critical")])
    assert main(["monitor", str(tmp_path / "bad"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["facts"]["verdict"] == "CRITICAL"
    assert any("blocks.0" in one["message"] for one in document["findings"])
    log = tmp_path / "bad" / "train.log"
    log.write_text(
        "".join(f"2026-11-30 00:00:{s:02d},000 INFO step={s} loss={3 - s / 50:.4f}\n" for s in range(60))
    )
    assert main(["monitor", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["facts"]["verdict"] == "CRITICAL"


def test_a_run_that_an_error_ended(tmp_path: Path, capsys: Capture) -> None:
    write(
        tmp_path / "run", healthy_rows(0), end={"error": "RuntimeError: no more data", "reason": "exception"}
    )
    assert main(["monitor", str(tmp_path / "run"), "--brief"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("CRITICAL, ended") and "no more data" in out


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (bytes(range(256)) * 20, "binary"),
        (b"hello world\n", "no known format"),
        (b"{'loss': '3.2', 'grad_norm': '1.0', 'learning_rate': '0.001', 'epoch': '0.1'}\n", "one loss only"),
        (None, "there is no"),
    ],
    ids=["empty", "binary", "no log", "one line", "missing"],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: Capture, content: bytes | None, told: str) -> None:
    log = tmp_path / "x.log"
    if content is not None:
        log.write_bytes(content)
    for option in ([], ["--brief"], ["--json"]):
        assert main(["monitor", "--log_file", str(log), *option]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert told in captured.err


def test_folders_and_usage(tmp_path: Path, capsys: Capture) -> None:
    for arguments, told in (
        (["monitor", str(tmp_path)], "folder without a log"),
        (["monitor"], "no log was given"),
        (["monitor", "a", "--log_file", "b"], "two logs were given"),
        (["monitor", "a", "--every", "0"], "0.1"),
    ):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and told in captured.err


def test_it_starts_without_torch(healthy: Path) -> None:
    program = f"from palingenesis.cli import main\nassert main(['monitor', {str(healthy)!r}, '--brief']) == 0"
    run_forbidding(program, forbid=("torch", "transformers", "lightning", "wandb", "tensorboard"))


# -- following -----------------------------------------------------------------------------------------------


class Grows:
    """A log that gets a line every now and then."""

    def __init__(self, path: Path, steps: int, every: float = 0.05) -> None:
        self._path, self._steps, self._every = path, steps, every
        path.write_text("")
        self._thread = threading.Thread(target=self._write, daemon=True)

    def _write(self) -> None:
        for step in range(1, self._steps + 1):
            with self._path.open("a") as file:
                file.write(line(step, self._steps, 3 - step / 50))
            time.sleep(self._every)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_a_pipe_gets_a_line_at_each_change_and_ends_with_the_run(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "grow.log"
    with Grows(log, 40):
        assert main(["monitor", str(log), "--follow", "--every", "0.3", "--brief"]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [int(found[1]) for one in lines if (found := re.search(r"step (\d+) of 40", one))]
    assert len(steps) == len(lines) >= 3
    assert steps == sorted(steps) and len(set(steps)) == len(steps) and steps[-1] == 40
    assert "ended" in lines[-1] and "ended" not in lines[0]


def test_what_is_waited_for_is_said_once(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "late.log"
    log.write_text("starting\n")

    def late() -> None:
        time.sleep(3.5)
        log.write_text("".join(line(step, 20, 3 - step / 50) for step in range(1, 21)))

    writer = threading.Thread(target=late)
    writer.start()
    assert main(["monitor", str(log), "--follow", "--every", "0.3", "--brief"]) == 0
    writer.join()
    told = capsys.readouterr()
    assert told.err.count("waiting") == told.err.count("\n") == 1 and str(log) in told.err
    assert "step 20 of 20" in told.out


def test_a_document_comes_at_the_end(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "grow.log"
    with Grows(log, 20):
        assert main(["monitor", str(log), "--follow", "--every", "0.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["step"] == 20


def test_a_pipe_that_is_followed_ends_with_its_writer() -> None:
    """The writer dies at step 30 of 40; the line before that was there while it wrote."""
    script = f"""
import sys, time
for step in range(1, 31):
    sys.stdout.write({line(0, 40, 2.5)!r}.replace('step    0', f'step {{step:4d}}'))
    sys.stdout.flush()
    time.sleep(0.1)
"""
    follow = [sys.executable, "-m", "palingenesis", "monitor", "-", "--follow", "--every", "0.3", "--brief"]
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    done = subprocess.run(
        follow, stdin=writer.stdout, capture_output=True, text=True, timeout=120, check=False
    )
    assert writer.stdout is not None
    writer.stdout.close()
    assert writer.wait() == 0
    assert done.returncode == 0, done.stderr
    assert "step 30 of 40" in done.stdout.splitlines()[-1]
    nothing = subprocess.run(follow, input="", capture_output=True, text=True, timeout=60, check=False)
    assert nothing.returncode == 2 and nothing.stderr.count("\n") == 1


def test_what_was_never_there_is_not_waited_for(tmp_path: Path, capsys: Capture) -> None:
    assert main(["monitor", str(tmp_path / "no.log"), "--follow"]) == 2
    assert "there is no" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_one_picture_that_is_drawn_anew(tmp_path: Path) -> None:
    log = tmp_path / "grow.log"
    command = [sys.executable, "-m", "palingenesis", "monitor", str(log), "--follow", "--every", "0.3"]
    main_end, other_end = pty.openpty()
    log.write_text("")
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "60", "LINES": "40"}
    process = subprocess.Popen(command, stdin=other_end, stdout=other_end, stderr=other_end, env=environment)
    os.close(other_end)
    shown = b""
    with Grows(log, 30, every=0.1):
        while select.select([main_end], [], [], 60)[0]:
            try:
                piece = os.read(main_end, 65536)
            except OSError:  # the other end was closed
                break
            if not piece:
                break
            shown += piece
    os.close(main_end)
    assert process.wait(60) == 0
    text = shown.decode()
    assert "\x1b[1A" in text  # the cursor goes back up
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # and is shown again
    end = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.rpartition("\x1b[2K")[2])
    assert "step           30 of 30 (100%)" in end and "monitor: nothing found" in end
    assert all(len(one.rstrip("\r")) <= 60 for one in end.split("\n"))
