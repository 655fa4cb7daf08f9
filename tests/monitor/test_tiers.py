"""The tiers, wired: every number at its own steps, and equal to one computed another way from copies."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from palingenesis import Event, Monitor, MonitorConfig, load_run
from palingenesis.errors import ConfigError
from palingenesis.record.reader import Run
from palingenesis.signals.packet import Packet

VOCABULARY = 40


class Net(nn.Module):
    """Tokens in, logits out: an embedding, two blocks of like-named matrices, a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, width)
        self.h = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)})
            for _ in range(2)
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.emb(tokens)
        for block in self.h:
            x = x + block["down"](torch.tanh(block["up"](x)))
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.hidden(tokens))
        return logits


def small() -> Net:
    """Every tensor is shorter than its sketches: nothing is estimated."""
    return Net()


def wide() -> Net:
    """Matrices of 165,888 elements, of which sketches are kept."""
    return Net(288)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


Weights = dict[str, torch.Tensor]


class Loop:
    """A training loop that keeps copies of everything a test may want to compute from.

    Args:
        make: makes the model.
        optimizer: makes the optimizer.
        out: of the monitor.
        options: of the config, or of the monitor where it has no such.
    """

    OF_THE_MONITOR = ("resume", "overwrite", "on_reading", "scaler", "start_step", "max_steps")

    def __init__(
        self,
        make: Callable[[], Net] = small,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        out: Path | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.model = make()
        self.optimizer = optimizer(self.model)
        self.events: list[Event] = []
        self.readings: list[Any] = []
        given = {name: options.pop(name) for name in self.OF_THE_MONITOR if name in options}
        given = {"on_reading": self.readings.append, **given}
        options = {"check_every": 5, **options}
        self.monitor = Monitor(
            self.model,
            self.optimizer,
            out,
            config=MonitorConfig(**options),
            on_event=self.events.append,
            **given,
        )
        self.random = torch.Generator().manual_seed(2)
        self.returned: list[Any] = []
        self.losses: list[float] = []
        # By step, from 1: gradients, and weights before and after the optimizer's step.
        self.gradients: dict[int, Weights] = {}
        self.before: dict[int, Weights] = {}
        self.after: dict[int, Weights] = {}

    def weights(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def batch(self) -> torch.Tensor:
        return torch.randint(VOCABULARY, (4, 9), generator=self.random)

    def step(
        self, tokens: torch.Tensor | None = None, look: Callable[[torch.Tensor], None] | None = None
    ) -> Any:
        tokens = self.batch() if tokens is None else tokens
        self.optimizer.zero_grad()
        logits = self.model(tokens)
        loss = F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        loss.backward()
        if look is not None:
            look(logits)
        now = self.monitor.global_step + 1
        self.gradients[now] = {
            n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None
        }
        self.before[now] = self.weights()
        self.losses.append(float(loss.detach()))
        self.returned.append(self.monitor.step(loss))
        self.optimizer.step()
        self.after[now] = self.weights()
        return self.returned[-1]

    def steps(self, count: int, **given: Any) -> None:
        for _ in range(count):
            self.step(**given)

    def named(self, *names: str) -> list[Event]:
        return [event for event in self.events if event.event in names]

    def value(self, step: int, name: str) -> Any:
        """A number, or numbers by layer, from the readings handed to ``on_reading``."""
        (reading,) = (one for one in self.readings if one.step == step)
        return reading.scalars[name] if name in reading.scalars else reading.layers[name]


def flat(weights: Weights) -> torch.Tensor:
    return torch.cat([weights[name].double().reshape(-1) for name in sorted(weights)])


def of(weights: Weights, prefix: str) -> Weights:
    return {name: w for name, w in weights.items() if name.startswith(f"{prefix}.")}


def relative_change(after: Weights, before: Weights) -> float:
    return float((flat(after) - flat(before)).norm() / flat(before).norm())


def stable_rank(weight: torch.Tensor) -> float:
    sigma = np.linalg.svd(weight.double().numpy(), compute_uv=False)
    return float((sigma**2).sum() / sigma[0] ** 2)


def steps_of(run: Run, name: str) -> list[int]:
    """The steps at which a column has a value."""
    column = run.metrics[name]
    return [int(s) for s in run.metrics["step"][~np.isnan(column)]]


BLOCKS = ("emb", "h.0", "h.1", "lm_head")
MATRICES = ("emb", "h.0.up", "h.0.down", "h.1.up", "h.1.down", "lm_head")


# -- when ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logging_steps", [1, 3, 7, 50])
@pytest.mark.parametrize("check_every", [1, 5])
def test_every_tier_has_its_own_cadence(logging_steps: int, check_every: int, tmp_path: Path) -> None:
    loop = Loop(
        out=tmp_path / "run",
        check_every=check_every,
        logging_steps=logging_steps,
        tier2_every=4,
        tier3_every=6,
        rl_readiness=True,
    )

    tokens = [loop.batch() for _ in range(24)]
    for batch in tokens:
        loop.monitor.batch(labels=batch)
        loop.step(
            batch, look=lambda logits, labels=batch: loop.monitor.observe_output(logits=logits, labels=labels)
        )
    loop.monitor.close()
    run = load_run(tmp_path / "run")
    assert run.metrics["step"].tolist() == list(range(1, 25))
    first = list(range(logging_steps, 25, logging_steps))
    second, third = [4, 8, 12, 16, 20, 24], [1, 6, 12, 18, 24]
    names = ["health/token_efficiency", "health/output_entropy", "health/output_entropy_se"]
    for name in [*names, "health/loss_mean"]:
        if first:
            assert steps_of(run, name) == first, name
        else:
            assert name not in run.metrics
    for name in ("health/grad_cosine_sim", *(f"health/grad_cosine/{block}" for block in BLOCKS)):
        assert steps_of(run, name) == second, name
    assert steps_of(run, "health/host_rss_gb") == second
    weights = ["health/stable_rank_min", "health/weight_norm_ratio", "health/weight_drift_max"]
    weights += [f"health/weight_norm/{block}" for block in BLOCKS]
    weights += [f"health/{name}/{m}" for name in ("stable_rank", "weight_drift") for m in MATRICES]
    for name in weights:
        assert steps_of(run, name) == third, name
    # What an optimizer step did is known a step later; step 25 never was.
    for name in ("health/update_lost_pct", *(f"health/update_ratio/{block}" for block in BLOCKS)):
        assert steps_of(run, name) == [2, 7, 13, 19], name
    assert run.verify().ok


def test_a_direction_of_every_step(tmp_path: Path) -> None:
    loop = Loop(out=tmp_path / "run", tier2_every=1)
    loop.steps(7)
    loop.monitor.close()
    run = load_run(tmp_path / "run")
    assert steps_of(run, "health/grad_cosine_sim") == [2, 3, 4, 5, 6, 7]


def test_a_run_shorter_than_every_tier_is_looked_at_when_it_begins_and_ends(tmp_path: Path) -> None:
    loop = Loop(out=tmp_path / "run", drift="exact")
    loop.steps(4)
    loop.monitor.close()
    run = load_run(tmp_path / "run")
    assert steps_of(run, "health/stable_rank_min") == [1, 4]
    assert run.metrics["health/weight_drift_max"][0] == 0.0
    # After the last step, not before it: nothing comes later.
    moved = {
        name: relative_change(of(loop.after[4], name), of(loop.before[1], name)) for name in ("lm_head",)
    }
    assert run.metrics["health/weight_drift/lm_head"][3] == pytest.approx(moved["lm_head"], rel=1e-4)
    assert "health/grad_cosine_sim" not in run.metrics
    (event,) = loop.named("tier3_at_end")
    assert event.step == 4 and "tier3_every" in event.message


def test_a_run_whose_end_is_known_is_looked_at_before_its_last_step(tmp_path: Path) -> None:
    loop = Loop(out=tmp_path / "run", drift="exact", max_steps=4)
    loop.steps(4)
    loop.monitor.close()
    run = load_run(tmp_path / "run")
    assert steps_of(run, "health/stable_rank_min") == [1, 4]
    exact = relative_change(of(loop.before[4], "lm_head"), of(loop.before[1], "lm_head"))
    assert run.metrics["health/weight_drift/lm_head"][3] == pytest.approx(exact, rel=1e-4)
    # Both the first step's update and the last that can be seen.
    assert steps_of(run, "health/update_lost_pct") == [2, 4]
    assert len(loop.named("tier3_at_end")) == 1


@pytest.mark.parametrize(
    ("steps", "every", "max_steps"), [(6, 6, None), (6, 3, 6), (6, 6, 6), (1, 5, 1), (7, 6, None)]
)
def test_a_run_that_has_its_regular_look_has_no_other(steps: int, every: int, max_steps: int | None) -> None:
    loop = Loop(tier3_every=every, max_steps=max_steps)
    loop.steps(steps)
    loop.monitor.close()
    assert not loop.named("tier3_at_end")


def test_a_run_that_breaks_off_is_not_looked_at_again() -> None:
    loop = Loop()
    loop.steps(3)
    error = RuntimeError("out of luck")
    loop.monitor.__exit__(RuntimeError, error, None)
    assert not loop.named("tier3_at_end")


def test_where_training_began_before_this_monitor_there_is_no_drift_and_a_reason() -> None:
    loop = Loop(start_step=1233)
    loop.steps(2)
    assert [reading.step for reading in loop.readings] == [1234, 1235]
    assert "health/stable_rank_min" in loop.readings[0].scalars
    assert not [name for reading in loop.readings for name in reading.flat() if "drift" in name]
    (event,) = (e for e in loop.named("signal_unavailable") if e.signal == "health/weight_drift")
    assert "first started" in event.reason


# -- what: gradients -------------------------------------------------------------------------------------


def exact_cosine(one: Weights, other: Weights) -> float:
    return float(F.cosine_similarity(flat(one), flat(other), dim=0))


def test_the_cosine_is_that_of_two_consecutive_gradients() -> None:
    loop = Loop(tier2_every=4)
    loop.steps(12)
    for step in (4, 8, 12):
        before, now = loop.gradients[step - 1], loop.gradients[step]
        assert loop.value(step, "health/grad_cosine_sim") == pytest.approx(
            exact_cosine(before, now), abs=1e-5
        )
        for block in BLOCKS:
            exact = exact_cosine(of(before, block), of(now, block))
            assert loop.value(step, "health/grad_cosine")[block] == pytest.approx(exact, abs=1e-5)


def test_the_cosine_of_sketches_is_close() -> None:
    loop = Loop(wide, tier2_every=2)
    loop.steps(8)
    for step in (2, 4, 6, 8):
        exact = exact_cosine(loop.gradients[step - 1], loop.gradients[step])
        assert loop.value(step, "health/grad_cosine_sim") == pytest.approx(exact, abs=0.02)


def test_a_loss_scale_does_not_touch_the_cosine() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    loop = Loop(tier2_every=2, scaler=scaler)
    kept = []
    for _ in range(2):
        tokens = loop.batch()
        loop.optimizer.zero_grad()
        scaler.scale(
            F.cross_entropy(loop.model(tokens).reshape(-1, VOCABULARY), tokens.reshape(-1))
        ).backward()
        kept.append({n: p.grad / 2.0**14 for n, p in loop.model.named_parameters()})
        loop.monitor.step()
        scaler.step(loop.optimizer)
        scaler.update()
    assert loop.value(2, "health/grad_cosine_sim") == pytest.approx(exact_cosine(*kept), abs=1e-5)


# -- what: weights ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> Loop:
    loop = Loop(wide, tier3_every=5, drift="sketch")
    loop.steps(16)
    return loop


@pytest.mark.parametrize("step", [1, 5, 10, 15])
def test_weights_are_as_svd_and_norms_say(step: int, trained: Loop) -> None:
    weights = trained.before[step]
    ranks = trained.value(step, "health/stable_rank")
    exact = {layer: stable_rank(weights[f"{layer}.weight"]) for layer in MATRICES}
    assert ranks == pytest.approx(exact, rel=0.01)
    inside = [exact[layer] for layer in MATRICES if layer not in ("emb", "lm_head")]
    assert trained.value(step, "health/stable_rank_min") == pytest.approx(min(inside), rel=0.01)
    assert trained.value(step, "health/stable_rank_mean") == pytest.approx(np.mean(inside), rel=0.01)
    norms = trained.value(step, "health/weight_norm")
    rms = {block: float(flat(of(weights, block)).square().mean().sqrt()) for block in BLOCKS}
    assert norms == pytest.approx(rms, rel=1e-5)
    alike = []
    for kind in ("up", "down"):
        pair = [float(weights[f"h.{i}.{kind}.weight"].double().norm()) for i in range(2)]
        alike.append(max(pair) / min(pair))
    assert trained.value(step, "health/weight_norm_ratio") == pytest.approx(max(alike), rel=1e-5)


@pytest.mark.parametrize("mode", ["sketch", "exact"])
def test_drift_is_the_distance_from_the_first_weights(mode: Any, trained: Loop) -> None:
    loop = trained
    if mode == "exact":
        loop = Loop(wide, tier3_every=5, drift="exact")
        loop.steps(11)
    tolerance = 0.1 if mode == "sketch" else 1e-5
    for step in (5, 10):
        exact = {}
        for layer in MATRICES:
            exact[layer] = relative_change(of(loop.before[step], layer), of(loop.before[1], layer))
        found = loop.value(step, "health/weight_drift")
        assert found == pytest.approx(exact, rel=tolerance)
        assert loop.value(step, "health/weight_drift_max") == pytest.approx(
            max(exact.values()), rel=tolerance
        )
        mean = float(np.mean(list(exact.values())))
        assert loop.value(step, "health/weight_drift_mean") == pytest.approx(mean, rel=tolerance)
    assert loop.value(1, "health/weight_drift") == dict.fromkeys(MATRICES, 0.0)


def test_without_drift_there_is_none(tmp_path: Path) -> None:
    loop = Loop(out=tmp_path / "run", tier3_every=3, drift="off")
    loop.steps(7)
    loop.monitor.close()
    run = load_run(tmp_path / "run")
    assert not [name for name in run.metrics if "drift" in name]
    assert steps_of(run, "health/stable_rank_min") == [1, 3, 6]
    assert steps_of(run, "health/update_lost_pct") == [2, 4, 7]
    assert not list((tmp_path / "run").glob("start*"))


@pytest.mark.parametrize("step", [1, 5, 10])
def test_the_update_ratio_is_that_of_one_step(step: int, trained: Loop) -> None:
    exact = {
        block: relative_change(of(trained.after[step], block), of(trained.before[step], block))
        for block in BLOCKS
    }
    assert trained.value(step + 1, "health/update_ratio") == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("drift", ["exact", "off"])
def test_the_update_ratio_does_not_need_the_sketches_of_drift(drift: Any) -> None:
    loop = Loop(wide, tier3_every=3, drift=drift)
    loop.steps(4)
    for step in (1, 3):
        before, after = loop.before[step], loop.after[step]
        exact = {block: relative_change(of(after, block), of(before, block)) for block in BLOCKS}
        assert loop.value(step + 1, "health/update_ratio") == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_updates_are_lost_in_bf16_and_not_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Weights of the usual size, of which a step of 1e-4 is far below half a bf16 number's distance.
    loop = Loop(
        lambda: Net(64).to(dtype), lambda model: torch.optim.Adam(model.parameters(), lr=1e-4), tier3_every=4
    )
    loop.steps(6)
    for step in (1, 4):
        touched = lost = 0
        for name, gradient in loop.gradients[step].items():
            has = gradient != 0
            touched += int(has.sum())
            lost += int((has & (loop.after[step][name] == loop.before[step][name])).sum())
        found, error = (loop.value(step + 1, f"health/update_lost_pct{end}") for end in ("", "_se"))
        assert abs(found - 100 * lost / touched) <= 4 * error + 0.2
        if dtype == torch.bfloat16:
            assert found > 60 and 0 < error < 3
        else:
            assert found < 1


def test_an_update_that_the_loss_scaler_skipped_is_missing_with_a_reason() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    loop = Loop(tier3_every=3, scaler=scaler)
    for step in range(1, 8):
        tokens = loop.batch()
        loop.optimizer.zero_grad()
        scaler.scale(
            F.cross_entropy(loop.model(tokens).reshape(-1, VOCABULARY), tokens.reshape(-1))
        ).backward()
        if step == 3:
            loop.model.lm_head.weight.grad[0, 0] = math.inf
        loop.monitor.step()
        scaler.step(loop.optimizer)
        scaler.update()
    # A skipped step would have "lost" every update.
    told = {reading.step for reading in loop.readings if "health/update_lost_pct" in reading.scalars}
    assert told == {2, 7}
    missing = [e for e in loop.named("signal_unavailable") if "update" in e.signal]
    assert {(e.signal, e.step) for e in missing} == {
        ("health/update_ratio", 4),
        ("health/update_lost_pct", 4),
    }
    assert "skipped" in missing[0].reason


# -- what: outputs, tokens, losses -----------------------------------------------------------------------


def test_token_efficiency_counts_labels() -> None:
    loop = Loop()
    labels = torch.ones(4, 10, dtype=torch.long)
    labels[:, 5:] = -100
    labels[0] = -100
    mask = torch.ones(4, 10)
    mask[:, 8:] = 0
    for _ in range(2):  # two micro-batches
        loop.monitor.batch(labels=labels, attention_mask=mask)
    loop.step()
    assert loop.monitor.latest["health/token_efficiency"] == pytest.approx(3 * 4 / 40)
    assert loop.monitor.latest["health/padding_pct"] == pytest.approx(20)
    loop.monitor.batch(labels=labels[1:], shifted=True)
    loop.step()
    assert loop.monitor.latest["health/token_efficiency"] == pytest.approx((24 + 15) / 110)


def test_no_labels_no_token_efficiency() -> None:
    loop = Loop()
    loop.steps(2)
    assert "health/token_efficiency" not in loop.monitor.latest


@pytest.mark.parametrize("way", ["logits", "hidden"])
def test_the_entropy_of_a_sample_is_that_of_all_positions(way: str) -> None:
    loop = Loop(rl_readiness=True, logging_steps=2, entropy_positions=32)
    torch.manual_seed(0)
    with torch.no_grad():
        loop.model.lm_head.weight.mul_(4)  # entropies that differ between positions
    exact = {}
    for step in range(1, 7):
        tokens = torch.randint(VOCABULARY, (8, 33), generator=loop.random)
        logits = loop.model(tokens).detach()
        p = logits[:, :-1].double().softmax(-1)
        exact[step] = float(-(p * p.log()).sum(-1).mean())
        if way == "logits":
            loop.monitor.observe_output(logits=logits, labels=tokens)
        else:
            hidden = loop.model.hidden(tokens)
            loop.monitor.observe_output(hidden=hidden, head=loop.model.lm_head, labels=tokens)
        loop.step(tokens)
    for step in (2, 4, 6):
        found, error = (loop.value(step, f"health/output_entropy{end}") for end in ("", "_se"))
        assert 0 < error < 0.1 * found
        assert abs(found - exact[step]) <= 3 * error


def test_without_rl_readiness_outputs_are_not_looked_at() -> None:
    loop = Loop()

    def look(logits: torch.Tensor) -> None:
        loop.monitor.observe_output(logits=logits, labels=torch.ones(logits.shape[:-1], dtype=torch.long))

    loop.steps(3, look=look)
    assert not [name for name in loop.monitor.latest if "entropy" in name]
    assert not loop.named("signal_unavailable", "monitor_error")


def test_entropy_that_nobody_gives_is_said_to_be_missing_once(tmp_path: Path) -> None:
    loop = Loop(out=tmp_path / "run", rl_readiness=True, tier2_every=2)
    loop.steps(6)
    loop.monitor.close()
    missing = [e for e in loop.named("signal_unavailable") if e.signal == "health/output_entropy"]
    assert len(missing) == 1
    assert "observe_output" in missing[0].reason
    assert "health/output_entropy" not in loop.monitor.latest


@pytest.mark.parametrize("check_every", [1, 7])
def test_the_losses_of_the_last_hundred_steps(check_every: int, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    random = np.random.default_rng(0)
    losses = random.lognormal(size=130)
    losses[60] = math.nan
    with Monitor(model, out=tmp_path / "run", check_every=check_every) as monitor:
        for loss in losses:
            model.weight.grad = torch.ones(3, 3)
            monitor.step(float(loss))
    run = load_run(tmp_path / "run")
    finite = np.delete(losses, 60)
    for step in (2, 40, 100, 130):
        window = finite[: step - (step > 60)][-100:]
        at = step - 1
        assert run.metrics["health/loss_mean"][at] == pytest.approx(window.mean(), rel=1e-6)
        assert run.metrics["health/loss_std"][at] == pytest.approx(window.std(ddof=1), rel=1e-6)
        assert run.metrics["health/loss_cv"][at] == pytest.approx(
            window.std(ddof=1) / window.mean(), rel=1e-6
        )


# -- readings --------------------------------------------------------------------------------------------


def test_step_returns_the_newest_reading_and_on_reading_gets_each_once(tmp_path: Path) -> None:
    loop = Loop(out=tmp_path / "run", tier2_every=4, tier3_every=6)
    loop.steps(12)
    assert [reading.step for reading in loop.readings] == list(range(1, 13))
    newest = None
    by_step = {reading.step: reading for reading in loop.readings}
    for step, returned in enumerate(loop.returned, 1):
        newest = by_step.get(step, newest)
        assert returned is newest
    loop.monitor.close()
    assert len(loop.readings) == 12
    run = load_run(tmp_path / "run")
    for reading in loop.readings:
        for name, value in reading.flat().items():
            assert run.metrics[name][reading.step - 1] == pytest.approx(value, rel=1e-5), name


def test_latest_holds_what_is_not_a_layers() -> None:
    loop = Loop(tier3_every=3, check_every=1)
    loop.steps(6)
    latest = loop.monitor.latest
    assert latest["health/weight_drift_max"] == loop.value(6, "health/weight_drift_max")
    assert latest["health/loss_mean"] == pytest.approx(np.mean(loop.losses), rel=1e-6)
    assert not [name for name in latest if name.startswith("health/weight_norm/")]
    latest.clear()
    assert loop.monitor.latest


def test_a_failing_on_reading_ends_nothing(tmp_path: Path) -> None:
    calls = []

    def broken(reading: Any) -> None:
        calls.append(reading.step)
        raise RuntimeError("no such dashboard")

    loop = Loop(out=tmp_path / "run", on_reading=broken, tier2_every=1, tier3_every=2, check_every=1)
    loop.steps(12)
    loop.monitor.close()
    (error,) = loop.named("monitor_error")
    assert "no such dashboard" in error.error
    assert calls
    run = load_run(tmp_path / "run")
    # What is watched is watched on, and recorded: only the callback is lost.
    assert run.metrics["step"].tolist() == list(range(1, 13))
    assert run.layers["step"].tolist() == list(range(1, 13))
    assert steps_of(run, "health/stable_rank_min") == [1, 2, 4, 6, 8, 10, 12]
    assert steps_of(run, "health/grad_cosine_sim") == list(range(2, 13))


def test_a_failing_on_reading_hides_no_event() -> None:
    def collapsed() -> Net:
        model = Net()
        with torch.no_grad():
            model.h[0]["up"].weight.copy_(torch.ones(32, 16))
        return model

    def broken(reading: Any) -> None:
        raise RuntimeError("no such dashboard")

    loop = Loop(collapsed, on_reading=broken, tier3_every=2, check_every=1)
    loop.steps(3)
    with torch.no_grad():
        loop.model.h[1]["up"].weight.copy_(torch.ones(32, 16))
    loop.steps(3)
    ranks = [event for event in loop.events if event.diagnosis == "stable_rank"]
    assert [(event.event, event.step) for event in ranks] == [("bound_at_start", 1), ("bound_crossed", 4)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of a device: a packet arrives when the clock, its only number, has gone on by two."""
    now = [0]
    make = Packet.__init__

    def init(self: Packet, tensors: Any) -> None:
        make(self, tensors)
        self.__dict__["since"] = now[0]

    monkeypatch.setattr(Packet, "__init__", init)
    monkeypatch.setattr(Packet, "ready", property(lambda self: now[0] >= self.since + 2))
    return now


@pytest.mark.parametrize("check_every", [1, 3, 5])
def test_numbers_that_arrive_late_are_recorded_at_their_step(
    check_every: int, clock: list[int], tmp_path: Path
) -> None:
    loop = Loop(out=tmp_path / "run", tier2_every=3, tier3_every=6, check_every=check_every)
    for _ in range(24):
        tokens = loop.batch()
        loop.monitor.batch(labels=tokens)
        loop.step(tokens)
        clock[0] += 1
    loop.monitor.close()
    run = load_run(tmp_path / "run")
    assert run.metrics["step"].tolist() == list(range(1, 25))
    assert [reading.step for reading in loop.readings] == list(range(1, 25))
    assert steps_of(run, "health/token_efficiency") == list(range(1, 25))
    assert steps_of(run, "health/grad_cosine_sim") == list(range(3, 25, 3))
    assert steps_of(run, "health/weight_drift_max") == [1, 6, 12, 18, 24]
    assert steps_of(run, "health/update_lost_pct") == [2, 7, 13, 19]
    assert steps_of(run, "health/loss_mean") == list(range(1, 25))


# -- no harm ---------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "logging_steps": 1,
    "tier2_every": 1,
    "tier3_every": 1,
    "rl_readiness": True,
    "check_every": 1,
}


def train(watched: bool, make: Callable[[], nn.Module]) -> tuple[Weights, torch.Tensor]:
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = Monitor(model, optimizer, None, config=MonitorConfig(**EVERYTHING)) if watched else None
    for _ in range(6):
        tokens = torch.randint(VOCABULARY, (4, 9))
        logits = F.dropout(model(tokens), 0.1)
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY).float(), tokens.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        if monitor is not None:
            monitor.batch(labels=tokens)
            monitor.observe_output(logits=logits, labels=tokens)
            monitor.step(loss)
        optimizer.step()
    if monitor is not None:
        assert not [event for event in monitor.events if event.event == "monitor_error"]
        assert "health/output_entropy" in monitor.latest
        monitor.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, torch.get_rng_state()


@pytest.mark.parametrize("make", [small, wide, lambda: small().bfloat16()], ids=["small", "wide", "bf16"])
def test_training_is_the_same_bit_by_bit(make: Callable[[], nn.Module]) -> None:
    with_it, without = train(True, make), train(False, make)
    for name, weight in with_it[0].items():
        assert torch.equal(weight, without[0][name]), name
    assert torch.equal(with_it[1], without[1])


def test_a_watched_model_can_be_copied() -> None:
    loop = Loop(**EVERYTHING)
    loop.steps(3)
    twin = copy.deepcopy(loop.model)
    for name, p in twin.named_parameters():
        assert torch.equal(p, dict(loop.model.named_parameters())[name])
    copy.deepcopy(loop.optimizer)
    loop.steps(2)
    assert not loop.named("monitor_error")
    copy.deepcopy(loop.monitor.step())  # a reading


def test_parameters_that_come_and_go_break_nothing(tmp_path: Path) -> None:
    loop = Loop(out=tmp_path / "run", **{**EVERYTHING, "rl_readiness": False})
    loop.steps(4)
    started = loop.before[1]
    loop.model.h.append(nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}))
    loop.optimizer.add_param_group({"params": list(loop.model.h[2].parameters())})
    loop.steps(4)
    assert loop.value(8, "health/weight_drift").keys() == {*MATRICES, "h.2.up", "h.2.down"}
    assert loop.value(5, "health/weight_drift")["h.2.up"] == 0
    assert loop.value(8, "health/weight_drift")["h.2.up"] > 0
    exact = relative_change(of(loop.before[8], "h.0.up"), of(started, "h.0.up"))
    assert loop.value(8, "health/weight_drift")["h.0.up"] == pytest.approx(exact, rel=1e-4)
    del loop.model.h[2]
    loop.model.emb.weight.requires_grad_(False)
    loop.optimizer = loop.optimizer.__class__(loop.model.parameters(), lr=0.1)
    loop.steps(4)
    assert "h.2.up" not in loop.value(12, "health/weight_drift")
    loop.monitor.close()
    assert not loop.named("monitor_error")
    run = load_run(tmp_path / "run")
    assert run.metrics["step"].tolist() == list(range(1, 13))
    assert steps_of(run, "health/weight_drift/h.2.up") == [5, 6, 7, 8]


# -- resume ----------------------------------------------------------------------------------------------

WEIGHTS_OFTEN: dict[str, Any] = {"tier3_every": 3, "check_every": 1}


def resumed(first: Loop, folder: Path, **options: Any) -> Loop:
    again = Loop(out=folder, resume=True, **{**WEIGHTS_OFTEN, **options})
    again.model.load_state_dict(first.model.state_dict())
    return again


@pytest.mark.parametrize("drift", ["sketch", "exact"])
@pytest.mark.parametrize("checkpoint", [True, False], ids=["checkpoint", "record alone"])
def test_a_resumed_run_drifts_from_its_first_start(drift: Any, checkpoint: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Loop(out=folder, drift=drift, **WEIGHTS_OFTEN)
    first.steps(7)
    state = json.loads(json.dumps(first.monitor.state_dict()))
    first.monitor.close()
    again = resumed(first, folder, drift=drift)
    if checkpoint:
        again.monitor.load_state_dict(state)
    again.steps(6)
    again.monitor.close()
    assert not again.named("monitor_error")
    run = load_run(folder)
    assert run.verify().ok
    for step in (9, 12):
        for layer in MATRICES:
            exact = relative_change(of(again.before[step], layer), of(first.before[1], layer))
            assert again.value(step, "health/weight_drift")[layer] == pytest.approx(exact, rel=1e-4)
    # And so does the first look after it.
    exact = relative_change(of(again.before[8], "lm_head"), of(first.before[1], "lm_head"))
    at = run.metrics["step"].tolist().index(8)
    assert run.metrics["health/weight_drift/lm_head"][at] == pytest.approx(exact, rel=1e-4)


def collapse_and_resume(folder: Path, *, checkpoint: bool) -> Loop:
    """A run whose matrix collapses at step 3, resumed after step 4, well again after step 10."""
    first = Loop(out=folder, **WEIGHTS_OFTEN)
    first.steps(2)
    with torch.no_grad():
        first.model.h[0]["up"].weight.copy_(torch.ones(32, 16))
    first.steps(2)
    assert [e.step for e in first.named("bound_crossed") if e.diagnosis == "stable_rank"] == [3]
    assert not first.named("bound_at_start")
    state = first.monitor.state_dict()
    first.monitor.close()
    again = resumed(first, folder)
    if checkpoint:
        again.monitor.load_state_dict(state)
    again.steps(6)
    # Well again.
    with torch.no_grad():
        again.model.h[0]["up"].weight.copy_(Net().h[0]["up"].weight)
    again.steps(2)
    again.monitor.close()
    return again


@pytest.mark.parametrize("checkpoint", [True, False], ids=["checkpoint", "record alone"])
def test_a_resumed_run_says_nothing_of_before_training(checkpoint: bool, tmp_path: Path) -> None:
    # The rank was fine when training began: this is no model that came so.
    assert not collapse_and_resume(tmp_path / "run", checkpoint=checkpoint).named("bound_at_start")


@pytest.mark.parametrize("checkpoint", [True, False], ids=["checkpoint", "record alone"])
def test_a_warning_stays_active_over_a_resume(checkpoint: bool, tmp_path: Path) -> None:
    again = collapse_and_resume(tmp_path / "run", checkpoint=checkpoint)
    assert again.value(9, "health/warnings") >= 1
    assert [e for e in again.named("bound_cleared") if "h.0.up" in e.message]


def test_another_way_of_drift_does_not_destroy_the_first_weights(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Loop(out=folder, drift="sketch", **WEIGHTS_OFTEN)
    first.steps(4)
    first.monitor.close()
    other = resumed(first, folder, drift="exact")
    other.steps(3)
    other.monitor.close()
    again = resumed(other, folder, drift="sketch")
    again.steps(6)
    again.monitor.close()
    exact = relative_change(of(again.before[9], "lm_head"), of(first.before[1], "lm_head"))
    assert again.value(9, "health/weight_drift")["lm_head"] == pytest.approx(exact, rel=1e-4)


def test_a_replaced_run_begins_at_its_own_weights(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Loop(out=folder, **WEIGHTS_OFTEN)
    first.steps(6)
    first.monitor.close()
    second = Loop(out=folder, overwrite=True, drift="off", **WEIGHTS_OFTEN)
    second.model.load_state_dict(first.model.state_dict())
    second.steps(2)
    second.monitor.close()
    third = resumed(second, folder, drift="sketch")
    third.steps(2)
    third.monitor.close()
    # No start of this run was kept; that of the run before is not it.
    assert not [name for reading in third.readings for name in reading.flat() if "drift" in name]
    assert [e.signal for e in third.named("signal_unavailable") if "first started" in e.reason]


def test_the_state_is_plain_and_goes_round() -> None:
    loop = Loop(**EVERYTHING, stable_rank_floor=8)
    for _ in range(30):
        tokens = loop.batch()
        loop.monitor.batch(labels=tokens)
        loop.step(tokens, look=lambda z, y=tokens: loop.monitor.observe_output(logits=z, labels=y))
    state = loop.monitor.state_dict()
    text = json.dumps(state, allow_nan=False)
    twin = Loop(**EVERYTHING, stable_rank_floor=8)
    twin.monitor.load_state_dict(json.loads(text))
    assert json.dumps(twin.monitor.state_dict()) == text
    assert twin.monitor.global_step == 30
    assert "health/entropy_trend" in loop.monitor.latest
    twin.model.load_state_dict(loop.model.state_dict())
    tokens = loop.batch()
    for one in (loop, twin):
        one.monitor.batch(labels=tokens)
        one.step(tokens, look=lambda z, one=one: one.monitor.observe_output(logits=z, labels=tokens))
    for name in ("token_efficiency", "loss_mean", "loss_std", "warnings"):
        name = f"health/{name}"
        assert twin.monitor.latest[name] == pytest.approx(loop.monitor.latest[name]), name
    # Other positions are drawn, but the nineteen values before are the same.
    trends = [one.monitor.latest["health/entropy_trend"] for one in (loop, twin)]
    assert trends[0] == pytest.approx(trends[1], abs=0.05)


def test_a_broken_state_changes_nothing() -> None:
    loop = Loop(**EVERYTHING, stable_rank_floor=8)
    loop.steps(4)
    before = json.dumps(loop.monitor.state_dict())
    other = Loop(**EVERYTHING)
    other.steps(2)
    state = other.monitor.state_dict()
    for part in ("bounds", "losses", "tokens", "entropy"):
        bad = {**state, "numbers": {**state["numbers"], part: {}}}
        with pytest.raises(ConfigError):
            loop.monitor.load_state_dict(bad)
        assert json.dumps(loop.monitor.state_dict()) == before, part
