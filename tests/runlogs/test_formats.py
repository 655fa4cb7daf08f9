"""Every format is recognised by content and gives the numbers that were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.runlogs.written import ALL, Written

from palingenesis.runlogs.read import read_log
from palingenesis.runlogs.table import RunLog

EACH = pytest.mark.parametrize("name", list(ALL))


def read(folder: Path, text: str | bytes, name: str = "a_log") -> RunLog:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_log(path)


def check(log: RunLog, written: Written) -> None:
    for name, values in written.columns.items():
        column = log.column(name)
        np.testing.assert_allclose(column.value, values, rtol=1e-12, err_msg=name)
        np.testing.assert_array_equal(column.step, written.steps, err_msg=name)
    for name, step, value in written.once:
        column = log.column(name)
        assert (column.step[-1], pytest.approx(column.value[-1])) == (step, value), name


@EACH
def test_a_format_is_recognised_and_read(name: str, tmp_path: Path) -> None:
    written = ALL[name]
    log = read(tmp_path, written.text)
    assert log.format == written.format
    check(log, written)
    assert (log.total_steps, log.step_inferred) == (written.total, written.inferred)
    assert log.restarts == () and log.processes == 1


#: Formats of single lines: the others are one document, or need their header.
LINES = pytest.mark.parametrize("name", [name for name in ALL if name not in ("trainer_state",)])
#: Formats whose lines say nothing of themselves: nothing else may stand in the log.
BARE = ("lightning", "wandb_csv", "step_and_number", "numbers")


@LINES
def test_windows_line_ends_byte_order_marks_and_other_encodings(name: str, tmp_path: Path) -> None:
    written = ALL[name]
    check(read(tmp_path, written.text.replace("\n", "\r\n")), written)
    check(read(tmp_path, b"\xef\xbb\xbf" + written.text.encode()), written)
    check(read(tmp_path, written.text.encode("utf-16")), written)


@LINES
def test_lines_of_other_programs_colours_and_bars_between(name: str, tmp_path: Path) -> None:
    if name in BARE:
        pytest.skip("lines of such a log have no name")
    written = ALL[name]
    noise = [
        "Some weights of the model were not used: ['lm_head']",
        "\x1b[33mWARNING\x1b[0m: the cache is full",
        "Map:  10%|█         | 10/100 [00:00<00:01, 90.00 examples/s]\rMap: 100%|██████████| 100/100 "
        "[00:01<00:00]",
        "",
        "   ",
        "\x00\x01\xff garbage \xfe".encode("latin-1").decode("latin-1"),
    ]
    lines = written.text.split("\n")
    mixed = [one for place, line in enumerate(lines) for one in (line, noise[place % len(noise)])]
    # What belongs together in OLMo's rows stays together.
    text = "\n".join(mixed if name != "olmo" else [*noise, *lines, *noise])
    log = read(tmp_path, text)
    assert log.format == written.format
    check(log, written)
    assert log.unread > 0 and any(event.kind == "warning" for event in log.events)


def test_progress_bars_are_passed_over(tmp_path: Path) -> None:
    """Many stand in one line; those of training are read, and none is more than one line that was not."""
    bars = [f"\r {step:2d}%|██        | {step}/100 [00:01<01:00,  1.0s/it]" for step in range(100)]
    others = [f"\rMap: {share}%|█| {share}/100 [00:00<00:01]" for share in range(100)]
    row = "\r{'loss': '4.6', 'grad_norm': '1.2', 'learning_rate': '0.001', 'epoch': '0.1'}\n"
    text = "".join(others) + "\n" + "".join("".join(bars[10 * at : 10 * at + 10]) + row for at in range(10))
    log = read(tmp_path, text)
    assert (log.format, log.rows, log.total_steps) == ("transformers", 10, 100)
    assert (log.lines, log.unread) == (11, 1)


REPEATED = 400


@LINES
def test_many_lines_give_the_same_as_few(name: str, tmp_path: Path) -> None:
    """Long logs are read many lines at a time: by another way than short ones."""
    written = ALL[name]
    if name in ("lightning", "wandb_csv"):
        head, _, body = written.text.partition("\n")
        text = head + "\n" + body * REPEATED
    else:
        text = written.text * REPEATED
    log = read(tmp_path, text)
    assert log.format == written.format
    count = len(written.steps)
    for name_of, values in written.columns.items():
        value = log.column(name_of).value.reshape(REPEATED, count)
        np.testing.assert_allclose(value, np.tile(values, (REPEATED, 1)), rtol=1e-12, err_msg=name_of)
    if name != "numbers":
        assert len(log.restarts) == REPEATED - 1
        assert log.live("train/loss").step.tolist() == written.steps


@LINES
def test_a_gzipped_log_is_read(name: str, tmp_path: Path) -> None:
    import gzip

    check(read(tmp_path, gzip.compress(ALL[name].text.encode()), "log.gz"), ALL[name])


def test_ids_of_formats_are_not_shared() -> None:
    from palingenesis.runlogs.formats import LINE_FORMATS

    ids = [format.id for format in LINE_FORMATS]
    assert len(set(ids)) == len(ids)


def test_the_page_has_every_format() -> None:
    from palingenesis.runlogs.formats import LINE_FORMATS

    page = (Path(__file__).parent.parent.parent / "docs" / "logs.md").read_text("utf-8")
    others = [
        "palingenesis",
        "trainer_state",
        "json",
        "lightning",
        "wandb_csv",
        "csv",
        "tensorboard",
        "trackio",
        "wandb",
    ]
    for name in [format.id for format in LINE_FORMATS] + others:
        assert f"| `{name}` |" in page
