"""Runs side by side: where they part is where they were made to part, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report import runs
from tests.report.runs import Script
from tests.report.test_browser import CONTRAST
from tests.runlogs.made import made

from palingenesis.cli.entry import main
from palingenesis.record.reader import load_run
from palingenesis.report.compare import (
    compare,
    comparison_document,
    figures_of,
    settings_that_differ,
    tell_parting,
)
from palingenesis.report.compare_page import render_comparison, write_comparison
from palingenesis.report.parting import PartingLimits, apart, parting_of
from palingenesis.report.subject import Subject, open_subject, subject_of
from palingenesis.runlogs.table import Column


def noisy(seed: int, steps: int = 400) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.asarray(1.5 + 2.0 * np.exp(-np.arange(steps) / 80) + 0.1 * rng.standard_normal(steps))


def column(values: np.ndarray) -> Column:
    return Column(np.arange(len(values)), np.arange(1.0, len(values) + 1), values)


def of_log(loss: Any, **columns: Any) -> Subject:
    return subject_of(made(loss, **columns), "made.log")


def test_a_run_is_the_same_as_itself() -> None:
    parting = parting_of(of_log(noisy(0)), of_log(noisy(0)))
    assert parting.first_step is None
    assert parting.differences == ()
    assert parting.loss is not None
    assert parting.loss.step is None
    assert "is the same as A in every number" in tell_parting(parting, "B")[0]


@pytest.mark.parametrize("step", [2, 77, 400])
def test_the_first_step_that_differs_is_found_exactly(step: int) -> None:
    other, rate = noisy(0), np.full(400, 1e-3)
    other[step - 1 :] += 1e-4
    changed = rate.copy()
    changed[step - 2 :] *= 2
    parting = parting_of(of_log(noisy(0), lr=rate), of_log(other, lr=changed))
    assert parting.first_step == max(step - 1, 1)
    found = {one.signal: one.step for one in parting.differences}
    assert found == {"train/lr": max(step - 1, 1), "train/loss": step}
    assert "first differs from A" in tell_parting(parting, "B")[0]
    assert "train/lr" in tell_parting(parting, "B")[0]


def test_a_nan_of_one_run_only_is_a_difference() -> None:
    broken = noisy(0)
    broken[99:] = np.nan
    (difference,) = parting_of(of_log(noisy(0)), of_log(broken)).differences
    assert (difference.signal, difference.step) == ("train/loss", 100)
    assert parting_of(of_log(broken), of_log(broken)).first_step is None


def test_an_infinite_number_of_one_run_only_is_a_difference() -> None:
    other = noisy(0)
    other[30] = np.inf
    for one, two in ((other, noisy(0)), (noisy(0), other)):
        parting = parting_of(of_log(one), of_log(two))
        assert {one.signal: one.step for one in parting.differences} == {"train/loss": 31}
    assert parting_of(of_log(other), of_log(other)).first_step is None


def test_runs_that_are_the_same_for_long_are_judged_by_the_noise_after_it() -> None:
    """The same seed, and something small changed late: where they are the same to the bit is no noise."""
    called = 0
    for seed in range(60):
        first, second = noisy(seed), noisy(seed)
        second[250:] = noisy(seed + 1000)[250:]
        side = apart(column(first), column(second), PartingLimits())
        assert side is not None
        assert side.low < side.difference < side.high
        called += side.step is not None
    assert called <= 1


def test_the_noise_of_the_start_does_not_hide_what_differs_at_the_end() -> None:
    """A loss that falls from 30 has noise that falls with it."""
    first = noisy(0)
    wild = 30 * np.exp(-np.arange(400) / 60) * (1 + 0.3 * np.random.default_rng(2).standard_normal(400))
    side = apart(column(first), column(first + wild + 1.0), PartingLimits())
    assert side is not None
    assert side.step is not None
    assert not side.lower
    assert 0.9 < side.low <= side.difference <= side.high < 1.2


def test_the_best_evaluation_is_the_lowest() -> None:
    every = np.full(400, np.nan)
    every[[99, 199, 299]] = 2.0, 1.5, 1.8
    figures = figures_of(of_log(noisy(0), eval_loss=every))
    assert (figures.best_eval, figures.best_eval_step) == (1.5, 200)


def test_runs_that_differ_by_noise_do_not_part() -> None:
    """Of 300 pairs none, or one by chance, stays apart: their noise is independent."""
    found = [
        apart(column(noisy(2 * seed)), column(noisy(2 * seed + 1)), PartingLimits()) for seed in range(300)
    ]
    assert sum(one is not None and one.step is not None for one in found) <= 1


@pytest.mark.parametrize("shift", [-0.4, 0.4])
def test_losses_that_part_are_found_near_the_step(shift: float) -> None:
    missed = 0
    for seed in range(40):
        other = noisy(1000 + seed)
        other[200:] += shift
        side = apart(column(noisy(seed)), column(other), PartingLimits())
        assert side is not None
        assert side.lower == (shift < 0)
        missed += side.step is None or abs(side.step - 201) > 20
    assert missed <= 1


def test_the_interval_of_the_difference_holds_the_truth() -> None:
    held = 0
    for seed in range(200):
        side = apart(column(noisy(seed)), column(noisy(5000 + seed) + 0.3), PartingLimits())
        assert side is not None
        held += side.low <= 0.3 <= side.high
    assert 0.90 <= held / 200 <= 0.99


def test_a_difference_that_went_away_is_no_parting() -> None:
    other = noisy(1)
    other[100:200] += 1.0
    side = apart(column(noisy(0)), column(other), PartingLimits())
    assert side is not None
    assert side.step is None


def test_a_difference_too_small_to_matter_is_none() -> None:
    side = apart(column(noisy(0)), column(noisy(0) * 1.001), PartingLimits())
    assert side is not None
    assert side.step is None


def test_few_common_steps_say_nothing() -> None:
    assert apart(column(noisy(0)[:19]), column(noisy(1)[:19]), PartingLimits()) is None
    parting = parting_of(of_log(noisy(0)[:10]), of_log(noisy(1)[:10]))
    assert "too few to say" in tell_parting(parting, "B")[-1]


def test_runs_without_a_common_step_say_so() -> None:
    parting = parting_of(of_log(noisy(0)), of_log(noisy(0), step=np.arange(1000, 1400)))
    assert tell_parting(parting, "B")[0] == "B and A have no number of the same step in common."


def test_numbers_of_a_log_are_the_same_within_what_it_writes() -> None:
    written = np.round(noisy(0), 2)
    exact, rough = of_log(noisy(0)), of_log(written, resolution=1e-2)
    assert parting_of(exact, rough).first_step is None
    assert parting_of(exact, of_log(written)).first_step == 1


def test_settings_that_differ() -> None:
    one = {"training": {"learning_rate": 1e-3, "options": {"train.learning_rate": 1e-3, "train.x": [1]}}}
    other = {"training": {"learning_rate": 3e-3, "options": {"train.learning_rate": 3e-3, "train.x": [2]}}}
    settings, same = settings_that_differ(
        [one | {"model": {"class": "M"}}, other | {"model": {"class": "M"}}]
    )
    assert [(setting.name, setting.values) for setting in settings] == [
        ("training.learning_rate", ("0.001", "0.003")),
        ("training.options.train.x", ("1", "2")),
    ]
    assert same == 1
    assert settings_that_differ([{}, {"a": None}])[0][0].values == ("–", "none")


def test_options_that_only_another_kind_of_loop_has_are_no_difference() -> None:
    one = {"training": {"by": "pgs train", "options": {"train.x": 1}}}
    others = [
        {"training": {"by": "trl", "options": {"bf16": True, "max_steps": steps}}} for steps in (20, 30)
    ]
    settings, _ = settings_that_differ([one, *others])
    assert [setting.name for setting in settings] == ["training.by", "training.options.max_steps"]


# -- records -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one seed, the second worse from step 301 on, on other batches from step 290 on."""
    names, folder = runs.block_names(1), tmp_path_factory.mktemp("pair")
    losses = [float(value) for value in runs.falling_losses(600) if value is not None]
    script = Script(names, runs.healthy_norms(60, len(names)), losses)
    worse = [loss + (0.5 if step >= 300 else 0.0) for step, loss in enumerate(losses)]
    made_of = {"training": {"learning_rate": 1e-3, "seed": 0}}
    other = {"training": {"learning_rate": 3e-3, "seed": 0}}
    first = runs.write_run(folder / "first", replace(script, info=made_of))
    second = runs.write_run(folder / "second", replace(script, losses=worse, info=other))
    for place, batch in ((first, "a"), (second, "b")):
        rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row["train/batch"] = batch if row["train/global_step"] >= 290 else "same"
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return first, second


def test_a_comparison_of_two_records(pair: tuple[Path, Path]) -> None:
    comparison = compare([subject_of(load_run(folder), str(folder)) for folder in pair])
    (parting,) = comparison.partings
    assert (parting.batches, parting.first_step) == (290, 290)
    assert parting.differences[0].step == 301
    assert parting.loss is not None
    assert parting.loss.step is not None
    assert abs(parting.loss.step - 301) <= 15
    assert abs(parting.loss.difference - 0.5) < 1e-9
    assert tell_parting(parting, "B")[0] == "From step 290 on B trained on other batches than A."
    assert {one.name: one.values for one in comparison.settings} == {
        "training.learning_rate": ("0.001", "0.003")
    }
    document = comparison_document(comparison)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [run["letter"] for run in document["runs"]] == ["A", "B"]
    assert document["parting"][0]["batches"] == 290


def test_the_page_of_a_comparison(pair: tuple[Path, Path], browser: Any, tmp_path: Path) -> None:
    folders = [*pair, pair[0]]
    comparison = compare([subject_of(load_run(folder), str(folder)) for folder in folders])
    page = write_comparison(comparison, tmp_path / "c.html")
    complaints: list[str] = []
    for options in ({"viewport": {"width": 360, "height": 740}}, {"color_scheme": "dark"}):
        context = browser.new_context(**options)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(page.as_uri())
        assert tab.locator(".card").count() == 3
        assert tab.locator("#chart-difference").count() == 1
        assert tab.get_by_role("table", name="Settings that are not the same").is_visible()
        tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.evaluate(CONTRAST) == []
        context.close()
    assert complaints == []


def test_names_in_a_comparison_are_text() -> None:
    bad = "<script>window.pwned=1</script>"
    subject = replace(of_log(noisy(0), **{f"other/{bad}": noisy(1)}), name=bad, place=bad, sentence=bad)
    page = render_comparison(compare([subject, subject])).decode()
    assert "<script>window.pwned" not in page
    assert "&lt;script&gt;window.pwned" in page


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_compares(
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, pair)]) in (0, 1)
    assert "report: comparison.html" in capsys.readouterr().out
    assert (tmp_path / "comparison.html").stat().st_size < 3_000_000
    main(["report", *map(str, pair), "--json"])
    assert json.loads(capsys.readouterr().out)["settings_same"] > 0
    main(["report", *map(str, pair), "--format", "text"])
    told = capsys.readouterr().out
    assert "From step 290 on B trained on other batches than A." in told
    assert "training.learning_rate: A 0.001, B 0.003" in told


@pytest.mark.parametrize("bad", ["nothing", "a b c d e f g"])
def test_bad_input_is_one_line(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *bad.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers prints."""
    file = tmp_path_factory.mktemp("log") / "train.log"
    rows = [
        {"loss": round(float(value), 4), "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": step / 100}
        for step, value in enumerate(noisy(0, 120), 1)
    ]
    file.write_text("".join(f"{row}\n" for row in rows))
    return file


def test_a_log_of_another_trainer_gets_a_page(
    log_file: Path, tmp_path: Path, browser: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "log.html"
    assert main(["report", str(log_file), "--out", str(page)]) in (0, 1)
    complaints: list[str] = []
    tab = browser.new_page(viewport={"width": 360, "height": 740})
    tab.on("console", lambda message: complaints.append(message.text))
    tab.goto(page.as_uri())
    assert tab.get_by_role("img", name="Loss: training against evaluation").count() == 1
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.close()
    assert complaints == []
    capsys.readouterr()
    main(["report", str(log_file), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["facts"]["format"] == "transformers"
    assert {"findings", "exit_code"} <= document.keys()


def test_a_log_and_a_record_compare(log_file: Path, folder_of: Callable[[str], Path]) -> None:
    places = [str(log_file), str(folder_of("healthy"))]
    comparison = compare([subject_of(open_subject(place), place) for place in places])
    assert [subject.format for subject in comparison.subjects] == ["transformers", "palingenesis"]
    assert comparison.subjects[0].verdict is None
    assert comparison.partings[0].loss is not None
