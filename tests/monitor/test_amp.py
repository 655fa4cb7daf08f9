"""Mixed precision: norms without the loss scale, and steps that the scaler skips."""

from __future__ import annotations

import torch
from torch import nn

from palingenesis import Event, Monitor, load_run


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
