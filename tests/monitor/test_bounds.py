"""Bounds through the monitor: weights and outputs that a test sets by hand."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from palingenesis import Event, Monitor, MonitorConfig


class Run:
    """Two blocks of like-named matrices, whose weights a test sets by hand; looked at every 2nd step."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {
                "h": nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2)),
                "lm_head": nn.Linear(32, 32),
            }
        )
        self.fine = [layer.weight.detach().clone() for layer in self.model["h"]]
        self.options: dict[str, Any] = options
        self.seen: list[Event] = []
        self.readings: list[Any] = []

    def pretrained(self) -> None:
        """Make it look as ``from_pretrained`` of transformers leaves it."""
        self.model.config = SimpleNamespace(_name_or_path="some/model")

    def begin(self) -> None:
        config = MonitorConfig(**{"tier2_every": 2, "tier3_every": 2, "check_every": 1, **self.options})
        self.monitor = Monitor(
            self.model, out=None, config=config, on_event=self.seen.append, on_reading=self.readings.append
        )

    @torch.no_grad()
    def put(self, weight: torch.Tensor, block: int = 0) -> None:
        self.model["h"][block].weight.copy_(weight)

    @torch.no_grad()
    def move(self, factor: float) -> None:
        for parameter in self.model.parameters():
            parameter.mul_(factor)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for p in self.model.parameters():
                p.grad = torch.ones_like(p)
            self.monitor.step(1.0)

    @property
    def told(self) -> list[tuple[str, str, int]]:
        return [(e.event, e.diagnosis, e.step) for e in self.seen if e.event.startswith("bound")]


def collapsed(rank: float, weight: torch.Tensor) -> torch.Tensor:
    """A matrix of the norm of ``weight`` and a stable rank of 1 + (rank − 1)."""
    q, _ = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(5)))
    sigma = torch.full((32,), math.sqrt((rank - 1) / 31))
    sigma[0] = 1.0
    matrix = q * sigma @ q.T
    return matrix * (weight.norm() / matrix.norm())


def test_a_collapsing_matrix_is_warned_of_once_and_cleared(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(drift="off")
    run.begin()
    with caplog.at_level(logging.INFO, logger="palingenesis"):
        run.steps(3)
        run.put(collapsed(1.5, run.fine[0]))
        run.steps(4)
        assert run.told == [("bound_crossed", "stable_rank", 4)]
        assert run.monitor.latest["health/warnings"] == 1
        run.put(run.fine[0])
        run.steps(2)
    assert run.told[1:] == [("bound_cleared", "stable_rank", 8)]
    assert run.monitor.latest["health/warnings"] == 0
    (event,) = (e for e in run.seen if e.event == "bound_crossed")
    assert event.layer == "h.0" and event.value == pytest.approx(1.5, rel=0.01)
    assert event.baseline > 3
    (line,) = (r for r in caplog.records if "bound_crossed" in r.getMessage())
    assert line.levelno == logging.WARNING and "h.0" in line.getMessage()
    (line,) = (r for r in caplog.records if "bound_cleared" in r.getMessage())
    assert line.levelno == logging.INFO
    by_step = {r.step: r.scalars["health/warnings"] for r in run.readings if "health/warnings" in r.scalars}
    assert by_step[4] == by_step[6] == 1 and by_step[2] == by_step[8] == 0


def test_a_matrix_that_came_collapsed_is_information() -> None:
    run = Run(drift="off")
    run.put(collapsed(2.0, run.fine[0]))
    run.begin()
    run.steps(4)
    assert run.told == [("bound_at_start", "stable_rank", 1)]
    assert run.monitor.latest["health/warnings"] == 0
    run.put(collapsed(1.5, run.fine[0]))
    run.steps(2)
    assert len(run.told) == 1
    run.put(collapsed(1.3, run.fine[0]))
    run.steps(2)
    assert run.told[1:] == [("bound_crossed", "stable_rank", 8)]


def test_the_head_and_the_embedding_are_not_bounded() -> None:
    run = Run(drift="off")
    run.begin()
    run.steps(1)
    with torch.no_grad():
        run.model["lm_head"].weight.copy_(collapsed(1.1, run.fine[0]))
    run.steps(3)
    assert run.told == []


def test_drift_and_imbalance_are_bounded_and_counted_together() -> None:
    run = Run()
    run.pretrained()
    run.begin()
    run.steps(1)
    run.put(run.fine[0] * 1.4)
    run.steps(1)
    assert run.told == []
    run.put(run.fine[0] * 200)
    run.steps(2)
    assert {(event, name) for event, name, _ in run.told} == {
        ("bound_crossed", "weight_drift"),
        ("bound_crossed", "norm_imbalance"),
    }
    assert run.monitor.latest["health/warnings"] == 2
    drift = next(e for e in run.seen if e.diagnosis == "weight_drift")
    assert drift.value == pytest.approx(199, rel=0.05)
    run.put(run.fine[0] * 1.6)
    run.steps(2)
    assert run.monitor.latest["health/warnings"] == 1  # imbalance is back, drift is not
    run.put(run.fine[0])
    run.steps(2)
    assert run.monitor.latest["health/warnings"] == 0


def test_the_drift_of_random_weights_is_an_ordinary_warning_and_no_finding() -> None:
    run = Run()
    run.begin()
    run.steps(1)
    run.move(1.9)
    run.steps(3)
    (event,) = (e for e in run.seen if e.diagnosis)
    assert (event.event, event.severity, event.ordinary) == ("bound_crossed", "warning", True)
    assert run.monitor.latest["health/warnings"] == 0
    assert run.monitor.verdict != "WARNING"


def test_one_random_matrix_that_moves_alone_is_a_finding() -> None:
    run = Run()
    run.begin()
    run.steps(1)
    run.put(run.fine[0] * 1.9)
    run.steps(3)
    (event,) = (e for e in run.seen if e.diagnosis)
    assert event.layer == "h.0" and not event.ordinary
    assert run.monitor.latest["health/warnings"] == 1
    assert run.monitor.verdict == "WARNING"


def test_a_name_of_a_configuration_is_no_proof_of_learning() -> None:
    run = Run()
    run.pretrained()
    run.begin()
    run.steps(1)
    run.move(1.9)
    run.steps(3)
    (event,) = (e for e in run.seen if e.diagnosis)
    assert event.ordinary


def test_a_new_head_on_a_trained_body_is_ordinary_in_nothing_but_itself() -> None:
    run = Run(drift="exact")
    for block in (0, 1):
        run.put(collapsed(4.0, run.fine[0]), block)
    run.fine = [layer.weight.detach().clone() for layer in run.model["h"]]
    run.begin()
    run.steps(1)
    with torch.no_grad():
        run.model["h"][0].weight.mul_(-1)
    run.steps(3)
    (event,) = (e for e in run.seen if e.event == "bound_crossed")
    assert event.layer == "h.0" and not event.ordinary and event.value == pytest.approx(2.0)
    assert run.monitor._numbers._bounds.fresh == {"lm_head"}


def test_a_model_whose_matrices_are_not_random_has_learned_something() -> None:
    run = Run()
    for block in (0, 1):
        run.put(collapsed(4.0, run.fine[0]), block)
    run.fine = [layer.weight.detach().clone() for layer in run.model["h"]]
    run.begin()
    run.steps(1)
    run.put(run.fine[0] * 1.9)
    run.steps(3)
    (event,) = (e for e in run.seen if e.event == "bound_crossed")
    assert event.diagnosis == "weight_drift" and not event.ordinary
    assert run.monitor.verdict == "WARNING"


@pytest.mark.parametrize("pretrained", [True, False])
def test_what_the_user_says_of_the_model_counts(pretrained: bool) -> None:
    run = Run(pretrained=pretrained)
    run.begin()
    run.steps(1)
    run.move(1.9)
    run.steps(3)
    told = [bool(e.ordinary) for e in run.seen if e.event == "bound_crossed"]
    assert told == ([False] * 3 if pretrained else [True])


@pytest.mark.parametrize("logging_steps", [1, 4])
@pytest.mark.parametrize("sure_at_start", [True, False])
def test_entropy_below_its_floor(logging_steps: int, sure_at_start: bool) -> None:
    run = Run(rl_readiness=True, logging_steps=logging_steps)
    run.begin()
    labels = torch.zeros(2, 9, dtype=torch.long)
    sure = F.one_hot(torch.full((2, 9), 3), 20) * 9.0
    for step in range(1, 13):
        logits = sure if sure_at_start or 4 < step <= 8 else torch.zeros(2, 9, 20)
        run.monitor.observe_output(logits=logits, labels=labels)
        run.steps(1)
    told = [(event, step) for event, name, step in run.told if name == "output_entropy"]
    if sure_at_start:
        assert told == [("bound_at_start", logging_steps)]
    else:
        crossed, cleared = (5, 9) if logging_steps == 1 else (8, 12)
        assert told == [("bound_crossed", crossed), ("bound_cleared", cleared)]
