"""The demonstration from end to end, and what it refuses."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from palingenesis.demo import BROKEN_LAYER, FEWEST_STEPS, DemoResult, DemoRun, run_demo
from palingenesis.demo.display import Display
from palingenesis.demo.run import RUN_NAMES
from palingenesis.errors import ConfigError, RecordExistsError
from palingenesis.events import Event


def demo_run(verdict: str, layer: str | None = None, last_loss: float = 3.0) -> DemoRun:
    alarm = None if layer is None else Event("alarm", 110, "warning", f"{layer} rang", {"layer": layer})
    return DemoRun(Path("run"), Path("run/report.html"), verdict, alarm, 7.0, last_loss, 1.0)


def result(healthy: DemoRun, faulty: DemoRun | None) -> DemoResult:
    return DemoResult(200, 0, "no_gradient", 100, BROKEN_LAYER, healthy, faulty)


def test_ok_asks_for_a_healthy_run_and_an_alarm_that_names_the_broken_layer() -> None:
    healthy = demo_run("HEALTHY")

    assert result(healthy, demo_run("WARNING", BROKEN_LAYER)).ok
    assert result(healthy, None).ok
    assert not result(healthy, demo_run("WARNING", "model.layers.1.mlp.up_proj")).ok
    assert not result(healthy, demo_run("HEALTHY")).ok
    assert not result(demo_run("WARNING", BROKEN_LAYER), demo_run("WARNING", BROKEN_LAYER)).ok


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"needs {FEWEST_STEPS} or more"):
        run_demo(tmp_path, steps=FEWEST_STEPS - 1)


def test_an_unknown_fault_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose one of no_gradient, exploding, none"):
        run_demo(tmp_path, fault="gremlins")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ['{"name": "my run"}', "[]", "{torn"])
def test_another_run_is_never_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "faulty").mkdir()
    info = tmp_path / "faulty" / "run.json"
    info.write_text(text)
    with pytest.raises(RecordExistsError, match="choose another folder"):
        run_demo(tmp_path)
    assert info.read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no_gradient", "exploding"])
def test_the_alarm_names_the_broken_layer_and_the_healthy_run_is_healthy(tmp_path: Path, fault: str) -> None:
    shown = io.StringIO()
    outcome = run_demo(
        tmp_path,
        steps=FEWEST_STEPS,
        fault=fault,  # type: ignore[arg-type]
        console=Console(file=shown, width=110),
    )

    assert outcome.ok, shown.getvalue()
    assert outcome.faulty is not None
    alarm = outcome.faulty.first_alarm
    assert alarm is not None
    assert (alarm.layer, alarm.diagnosis) == (BROKEN_LAYER, fault)
    assert outcome.fault_step < alarm.step <= outcome.fault_step + 10
    assert outcome.faulty.verdict == "WARNING"
    assert outcome.healthy.last_loss < outcome.healthy.first_loss - 1
    for run in (outcome.healthy, outcome.faulty):
        assert run.report.is_file()
        assert json.loads((run.folder / "run.json").read_text("utf-8"))["end"]["reason"] == "completed"

    text = shown.getvalue()
    for run in (outcome.healthy, outcome.faulty):
        assert f"{run.first_loss:.2f} in the first 10 steps, {run.last_loss:.2f} in the last 10" in text
    assert "HEALTHY" in text
    assert "WARNING" in text
    assert "pgs report" in text
    assert text.index("from here on") < text.index("named it at step")


@pytest.mark.slow
def test_without_a_fault_there_is_one_run_and_an_earlier_one_is_replaced(tmp_path: Path) -> None:
    earlier = tmp_path / "healthy"
    earlier.mkdir()
    (earlier / "run.json").write_text(json.dumps({"record_version": 1, "name": RUN_NAMES["healthy"]}))

    outcome = run_demo(tmp_path, steps=FEWEST_STEPS, fault="none")

    assert outcome.ok
    assert outcome.faulty is None
    assert [folder.name for folder in tmp_path.iterdir()] == ["healthy"]
    assert json.loads((earlier / "run.json").read_text("utf-8"))["end"]["steps"] == FEWEST_STEPS


def test_a_terminal_gets_a_bar_and_nothing_in_a_name_is_markup() -> None:
    shown = io.StringIO()
    display = Display(Console(file=shown, force_terminal=True, width=100, color_system=None), steps=2)
    with display.run("Healthy run"):
        logging.getLogger("palingenesis").warning("step 1: alarm: layer [red]x[/red] rang")
        display.step(1, 7.25)
        display.step(2, 6.5)
    text = shown.getvalue()

    assert "step 2 of 2 loss 6.50" in text
    assert "layer [red]x[/red] rang" in text
    assert logging.getLogger("palingenesis").handlers == []


@pytest.mark.parametrize(
    ("healthy", "faulty", "sentence"),
    [
        (demo_run("WARNING"), demo_run("WARNING", BROKEN_LAYER), "it should be HEALTHY"),
        (demo_run("HEALTHY"), None, "Nothing was broken, and nothing rang."),
        (demo_run("HEALTHY"), demo_run("HEALTHY"), "was broken after step 100, and nothing rang"),
        (demo_run("HEALTHY"), demo_run("WARNING", "lm_head"), "the first alarm names lm_head"),
        (demo_run("HEALTHY"), demo_run("WARNING", BROKEN_LAYER), "the alarm named it at step 110"),
    ],
)
def test_the_closing_panel_says_how_it_went(healthy: DemoRun, faulty: DemoRun | None, sentence: str) -> None:
    shown = io.StringIO()
    Display(Console(file=shown, width=160), steps=200).closing(result(healthy, faulty))

    assert sentence in " ".join(shown.getvalue().split())
    assert f"pgs report {Path('run')} --format text" in shown.getvalue()


def test_the_closing_panel_says_whose_losses_it_shows_and_over_which_steps() -> None:
    shown = io.StringIO()
    both = result(demo_run("HEALTHY"), demo_run("WARNING", BROKEN_LAYER, last_loss=4.5))
    Display(Console(file=shown, width=160), steps=200).closing(both)
    healthy, faulty = shown.getvalue().split("faulty run")

    assert "mean loss  7.00 in the first 10 steps, 3.00 in the last 10" in healthy
    assert "mean loss  7.00 in the first 10 steps, 4.50 in the last 10" in faulty
