"""``pgs explain``: one finding, all of them, and ids that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.findings.runs import healthy_rows, write
from tests.test_house import run

from palingenesis.cli import main
from palingenesis.findings.catalog import CATALOG


@pytest.mark.parametrize("check", CATALOG)
def test_a_finding_is_explained(check: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", check]) == 0
    out = capsys.readouterr().out
    entry = CATALOG[check]
    assert out.startswith(f"{check}: {entry.title}\n")
    for text in (entry.meaning, entry.why, entry.confirm, entry.fix, entry.source):
        assert f"  {text}\n" in out


def test_a_pathology_has_causes_and_says_what_is_not_there_yet(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "run.forgetting"])
    out = capsys.readouterr().out
    assert "Usual causes\n" in out
    assert "Remedies that are not options yet\n  base_merge; pretrain_replay_dataset\n" in out


def test_one_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "run.lr_too_high", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["check"] == "run.lr_too_high"
    assert document["fix"] == CATALOG["run.lr_too_high"].fix
    assert document["causes"]
    assert document["follows_from"] == [
        "run.replicas_diverge",
        "run.no_zero_grad",
        "run.worse_after_resume",
    ]
    assert "data that gets harder on the way" in document["otherwise"]


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(CATALOG)
    assert main(["explain", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {one["check"]: one["title"] for one in document["findings"]} == {
        entry.check: entry.title for entry in CATALOG.values()
    }


def test_a_hyphen_is_as_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "run.lr-too-high"]) == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("run.lr_to_high", "did you mean run.lr_too_high"),
        ("xyzzy", "`pgs explain` lists the"),
        ("", "no finding is called ''"),
    ],
)
def test_an_unknown_id_is_one_line_and_2(given: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", given, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("pgs: error: no finding is called")
    assert told in line


def test_a_run_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "run", healthy_rows(0, 60))
    program = f"sys.argv = ['pgs', 'explain', {str(tmp_path / 'run')!r}]\n"
    program += "from palingenesis.cli import main\nraise SystemExit(main())"
    run(program, forbid=("torch", "transformers", "lightning"))


def test_it_needs_no_torch() -> None:
    program = "sys.argv = ['pgs', 'explain', 'run.lr_too_high']\nfrom palingenesis.cli import main\nmain()"
    run(program, forbid=("torch", "transformers", "lightning"))
