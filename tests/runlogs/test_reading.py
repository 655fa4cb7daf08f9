"""What logs have besides plain rows: restarts, ranks, torn ends, NaN, events; and what is no log at all."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from tests.runlogs.written import ALL

from palingenesis.errors import RunLogError
from palingenesis.runlogs.read import read_log
from palingenesis.runlogs.spelling import number
from palingenesis.runlogs.table import RunLog


def read(folder: Path, text: str | bytes, name: str = "a_log") -> RunLog:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_log(path)


def line(step: int, loss: float, rest: str = "lr=1.00e-05") -> str:
    return f"step={step} loss={loss:.4f} {rest}\n"


# -- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("nan", math.nan), ("NaN", math.nan), ("-nan", math.nan), ("NAN", math.nan), ("nan(ind)", math.nan),
        ("1.#QNAN", math.nan), ("-1.#IND", math.nan), ("inf", math.inf), ("-Infinity", -math.inf),
        ("+Inf", math.inf), ("1.#INF", math.inf), ("1,234", 1234.0), ("1,234,567.5", 1234567.5),
        ("1.02K", 1020.0), ("3M", 3e6), ("1e-05", 1e-5), ("'0.5'", 0.5), (".5", 0.5),
        ("np.float64(1.5)", 1.5), ("tensor(2.5, device='cuda:0')", 2.5),
    ],
)  # fmt: skip
def test_spellings_of_numbers(text: str, value: float) -> None:
    assert number(text) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("text", ["", "fast", "1,23", "1_000", "--1", "0x10", "K", "1.2.3", "None", "null"])
def test_what_is_no_number(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize("spelling", ["nan", "NaN", "-nan", "inf", "-inf", "Infinity"])
def test_losses_that_are_no_numbers_are_values(spelling: str, tmp_path: Path) -> None:
    log = read(tmp_path, line(1, 2.0) + f"step=2 loss={spelling} lr=1e-5\n" + line(3, 1.5))
    value = log.column("train/loss").value
    assert (
        len(value) == 3 and not np.isfinite(value[1]) and log.column("train/loss").step.tolist() == [1, 2, 3]
    )


def test_json_with_words_for_numbers_that_are_none(tmp_path: Path) -> None:
    rows = ['{"step": 1, "loss": NaN}', '{"step": 2, "loss": "Infinity"}', '{"step": 3, "loss": null}']
    log = read(tmp_path, "\n".join([*rows, '{"step": 4, "loss": 2, "lr": 1}']) + "\n")
    np.testing.assert_array_equal(log.column("train/loss").value, [math.nan, math.inf, 2.0])


# -- steps, restarts, ranks --------------------------------------------------------------------------------


def test_a_run_that_began_again(tmp_path: Path) -> None:
    text = "".join(line(s, 3 - s / 100) for s in range(10, 210, 10))
    again = "".join(line(s, 2 - s / 100) for s in range(110, 310, 10))
    log = read(tmp_path, text + again)
    (restart,) = log.restarts
    assert (restart.row, restart.from_step, restart.to_step) == (20, 200, 110)
    live = log.live("train/loss")
    assert live.step.tolist() == list(range(10, 310, 10))
    assert live.value[10] == pytest.approx(2 - 1.1) and len(log.column("train/loss").value) == 40
    assert [(event.kind, event.step, event.line) for event in log.events] == [("restart", 110, 21)]


def test_a_run_that_began_from_nothing_again(tmp_path: Path) -> None:
    log = read(tmp_path, "".join(line(s, 3.0) for s in (1, 2, 3, 4, 5, 1, 2, 3)))
    assert log.live("train/loss").row.tolist() == [5, 6, 7] and log.last_step == 3


def test_a_row_out_of_order_is_no_restart(tmp_path: Path) -> None:
    log = read(tmp_path, "".join(line(s, 3.0) for s in (1, 2, 4, 3, 5, 6, 7, 8)))
    assert log.restarts == ()


def test_an_evaluation_at_the_same_step_is_no_restart(tmp_path: Path) -> None:
    rows = "".join(line(s, 3.0) + f"step={s} eval/loss=2.5\n" for s in (1, 2, 3, 4))
    log = read(tmp_path, rows)
    assert log.restarts == () and log.processes == 1 and log.rows == 8


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_that_write_into_one_log(ranks: int, marked: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for step in range(1, 60):
        # Every rank's own loss; in any order, and sometimes one step late.
        mine = [
            (step + (rng.random() < 0.2), f"[rank{r}]: " * marked + line(step, 3 + r)) for r in range(ranks)
        ]
        lines += [(late, rng.random(), text) for late, text in mine]
    log = read(tmp_path, "".join(text for _, _, text in sorted(lines)))
    assert log.processes == ranks and log.restarts == ()
    assert sorted(log.column("train/loss").step.tolist()) == list(range(1, 60))
    if marked:
        assert set(log.column("train/loss").value.tolist()) == {3.0}


def test_two_runs_of_several_ranks_one_after_the_other(tmp_path: Path) -> None:
    one = "".join(line(s, 3.0 + r) for s in range(1, 40) for r in range(4))
    log = read(tmp_path, one + one)
    assert log.processes == 4 and len(log.restarts) == 1
    assert log.live("train/loss").step.tolist() == list(range(1, 40))


def test_epochs_that_go_back_are_a_restart_of_counted_steps(tmp_path: Path) -> None:
    rows = [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.4, 0.5, 0.6]
    log = read(tmp_path, "".join(f"{{'loss': '3.1', 'epoch': '{epoch}'}}\n" for epoch in rows))
    assert log.step_inferred and log.column("train/loss").step.tolist() == [1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert log.live("train/loss").step.tolist() == [1, 2, 3, 4, 5, 6]


def test_rows_without_a_step_have_that_before(tmp_path: Path) -> None:
    log = read(tmp_path, 'noise\n{"loss": 3, "step": 5}\n{"eval_loss": 2.5}\n{"loss": 2, "step": 6}\n')
    assert log.column("eval/loss").step.tolist() == [5]


def test_progress_bars_with_a_loss_behind_them(tmp_path: Path) -> None:
    bar = "{at}%|##  | {at}/100 [01:00<05:00, 2.0it/s, loss={loss}]\r"
    log = read(tmp_path, "".join(bar.format(at=at, loss=5 - at / 50) for at in range(1, 91)) + "\n")
    assert (log.total_steps, log.last_step, log.rows) == (100, 90, 90)
    assert set(log.column("train/step_time_s").value.tolist()) == {0.5}
    text = "".join(f"Epoch {e}: " + bar.format(at=at, loss=3) for e in range(3) for at in range(1, 101))
    log = read(tmp_path, text + "\n")
    assert log.column("train/loss").step.tolist() == list(range(1, 301)) and log.restarts == ()


@pytest.mark.parametrize("elapsed", ["0:01:{:02d}", "1m {:d}s"])
def test_time_since_the_start(elapsed: str, tmp_path: Path) -> None:
    rows = [{"current_steps": s, "loss": 3.0, "elapsed_time": elapsed.format(s)} for s in range(1, 40)]
    log = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert log.column("time").value.tolist() == [60.0 + s for s in range(1, 40)] and log.started is None


# -- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(1, 36))
def test_a_last_line_that_was_cut_says_nothing_wrong(cut: int, tmp_path: Path) -> None:
    text = "".join(line(s, 12.25 + s) for s in range(1, 6))
    log = read(tmp_path, text[:-cut])
    for column, true in (("train/loss", lambda s: 12.25 + s), ("train/lr", lambda s: 1e-5)):
        found = log.column(column)
        assert found.value.tolist() == [pytest.approx(true(step)) for step in found.step]


def test_a_whole_last_line_needs_no_line_end(tmp_path: Path) -> None:
    assert read(tmp_path, "".join(line(s, 2.0) for s in (1, 2, 3)).rstrip("\n")).rows == 3
    assert read(tmp_path, '{"loss": 1, "step": 1}\n{"loss": 2.25, "step": 2}').rows == 2
    assert read(tmp_path, "3.5\n3.25\n3.125").rows == 3


def test_a_document_that_was_cut_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    text = ALL["trainer_state"].text
    log = read(tmp_path, text[: len(text) // 2])
    whole = ALL["trainer_state"].columns["train/loss"]
    assert 10 < log.rows < 40 and log.column("train/loss").value.tolist() == whole[: log.rows]


def test_the_end_of_training_is_known_where_the_log_tells_it(tmp_path: Path) -> None:
    rows = "{'loss': '3.1', 'epoch': '0.5'}\n{'loss': '3.0', 'epoch': '1'}\n"
    end = "{'train_runtime': '7.2', 'train_loss': '3.05', 'epoch': '1'}\n"
    assert read(tmp_path, rows).finished is None
    assert read(tmp_path, rows + end).finished is True
    assert read(tmp_path, rows + end + rows).finished is None
    failed = (
        rows
        + 'Traceback (most recent call last):\n  File "a.py"\ntorch.cuda.OutOfMemoryError: out of memory\n'
    )
    log = read(tmp_path, failed)
    assert log.finished is False and {event.kind for event in log.events} == {"error"}
    assert read(tmp_path, "step 10/10 loss: 1.5\nstep 10/10 loss: 1.5\n").finished is True


def test_events(tmp_path: Path) -> None:
    text = (
        line(1, 3.0)
        + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempting loss scale: 65536, reducing to 32768.0\n"
        + line(2, 3.0)
        + "UserWarning: the learning rate scheduler was called before the optimizer\n"
        + "Loss is nan, stopping training\n"
        + "skipping batch 7\n"
        + "2026-01-01 00:00:00,000 INFO step 5: nonfinite_cleared: the loss is finite again\n"
        + "RuntimeError: CUDA error: device-side assert triggered\n"
    )
    log = read(tmp_path, text)
    assert [(event.kind, event.step, event.line) for event in log.events] == [
        ("overflow", 1, 2),
        ("warning", 2, 4),
        ("nonfinite", 2, 5),
        ("skipped", 2, 6),
        ("error", 2, 8),
    ]


def test_times_of_lines(tmp_path: Path) -> None:
    log = read(tmp_path, ALL["ours"].text)
    first = datetime(2026, 11, 30, 0, 0, 10, 250000).timestamp()
    assert log.started == pytest.approx(first) and log.column("time").value[1] == pytest.approx(first + 10)
    zoned = read(
        tmp_path, "2026-11-30T01:00:00+01:00 step 1 loss: 1.5\n2026-11-30T00:00:09Z step 2 loss: 1.4\n"
    )
    assert zoned.started == datetime.fromisoformat("2026-11-30T00:00:00+00:00").timestamp()
    assert zoned.ended == zoned.started + 9


def test_resolution_is_what_the_decimals_can_show(tmp_path: Path) -> None:
    assert read(tmp_path, ALL["ours"].text).resolution == pytest.approx(1e-4)
    assert read(tmp_path, "".join(f"{1 / (3 + i)!r}\n" for i in range(9))).resolution is None


# -- documents, folders, stdin -----------------------------------------------------------------------------


def test_lists_by_name_and_lists_of_objects(tmp_path: Path) -> None:
    log = read(tmp_path, json.dumps({"loss": [3, 2, 1], "val_loss": [3.5, 2.5, 1.5]}))
    assert log.column("train/loss").value.tolist() == [3, 2, 1] and log.column("eval/loss").step.tolist() == [
        1,
        2,
        3,
    ]
    log = read(tmp_path, json.dumps([{"step": 5, "loss": 3}, {"step": 9, "loss": 2}]))
    assert log.column("train/loss").step.tolist() == [5, 9]
    assert read(tmp_path, "[3.5, 2.5, NaN, 1.5]").rows == 4


def test_a_folder_gives_what_trainers_leave_in_it(tmp_path: Path) -> None:
    for step in (5, 40):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        history = [{"step": s, "loss": 3.0} for s in range(1, step)]
        (folder / "trainer_state.json").write_text(
            json.dumps({"log_history": history, "max_steps": 90}, indent=1)
        )
    log = read_log(tmp_path / "out")
    assert log.rows == 39 and log.total_steps == 90
    lightning = tmp_path / "lightning_logs" / "version_0"
    lightning.mkdir(parents=True)
    (lightning / "metrics.csv").write_text(ALL["lightning"].text)
    assert read_log(tmp_path / "lightning_logs").format == "lightning"


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(ALL["megatron"].text.encode())

    monkeypatch.setattr(sys, "stdin", Stdin())
    log = read_log("-")
    assert (log.source, log.format, log.modified) == ("-", "megatron", None)


# -- what is no log ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"  \n \n", "is empty"),
        (bytes(range(256)) * 40, "binary"),
        (b"\x89PNG\r\n\x1a\n" + bytes(1000), "binary"),
        (b"SQLite format 3\x00" + bytes(200), "SQLite"),
        (b"hello\nworld\n", "first line is 'hello'"),
        (b"step,lr\n1,0.1\n2,0.1\n", "no loss"),
        (b'{"a": 1}\n{"a": 2}\n', "no loss"),
        (b'{"log_history": []}', "no loss"),
        (b'[\n{"step": 1}\n]', "no loss"),
        (b"\x1f\x8b damaged", "gzip"),
        (b"the loss of the war was great\n" * 3, "no loss"),
    ],
)
def test_what_is_no_log_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match=says) as error:
        read(tmp_path, content)
    assert "\n" not in str(error.value) and "a_log" in str(error.value)


def test_no_file_no_log_in_a_folder_and_no_right_to_read(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="there is no"):
        read_log(tmp_path / "nothing")
    with pytest.raises(RunLogError, match="folder without a log"):
        read_log(tmp_path)
    closed = tmp_path / "closed"
    closed.write_text("3.0\n2.0\n")
    closed.chmod(0)
    if not os.access(closed, os.R_OK):  # root reads everything
        with pytest.raises(RunLogError, match="cannot be read"):
            read_log(closed)


def test_reading_imports_neither_torch_nor_what_wrote_the_log() -> None:
    program = (
        "import sys, time; start = time.perf_counter(); import palingenesis.runlogs.read, "
        "palingenesis.runlogs.follow; "
        "bad = {'torch', 'transformers', 'wandb', 'tensorboard', 'trackio', 'pandas'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "unit",
    [
        "a" * 50, "1" * 50, "{'loss': ", "loss ", "step 1 ", "[", '{"', "=", "| ", ": 1,234", "\r", "\x1b[",
        "nan ", "loss: 1.5 ", " ", "\t", "- ", "  3%|", "1,", "step=1 loss=", '{"loss":{"loss":', " - ",
    ],
)  # fmt: skip
def test_no_line_takes_more_than_linear_time(unit: str, tmp_path: Path) -> None:
    """One endless line, of every kind that could lead a pattern astray."""
    size = 400_000
    text = "step=1 loss=1.5 lr=1\n" + unit * (size // len(unit)) + "\nstep=2 loss=1.4 lr=1\n"
    start = time.process_time()
    log = read(tmp_path, text)
    assert log.rows >= 2 and time.process_time() - start < 4.0
