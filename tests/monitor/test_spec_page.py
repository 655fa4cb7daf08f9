"""The page on layer alarms, sentence by sentence: each test is named after the one it holds to."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.monitor.scripted import Scripted
from torch import nn

from palingenesis import Monitor, MonitorConfig, load_run
from palingenesis.signals import gradients

WARMUP = 8


# -- how a layer alarm fires ------------------------------------------------------------------------------


def test_the_monitor_compares_each_layer_with_its_own_recent_history() -> None:
    """Norms orders of magnitude apart are all normal; a value is an alarm only where it is unusual."""
    run = Scripted(normals=(1e-4, 1e-2, 1.0, 100.0))
    run.steps(20)
    assert not run.alarms
    run.steps(2, a=1e4)  # 1.0, which is layer c's normal
    assert [alarm.layer for alarm in run.alarms] == ["a"]


def test_both_drift_during_training() -> None:
    """A drift of all layers that the baseline can follow raises nothing."""
    run = Scripted()
    for i in range(200):
        run.step(every=10 ** (-i / 50), b=10 ** (i / 40))
    assert not run.alarms


def test_every_check_every_steps_defaults_to_50_and_begins_with_step_50() -> None:
    assert MonitorConfig().check_every == 50
    run = Scripted(check_every=50)
    run.steps(149)
    assert run.monitor.counts["checks"] == 2


def test_in_one_device_to_host_transfer_per_device_that_holds_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    real = gradients.Packet

    def counting(tensors: dict[str, torch.Tensor]) -> gradients.Packet:
        packet = real(tensors)
        made.append(len(packet._parts))
        return packet

    monkeypatch.setattr(gradients, "Packet", counting)
    run = Scripted(check_every=5)
    run.steps(20, loss=torch.tensor(1.0))
    assert made == [1, 1, 1, 1]


def test_it_keeps_a_running_mean_and_variance_of_log10_of_the_norm() -> None:
    """The baseline equals a plain computation of the same statistics."""
    run = Scripted(noise=0.2, config=MonitorConfig(common_mode=False))
    norms = []
    for _ in range(30):
        run.step()
        norms.append([float(layer.weight.grad.double().norm()) for layer in run.model.values()])
    logs = np.log10(norms)
    mean, var = logs[:WARMUP].mean(axis=0), logs[:WARMUP].var(axis=0)
    for i, row in enumerate(logs[WARMUP:], WARMUP):
        rate = max(1 / (i + 1), 0.1)
        var = (1 - rate) * (var + rate * (row - mean) ** 2)
        mean = mean + rate * (row - mean)
    band_mean, band_std = run.monitor._judging.watchers.layers.band()
    np.testing.assert_allclose(band_mean, mean, rtol=1e-6)
    np.testing.assert_allclose(band_std, np.sqrt(var), rtol=1e-5)


def test_after_warmup_checks_default_8_have_built_the_baseline() -> None:
    assert MonitorConfig().warmup == WARMUP
    early = Scripted()
    early.steps(6)
    early.steps(2, b=1e4)  # checks 7 and 8 still build the baseline
    assert not early.alarms
    ready = Scripted()
    ready.steps(8)
    ready.steps(2, b=1e4)
    assert [(alarm.layer, alarm.step) for alarm in ready.alarms] == [("b", 10)]


@pytest.mark.parametrize(("factor", "fires"), [(1 / 9, False), (1 / 12, True)])
def test_vanishing_needs_at_least_one_order_of_magnitude(factor: float, fires: bool) -> None:
    run = Scripted(noise=0.01)
    run.steps(20)
    run.steps(2, c=factor)
    assert [alarm.diagnosis for alarm in run.alarms] == (["vanishing"] if fires else [])


@pytest.mark.parametrize(("factor", "fires"), [(9, False), (12, True)])
def test_the_same_distance_above_its_mean_is_exploding(factor: float, fires: bool) -> None:
    run = Scripted(noise=0.01)
    run.steps(20)
    run.steps(2, c=factor)
    assert [alarm.diagnosis for alarm in run.alarms] == (["exploding"] if fires else [])


@pytest.mark.parametrize("sigma", [2.5, 6.0])
def test_more_than_sigma_standard_deviations_default_2_5(sigma: float) -> None:
    """A layer that scatters by half a decade is not exploding at 30 times its mean unless sigma allows."""
    assert MonitorConfig().sigma == 2.5
    run = Scripted(noise=0.0, sigma=sigma)
    for i in range(30):
        run.step(c=10 ** (0.4 * (-1) ** i))
    run.steps(2, c=10**1.5)
    distance = 1.5 / 0.4  # 3.75 standard deviations
    assert bool(run.alarms) == (distance > sigma)


def test_exactly_zero_while_the_baseline_is_nonzero_is_no_gradient() -> None:
    run = Scripted()
    run.steps(20)
    run.steps(2, b=0.0)
    assert [(alarm.layer, alarm.diagnosis) for alarm in run.alarms] == [("b", "no_gradient")]


def test_an_alarm_fires_only_when_the_same_condition_holds_on_two_checks_in_a_row() -> None:
    run = Scripted()
    run.steps(20)
    for factor in (1e4, 1.0, 1e4, 1e-4, 1e4, 0.0, 1e-4, 1.0):  # never twice the same
        run.step(b=factor)
    assert not run.alarms
    run.steps(2, b=1e-4)
    assert [(alarm.diagnosis, alarm.since, alarm.step) for alarm in run.alarms] == [("vanishing", 29, 30)]


def test_it_is_cleared_with_an_alarm_cleared_event_on_the_first_check_back_in_range() -> None:
    run = Scripted()
    run.steps(20)
    run.steps(4, b=1e4)
    run.steps(3)
    cleared = run.events("alarm_cleared")
    assert [(event.layer, event.step, event.since) for event in cleared] == [("b", 25, 22)]
    assert run.monitor.counts["alarms_cleared"] == 1


def test_one_event_an_episode() -> None:
    run = Scripted()
    run.steps(20)
    run.steps(15, b=1e4)
    run.steps(5)
    run.steps(15, b=1e4)
    assert [alarm.step for alarm in run.alarms] == [22, 42]


def test_out_of_range_values_are_not_added_to_the_baseline() -> None:
    run = Scripted()
    run.steps(20)
    before, _ = run.monitor._judging.watchers.layers.band()
    run.steps(15, b=1e4)
    after, _ = run.monitor._judging.watchers.layers.band()
    assert abs(after[1] - before[1]) < 1e-12
    run.steps(1)
    assert len(run.events("alarm_cleared")) == 1  # judged against the old normal, it is back


# -- loss checks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_raises_a_critical_event_once_per_episode(value: float) -> None:
    run = Scripted()
    run.steps(10, loss=1.0)
    run.steps(5, loss=value)
    run.steps(5, loss=1.0)
    run.steps(2, loss=torch.tensor(value))
    events = run.events("nonfinite")
    assert [(event.severity, event.step, event.source) for event in events] == [
        ("critical", 11, "loss"),
        ("critical", 21, "loss"),
    ]
    assert run.monitor.verdict == "CRITICAL"


def test_non_finite_gradients_raise_a_critical_event_once_per_episode() -> None:
    run = Scripted()
    run.steps(10)
    run.steps(4, c=math.nan)
    events = run.events("nonfinite")
    assert [(event.step, event.layers, event.source) for event in events] == [(11, ["c"], "gradients")]


def test_a_loss_spike_is_more_than_sigma_std_above_the_mean_and_more_than_1_5_times_it() -> None:
    noise = torch.Generator().manual_seed(1)

    def loss(_: int) -> float:
        return 2.0 + 0.02 * float(torch.randn((), generator=noise))

    for value, spike in ((2.9, False), (3.2, True)):  # 45 and 60 sigma; 1.45 and 1.6 times
        run = Scripted()
        run.steps(50, loss=loss)
        run.step(value)
        assert bool(run.events("loss_spike")) == spike
    wide = Scripted()
    wide.steps(60, loss=lambda i: 2.0 + 1.0 * (-1) ** i)
    wide.step(3.4)  # 1.7 times the mean, but only 1.4 sigma
    assert not wide.events("loss_spike")


def test_one_loss_spike_event_per_episode_followed_by_loss_recovered() -> None:
    run = Scripted()
    run.steps(20, loss=1.0)
    run.steps(5, loss=9.0)
    run.steps(5, loss=1.0)
    told = [(event.event, event.step) for event in run.events("loss_spike", "loss_recovered")]
    assert told == [("loss_spike", 21), ("loss_recovered", 26)]
    assert run.monitor.counts["loss_spikes"] == 1


def test_note_loss_is_used_by_the_next_step_without_a_loss(tmp_path: Path) -> None:
    run = Scripted(out=tmp_path / "run")
    run.monitor.note_loss(torch.tensor(7.0))
    run.step()
    run.step()
    run.monitor.close()
    losses = load_run(tmp_path / "run").metrics["train/loss"]
    assert losses[0] == 7.0
    assert math.isnan(losses[1])


def test_a_loss_passed_to_step_wins(tmp_path: Path) -> None:
    run = Scripted(out=tmp_path / "run")
    run.monitor.note_loss(7.0)
    run.step(3.0)
    run.step()
    run.monitor.close()
    losses = load_run(tmp_path / "run").metrics["train/loss"]
    assert losses[0] == 3.0
    assert math.isnan(losses[1])


def test_a_loss_with_more_than_one_element_is_recorded_as_its_mean_and_one_loss_reduced_event_says_so(
    tmp_path: Path,
) -> None:
    run = Scripted(out=tmp_path / "run")
    run.steps(3, loss=torch.tensor([1.0, 2.0, 6.0]))
    run.monitor.close()
    assert load_run(tmp_path / "run").metrics["train/loss"].tolist() == [3.0, 3.0, 3.0]
    assert [event.shape for event in run.events("loss_reduced")] == [[3]]


@pytest.mark.parametrize(
    "loss",
    [
        2,
        2.0,
        torch.tensor(2),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.tensor([2.0], dtype=torch.float64),
        torch.tensor(2.0, requires_grad=True),
        torch.tensor(1.0, requires_grad=True) * 2,
    ],
)
def test_losses_of_any_kind(loss: torch.Tensor | float, tmp_path: Path) -> None:
    run = Scripted(out=tmp_path / "run")
    run.step(loss)
    run.monitor.close()
    assert load_run(tmp_path / "run").metrics["train/loss"].tolist() == [2.0]
    assert not run.events("monitor_error")


# -- no gradients -----------------------------------------------------------------------------------------


def test_no_watched_layer_with_a_gradient_writes_one_no_gradients_warning_and_counts_every_such_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Scripted()
    with caplog.at_level(logging.WARNING, logger="palingenesis"):
        run.steps(5, a=None, b=None, c=None, d=None)
    assert len(run.events("no_gradients")) == 1
    assert run.monitor.counts["checks_without_gradients"] == 5
    assert run.monitor.verdict == "NOT MONITORED"
    assert len(caplog.records) == 1
    assert "loss.backward()" in caplog.text


def test_calling_step_before_backward_is_found_out() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, out=None, check_every=1)
    for _ in range(3):
        loss = model(torch.randn(2, 4)).square().mean()
        monitor.step(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.verdict == "NOT MONITORED"


def test_partly_monitored_when_some_checks_saw_gradients() -> None:
    run = Scripted()
    run.steps(3, a=None, b=None, c=None, d=None)
    run.steps(20)
    assert run.monitor.verdict == "PARTLY MONITORED"


def test_the_reports_say_so_instead_of_healthy(tmp_path: Path) -> None:
    run = Scripted(out=tmp_path / "run")
    run.steps(3, a=None, b=None, c=None, d=None)
    run.monitor.close()
    found = load_run(tmp_path / "run")
    assert found.verdict == "NOT MONITORED"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "NOT MONITORED" in page.upper()
    assert "HEALTHY" not in page.upper().split("<TITLE>")[1].split("</TITLE>")[0]


def test_a_run_with_no_check_at_all_is_unknown(tmp_path: Path) -> None:
    run = Scripted(out=tmp_path / "run", check_every=50)
    run.steps(49)
    assert run.monitor.verdict == "UNKNOWN"
    run.monitor.close()
    assert load_run(tmp_path / "run").verdict == "UNKNOWN"


def test_a_run_that_ended_before_the_warm_up_is_unknown_and_says_still_warming_up(tmp_path: Path) -> None:
    run = Scripted(out=tmp_path / "run")
    run.steps(WARMUP - 1)
    run.monitor.close()
    found = load_run(tmp_path / "run")
    assert found.verdict == "UNKNOWN"
    assert "warming up" in found.verdict_sentence


# -- why the numbers are what they are --------------------------------------------------------------------


def test_raising_sigma_or_warmup_quietens(tmp_path: Path) -> None:
    loud, wide, late = (Scripted(noise=0.0, **o) for o in ({}, {"sigma": 50.0}, {"warmup": 40}))
    for run in (loud, wide, late):
        for i in range(30):
            run.step(b=1.2 ** (-1) ** i)
        run.steps(2, b=30.0)
    assert loud.alarms
    assert not wide.alarms
    assert not late.alarms
