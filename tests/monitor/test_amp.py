"""Mixed precision: norms without the loss scale, and steps that the scaler skips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from palingenesis import Event, Monitor, MonitorConfig, load_run
from palingenesis.reading import Reading


class Loop:
    """A real loop with a real ``GradScaler`` on the CPU.

    Args:
        unscale: call ``scaler.unscale_`` before the monitor.
        give: hand the scaler to the monitor.
        options: of the monitor.
    """

    def __init__(
        self, *, unscale: bool, give: bool = True, scale: float = 2.0**16, **options: object
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        self.unscale = unscale
        self.seen: list[Event] = []
        self.norms: list[float] = []
        options = {"out": None, "check_every": 5, **options}
        self.monitor = Monitor(
            self.model,
            self.optimizer,
            scaler=self.scaler if give else None,
            on_event=self.seen.append,
            **options,  # type: ignore[arg-type]
        )

    def step(self, *, overflow: bool = False) -> None:
        loss = self.model(torch.randn(16, 8)).square().mean()
        self.scaler.scale(loss).backward()
        if overflow:
            self.model[1].weight.grad[0, 0] = float("inf")
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        self.monitor.step(loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def steps(self, count: int, **given: bool) -> None:
        for _ in range(count):
            self.step(**given)

    def told(self, *names: str) -> list[Event]:
        return [event for event in self.seen if event.event in names]


def test_norms_are_divided_by_the_scale_if_unscale_was_not_called(tmp_path: object) -> None:
    found = []
    for unscale in (True, False):
        loop = Loop(unscale=unscale, out=f"{tmp_path}/{unscale}")
        loop.steps(10)
        loop.monitor.close()
        found.append(load_run(f"{tmp_path}/{unscale}").layers["2"])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-5, atol=0)


def test_a_step_the_scaler_skips_is_a_skipped_step_and_moves_no_baseline() -> None:
    loop = Loop(unscale=True)
    loop.steps(50)
    before, _ = loop.monitor._judging.watchers.layers.band()
    loop.steps(4)
    loop.step(overflow=True)  # step 55, a check
    after, _ = loop.monitor._judging.watchers.layers.band()
    assert before.tolist() == after.tolist()
    loop.steps(2)
    loop.step(overflow=True)  # step 58, between two checks
    loop.steps(3)
    assert [event.step for event in loop.told("skipped_step")] == [55, 58]
    assert loop.monitor.counts["skipped_steps"] == 2
    assert not loop.told("nonfinite", "alarm", "skipped_steps")


def test_ten_in_a_row_is_a_warning() -> None:
    loop = Loop(unscale=False)
    loop.steps(300)
    loop.steps(10, overflow=True)
    loop.steps(5)
    warnings = loop.told("skipped_steps")
    assert [(event.severity, event.in_a_row) for event in warnings] == [("warning", 10)]
    assert loop.monitor.verdict == "WARNING"


def test_over_five_percent_of_the_run_is_a_warning() -> None:
    loop = Loop(unscale=False)
    for i in range(200):
        loop.step(overflow=i % 15 == 14)
    assert len(loop.told("skipped_steps")) == 1
    rare = Loop(unscale=False)
    for i in range(400):
        rare.step(overflow=i % 30 == 29)
    assert not rare.told("skipped_steps")


def test_a_run_whose_every_step_was_skipped_is_not_healthy(tmp_path: object) -> None:
    loop = Loop(unscale=True, out=f"{tmp_path}/run", check_every=1, warmup=2, scale=2.0**60)
    loop.steps(6, overflow=True)
    loop.monitor.close()
    assert load_run(f"{tmp_path}/run").verdict == "WARNING"
    assert loop.monitor.counts["skipped_steps"] == 6  # the last one too


def test_a_layer_that_overflows_for_ever_is_named_and_every_step_is_counted() -> None:
    loop = Loop(unscale=True, scale=2.0**4)
    loop.steps(100)
    loop.steps(200, overflow=True)  # the scale reaches zero and cannot fall any further
    loop.monitor.close()
    assert loop.monitor.counts["skipped_steps"] == 200
    warning = loop.told("skipped_steps")[0]
    assert warning.layers == ["1"] and "first to overflow: 1" in warning.message


def test_a_nan_loss_under_a_scaler_is_still_critical() -> None:
    loop = Loop(unscale=True)
    loop.steps(7)
    loop.monitor.step(float("nan"))
    loop.steps(3)
    assert [event.source for event in loop.told("nonfinite")] == ["loss"]


def test_a_disabled_scaler_is_no_scaler() -> None:
    loop = Loop(unscale=False)
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    monitor = Monitor(loop.model, loop.optimizer, out=None, scaler=loop.scaler, check_every=1)
    loop.model(torch.randn(4, 8)).square().mean().backward()
    loop.model[0].weight.grad[0, 0] = float("nan")
    monitor.step()
    assert [event.event for event in monitor.events][-1] == "nonfinite"


def test_without_scaler_a_loss_scale_that_doubles_does_not_ring() -> None:
    loop = Loop(unscale=False, give=False, check_every=1)
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10)
    loop.steps(200)
    assert not loop.told("alarm", "incident", "global_shift", "gradient_spike")


# -- the tiers ---------------------------------------------------------------------------------------------


class Tiers:
    """A loop whose tiers look often, and whose unscaled gradients are kept.

    Args:
        unscale: call ``unscale_`` before the monitor; ``None`` for no scaler at all.
        growth: steps after which the scale doubles.
        overflow: steps whose gradients are not finite.
    """

    def __init__(self, *, unscale: bool | None, growth: int = 1, overflow: tuple[int, ...] = ()) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=growth)
        self.unscale, self.overflow = unscale, overflow
        self.readings: list[Reading] = []
        self.events: list[Event] = []
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.monitor = Monitor(
            self.model,
            self.optimizer,
            None,
            config=MonitorConfig(check_every=3, tier2_every=2, tier3_every=3, drift="exact"),
            scaler=None if unscale is None else self.scaler,
            on_reading=self.readings.append,
            on_event=self.events.append,
        )
        for step in range(1, 19):
            self._step(step)
        self.monitor.close()

    def _step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(16, 12)).square().mean()
        scale = 1.0 if self.unscale is None else self.scaler.get_scale()
        (loss if self.unscale is None else self.scaler.scale(loss)).backward()
        if step in self.overflow:
            self.model[1].weight.grad[0, 0] = math.inf
        named = list(self.model.named_parameters())
        self.gradients[step] = {name: p.grad.double() / scale for name, p in named}
        self.weights[step] = {name: p.detach().double() for name, p in named}
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        self.monitor.step(loss)
        if self.unscale is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def exact_cosine(self, step: int, layer: str = "") -> float:
        one, other = (
            torch.cat([g.flatten() for name, g in self.gradients[at].items() if name.startswith(layer)])
            for at in (step - 1, step)
        )
        return float(F.cosine_similarity(one, other, dim=0))

    def exact_ratio(self, step: int, layer: str) -> float:
        gradient, weight = (
            torch.cat([one.flatten() for name, one in kept[step].items() if name.startswith(layer)])
            for kept in (self.gradients, self.weights)
        )
        return float(gradient.norm() / weight.norm())

    def of(self, name: str) -> dict[int, Any]:
        found = {}
        for reading in self.readings:
            value = reading.scalars.get(name, reading.layers.get(name))
            if value is not None:
                found[reading.step] = value
        return found


@pytest.mark.parametrize("growth", [1, 4, 1000])
@pytest.mark.parametrize("unscale", [True, False, None])
def test_directions_and_ratios_do_not_carry_the_scale(unscale: bool | None, growth: int) -> None:
    """Also where it doubles between the two steps that are compared."""
    loop = Tiers(unscale=unscale, growth=growth)
    if unscale is not None:
        assert loop.scaler.get_scale() == 2.0 ** (8 + 18 // growth)
    cosines = loop.of("health/grad_cosine_sim")
    assert list(cosines) == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    for step, found in cosines.items():
        assert found == pytest.approx(loop.exact_cosine(step), abs=1e-5)
        blocks = {layer: loop.exact_cosine(step, layer) for layer in "012"}
        assert loop.of("health/grad_cosine")[step] == pytest.approx(blocks, abs=1e-5)
    ratios = loop.of("health/gw_ratio")
    assert list(ratios) == [1, 3, 6, 9, 12, 15, 18]
    for step, found in ratios.items():
        assert found == pytest.approx({layer: loop.exact_ratio(step, layer) for layer in "012"}, rel=1e-5)


@pytest.mark.parametrize("unscale", [True, False])
def test_what_the_tiers_say_of_a_step_that_is_skipped(unscale: bool) -> None:
    """The step itself is told as it is; its neighbours are not touched by it."""
    loop = Tiers(unscale=unscale, growth=1000, overflow=(4, 7, 12))
    assert [e.step for e in loop.events if e.event == "skipped_step"] == [4, 7, 12]
    told = {"run_started", "skipped_step", "signal_unavailable", "run_ended", "bound_at_start"}
    assert {event.event for event in loop.events} <= {*told, "skipped_steps"}
    for step, found in loop.of("health/grad_cosine_sim").items():
        assert step not in (4, 8, 12)  # it, or the step before
        assert found == pytest.approx(loop.exact_cosine(step), abs=1e-5)
        # Blocks without an overflow are as they were.
        for layer, cosine in loop.of("health/grad_cosine")[step].items():
            if layer != "1":
                assert cosine == pytest.approx(loop.exact_cosine(step, layer), abs=1e-5)
    for step, found in loop.of("health/gw_ratio").items():
        for layer in found:
            assert found[layer] == pytest.approx(loop.exact_ratio(step, layer), rel=1e-5)
    assert "1" not in loop.of("health/gw_ratio")[12]
    # Nothing was updated at 12, which is looked at 13.
    assert sorted(loop.of("health/update_ratio")) == [2, 4, 7, 10, 16]
    (missing,) = [
        e for e in loop.events if e.event == "signal_unavailable" and e.signal == "health/update_ratio"
    ]
    assert missing.step == 13 and "skipped" in missing.reason


def test_drift_of_weights_that_a_skipped_step_left_alone() -> None:
    loop = Tiers(unscale=True, growth=1000, overflow=(1, 2))
    drifts = loop.of("health/weight_drift")
    assert set(drifts[1].values()) == set(drifts[3].values()) == {0.0}
    first = loop.weights[1]
    for layer, found in drifts[6].items():
        before, now = (
            torch.cat([w.flatten() for name, w in kept.items() if name.startswith(layer)])
            for kept in (first, loop.weights[6])
        )
        assert found == pytest.approx(float((now - before).norm() / before.norm()), rel=1e-4)
