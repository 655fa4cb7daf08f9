"""``pgs loss``: what it prints, its JSON, its pictures, its exit codes, and bad input."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.findings.runs import healthy_rows, write
from tests.test_house import run

from palingenesis.cli import main
from palingenesis.record.spikes import MicroBatch, Sample, Spike, write_spike

ROWS = 600


def losses(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (1.5 + 4 * (1 + np.arange(ROWS) / 20) ** -0.5) * (1 + 0.02 * rng.normal(size=ROWS))


def log(path: Path, values: np.ndarray) -> str:
    """Lines as pgs train prints them."""
    path.write_text("".join(f"step={10 * i} loss={v:.4f} lr=2.00e-05\n" for i, v in enumerate(values, 1)))
    return str(path)


def test_a_log_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = losses()
    values[300] *= 3
    assert main(["loss", "--log_file", log(tmp_path / "train.log", values)]) == 1
    shown = capsys.readouterr().out
    for words in (
        "convergence: power law",
        "20% more steps: 1198 more steps",
        "spikes: 1: step 3010",
        "plateaus: 0",
    ):
        assert words in shown
    assert "recommended next steps:" in shown
    assert "log an evaluation loss as well" in shown
    assert shown.isascii()


def test_one_document_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = losses()
    values[400:] = np.linspace(2.3, 4, ROWS - 400)
    assert main(["loss", log(tmp_path / "train.log", values), "--json"]) == 1
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["command"] == "loss"
    assert document["exit_code"] == 1
    assert "curve.diverged" in [one["check"] for one in document["findings"]]
    facts = document["facts"]
    assert facts["rise"]["since_step"] == pytest.approx(4010, abs=300)
    assert facts["rows"] == ROWS
    assert facts["next_steps"]


def test_the_same_from_stdin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log(tmp_path / "train.log", losses())
    main(["loss", path, "--json"])
    first = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(path).read_bytes())))
    main(["loss", "-", "--json"])
    second = json.loads(capsys.readouterr().out)
    assert second["facts"] | {"source": path} == first["facts"]


def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "curve.html"
    values = losses()
    values[300] *= 3
    assert main(["loss", log(tmp_path / "<b>.log", values), "--html", str(page)]) == 1
    text = page.read_text("utf-8")
    assert f"page: {page}" in capsys.readouterr().out
    assert "spike at step 3,010" in text
    assert "<b>.log" not in text
    assert "&lt;b&gt;.log" in text
    assert 'src="' not in text
    assert 'href="http' not in text
    assert len(text) < 200_000


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib draws the picture")
def test_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    assert main(["loss", log(tmp_path / "train.log", losses()), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_folder_with_its_spikes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = healthy_rows(np.random.default_rng(0))
    write(tmp_path / "run", rows)
    sample = Sample(source="chats.jsonl", row=17, tokens=210, text="What is the capital of")
    write_spike(tmp_path / "run", Spike(40, "loss_spike", loss=9.5, microbatches=(MicroBatch((sample,)),)))
    main(["loss", str(tmp_path / "run"), "--spikes"])
    shown = capsys.readouterr().out
    assert "batches of spikes:\n  step 40: loss spike (loss 9.5)" in shown
    assert "chats.jsonl row 17: 210 tokens: What is the capital of" in shown
    main(["loss", str(tmp_path / "run"), "--spikes", "--json"])
    (batch,) = json.loads(capsys.readouterr().out)["facts"]["batches"]
    assert batch["step"] == 40


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "train.log"),
        (b"\x00\x01\x02\xff" * 100, "train.log"),
        (b"nothing of the kind\n" * 20, "train.log"),
        (b"step=10 loss=1.5\n", "a curve needs at least 2"),
        (b"step=10 lr=0.1\nstep=20 lr=0.1\n", "no loss"),
    ],
    ids=["empty", "binary", "no log", "one line", "no loss"],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    assert main(["loss", "--log_file", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert words in shown.err


@pytest.mark.parametrize(
    "arguments",
    [[], ["--log_file", "nowhere.log"], ["a", "--log_file", "b"], ["--log_file", "."]],
    ids=["nothing", "missing", "two", "a folder without a log"],
)
def test_wrong_use_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["loss", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_spikes_of_a_file_and_a_place_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(tmp_path / "train.log", losses())
    assert main(["loss", path, "--spikes"]) == 2
    assert "--spikes shows what a run folder keeps" in capsys.readouterr().err
    assert main(["loss", path, "--html", str(tmp_path / "none" / "a.html")]) == 2
    assert main(["loss", path, "--png", str(tmp_path / "none" / "a.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_it_needs_no_torch(tmp_path: Path) -> None:
    path = log(tmp_path / "train.log", losses())
    program = f"sys.argv = ['pgs', 'loss', {path!r}]\nfrom palingenesis.cli import main\nmain()"
    run(program, forbid=("torch", "transformers", "matplotlib"))


def test_what_is_not_known_of_a_sample_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", healthy_rows(0))
    main(["loss", str(tmp_path / "run"), "--spikes"])
    shown = capsys.readouterr().out
    assert "spikes: 0 above what this curve's own noise reaches" in shown
    assert "this run kept none: while it ran, no loss was called a spike" in shown
    samples = (Sample(index=7, values={"x": 3}), Sample(index=8, tokens=1, loss_tokens=1))
    write_spike(tmp_path / "run", Spike(40, "loss_spike", loss=9.5, microbatches=(MicroBatch(samples),)))
    main(["loss", str(tmp_path / "run"), "--spikes"])
    shown = capsys.readouterr().out
    assert "    data set index 7: x 3\n    data set index 8: 1 token, 1 with loss\n" in shown
