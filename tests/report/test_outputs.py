"""Text and JSON: widths, strictness, and that they say what the record holds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from tests.report import runs
from tests.report.conftest import SMALL

from palingenesis.findings.finding import Finding
from palingenesis.record.reader import Run, load_run
from palingenesis.record.verdict import WORDS
from palingenesis.report import render_text, to_json
from palingenesis.report.verdicts import overall


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("width", [80, 40, 24])
def test_no_line_of_text_is_too_long(name: str, width: int, run_of: Callable[[str], Run]) -> None:
    text = render_text(run_of(name), width)
    lines = [line for line in text.splitlines() if not line.startswith("Page: ")]
    assert max(map(cell_len, lines)) <= width
    assert text.startswith(to_json(run_of(name))["verdict"] + ":")
    assert text.endswith("\n")
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_text_names_the_layer_and_the_page(
    run_of: Callable[[str], Run], folder_of: Callable[[str], Path]
) -> None:
    text = render_text(run_of("faulty"))
    assert "model.layers.2.mlp.up_proj  no gradient    310    320  not cleared" in text
    assert f"Page: {folder_of('faulty') / 'report.html'}" in text
    assert "6 alarms (5 cleared)" in text


def test_text_survives_a_pipe(folder_of: Callable[[str], Path]) -> None:
    program = (
        "import sys; from palingenesis.record.reader import load_run; "
        "from palingenesis.report import render_text; "
        "sys.stdout.write(render_text(load_run(sys.argv[1]), 40))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder_of("faulty"))], capture_output=True, check=True
    )
    assert done.stdout.decode("utf-8").startswith("CRITICAL:")


@pytest.mark.parametrize("name", SMALL)
def test_json_is_strict(name: str, run_of: Callable[[str], Run]) -> None:
    run = run_of(name)
    document = to_json(run)
    again = json.loads(json.dumps(document, allow_nan=False))
    assert again == document
    assert list(document) == [
        "verdict", "sentence", "record_verdict", "run", "counts", "first", "findings", "alarms", "incidents",
        "unconfirmed", "events", "spikes", "monitored",
    ]  # fmt: skip
    assert document["record_verdict"] == run.verdict
    assert WORDS.index(document["verdict"]) <= WORDS.index(run.verdict)
    assert len(document["events"]) == len(run.events)


def test_json_holds_the_alarms(run_of: Callable[[str], Run]) -> None:
    document = to_json(run_of("faulty"))
    dead = next(a for a in document["alarms"] if a["diagnosis"] == "no_gradient")
    assert dead["layer"] == "model.layers.2.mlp.up_proj"
    assert (dead["since"], dead["step"], dead["cleared_step"]) == (310, 320, None)
    assert dead["incident"] == document["incidents"][0]["incident"]
    assert document["incidents"][0]["origin"] == dead["layer"]
    assert document["monitored"]["not_watched"][0]["layer"] == "model.rotary_emb"
    assert document["monitored"]["first_judged_step"] == 90
    assert document["run"]["last_step"] == 600
    assert document["monitored"]["alarms_possible_from"] == 100
    monitored = to_json(run_of("warming_up"))["monitored"]
    assert (monitored["first_judged_step"], monitored["alarms_possible_from"]) == (None, None)


def test_json_tells_accepted_levels_from_those_that_came_back(run_of: Callable[[str], Run]) -> None:
    document = to_json(run_of("accepted"))
    assert {a["layer"]: a["ended"] for a in document["alarms"]} == {
        "model.layers.0.mlp.up_proj": "level_accepted",
        "model.layers.1.mlp.up_proj": "in_range",
    }
    assert (document["counts"]["alarms_cleared"], document["counts"]["alarms_accepted"]) == (1, 1)
    assert document["unconfirmed"] == [
        {"step": 600, "layer": "lm_head", "diagnosis": "vanishing"},
        {"step": 600, "layer": "model.embed_tokens", "diagnosis": "exploding"},
    ]
    assert len(document["monitored"]["not_optimized"]) == 8
    assert document["first"][0]["kind"] == "not_optimized"
    assert document["first"][-1]["layer"] == "lm_head"
    assert {a["ended"] for a in to_json(run_of("faulty"))["alarms"]} == {None, "in_range"}


def test_text_tells_accepted_levels_from_those_that_came_back(run_of: Callable[[str], Run]) -> None:
    text = render_text(run_of("accepted"))
    assert "2 alarms (1 cleared, 1 accepted as a new level)" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  model.layers.0.mlp.up_proj")]
    assert "  accepted 4" in row
    assert "alarm 220, accepted 4" in render_text(run_of("accepted"), 60)


def test_json_and_text_of_a_run_without_its_events(tmp_path: Path) -> None:
    folder = runs.healthy(tmp_path / "run")
    (folder / "events.jsonl").write_bytes(b"")
    document = to_json(load_run(folder))
    assert document["verdict"] == "UNKNOWN"
    assert document["monitored"]["problems"] == ["2 of 2 events are missing from the record"]
    assert "pgs verify" in render_text(load_run(folder))


def test_importing_the_report_imports_no_torch() -> None:
    program = "import sys, palingenesis.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_verdict_is_the_worse_of_events_and_findings(run_of: Callable[[str], Run]) -> None:
    run = run_of("killed")
    likely = Finding("run.overfitting", "warning", "evaluation rises", {}, "stop", confidence=0.75)
    doubtful = replace(likely, severity="critical", confidence=0.35)
    assert overall(run.verdict, "killed", [doubtful]) == ("INTERRUPTED", "killed")
    assert overall(run.verdict, "killed", [doubtful, likely]) == ("WARNING", "evaluation rises")
    assert overall("CRITICAL", "NaN", [likely]) == ("CRITICAL", "NaN")
    assert overall("HEALTHY", "well", [likely, replace(likely, severity="critical", message="lost")]) == (
        "CRITICAL",
        "lost",
    )


def test_what_is_found_over_the_whole_run_is_on_top_and_the_monitor_beside_it(
    run_of: Callable[[str], Run],
) -> None:
    text = " ".join(render_text(run_of("resumed")).split())
    assert text.startswith("CRITICAL: after the resume from step 200")
    assert "What the monitor said of it: HEALTHY: " in text
    assert "There is nothing to look at first" not in text
