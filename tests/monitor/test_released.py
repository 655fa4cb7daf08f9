"""An optimizer that steps inside ``backward`` and frees each gradient there, next to one that does not."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from palingenesis import Event, Monitor, MonitorConfig, load_run
from palingenesis.reading import Reading

Tensors = dict[str, torch.Tensor]

RATE = 1e-3


class Net(nn.Module):
    """Two blocks, of which the second may be cut off from the loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into = nn.Linear(6, width)
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, 4)
        self.cut = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.into(x))
        for block in self.h:
            x = x + torch.tanh(block(x))
            if self.cut:
                x = x.detach()
        found: torch.Tensor = self.out(x)
        return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


class Loop:
    """A loop of which every gradient is known.

    Args:
        release: step and free each gradient inside ``backward``.
        watched: with a monitor.
        width: of the model; from 300 on its blocks are sketched, below they are kept whole.
        given: of the monitor, or of its config.
    """

    OF_THE_MONITOR = ("gradients", "scaler", "max_steps")

    def __init__(
        self,
        *,
        release: bool,
        watched: bool = True,
        width: int = 16,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        out: Path | None = None,
        **given: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.release = Net(width), release
        self.optimizers = {p: optimizer([p]) for p in self.model.parameters()}
        self.names = {p: name for name, p in self.model.named_parameters()}
        self.events: list[Event] = []
        self.readings: list[Reading] = []
        self.random = torch.Generator().manual_seed(1)
        # By step: gradients as the optimizers got them, and weights as they were when the monitor was called.
        self.gradients: dict[int, Tensors] = {}
        self.weights: dict[int, Tensors] = {}
        self.at = 0
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(self._take if release else self._note)
        self.monitor: Monitor | None = None
        if watched:
            of_monitor = {name: given.pop(name) for name in self.OF_THE_MONITOR if name in given}
            given = {"check_every": 5, "tier2_every": 4, "tier3_every": 6, **given}
            self.monitor = Monitor(
                self.model,
                list(self.optimizers.values()),
                out,
                config=MonitorConfig(**given),
                on_event=self.events.append,
                on_reading=self.readings.append,
                **of_monitor,
            )

    def _note(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        self.gradients.setdefault(self.at, {})[self.names[p]] = p.grad.clone()

    def _take(self, p: torch.Tensor) -> None:
        self._note(p)
        self.optimizers[p].step()
        self.optimizers[p].zero_grad()

    def step(self) -> None:
        self.at += 1
        x = torch.randn(32, 6, generator=self.random)
        target = torch.randn(32, 4, generator=self.random)
        loss = F.mse_loss(self.model(x), target)
        loss.backward()
        self.weights[self.at] = {name: p.detach().clone() for p, name in self.names.items()}
        if self.monitor is not None:
            self.monitor.step(loss)
        if not self.release:
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def close(self) -> None:
        assert self.monitor is not None
        self.monitor.close()

    def named(self, *names: str) -> list[Event]:
        return [event for event in self.events if event.event in names]

    def of(self, name: str) -> dict[int, Any]:
        """A number, or numbers by layer, by step."""
        found = {}
        for reading in self.readings:
            if name in reading.scalars or name in reading.layers:
                found[reading.step] = reading.scalars.get(name, reading.layers.get(name))
        return found

    @property
    def hooks(self) -> int:
        return sum(len(p._backward_hooks or ()) for p in self.model.parameters())


BLOCKS = ("into", "h.0", "h.1", "out")
WAYS = ["found out", "told"]


def released(way: str, **given: Any) -> Loop:
    return Loop(release=True, **({"gradients": "released"} if way == "told" else {}), **given)


def flat(tensors: Tensors, prefix: str = "") -> torch.Tensor:
    return torch.cat([one.double().flatten() for name, one in tensors.items() if name.startswith(prefix)])


def cosine(one: Tensors, other: Tensors, prefix: str = "") -> float:
    return float(F.cosine_similarity(flat(one, prefix), flat(other, prefix), dim=0))


# -- what is seen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [16, 300])
def test_cosines_are_those_of_a_run_that_keeps_its_gradients(way: str, width: int) -> None:
    loop, plain = released(way, width=width), Loop(release=False, width=width)
    for one in (loop, plain):
        one.steps(20)
        one.close()
    # A first step that has left nothing is doubted: the second is listened to.
    looks = [4, 8, 12, 16, 20]
    found = loop.of("health/grad_cosine_sim")
    assert list(found) == looks
    for step in looks:
        assert found[step] == pytest.approx(plain.of("health/grad_cosine_sim")[step], abs=1e-5)
        exact = cosine(plain.gradients[step - 1], plain.gradients[step])
        assert found[step] == pytest.approx(exact, abs=1e-5 if width == 16 else 0.02)
        blocks = loop.of("health/grad_cosine")[step]
        assert blocks == pytest.approx(plain.of("health/grad_cosine")[step], abs=1e-5)
        assert set(blocks) == set(BLOCKS)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_against_weights(way: str) -> None:
    loop, plain = released(way), Loop(release=False)
    for one in (loop, plain):
        one.steps(20)
        one.close()
    found = loop.of("health/gw_ratio")
    assert list(found) == ([6, 12, 18] if way == "found out" else [1, 6, 12, 18])
    for step, ratios in found.items():
        # The weights are those after the step: they are all that is left when the monitor is called.
        exact = {
            block: float(flat(loop.gradients[step], block).norm() / flat(loop.weights[step], block).norm())
            for block in BLOCKS
        }
        assert ratios == pytest.approx(exact, rel=1e-5)
        # One step at this rate changes the norm of the weights by far less than a hundredth.
        assert ratios == pytest.approx(plain.of("health/gw_ratio")[step], rel=1e-2)


@pytest.mark.parametrize("way", WAYS)
def test_norms_of_layers_at_every_check(way: str, tmp_path: Path) -> None:
    loop, plain = released(way, out=tmp_path / "one"), Loop(release=False, out=tmp_path / "two")
    for one in (loop, plain):
        one.steps(20)
        one.close()
    found, expected = load_run(tmp_path / "one").layers, load_run(tmp_path / "two").layers
    assert list(found) == list(expected) and found["step"].tolist() == [5, 10, 15, 20]
    for layer in BLOCKS:
        torch.testing.assert_close(
            torch.tensor(found[layer]), torch.tensor(expected[layer]), rtol=1e-5, atol=0
        )
    assert load_run(tmp_path / "one").info["gradients"] == "released"
    norms = [load_run(tmp_path / name).metrics["train/grad_norm_raw"][4::5] for name in ("one", "two")]
    torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_stops_training_rings(way: str) -> None:
    alarms = []
    for loop in (released(way, check_every=4, warmup=3), Loop(release=False, check_every=4, warmup=3)):
        loop.steps(40)
        loop.model.cut = True
        loop.steps(20)
        loop.close()
        alarms.append([(e.step, e.layer, e.diagnosis) for e in loop.named("alarm")])
    assert alarms[0] == alarms[1]
    assert {layer for _, layer, _ in alarms[0]} == {"into", "h.0", "h.1"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("check_every", [2, 5, 20])
def test_a_healthy_run_does_not_ring_however_late_it_is_found_out(way: str, check_every: int) -> None:
    loop = released(way, check_every=check_every, warmup=2, tier2_every=10)
    loop.steps(120)
    loop.close()
    assert not loop.named("alarm", "incident", "global_shift", "monitor_error", "no_gradients")
    assert loop.monitor is not None and loop.monitor.verdict == "HEALTHY"


def test_it_is_said_once(tmp_path: Path) -> None:
    loop = released("found out", out=tmp_path / "run")
    loop.steps(24)
    loop.close()
    (event,) = loop.named("gradients_released")
    assert event.step == 2 and event.severity == "info" and "inside backward" in event.message
    assert not loop.named("monitor_error")
    again = [e for e in load_run(tmp_path / "run").events if e.event == "gradients_released"]
    assert len(again) == 1


def test_what_was_told_is_not_told_back() -> None:
    loop = released("told")
    loop.steps(12)
    loop.close()
    assert not loop.named("gradients_released", "monitor_error", "clipped_gradients")


def test_a_run_that_keeps_its_gradients_is_not_mistaken() -> None:
    loop = Loop(release=False)
    loop.steps(12)
    loop.close()
    assert not loop.named("gradients_released")


@pytest.mark.parametrize("noise_scale", [True, False])
@pytest.mark.parametrize("order", ["before backward", "after zero_grad"])
def test_step_in_the_wrong_place_is_no_release(order: str, noise_scale: bool) -> None:
    """Nothing is there when the monitor is called, but it was when backward ended."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    events: list[Event] = []
    config = MonitorConfig(check_every=20, noise_scale=noise_scale)
    monitor = Monitor(model, optimizer, None, config=config, on_event=events.append)
    for _ in range(60):
        loss = model(torch.randn(8, 6)).square().mean()
        if order == "before backward":
            monitor.step(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if order == "after zero_grad":
            monitor.step(loss)
    monitor.close()
    assert [(e.event, e.step) for e in events if "gradients" in e.event] == [("no_gradients", 20)]
    assert monitor.counts["checks_without_gradients"] == 3
    assert monitor.verdict == "NOT MONITORED"


def test_freed_gradients_are_found_without_the_noise_scale() -> None:
    loop = released("found out", noise_scale=False)
    loop.steps(12)
    loop.close()
    assert [event.step for event in loop.named("gradients_released")] == [2]
    assert list(loop.of("health/grad_cosine_sim")) == [4, 8, 12]


def test_gradients_that_are_freed_one_behind_are_found_out() -> None:
    """Each is stepped and freed when the next one comes, the last one after backward."""
    loop = Loop(release=False, watched=False)
    held: list[torch.Tensor] = []

    def free_the_one_before() -> None:
        for p in held:
            loop.optimizers[p].step()
            loop.optimizers[p].zero_grad()
        held.clear()

    def come(p: torch.Tensor) -> None:
        free_the_one_before()
        held.append(p)

    for p in loop.model.parameters():
        p.register_post_accumulate_grad_hook(come)
    monitor = Monitor(loop.model, None, None, config=MonitorConfig(check_every=5))
    for _ in range(20):
        F.mse_loss(loop.model(torch.randn(32, 6)), torch.randn(32, 4)).backward()
        free_the_one_before()
        monitor.step()
    monitor.close()
    assert [e.step for e in monitor.events if e.event == "gradients_released"] == [2]
    assert monitor.counts["checks_without_gradients"] == 0


def test_the_loss_scale_is_taken_out_of_what_hooks_hear() -> None:
    """Scaled by hand: a scaler cannot unscale what is gone, but the optimizers may."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plain, loop = Loop(release=False), released("told", scaler=scaler)
    plain.steps(12)
    assert loop.monitor is not None
    for _ in range(12):
        loop.at += 1
        x = torch.randn(32, 6, generator=loop.random)
        target = torch.randn(32, 4, generator=loop.random)
        loss = F.mse_loss(loop.model(x), target)
        for optimizer in loop.optimizers.values():
            optimizer.param_groups[0]["lr"] = RATE / 2.0**10
        scaler.scale(loss).backward()
        loop.monitor.step(loss)
    for step in (4, 8, 12):
        for name in ("health/grad_cosine_sim", "health/grad_cosine"):
            assert loop.of(name)[step] == pytest.approx(plain.of(name)[step], abs=1e-4)
    for step in (6, 12):
        assert loop.of("health/gw_ratio")[step] == pytest.approx(plain.of("health/gw_ratio")[step], rel=1e-2)


# -- what is not touched -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", [sgd, lambda p: torch.optim.AdamW(p, lr=1e-2)], ids=["sgd", "adamw"])
def test_training_is_the_same_bit_by_bit(way: str, optimizer: Any) -> None:
    options = {"tier2_every": 1, "tier3_every": 1, "check_every": 1}
    with_it = released(way, optimizer=optimizer, **options)
    without = Loop(release=True, watched=False, optimizer=optimizer)
    for loop in (with_it, without):
        loop.steps(12)
    for one, other in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other) and one.grad is None
    assert not with_it.named("monitor_error")


@pytest.mark.parametrize("way", WAYS)
def test_hooks_are_there_for_the_steps_that_are_looked_at_only(way: str) -> None:
    loop = released(way, check_every=7, tier2_every=10, tier3_every=16)
    listening = []
    for step in range(1, 41):
        if loop.hooks:
            listening.append(step)
        loop.step()
    assert loop.hooks in (0, len(list(loop.model.parameters())))
    loop.close()
    assert loop.hooks == 0
    if way == "told":
        # Checks, looks at the weights, and two steps in a row for their directions.
        assert listening == [1, 7, 9, 10, 14, 16, 19, 20, 21, 28, 29, 30, 32, 35, 39, 40]
    else:
        assert listening == [2, 7, 9, 10, 14, 16, 19, 20, 21, 28, 29, 30, 32, 35, 39, 40]


def test_a_run_that_keeps_its_gradients_is_hardly_ever_listened_to() -> None:
    loop = Loop(release=False, tier2_every=10)
    listening = []
    for step in range(1, 241):
        if loop.hooks:
            listening.append(step)
        loop.step()
    loop.close()
    assert listening == [10, 110, 210] and loop.hooks == 0


@pytest.mark.parametrize("close", [False, True])
def test_a_model_with_hooks_can_be_copied_and_saved(close: bool) -> None:
    loop = released("told", tier2_every=1)
    loop.steps(5)
    # Those hooks of a loop's own that step the optimizers cannot be copied by anyone.
    for p in loop.model.parameters():
        p._post_accumulate_grad_hooks = None
    if close:
        loop.close()
    assert bool(loop.hooks) != close
    file = io.BytesIO()
    torch.save(loop.model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(loop.model),
        pickle.loads(pickle.dumps(loop.model)),
        torch.load(file, weights_only=False),
    ]
    copies.append(Net())
    copies[-1].load_state_dict(loop.model.state_dict())
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    copies.append(average.module)
    for one in copies:
        assert not any(p._backward_hooks for p in one.parameters())
        for mine, other in zip(one.parameters(), loop.model.parameters(), strict=True):
            assert torch.equal(mine, other)
        one(torch.randn(2, 6)).sum().backward()
        assert all(p.grad is not None for p in one.parameters())
    if not close:
        loop.step()
    assert not loop.named("monitor_error")


def test_a_run_that_breaks_off_leaves_no_hooks() -> None:
    loop = released("told", tier2_every=1)
    assert loop.monitor is not None
    loop.steps(3)
    assert loop.hooks
    with pytest.raises(ZeroDivisionError), loop.monitor:
        raise ZeroDivisionError
    assert loop.hooks == 0


def test_layers_that_come_and_go() -> None:
    loop = released("told", check_every=2)
    loop.steps(6)
    loop.model.h[1].weight.requires_grad_(False)
    loop.steps(6)
    loop.model.h[1].weight.requires_grad_(True)
    loop.steps(8)
    loop.close()
    assert loop.hooks == 0 and not loop.named("monitor_error", "gradients_released")
    last = loop.of("health/grad_cosine")[20]
    assert last["h.1"] == pytest.approx(cosine(loop.gradients[19], loop.gradients[20], "h.1"), abs=1e-5)
    assert not math.isnan(loop.of("health/grad_cosine_sim")[20])
