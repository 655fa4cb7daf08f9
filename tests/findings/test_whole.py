"""A whole run by its path: what was read, the story, and the two commands that tell it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.findings.foreign import write_as
from tests.findings.more_runs import chain
from tests.findings.runs import healthy_rows, lr_too_high, packed_pair, write
from tests.findings.test_render import problems

from palingenesis.cli import main
from palingenesis.findings.schema import json_schema
from palingenesis.findings.whole import facts_in_words, report_on, story


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which one thing led to the next."""
    return chain(tmp_path_factory.mktemp("wrong") / "run", 0).folder


def told(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_story_goes_from_causes_to_consequences(wrong: Path) -> None:
    lines = list(story(report_on("explain", wrong).findings))
    assert lines[0] == "in the order of causes:"
    assert lines[1] == "  step 301: The loss jumps up at a resume (run.worse_after_resume)"
    assert any(line.startswith("    ") and "(run.nonfinite)" in line for line in lines)


def test_a_single_finding_needs_no_story(tmp_path: Path) -> None:
    lr_too_high(tmp_path / "run", 0, True)
    assert list(story(report_on("explain", tmp_path / "run").findings)) == []


def test_what_was_read_is_said(wrong: Path, tmp_path: Path) -> None:
    lines = facts_in_words(report_on("explain", wrong).facts)
    assert lines[0].startswith(f"{wrong}: palingenesis, 600 rows, to step 600")
    assert lines[1].startswith("the monitor's verdict: CRITICAL: step 551")
    run = write(tmp_path / "run", healthy_rows(0, 100))
    log = write_as("transformers 5", run, tmp_path / "log")
    lines = facts_in_words(report_on("explain", log).facts)
    assert lines[0].startswith(f"{log}: transformers")
    assert "the log has no steps: they are worked out, only their order is sure" in lines


def test_explain_a_run(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(wrong)]) == 1
    out = told(capsys)
    lines = out.splitlines()
    heads = [line for line in lines if line.startswith(("CRITICAL run.", "WARNING run.", "INFO run."))]
    assert heads[0] == "CRITICAL run.worse_after_resume"
    for text in ("  why: ", "  confidence: ", "  or else: ", "  to tell: ", "  fix: "):
        assert sum(line.startswith(text) for line in lines) >= len(heads) - 1


def test_explain_as_json_has_the_findings_form_and_the_story(
    wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(wrong), "--json"]) == 1
    document: dict[str, Any] = json.loads(told(capsys))
    assert problems(document, json_schema()) == []
    assert document["facts"]["story"][0] == {
        "check": "run.worse_after_resume",
        "since": 301,
        "explained_by": [],
    }
    by_check = {one["check"]: one for one in document["findings"]}
    assert 0 < by_check["run.worse_after_resume"]["confidence"] <= 1
    assert by_check["run.worse_after_resume"]["next"]


def test_explain_a_log_and_stdin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run", healthy_rows(0))
    log = write_as("Megatron-LM", run, tmp_path / "log")
    assert main(["explain", str(log)]) == 0
    assert told(capsys).splitlines()[-1] == "explain: nothing found"
    piped = io.TextIOWrapper(io.BytesIO(log.read_bytes()))
    monkeypatch.setattr("sys.stdin", piped)
    assert main(["explain", "-", "--json"]) == 0
    assert json.loads(told(capsys))["facts"]["format"] == "megatron"


def test_explain_against_an_unpacked_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, unpacked = packed_pair(tmp_path, 0, True)
    assert main(["explain", str(packed.folder)]) == 0
    capsys.readouterr()
    assert main(["explain", str(packed.folder), "--unpacked", str(unpacked.folder), "--json"]) == 1
    (finding,) = json.loads(told(capsys))["findings"]
    assert finding["check"] == "run.packing_leak"


@pytest.mark.parametrize("width", [60, 120])
def test_a_terminal_shows_all_of_it(wrong: Path, width: int) -> None:
    from palingenesis.cli.explain import _show

    out = io.StringIO()
    _show(report_on("explain", wrong), Console(file=out, width=width, force_terminal=True, color_system=None))
    assert all(len(line.rstrip()) <= width for line in out.getvalue().splitlines())


def test_diagnose_a_log_of_another_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_as("trainer_state", lr_too_high(tmp_path / "run", 0, False), tmp_path / "trainer_state.json")
    assert main(["diagnose", "--mode", "post", "--log_file", str(log), "--json"]) == 0
    document = json.loads(told(capsys))
    assert document["facts"]["mode"] == "post"
    assert document["facts"]["format"]
    assert main(["diagnose", "--mode", "post", "--log_file", str(log)]) == 0
    assert told(capsys).splitlines()[-1] == "diagnose: nothing found"


def test_what_the_curve_shows_stands_where_it_began(tmp_path: Path) -> None:
    """A plateau from step 200 on, and one loss of step 450 that is not finite."""
    rng = np.random.default_rng(0)
    losses = np.concatenate([np.linspace(5, 4, 200), np.full(400, 4.0)]) + rng.normal(0, 0.02, 600)
    losses[449] = np.nan
    log = tmp_path / "train.log"
    log.write_text("".join(f"step={at} loss={loss:.4f}\n" for at, loss in enumerate(losses, 1)))
    findings = report_on("explain", log).findings
    assert [one.check for one in findings] == ["curve.plateau", "run.nonfinite"]
    assert "step 450" in list(story(findings))[-1]


@pytest.mark.parametrize("command", [["explain"], ["diagnose", "--mode", "post", "--log_file"]])
@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02\xff" * 50, b"hello\nworld\n", b"1.0\n", None])
def test_bad_input_is_one_line(
    command: list[str], content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    code = main([*command, str(path)])
    captured = capsys.readouterr()
    if content == b"1.0\n":  # one number is a log, and shows nothing
        assert code in (0, 2)
        return
    assert code == 2
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_commands_agree_on_a_plateau(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that falls and then stands still is told by every command that reads a whole log."""
    rng = np.random.default_rng(0)
    losses = np.concatenate([np.linspace(5, 4, 200), np.full(400, 4.0)]) + rng.normal(0, 0.02, 600)
    log = tmp_path / "train.log"
    log.write_text("".join(f"step={at} loss={loss:.4f}\n" for at, loss in enumerate(losses, 1)))
    for command in (["explain"], ["loss"], ["monitor"], ["diagnose", "--mode", "post", "--log_file"]):
        assert main([*command, str(log)]) == 1
        assert "WARNING curve.plateau" in told(capsys)


@pytest.mark.parametrize("command", [["explain"], ["diagnose", "--mode", "post", "--log_file"]])
def test_a_single_loss_is_told_in_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "one.log"
    log.write_text("step=1 loss=2.0\n")
    assert main([*command, str(log)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    log.write_text("step=1 loss=nan\n")
    assert main([*command, str(log)]) == 1
