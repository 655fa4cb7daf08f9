"""Pathologies in the logs of other trainers: what a format shows is found, what it lacks is no symptom."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.findings.foreign import WRITERS, write_as
from tests.findings.more_runs import lr_schedule_planned, zero_loss_without_norm
from tests.findings.runs import (
    Builder,
    data_quality,
    entropy_collapse,
    healthy_rows,
    lr_schedule,
    lr_too_high,
    lr_too_high_climbing,
    lr_too_low,
    no_loss_tokens,
    nonfinite,
    overfitting,
    slower_and_slower,
    source_overfitting,
    write,
    zero_loss_nan_norm,
)
from tests.runlogs.made import made

from palingenesis.findings.pathologies import pathologies_of
from palingenesis.findings.sources import LogSource, RecordSource, source_of
from palingenesis.record.reader import load_run
from palingenesis.runlogs.read import read_log
from palingenesis.runlogs.table import LogEvent, Restart

#: What each format has the numbers for.
SHOWN: dict[str, tuple[Builder, ...]] = {
    "transformers 5": (lr_schedule, zero_loss_nan_norm, overfitting, data_quality),
    "trainer_state": (no_loss_tokens, lr_too_high_climbing, source_overfitting, lr_too_low),
    "Megatron-LM": (lr_schedule, nonfinite, lr_too_high_climbing, lr_too_low),
    "torchtitan": (slower_and_slower, zero_loss_nan_norm, data_quality),
    "JSONL": (lr_too_high, entropy_collapse, source_overfitting),
    "one number a line": (data_quality, lr_too_low, zero_loss_without_norm),
}
CASES = [(form, builder) for form, builders in SHOWN.items() for builder in builders]
IDS = [f"{builder.__name__} in {form}" for form, builder in CASES]


def in_log(form: str, builder: Builder, folder: Path, *, sick: bool) -> list[str]:
    path = write_as(form, builder(folder / f"run{sick}", 3, sick), folder / f"{sick}.log")
    return [finding.check for finding in pathologies_of(read_log(path))]


@pytest.mark.parametrize(("form", "builder"), CASES, ids=IDS)
def test_it_shows_in_another_trainers_log(form: str, builder: Builder, tmp_path: Path) -> None:
    check = f"run.{builder.__name__}".replace("_climbing", "")
    check = {"run.slower_and_slower": "run.slow_throughput"}.get(check, check)
    check = check.replace("zero_loss_without_norm", "zero_loss_nan_norm")
    assert check in in_log(form, builder, tmp_path, sick=True)
    assert check not in in_log(form, builder, tmp_path, sick=False)


@pytest.mark.parametrize("form", WRITERS)
def test_a_healthy_log_has_no_finding(form: str, tmp_path: Path) -> None:
    path = write_as(form, write(tmp_path / "run", healthy_rows(5)), tmp_path / "log")
    assert pathologies_of(read_log(path)) == []


def test_a_log_without_steps_says_so_and_is_less_sure(tmp_path: Path) -> None:
    run = overfitting(tmp_path / "run", 3, True)
    (known,) = pathologies_of(run)
    (inferred,) = pathologies_of(read_log(write_as("transformers 5", run, tmp_path / "log")))
    assert "steps are worked out" in inferred.message
    assert "steps are worked out" not in known.message
    assert inferred.confidence < known.confidence


def test_an_error_at_the_end_is_told_and_one_that_was_got_over_is_not(tmp_path: Path) -> None:
    run = write(tmp_path / "run", healthy_rows(0, 60))
    error = ["Traceback (most recent call last):", "ValueError: row 7 has no answer"]
    (finding,) = pathologies_of(read_log(write_as("Megatron-LM", run, tmp_path / "ended", *error)))
    assert finding.check == "run.failed"
    assert "row 7 has no answer" in finding.message
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    (finding,) = pathologies_of(read_log(write_as("Megatron-LM", run, tmp_path / "memory", memory)))
    assert finding.check == "run.memory_pressure"
    assert finding.severity == "critical"
    lines = (tmp_path / "ended").read_text().splitlines()
    (tmp_path / "on").write_text("\n".join([*lines[:30], *error, *lines[30:60]]) + "\n")
    assert pathologies_of(read_log(tmp_path / "on")) == []


def test_skipped_steps_of_a_log() -> None:
    random = np.random.default_rng(0)
    loss = 2 + random.normal(0, 0.05, 400)
    events = tuple(LogEvent("overflow", step, int(step), "OVERFLOW!") for step in range(20, 400, 10))
    found = {one.check: one for one in pathologies_of(made(loss, events=events))}
    assert found["run.steps_skipped"].evidence["skipped"] == len(events)
    assert found["run.steps_skipped"].since == 20
    assert pathologies_of(made(loss[:300] - np.arange(300) / 400, events=events[:4])) == []


def test_a_restart_with_other_weights() -> None:
    """Steps 101 to 150 are there twice; only the second version counts."""
    random = np.random.default_rng(0)
    first = 3 * np.exp(-np.arange(150) / 60) + 1 + random.normal(0, 0.02, 150)
    second = first[99] + 3 + random.normal(0, 0.02, 200)
    steps = [*range(1, 151), *range(101, 301)]
    log = made([*first, *second], steps, restarts=(Restart(150, 150.0, 101.0),))
    found = {one.check: one for one in pathologies_of(log)}
    assert found["run.worse_after_resume"].since == 101
    healthy = made([*first, *(first[99] + random.normal(0, 0.02, 200))], steps, restarts=log.restarts)
    assert "run.worse_after_resume" not in {one.check for one in pathologies_of(healthy)}


def test_norms_at_their_bound_are_known_to_be_clipped() -> None:
    norm = np.random.default_rng(0).lognormal(0, 0.5, 200)
    assert not LogSource(made(norm, grad_norm=norm)).clipped_only
    assert LogSource(made(norm, grad_norm=np.minimum(norm, 1.0))).clipped_only


def test_a_loss_of_few_digits_has_no_outliers_below_them() -> None:
    """Rounded to 0.1, most neighbours are equal and the spread is zero."""
    loss = np.round(np.random.default_rng(1).normal(1.0, 0.04, 600), 1)
    assert pathologies_of(made(loss[:400], resolution=0.1)) == []


def test_a_log_that_was_read_from_a_run_folder_has_its_record(tmp_path: Path) -> None:
    run = lr_schedule_planned(tmp_path / "run", 0, True)
    log = read_log(tmp_path / "run")
    assert isinstance(source_of(log), RecordSource)
    assert [one.message for one in pathologies_of(log)] == [one.message for one in pathologies_of(run)]
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert load_run(tmp_path / "other").training["schedule"] == "cosine"


def test_the_plan_names_what_the_schedule_was_multiplied_by(tmp_path: Path) -> None:
    (finding,) = pathologies_of(lr_schedule_planned(tmp_path / "run", 0, True))
    assert "times too fast, which is the number of micro-batches in a step" in finding.message
    assert finding.evidence["factor"] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("every", [1, 5, 10, 25])
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_planned_schedule_that_is_seen_at_few_steps_is_none_that_runs_slowly(
    every: int, shape: str, tmp_path: Path
) -> None:
    """The record has a loss for every step, and a learning rate at checks alone."""
    for total, warm, times in (
        (100, 0, 1),
        (200, 0, 1),
        (200, 20, 1),
        (900, 0, 1),
        (900, 27, 1),
        (900, 0, 4),
    ):
        rows = [{"train/global_step": step, "train/loss": 3 * step**-0.2} for step in range(1, total + 1)]
        for row in rows[every - 1 :: every]:
            done = (min(times * row["train/global_step"], total) - warm) / (total - warm)
            left = 1 - done if shape == "linear" else 0.5 * (1 + np.cos(np.pi * done))
            row["train/lr"] = 1e-3 * min(left, times * row["train/global_step"] / max(warm, 1))
        training = {
            "schedule": shape,
            "total_steps": total,
            "warmup_steps": warm,
            "learning_rate": 1e-3,
        }
        run = write(tmp_path / f"{total}-{warm}-{times}", rows, info={"training": training})
        found = [one.check for one in pathologies_of(run) if one.check == "run.lr_schedule"]
        assert found == ["run.lr_schedule"] * (times > 1), (total, warm, times)


def test_a_rate_far_too_high_leads_where_all_is_lost_after_a_few_steps() -> None:
    loss = [7.38, 7.35, 116.0, 350.0, 1117.0, 880.0, 637.0, 1284.0, 747.0, 1911.0, 3864.0, *[np.nan] * 40]
    norm = [4.3, 4.0, 104.0, 871.0, 73.0, 83.0, 78.0, 122.0, 164.0, 1e16, *[np.nan] * 41]
    found = pathologies_of(made(loss, grad_norm=norm, lr=np.full(51, 3.0)))
    assert [one.check for one in found][:2] == ["run.lr_too_high", "run.nonfinite"]
    assert found[1].explained_by == ("run.lr_too_high",)
    falling = [7.4, 7.2, 7.0, 6.6, 6.5, 6.3, 6.4, 6.1, 6.0, 5.9]
    assert pathologies_of(made(falling, grad_norm=[4.0, 3.0, 2.5, 9.0, 8.0, 7.0, 9.0, 8.0, 7.0, 8.0])) == []
