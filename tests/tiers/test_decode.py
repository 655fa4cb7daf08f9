"""What rank 0 makes of what all ranks tell, and what it says where one of them does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers.ranks import Ranks
from torch import nn
from torch.nn import functional as F

from palingenesis import Event, Monitor, MonitorConfig, load_run
from palingenesis.reading import Reading
from palingenesis.tiers import company

WORDS, STEPS = 30, 24
OPTIONS: dict[str, Any] = {"check_every": 4, "tier2_every": 2, "tier3_every": 6, "rl_readiness": True}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 12), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, WORDS))


class Run:
    """Ranks of one process that train together: each on its own rows, with gradients averaged.

    Args:
        size: how many ranks.
        out: where rank 0 keeps its record.
        options: of the config.
    """

    def __init__(self, size: int = 2, out: Path | None = None, **options: Any) -> None:
        self.ranks = Ranks(size)
        self.models = [net() for _ in range(size)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.readings: list[list[Reading]] = [[] for _ in range(size)]
        self.events: list[list[Event]] = [[] for _ in range(size)]
        self.monitors: list[Monitor] = []
        for rank in range(size):
            with self.ranks.rank(rank):
                self.monitors.append(
                    Monitor(
                        self.models[rank],
                        self.optimizers[rank],
                        out,
                        config=MonitorConfig(**{**OPTIONS, **options}),
                        on_reading=self.readings[rank].append,
                        on_event=self.events[rank].append,
                    )
                )
        self.random = torch.Generator().manual_seed(1)
        # Of each step, the gradients that ranks had before they were averaged.
        self.own: list[list[torch.Tensor]] = []

    def step(self, *, stepping: tuple[int, ...] | None = None) -> None:
        losses = []
        for model, optimizer, monitor in zip(self.models, self.optimizers, self.monitors, strict=True):
            optimizer.zero_grad()
            tokens = torch.randint(WORDS, (3, 7), generator=self.random)
            monitor.batch(labels=tokens)
            logits = model(tokens)
            losses.append(F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1)))
            losses[-1].backward()
            monitor.observe_output(logits=logits, labels=tokens)
        flat = [torch.cat([p.grad.flatten() for p in model.parameters()]) for model in self.models]
        self.own.append(flat)
        for group in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([p.grad for p in group]).mean(0)
            for p in group:
                p.grad.copy_(mean)
        chosen = stepping if stepping is not None else range(len(self.monitors))
        for rank in reversed(chosen):
            self.monitors[rank].step(losses[rank])
        for optimizer in self.optimizers:
            optimizer.step()

    def steps(self, count: int = STEPS, **given: Any) -> None:
        for _ in range(count):
            self.step(**given)

    def close(self) -> None:
        for monitor in reversed(self.monitors):
            monitor.close()

    def steps_of(self, name: str) -> list[int]:
        return [reading.step for reading in self.readings[0] if name in reading.flat()]

    def told(self, rank: int = 0, event: str = "signal_unavailable") -> list[Event]:
        return [one for one in self.events[rank] if one.event == event]


#: By family: a number that it tells, and where it is found.
FAMILIES = {
    "memory": ("health/host_rss_gb", "memory"),
    "replicas": ("health/replica_divergence", "replicas"),
    "ranks": ("health/rank_gradient_ratio", "own"),
}


@pytest.fixture(scope="module")
def whole() -> Run:
    run = Run()
    run.steps()
    run.close()
    return run


def test_rank_0_reads_for_all(whole: Run) -> None:
    assert [reading.step for reading in whole.readings[0]] == list(range(1, STEPS + 1))
    assert whole.readings[1] == []
    assert whole.steps_of("health/token_efficiency") == list(range(1, STEPS + 1))
    assert whole.steps_of("health/output_entropy") == list(range(1, STEPS + 1))
    assert whole.steps_of("health/host_rss_gb_max") == list(range(2, STEPS + 1, 2))
    assert whole.steps_of("health/replica_divergence") == [1, 6, 12, 18, 24]
    assert whole.steps_of("health/rank_gradient_ratio") == [6, 12, 18, 24]
    assert not [e for rank in range(2) for e in whole.told(rank, "monitor_error")]


def test_what_ranks_are_compared_by(whole: Run) -> None:
    """The largest ratio of a layer's norms before the average, computed from copies."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in whole.models[0]]
    for reading in whole.readings[0]:
        if "health/rank_gradient_ratio" not in reading.scalars:
            continue
        one, two = whole.own[reading.step - 1]
        norms = [[float(part.norm()) for part in flat.split(sizes) if part.numel()] for flat in (one, two)]
        ratio = max(max(a / b, b / a) for a, b in zip(*norms, strict=True))
        assert reading.scalars["health/rank_gradient_ratio"] == pytest.approx(ratio, rel=1e-4)
        assert reading.scalars["health/replica_divergence"] == 0.0


def test_the_noise_comes_from_the_ranks(whole: Run) -> None:
    told = {
        reading.step: reading.labels["health/gns_source"] for reading in whole.readings[0] if reading.labels
    }
    # Eight steps are needed, and ranks know of one another from the first look on that they have met at.
    assert told == {16: "consecutive", 18: "rank", 20: "rank", 22: "rank", 24: "rank"}


def test_nothing_is_missing_but_what_was_not_given(whole: Run) -> None:
    assert {event.signal for event in whole.told()} == {"health/padding_pct"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("broken", [0, 1])
def test_a_family_that_one_rank_cannot_tell_is_left_out_with_the_reason(
    family: str, broken: int, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, where = FAMILIES[family]
    run = Run()
    run.steps(10)

    def fails(*given: Any) -> Any:
        raise OSError("no such book")

    monkeypatch.setattr(getattr(run.monitors[broken]._numbers.tiers, where), "compute", fails)
    run.steps(STEPS - 10)
    run.close()
    assert run.steps_of(name) == [step for step in whole.steps_of(name) if step <= 10]
    (event,) = [e for e in run.told() if e.signal == FAMILIES[family][0]]
    assert event.reason == f"rank {broken} could not tell its part"
    assert event.step == 12
    # It is the failing rank's to say what went wrong.
    assert [len(run.told(rank, "monitor_error")) for rank in range(2)] == [broken == 0, broken == 1]
    # Nothing else is missing.
    for other in ("health/token_efficiency", "health/grad_cosine_sim", "health/weight_drift_max"):
        assert run.steps_of(other) == whole.steps_of(other)


def test_tokens_that_one_rank_cannot_count(whole: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.steps(11)
    end_step = run.monitors[1]._numbers.tiers.outputs.end_step

    def fails(step: int, **given: Any) -> None:
        if step >= 12:
            raise ValueError("no tokens")
        end_step(step, **given)

    monkeypatch.setattr(run.monitors[1]._numbers.tiers.outputs, "end_step", fails)
    run.steps(STEPS - 11)
    run.close()
    assert max(run.steps_of("health/token_efficiency")) < 13
    assert {e.reason for e in run.told() if e.signal == "health/token_efficiency"} >= {
        "rank 1 could not tell its part"
    }
    assert run.steps_of("health/weight_drift_max") == whole.steps_of("health/weight_drift_max")
    assert run.steps_of("health/loss_mean") == list(range(1, STEPS + 1))


def test_a_rank_whose_rows_do_not_fit_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.steps(8)
    end_step = run.monitors[1]._numbers.tiers.outputs.end_step

    def skips(step: int, **given: Any) -> None:
        if step != 11:
            end_step(step, **given)

    monkeypatch.setattr(run.monitors[1]._numbers.tiers.outputs, "end_step", skips)
    run.steps(STEPS - 8)
    run.close()
    (event,) = [e for e in run.told() if e.signal == "health/token_efficiency"]
    assert event.reason == "what the ranks tell does not fit together" and event.step == 12
    assert run.steps_of("health/token_efficiency") == [*range(1, 11), *range(13, STEPS + 1)]


# -- late --------------------------------------------------------------------------------------------------


def numbers(run: Run) -> dict[int, dict[str, float | str]]:
    """What rank 0 has told of each step, but for memory."""
    rows: dict[int, dict[str, float | str]] = {}
    for reading in run.readings[0]:
        rows.setdefault(reading.step, {}).update(reading.flat())
    return {step: {n: v for n, v in row.items() if "host_rss" not in n} for step, row in rows.items()}


@pytest.mark.parametrize("every", [3, 11, 100])
def test_what_another_rank_tells_late_is_told_of_its_step(
    every: int, whole: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every few steps all at once; in the last case, when the run ends."""
    run = Run(out=tmp_path / "run")
    other = run.monitors[1]._numbers.tiers.company
    run.steps(1)  # they have met
    told: list[tuple[int, Any]] = []
    tell = other.tell
    monkeypatch.setattr(other, "tell", lambda step, found: told.append((step, found)))

    def post() -> None:
        for one in told:
            tell(*one)
        told.clear()

    for step in range(2, STEPS + 1):
        run.step()
        if step % every == 0:
            post()
    run.monitors[1].close()
    post()
    run.monitors[0].close()
    expected = numbers(whole)
    found = numbers(run)
    assert list(found) == list(expected)
    for step, row in expected.items():
        assert found[step] == {
            name: v if isinstance(v, str) else pytest.approx(v, rel=1e-6) for name, v in row.items()
        }
    assert not [event for event in run.told() if event.signal != "health/padding_pct"]
    record = load_run(tmp_path / "run")
    assert record.metrics["step"].tolist() == list(range(1, STEPS + 1))
    assert record.verify().ok


# -- alone -------------------------------------------------------------------------------------------------


def test_a_monitor_on_rank_0_only_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(company.time, "monotonic", lambda: now[0])
    run = Run()
    for _ in range(STEPS):
        run.step(stepping=(0,))
        now[0] += 5
    run.monitors[0].close()
    assert [reading.step for reading in run.readings[0]] == list(range(1, STEPS + 1))
    assert run.steps_of("health/grad_cosine_sim") == list(range(2, STEPS + 1, 2))
    assert run.steps_of("health/weight_drift_max") == [1, 6, 12, 18, 24]
    told = [e for e in run.told() if "do not tell theirs" in str(e.reason)]
    assert {e.signal for e in told} == {"health/rank_gradient_ratio", "health/replica_divergence"}
    assert all("make a Monitor on every rank" in e.reason for e in told) and len(told) == 2
    assert not run.told(event="monitor_error")


def test_a_rank_that_falls_silent_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(company.time, "monotonic", lambda: now[0])
    run = Run()
    run.steps(9)
    for _ in range(STEPS - 9):
        run.step(stepping=(0,))
        now[0] += 5
    run.monitors[0].close()
    assert [reading.step for reading in run.readings[0]] == list(range(1, STEPS + 1))
    assert run.steps_of("health/weight_drift_max") == [1, 6, 12, 18, 24]
    assert max(run.steps_of("health/rank_gradient_ratio")) == 6
    assert [e for e in run.told() if "do not tell theirs" in str(e.reason)]
    # The other one, when it comes back, says no more than that.
    keys = run.ranks.store.num_keys()
    for _ in range(20):
        run.step(stepping=(1,))
    assert run.ranks.store.num_keys() <= keys + 1
    assert not run.told(1, "monitor_error")


# -- the end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [10, 11])
def test_a_short_run_is_looked_at_again_by_rank_0_alone(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are the same on all ranks: nobody else is asked, or waited for."""
    run = Run(tier3_every=100, drift="exact")
    before = {name: p.detach().clone() for name, p in run.models[0].named_parameters()}
    run.steps(steps)
    waited: list[int] = []
    monkeypatch.setattr(
        run.monitors[0]._numbers.tiers.company, "_hear", lambda step, *_, **__: waited.append(step)
    )
    run.close()
    assert not waited
    assert [event.step for event in run.told(event="tier3_at_end")] == [steps]
    assert {event.signal for event in run.told()} == {"health/padding_pct"}
    assert run.steps_of("health/weight_drift_max") == [1, steps]
    (last,) = [one for one in run.readings[0] if one.step == steps and "health/weight_drift" in one.layers]
    now = run.models[0].get_parameter("0.weight").detach()
    exact = float((now - before["0.weight"]).norm() / before["0.weight"].norm())
    assert last.layers["health/weight_drift"]["0"] == pytest.approx(exact, rel=1e-4) and exact > 0
    # Tokens are those of all ranks, or none.
    assert run.steps_of("health/token_efficiency") == list(range(1, 11))
