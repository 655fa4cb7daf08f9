"""Readings as lines of the log."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from palingenesis import Monitor, MonitorConfig
from palingenesis.reading import Reading
from palingenesis.tiers import console
from palingenesis.tiers.console import Console, line_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="palingenesis")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that are readings: events have others."""
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("step=")]


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    return [dict(part.split("=", 1) for part in line.split(" ")) for line in lines(caplog)]


def test_the_line(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    made = Console()
    made.note(99, 3e-5)
    clock[0] += 0.52
    made.note(100, 2e-5)
    scalars = {
        "train/loss": 1.23449,
        "health/loss_mean": 1.0, "health/loss_std": 1.0, "health/loss_cv": 1.0,
        "health/grad_cosine_sim": 0.42,
        "health/gns": 12345.678, "health/gns_se": 1.0,
        "health/cuda_peak_gb": 14.2,
    }  # fmt: skip
    made.tell(Reading(100, scalars, {"health/stable_rank": {"a": 3.0}}, {"health/gns_source": "rank"}))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("palingenesis", "INFO")
    assert record.getMessage() == (
        "step=100 loss=1.2345 lr=2.00e-05 dt=0.52s health/grad_cosine_sim=0.42 health/gns=1.235e+04 "
        "health/cuda_peak_gb=14.2 health/gns_source=rank"
    )


def test_what_is_not_known_is_left_out(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    made = Console()
    made.tell(Reading(7, {"health/host_rss_gb": 1.0}))
    made.note(8, None)
    made.tell(Reading(8, {"train/loss": math.nan}))
    assert lines(caplog) == ["step=7 health/host_rss_gb=1", "step=8 loss=nan"]


def test_a_reading_that_comes_late_has_the_rate_and_the_time_of_its_step(
    caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    made = Console()
    for step in range(1, 2000):
        made.note(step, 1e-3 / step)
        clock[0] += step
    made.tell(Reading(1990, {}))
    made.tell(Reading(3, {}))  # long forgotten
    assert lines(caplog) == [f"step=1990 lr={1e-3 / 1990:.2e} dt=1989.00s", "step=3"]
    assert len(made._steps) < 300


def test_a_log_that_nobody_reads_costs_no_words(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="palingenesis")
    monkeypatch.setattr(Console, "_line", None)
    Console().tell(Reading(1, {"train/loss": 1.0}))
    assert not caplog.records


def run(steps: int, **options: Any) -> Monitor:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-5)
    monitor = Monitor(model, optimizer, None, config=MonitorConfig(check_every=5, **options))
    for step in range(1, steps + 1):
        model(torch.randn(4, 16)).square().mean().backward()
        monitor.step(1.0 / step)
        optimizer.step()
        optimizer.zero_grad()
    return monitor


def test_a_line_every_logging_steps(caplog: pytest.LogCaptureFixture) -> None:
    run(24, logging_steps=6, tier2_every=12, tier3_every=24)
    found = told(caplog)
    # The first look at the weights, and what the first step did to them, come with no logging step.
    assert [int(one["step"]) for one in found] == [1, 2, 6, 12, 18, 24]
    for one in found[2:]:
        assert one["loss"] == f"{1 / int(one['step']):.4f}"
        assert one["lr"] == "2.00e-05"
        assert float(one["dt"].removesuffix("s")) >= 0
    assert "loss" not in found[0] | found[1]
    assert "health/grad_cosine_sim" in found[3] and "health/grad_cosine_sim" not in found[2]
    for name in ("health/stable_rank_min", "health/weight_drift_max"):
        assert name in found[5] and name not in found[3]


def test_tiers_two_and_three_show_between_logging_steps_too(caplog: pytest.LogCaptureFixture) -> None:
    run(12, logging_steps=50, tier2_every=4, tier3_every=6)
    found = {int(one["step"]): one for one in told(caplog)}
    assert sorted(found) == [1, 2, 4, 6, 7, 8, 12]
    assert all("health/grad_cosine_sim" in found[step] for step in (4, 8, 12))
    assert all("health/weight_drift_max" in found[step] for step in (1, 6, 12))
    assert all("health/update_lost_pct" in found[step] for step in (2, 7))


def test_a_line_reads_back_as_the_reading(caplog: pytest.LogCaptureFixture) -> None:
    """Every number of a line is that of the reading, to four digits."""
    monitor = run(12, logging_steps=1, tier2_every=4, tier3_every=6)
    found = told(caplog)
    assert [int(one["step"]) for one in found] == list(range(1, 13))
    for name, value in found[11].items():
        if name.startswith("health/"):
            assert float(value) == pytest.approx(monitor.latest[name], rel=1e-3), name


WHOLE = {
    "train/global_step": 100,
    "train/loss": 1.23449,
    "train/ppl": 3.4,
    "train/lr": 2e-5,
    "train/grad_norm": 0.98765,
    "train/grad_norm_raw": 7.0,
    "train/tokens_per_sec": 600.0,
    "train/tokens_per_sec_global": 1234.5,
    "train/step_time_s": 0.519,
    "train/batch": "0000000000ff",
    "time": 1.7e9,
}


def test_a_row_of_training() -> None:
    assert line_of(WHOLE) == "step=100 loss=1.2345 lr=2.00e-05 grad_norm=0.988 tok/s=1234 dt=0.52s"


def test_a_row_of_an_evaluation() -> None:
    row = {
        "train/global_step": 7,
        "eval/loss": 2.0,
        "eval/ppl": 7.389056,
        "eval/gap": -0.5,
        "eval/code/loss": 3.0,
    }
    assert line_of(row) == "step=7 eval/loss=2 eval/ppl=7.389 eval/gap=-0.5 eval/code/loss=3"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("health/stable_rank/model.layers.0", 3.0, ""),  # of a layer
        ("health/gns_se", 3.0, ""),
        ("health/gns", 3.0, " health/gns=3"),
        ("health/gns_source", "rank", " health/gns_source=rank"),
        ("health/alarms_active", 0, ""),
        ("health/alarms_active", 2, " health/alarms_active=2"),
        ("health/warnings", 0.0, ""),
        ("health/warnings", 1.0, " health/warnings=1"),
        ("health/alarms", 5, ""),
        ("health/loss_spikes", 5, ""),
        ("health/nonfinite", 5, ""),
        ("health/checks", 5, ""),
        ("health/verdict", 2.0, ""),
        ("health/output_entropy", math.inf, " health/output_entropy=inf"),
        ("eval/loss", math.nan, " eval/loss=nan"),
        ("eval/x_se/loss", 1.0, " eval/x_se/loss=1"),  # a source's name
        ("own/number", 1.0, ""),
        ("lonely", 1.0, ""),
    ],
)
def test_which_numbers_have_a_place(name: str, value: Any, expected: str) -> None:
    assert line_of({"train/global_step": 1, name: value}) == f"step=1{expected}"
