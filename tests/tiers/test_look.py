"""Families look by themselves: what goes wrong in one leaves the others whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from palingenesis import Event, Monitor, MonitorConfig
from palingenesis.reading import Reading
from palingenesis.tiers.look import Tiers

WORDS = 30


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 12), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, WORDS))


class Run:
    """A run of which every number is told.

    Args:
        options: of the config.
    """

    def __init__(self, **options: Any) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.readings: list[Reading] = []
        self.events: list[Event] = []
        given = {"check_every": 4, "tier2_every": 2, "tier3_every": 4, "rl_readiness": True, **options}
        self.monitor = Monitor(
            self.model,
            self.optimizer,
            None,
            config=MonitorConfig(**given),
            on_reading=self.readings.append,
            on_event=self.events.append,
        )
        self.random = torch.Generator().manual_seed(1)

    @property
    def tiers(self) -> Tiers:
        return self.monitor._numbers.tiers

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            for _ in range(2):
                tokens = torch.randint(WORDS, (3, 7), generator=self.random)
                self.monitor.batch(labels=tokens)
                logits = self.model(tokens)
                loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))
                (loss / 2).backward()
                self.monitor.observe_output(logits=logits, labels=tokens)
            self.monitor.step(loss)
            self.optimizer.step()

    def rows(self) -> dict[int, dict[str, Any]]:
        """Every number by step but those of the clock and of memory in use."""
        rows: dict[int, dict[str, Any]] = {}
        for reading in self.readings:
            rows.setdefault(reading.step, {}).update(reading.flat())
        return {
            step: {name: 0.0 if "host_rss" in name else value for name, value in row.items()}
            for step, row in rows.items()
        }


def finished(run: Run, steps: int = 18) -> Run:
    run.steps(steps)
    run.monitor.close()
    return run


@pytest.fixture(scope="module")
def whole() -> Run:
    return finished(Run())


# By family: what fails, the names that it tells, and those that rest on them.
FAMILIES: dict[str, tuple[Callable[[Tiers], tuple[Any, str]], tuple[str, ...]]] = {
    "cosine": (lambda tiers: (tiers.cosine, "compute"), ("health/grad_cosine",)),
    "memory": (lambda tiers: (tiers.memory, "compute"), ("health/host_rss_gb",)),
    "noise": (lambda tiers: (tiers.noise, "compute"), ("health/gns",)),
    "micro-batches": (lambda tiers: (tiers.hearing, "heard"), ("health/gns",)),
    "weights": (
        lambda tiers: (tiers.weights._norms, "compute"),
        ("health/weight_norm", "health/gw_ratio"),
    ),
    "gradients": (lambda tiers: (tiers.weights, "gradients"), ("health/gw_ratio",)),
    "spectrum": (lambda tiers: (tiers.weights, "spectrum"), ("health/stable_rank",)),
    "drift": (lambda tiers: (tiers.weights, "drifted"), ("health/weight_drift",)),
    "updates": (lambda tiers: (tiers.weights, "updated"), ("health/update",)),
    "outputs": (
        lambda tiers: (tiers.outputs, "end_step"),
        ("health/token_efficiency", "health/output_entropy", "health/gns", "health/warnings"),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_fails_leaves_the_others_whole(
    family: str, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, gone = FAMILIES[family]
    run = Run()
    run.steps(7)

    def fails(*_: Any, **__: Any) -> Any:
        raise FloatingPointError("out of numbers")

    monkeypatch.setattr(*find(run.tiers), fails)
    finished(run, 11)
    (event,) = [event for event in run.events if event.event == "monitor_error"]
    assert event.where == family and "out of numbers" in event.error
    expected, found = whole.rows(), run.rows()
    for step, row in expected.items():
        rest = {name: v for name, v in row.items() if not (step > 7 and name.startswith(gone))}
        missing = rest.keys() - found.get(step, {}).keys()
        assert not missing, (step, missing)
        for name, value in rest.items():
            if not isinstance(value, str):
                assert found[step][name] == pytest.approx(value, rel=1e-6, nan_ok=True), (step, name)
        # Of the family itself nothing is made up.
        if step > 8:
            told = [name for name in found.get(step, {}) if name.startswith(gone)]
            assert not [name for name in told if name != "health/warnings" and "gns" not in name]


def test_what_is_due_is_sent_at_its_step_and_nothing_else_is() -> None:
    run = Run(logging_steps=5, tier2_every=4, tier3_every=6, rl_readiness=False)
    finished(run, 12)
    assert sorted(run.rows()) == [1, 2, 4, 5, 6, 7, 8, 10, 12]


def test_losses_and_tokens_between_two_looks_are_not_lost() -> None:
    """They are counted at every step, and told at those of tier 1."""
    run, fine = Run(logging_steps=5), Run(logging_steps=1)
    for one in (run, fine):
        finished(one, 17)
    told = {step for step, row in run.rows().items() if "health/loss_mean" in row}
    assert told == {5, 10, 15}
    for name in ("health/loss_mean", "health/loss_std", "health/token_efficiency"):
        for step in (5, 10, 15):
            assert run.rows()[step][name] == pytest.approx(fine.rows()[step][name], rel=1e-9)


def test_several_failures_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.steps(3)

    def fails(*_: Any, **__: Any) -> Any:
        raise FloatingPointError("out of numbers")

    for where in ("cosine", "memory"):
        monkeypatch.setattr(getattr(run.tiers, where), "compute", fails)
    finished(run, 10)
    assert len([event for event in run.events if event.event == "monitor_error"]) == 1
    assert run.monitor._journal.errors > 5
