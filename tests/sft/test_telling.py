"""What a person sees: the log file, stderr, and the bar of a terminal."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from palingenesis.sft import telling as module
from palingenesis.sft.telling import LOG_FILE, Teller, telling

log = logging.getLogger("palingenesis")


def row(step: int, **others: Any) -> dict[str, Any]:
    return {
        "train/global_step": step,
        "train/loss": 1.23456,
        "train/lr": 1e-3,
        "train/tokens_per_sec_global": 4321.4,
        "train/step_time_s": 0.5,
        **{name.replace("__", "/"): value for name, value in others.items()},
    }


class Terminal:
    """A terminal of some width whose output is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int = 100) -> None:
        self.file = io.StringIO()
        monkeypatch.setattr(
            module,
            "_Stderr",
            lambda **_: Console(
                file=self.file, force_terminal=True, width=width, highlight=False, _environ={"TERM": "xterm"}
            ),
        )

    @property
    def text(self) -> str:
        """What was written, without colours and movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue()).replace("\r", "\n")


def lines(folder: Path) -> list[str]:
    return (folder / LOG_FILE).read_text(encoding="utf-8").splitlines()


def test_lines_go_to_the_file_and_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "a line of " + "very many words " * 30 + "[bold]and no markup[/bold] äöü"
    with telling(tmp_path, main=True):
        log.info("begin %d", 1)
        log.warning("%s", long)
        log.debug("not told")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["begin 1", long]  # whole, whatever the width
    first, second = lines(tmp_path)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"{stamp} INFO begin 1", first)
    assert re.fullmatch(rf"{stamp} WARNING {re.escape(long)}", second)


def test_a_resumed_run_adds_to_the_file(tmp_path: Path) -> None:
    for number in range(2):
        with telling(tmp_path, main=True):
            log.info("start %d", number)
    assert [line.rsplit(" ", 2)[1:] for line in lines(tmp_path)] == [["start", "0"], ["start", "1"]]


def test_other_ranks_tell_warnings_and_write_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with telling(tmp_path, main=False) as teller:
        log.info("of no interest")
        teller.row(row(1))
        log.warning("of interest")
    assert capsys.readouterr().err.splitlines() == ["of interest"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.ERROR])
@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_logger_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int, propagate: bool, fails: bool
) -> None:
    other = logging.NullHandler()
    monkeypatch.setattr(log, "handlers", [other])
    monkeypatch.setattr(log, "propagate", propagate)
    before = log.level
    log.setLevel(level)
    try:
        try:
            with telling(tmp_path, main=True):
                assert log.isEnabledFor(logging.INFO) and not log.propagate
                assert len(log.handlers) == 3
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert (log.level, log.propagate, log.handlers) == (level, propagate, [other])
    finally:
        log.setLevel(before)
    log.warning("afterwards")
    assert lines(tmp_path) == []


def test_lines_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with telling(tmp_path, main=True) as teller:
        teller.begin(0, 10)  # without a terminal there is no bar
        teller.row({"train/global_step": 1, "train/loss": 2.0, "train/lr": 1e-3})  # between two rows
        teller.row(row(2, health__gns=12.0))
        teller.row({"train/global_step": 3, "train/loss": 2.0, "eval/loss": 1.5, "eval/code/loss": 1.75})
        teller.row(row(4, train__loss=float("nan")))
    assert capsys.readouterr().err.splitlines() == [
        "step=2 loss=1.2346 lr=1.00e-03 tok/s=4321 dt=0.50s health/gns=12",
        "step=3 loss=2.0000 eval/loss=1.5 eval/code/loss=1.75",
        "step=4 loss=nan lr=1.00e-03 tok/s=4321 dt=0.50s",
    ]
    assert "INFO step=2 loss=1.2346 lr" in lines(tmp_path)[0]


def test_the_bar_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    with telling(tmp_path, main=True) as teller:
        teller.begin(3, 10)
        teller.row({"train/global_step": 4, "train/loss": 9.0, "train/lr": 1e-3})
        teller.row(row(5))
        log.warning("in between [red]not markup[/red]")
        teller.row(row(7, train__loss=1.5))
    text = terminal.text
    told = [line for line in text.splitlines() if line.startswith("step=")]
    assert told == [
        "step=5 loss=1.2346 lr=1.00e-03 tok/s=4321 dt=0.50s",
        "step=7 loss=1.5000 lr=1.00e-03 tok/s=4321 dt=0.50s",
    ]
    assert any(line.strip() == "in between [red]not markup[/red]" for line in text.splitlines())
    last = [line for line in text.splitlines() if "step 7 of 10" in line][-1]
    assert "loss 1.5000" in last and "4321 tok/s" in last and re.search(r"\d:\d\d|-:--", last)
    assert "9.0000" not in text  # of a step between two rows
    assert not any("\x1b" in line for line in lines(tmp_path))  # no colours in the file


def test_the_bar_counts_the_steps_of_this_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    with telling(tmp_path, main=True) as teller:
        teller.begin(40, 100)
        time.sleep(0.15)
    assert "step 40 of 100" in terminal.text


def test_other_ranks_have_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    with telling(tmp_path, main=False) as teller:
        teller.begin(0, 10)
        teller.row(row(1))
    assert "step 1" not in terminal.text


NOBODY_READS = """
import logging, sys, time
from pathlib import Path
from palingenesis.sft.telling import telling
log = logging.getLogger("palingenesis")
with telling(Path(sys.argv[1]), main=True):
    log.info("first")
    sys.stdin.readline()
    log.info("second")
    log.error("third")
print("the end")
"""


def test_a_stderr_that_nobody_reads_ends_no_run(tmp_path: Path) -> None:
    """`pgs train … 2>&1 | head`, or a terminal that is closed: the log file has it all."""
    run = subprocess.Popen(
        [sys.executable, "-c", NOBODY_READS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdin and run.stdout and run.stderr
    assert run.stderr.readline() == "first\n"
    run.stderr.close()
    run.stdin.write("go on\n")
    run.stdin.close()
    assert run.stdout.read() == "the end\n"
    run.stdout.close()
    assert run.wait(60) == 0
    assert [line.split(" ", 2)[2] for line in lines(tmp_path)] == ["INFO first", "INFO second", "ERROR third"]


def test_a_stderr_that_cannot_be_written_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    with telling(tmp_path, main=True) as teller:
        teller.row(row(1))
        log.error("still here")
    assert [line.split(" ")[2] for line in lines(tmp_path)] == ["INFO", "ERROR"]


def test_a_teller_without_a_bar_takes_rows() -> None:
    teller = Teller(None)
    teller.begin(0, 3)
    teller.row({"train/global_step": 1})
