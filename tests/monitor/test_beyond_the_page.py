"""The conditions beyond the basic rule: each one where it must speak, where it must not, and switched off."""

from __future__ import annotations

import math

import pytest
import torch
from tests.monitor.scripted import Scripted
from torch import nn

from palingenesis import Monitor, MonitorConfig
from palingenesis.watch.loss import LossWatch

EIGHT = (1e-3, 1e-2, 1e-2, 1e-1, 1e-1, 1.0, 1.0, 10.0)


# -- absent gradients -------------------------------------------------------------------------------------


def test_a_gradient_of_none_where_history_has_one_counts_as_no_gradient() -> None:
    run = Scripted()
    run.steps(20)
    run.steps(2, b=None)
    assert [(alarm.layer, alarm.diagnosis) for alarm in run.alarms] == [("b", "no_gradient")]
    assert "None" in run.alarms[0].cause
    run.step()
    assert [event.layer for event in run.events("alarm_cleared")] == ["b"]


def test_absent_gradients_can_be_switched_off() -> None:
    run = Scripted(config=MonitorConfig(absent_gradients=False))
    run.steps(20)
    run.steps(5, b=None)
    assert not run.alarms


def test_requires_grad_switched_off_mid_run_is_named_with_its_cause() -> None:
    run = Scripted()
    run.steps(20)
    run.model["b"].weight.requires_grad_(False)
    run.steps(2, b=None)
    assert [(alarm.layer, alarm.cause) for alarm in run.alarms] == [("b", "requires_grad is off")]


@pytest.mark.parametrize("rate", [0.7, 0.3, 0.05])
@pytest.mark.parametrize("check_every", [1, 10])
def test_a_rarely_present_layer_is_judged_by_its_own_rate(rate: float, check_every: int) -> None:
    """Present at random it never rings; gone for good it does."""
    run = Scripted(check_every=check_every, config=MonitorConfig(from_start=False))
    chance = torch.Generator().manual_seed(2)
    for _ in range(400):
        there = float(torch.rand((), generator=chance)) < rate
        run.step(c=1.0 if there else None)
    assert not run.alarms
    run.steps(round(20 / rate) + 3 * check_every, c=None)
    while not run.alarms and run.monitor.global_step < 3000:
        run.step(c=None)
    assert [(alarm.layer, alarm.diagnosis) for alarm in run.alarms] == [("c", "no_gradient")]


def test_one_exact_zero_in_the_warm_up_does_not_blind_a_layer() -> None:
    """Every LoRA A matrix has one at step 1."""
    run = Scripted()
    run.step(b=0.0)
    run.steps(19)
    run.steps(2, b=1e-3)
    assert [(alarm.layer, alarm.diagnosis) for alarm in run.alarms] == [("b", "vanishing")]
    dead = Scripted()
    dead.step(b=0.0)
    dead.steps(19)
    dead.steps(2, b=0.0)
    assert [(alarm.layer, alarm.diagnosis) for alarm in dead.alarms] == [("b", "no_gradient")]


def test_one_outlier_in_the_warm_up_does_not_blind_a_layer() -> None:
    run = Scripted()
    run.steps(4)
    run.step(b=1e6)
    run.steps(3)
    run.steps(2, b=100.0)
    assert [(alarm.layer, alarm.diagnosis) for alarm in run.alarms] == [("b", "exploding")]


# -- from the start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [None, 0.0])
def test_never_trained_is_told_at_the_end_of_the_warm_up(gone: float | None) -> None:
    run = Scripted()
    run.steps(8, b=gone)
    assert [(alarm.layer, alarm.diagnosis, alarm.step) for alarm in run.alarms] == [("b", "never_trained", 8)]
    run.steps(3)
    assert [event.layer for event in run.events("alarm_cleared")] == ["b"]
    assert run.monitor.verdict == "WARNING"


def test_never_trained_can_be_switched_off() -> None:
    run = Scripted(config=MonitorConfig(from_start=False))
    run.steps(20, b=None)
    assert not run.alarms


def test_a_layer_that_no_optimizer_holds_is_told_and_is_not_never_trained() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    monitor = Monitor(model, torch.optim.SGD(model["a"].parameters(), lr=0.1), out=None, check_every=1)
    for _ in range(12):
        model["a"](torch.randn(3, 2)).square().mean().backward()
        monitor.step()
    assert not [event for event in monitor.events if event.event == "alarm"]
    told = [event for event in monitor.events if event.event == "not_optimized"]
    assert [event.parameters for event in told] == [["b.weight", "b.bias"]]


# -- common mode and clipping -----------------------------------------------------------------------------


def test_the_whole_model_moving_is_one_global_shift_and_no_alarm() -> None:
    run = Scripted(EIGHT)
    run.steps(20)
    run.steps(30, every=1e-3)
    assert not run.alarms
    shifts = run.events("global_shift")
    assert [(shift.layers, round(shift.value)) for shift in shifts] == [(8, -3)]
    assert shifts[0].severity == "warning"


@pytest.mark.parametrize("check", [9, 12, 17, 25])
@pytest.mark.parametrize("factor", [1e3, 1e-4])
def test_a_jump_of_the_whole_model_is_seen_as_soon_as_layers_are_judged(check: int, factor: float) -> None:
    run = Scripted(EIGHT)
    run.steps(check - 1)
    run.steps(12, every=factor)
    shifts = run.events("global_shift")
    assert [(shift.step, shift.severity) for shift in shifts] == [(check + 1, "warning")]
    assert not run.alarms


def test_a_loss_scale_that_doubles_does_not_ring() -> None:
    run = Scripted(EIGHT)
    scale = 1.0
    for i in range(400):
        scale *= 2 if i % 5 == 4 and i < 200 else 1
        run.step(every=scale)
    assert not run.alarms
    assert not [event for event in run.seen if event.severity != "info"]


def test_a_layer_is_still_judged_while_all_move() -> None:
    run = Scripted(EIGHT)
    run.steps(20)
    run.steps(4, every=1e3, c=1e3)
    assert {alarm.layer for alarm in run.alarms} == {"c"}


def test_common_mode_can_be_switched_off() -> None:
    run = Scripted(EIGHT, config=MonitorConfig(common_mode=False))
    run.steps(20)
    run.steps(2, every=1e-3)
    assert len(run.alarms) == 8
    assert not run.events("global_shift")


@pytest.mark.parametrize("layers", [3, 8])
@pytest.mark.parametrize("before", [0.05, 1e3], ids=["always_clipped", "only_by_the_fault"])
def test_under_clipping_the_culprit_is_named_and_not_the_innocent(layers: int, before: float) -> None:
    run = Scripted(EIGHT[-layers:], noise=0.1)
    culprit = "a"
    for step in range(60):
        factor = 1e6 if step >= 40 else 1.0
        for i, (name, layer) in enumerate(run.model.items()):
            noise = 10 ** (0.1 * float(torch.randn((), generator=run.random)))
            norm = run.normals[i] * noise * (factor if name == culprit else 1.0)
            layer.weight.grad = torch.full((2, 3), norm / math.sqrt(6))
        nn.utils.clip_grad_norm_(run.model.parameters(), before)
        run.monitor.step()
    assert [(alarm.layer, alarm.diagnosis) for alarm in run.alarms] == [(culprit, "exploding")]
    assert run.alarms[0].step <= 43
    assert run.events("clipped_gradients")


def test_unclipped_totals_are_not_called_clipped() -> None:
    run = Scripted(EIGHT)
    run.steps(2000)
    assert not run.events("clipped_gradients")


# -- level shifts -----------------------------------------------------------------------------------------


def test_a_lasting_new_level_is_accepted_with_an_event_and_clears_the_alarm() -> None:
    run = Scripted()
    run.steps(20)
    run.steps(30, c=1e3)
    told = [(event.event, event.step) for event in run.events("alarm", "level_shift", "alarm_cleared")]
    assert told == [("alarm", 22), ("level_shift", 40), ("alarm_cleared", 40)]
    assert run.events("alarm_cleared")[0].reason == "level_accepted"
    run.steps(2)  # the old normal is now a departure
    assert run.alarms[-1].diagnosis == "vanishing"


def test_a_level_that_keeps_rising_is_not_accepted() -> None:
    run = Scripted()
    run.steps(20)
    for i in range(40):
        run.step(c=100 * 2.0**i)
    assert len(run.alarms) == 1
    assert not run.events("level_shift")


def test_level_shift_can_be_switched_off() -> None:
    run = Scripted(config=MonitorConfig(level_shift=False))
    run.steps(20)
    run.steps(60, c=1e3)
    assert not run.events("level_shift", "alarm_cleared")


# -- non-finite values ------------------------------------------------------------------------------------


def test_a_non_finite_value_never_enters_a_baseline() -> None:
    run = Scripted()
    for i in range(40):
        run.step(
            math.nan if i % 5 == 2 else 1.0,
            c=math.nan if i % 3 == 0 else 1.0,
            b=math.inf if i % 4 == 0 else 1,
        )
    mean, std = run.monitor._judging.watchers.layers.band()
    assert torch.isfinite(torch.tensor([*mean, *std])).all()
    run.steps(3)
    run.steps(2, c=1e4, loss=50.0)
    assert [alarm.layer for alarm in run.alarms] == ["c"]
    assert run.events("loss_spike")


# -- between two checks -----------------------------------------------------------------------------------


def test_a_one_step_nan_between_two_checks_is_reported_with_its_layer_and_step() -> None:
    run = Scripted(check_every=10)
    run.steps(94)
    run.step(c=math.nan)
    run.steps(5)
    events = run.events("nonfinite")
    assert [(event.step, event.layers, event.between_checks) for event in events] == [(95, ["c"], True)]
    assert [event.step for event in run.events("nonfinite_cleared")] == [100]


def test_a_twenty_step_spike_between_two_checks_is_reported_with_its_layer_and_step() -> None:
    run = Scripted(check_every=50)
    run.steps(610)
    run.steps(20, b=1e4)
    run.steps(70)
    events = run.events("gradient_spike")
    assert len(events) == 1
    assert events[0].layer == "b"
    assert 611 <= events[0].step <= 630
    assert events[0].severity == "warning"
    assert not run.alarms


@pytest.mark.parametrize("start", [601, 631, 640, 645, 650])
@pytest.mark.parametrize("length", [1, 20])
def test_a_spike_that_touches_a_check_is_told_too(start: int, length: int) -> None:
    run = Scripted(check_every=50)
    run.steps(start - 1)
    run.steps(length, b=1e4)
    run.steps(100)
    told = run.events("gradient_spike")
    assert [event.layer for event in told] == ["b"] and start <= told[0].step < start + length
    assert not run.alarms


def test_a_lasting_explosion_is_an_alarm_and_not_a_spike_as_well() -> None:
    run = Scripted(check_every=10)
    run.steps(154)
    run.steps(60, b=1e4)
    run.steps(60)
    assert [alarm.layer for alarm in run.alarms] == ["b"]
    assert not run.events("gradient_spike")


def test_what_the_last_check_saw_but_no_second_could_confirm_is_told_at_close() -> None:
    run = Scripted(check_every=50)
    run.steps(959)
    run.steps(41, b=0.0)
    run.monitor.close()
    told = run.events("unconfirmed")
    assert [(event.severity, event.diagnoses) for event in told] == [("warning", {"b": "no_gradient"})]
    assert run.monitor.verdict == "WARNING"


def test_one_judged_check_is_not_enough_to_be_healthy() -> None:
    run = Scripted()
    run.steps(9)
    assert run.monitor.verdict == "UNKNOWN"
    run.step()
    assert run.monitor.verdict == "HEALTHY"


def test_guard_off_sees_only_checks_and_the_loss() -> None:
    run = Scripted(check_every=10, config=MonitorConfig(guard_every_step=False))
    run.steps(94, loss=1.0)
    run.step(math.nan, c=math.nan, b=1e5)
    run.steps(5, loss=1.0)
    assert [(event.step, event.source) for event in run.events("nonfinite")] == [(95, "loss")]
    assert not run.events("gradient_spike")


def test_what_happens_after_the_last_check_is_told_at_close() -> None:
    run = Scripted(check_every=50)
    run.steps(455, loss=1.0)
    run.step(80.0, b=1e5, c=math.nan)
    run.steps(3, loss=1.0)
    run.monitor.close()
    assert [event.step for event in run.events("nonfinite")] == [456]
    assert [event.step for event in run.events("loss_spike")] == [456]
    assert [event.layer for event in run.events("gradient_spike")] == ["b"]


def test_a_loss_that_spikes_between_two_checks_is_reported_with_its_step() -> None:
    run = Scripted(check_every=10)
    run.steps(123, loss=1.0)
    run.step(30.0)
    assert not run.events("loss_spike")  # known at the next check
    run.steps(6, loss=1.0)
    assert [(event.step, event.between_checks) for event in run.events("loss_spike")] == [(124, True)]
    assert [event.step for event in run.events("loss_recovered")] == [125]


# -- losses of other kinds --------------------------------------------------------------------------------


def test_negative_losses_are_watched_by_the_sigma_rule_and_the_event_says_so() -> None:
    noise = torch.Generator().manual_seed(3)
    run = Scripted()
    run.steps(300, loss=lambda _: -5.0 + 0.1 * float(torch.randn((), generator=noise)))
    assert len(run.events("loss_spike")) <= 1
    before = len(run.events("loss_spike"))
    run.step(-1.0)
    spikes = run.events("loss_spike")[before:]
    assert [(spike.rule, spike.ratio) for spike in spikes] == [("sigma_only", None)]
    assert "not positive" in spikes[0].message


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("gaussian", lambda g, i: 2.0 + 0.2 * float(torch.randn((), generator=g))),
        ("log-normal", lambda g, i: math.exp(float(torch.randn((), generator=g)))),
        ("converged", lambda g, i: 1e-4 * math.exp(0.7 * float(torch.randn((), generator=g))) * 0.999**i),
        ("negative", lambda g, i: -3.0 + 0.2 * float(torch.randn((), generator=g))),
    ],
)
def test_ordinary_losses_hardly_ring(kind: str, loss: object) -> None:
    """At most four false spikes in a thousand checks, where the plain rule has 0, 100, 100 and 20."""
    noise = torch.Generator().manual_seed(4)
    watch = LossWatch(MonitorConfig(check_every=1))
    told = [
        event
        for step in range(1, 8001)
        for event in watch.check([(step, loss(noise, step % 1000))], step)  # type: ignore[operator]
    ]
    assert sum(event.event == "loss_spike" for event in told) <= 8 * 4


def falling(step: int, noise: torch.Generator) -> float:
    return 3.0 + 7.0 * math.exp(-step / 150) + 0.08 * float(torch.randn((), generator=noise))


@pytest.mark.parametrize(("at", "height"), [(421, 9.5), (700, 6.0), (1500, 6.0), (2900, 6.0)])
def test_a_spike_on_a_falling_curve_is_seen(at: int, height: float) -> None:
    noise = torch.Generator().manual_seed(5)
    watch = LossWatch(MonitorConfig())
    told = []
    for check in range(50, 3001, 50):
        losses = [
            (step, height if step == at else falling(step, noise)) for step in range(check - 49, check + 1)
        ]
        told += watch.check(losses, check)
    assert [(event.event, event.step) for event in told] == [("loss_spike", at), ("loss_recovered", at + 1)]


def test_a_loss_that_stays_up_is_never_called_recovered_before_its_level_is_accepted() -> None:
    noise = torch.Generator().manual_seed(6)
    watch = LossWatch(MonitorConfig())
    told = []
    for check in range(50, 3001, 50):
        jump = [4.0 if step >= 700 else 0.0 for step in range(check - 49, check + 1)]
        losses = [(check - 49 + i, falling(check - 49 + i, noise) + up) for i, up in enumerate(jump)]
        told += watch.check(losses, check)
    assert [event.event for event in told] == ["loss_spike", "loss_level_shift", "loss_recovered"]
    assert told[2].step - told[0].step >= 20 * 50 - 1


def test_an_earlier_larger_spike_does_not_hide_later_ones() -> None:
    noise = torch.Generator().manual_seed(7)
    spikes = {601: 30.0, 901: 10.0, 1301: 5.0}
    watch = LossWatch(MonitorConfig())
    told = []
    for check in range(50, 2001, 50):
        steps = range(check - 49, check + 1)
        losses = [(s, spikes.get(s, 1.0 + 0.1 * float(torch.randn((), generator=noise)))) for s in steps]
        told += watch.check(losses, check)
    assert [event.step for event in told if event.event == "loss_spike"] == [601, 901, 1301]


@pytest.mark.parametrize(("rate", "most"), [(0.1, 0), (0.02, 8)])
def test_a_term_that_only_some_batches_have_does_not_ring_for_ever(rate: float, most: int) -> None:
    noise = torch.Generator().manual_seed(8)
    watch = LossWatch(MonitorConfig())
    told = []
    for check in range(50, 5001, 50):
        losses = []
        for step in range(check - 49, check + 1):
            term = 0.8 if float(torch.rand((), generator=noise)) < rate else 0.0
            losses.append((step, 0.2 + term + 0.02 * float(torch.randn((), generator=noise))))
        told += watch.check(losses, check)
    assert sum(event.event == "loss_spike" for event in told) <= most


def test_losses_given_only_now_and_then_are_watched_all_the_same() -> None:
    run = Scripted(check_every=50)
    for step in range(1, 1201):
        run.step((50.0 if step >= 1000 else 1.0) if step % 50 == 0 else None)
    assert [event.step for event in run.events("loss_spike")] == [1000]


def test_a_permanent_step_of_the_loss_is_accepted_and_does_not_silence_the_rule() -> None:
    run = Scripted()
    run.steps(30, loss=1.0)
    run.steps(40, loss=10.0)
    told = [event.event for event in run.events("loss_spike", "loss_level_shift", "loss_recovered")]
    assert told == ["loss_spike", "loss_level_shift", "loss_recovered"]
    run.step(200.0)
    assert len(run.events("loss_spike")) == 2


def test_a_spike_in_the_warm_up_does_not_hide_later_ones() -> None:
    run = Scripted()
    for i in range(8):
        run.step(1000.0 if i == 3 else 1.0 + 0.01 * i)
    run.step(20.0)
    assert [event.step for event in run.events("loss_spike")] == [9]


# -- incidents --------------------------------------------------------------------------------------------


def test_alarms_that_begin_together_are_one_incident_with_the_origin_first() -> None:
    run = Scripted(EIGHT)
    run.steps(20)
    run.steps(3, a=None, b=None, c=None)
    incidents = run.events("incident")
    assert [(event.origin, event.layers) for event in incidents] == [("c", ["c", "b", "a"])]
    assert {alarm.incident for alarm in run.alarms} == {incidents[0].incident}


def test_a_departure_that_stands_out_is_the_origin_wherever_it_is() -> None:
    run = Scripted(EIGHT)
    run.steps(20)
    run.steps(2, b=1e5, f=30.0, g=30.0)
    assert run.events("incident")[0].origin == "b"


def test_the_log_has_one_line_for_an_incident(caplog: pytest.LogCaptureFixture) -> None:
    run = Scripted(EIGHT)
    run.steps(20)
    with caplog.at_level("INFO", logger="palingenesis"):
        run.steps(3, a=None, b=None, c=None)
    assert len(caplog.records) == 1
    assert "look first at c" in caplog.text


def test_incidents_can_be_switched_off() -> None:
    run = Scripted(EIGHT, config=MonitorConfig(incidents=False))
    run.steps(20)
    run.steps(3, a=None, b=None)
    assert len(run.alarms) == 2
    assert not run.events("incident")


# -- parts of a layer -------------------------------------------------------------------------------------


def test_weight_and_bias_are_told_apart_when_one_is_exactly_zero() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    seen = []
    monitor = Monitor(model, None, out=None, check_every=1, on_event=seen.append)
    for step in range(24):
        model.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        if step >= 20:
            model[0].weight.grad.zero_()
        monitor.step()
    alarms = [event for event in seen if event.event == "alarm"]
    assert [(alarm.layer, alarm.parameter, alarm.diagnosis) for alarm in alarms] == [
        ("0", "0.weight", "no_gradient")
    ]


def test_the_parts_of_a_fused_projection_are_watched_apart() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    seen = []
    monitor = Monitor(model, None, out=None, check_every=1, on_event=seen.append)
    for step in range(24):
        model.zero_grad()
        x = torch.randn(4, 5, 8)
        model(x, x, x)[0].square().mean().backward()
        if step >= 20:
            model.in_proj_weight.grad[:8] *= 1e-3
            model.in_proj_bias.grad[:8] *= 1e-3
        monitor.step()
    alarms = [event for event in seen if event.event == "alarm"]
    assert [(alarm.layer, alarm.diagnosis) for alarm in alarms] == [("in_proj[q]", "vanishing")]
