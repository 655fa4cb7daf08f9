"""The noise scale through ``Monitor``, on linear regression with Gaussian data, where it is known.

Loss (y − x·w)²/2 with x ~ N(0, I) in d dimensions, y = x·w* + σ·noise and |w − w*| = 1, at weights that stay
where they are. The gradient of one example is x(x·(w − w*) − σ·noise): |G|² = 1 and tr(Σ) = d + 1 + d·σ²,
which is the noise scale.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from palingenesis import Event, Monitor, MonitorConfig
from palingenesis.reading import Reading
from palingenesis.signals.noise_scale import NoiseScale

GNS, TOKENS, RATIO = "health/gns", "health/gns_tokens", "health/gns_ratio"
SOURCE = "health/gns_source"

TRIALS, STEPS = 30, 10
# Name: dimensions, noise scale over the batch, examples of each micro-batch.
PROBLEMS = {
    "0.01": (3, 0.01, (100, 100, 100, 100)),
    "0.01, unequal": (3, 0.01, (25, 75, 125, 175)),
    "1": (15, 1.0, (8, 8, 8, 8)),
    "1, unequal": (15, 1.0, (2, 5, 9, 16)),
    "10": (40, 10.0, (4, 4)),
    "10, unequal": (40, 10.0, (1, 2, 5)),
    "100": (40, 100.0, (2, 2, 2, 2)),
    "100, unequal": (40, 100.0, (1, 1, 2, 4)),
}


class Regression:
    """A loop on one problem.

    Args:
        dims: dimensions.
        scale: the noise scale, in examples.
        counts: examples of each micro-batch.
        seed: of the data.
        labels: tell the monitor of each micro-batch.
        weights: of the micro-batches' mean losses; by default their shares of the examples.
        length: tokens of a sequence: each example is one.
        clip: to this norm before the monitor is called.
        scaler: a gradient scaler.
        unscale: call ``unscale_`` before the monitor.
        given: of the config.
    """

    def __init__(
        self,
        dims: int,
        scale: float,
        counts: tuple[int, ...],
        *,
        seed: int = 0,
        labels: bool = True,
        weights: tuple[float, ...] | None = None,
        length: int = 1,
        clip: float | None = None,
        scaler: Any = None,
        unscale: bool = False,
        **given: Any,
    ) -> None:
        self.sigma = math.sqrt(max(scale - dims - 1, 0.0) / dims)
        self.truth = max(scale, dims + 1.0)
        self.dims, self.counts, self.labels, self.weights = dims, counts, labels, weights
        self.length, self.clip, self.scaler, self.unscale = length, clip, scaler, unscale
        self.random = torch.Generator().manual_seed(seed)
        self.model = nn.Linear(dims, 1, bias=False)
        with torch.no_grad():
            self.model.weight.zero_()[0, 0] = 1.0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.readings: list[Reading] = []
        self.events: list[Event] = []
        # What each micro-batch of each step added to the gradient.
        self.added: list[list[torch.Tensor]] = []
        never = 10**6
        given = {"tier2_every": 1, "guard_every_step": False, **given}
        cadences = {"check_every": never, "logging_steps": never, "tier3_every": never}
        self.monitor = Monitor(
            self.model,
            self.optimizer,
            None,
            config=MonitorConfig(**{**cadences, "drift": "off", **given}),
            scaler=scaler,
            on_reading=self.readings.append,
            on_event=self.events.append,
        )

    def step(self, *, overflow: bool = False) -> None:
        self.optimizer.zero_grad()
        self.added.append([])
        for i, count in enumerate(self.counts):
            x = torch.randn(count, self.dims, generator=self.random)
            y = -self.sigma * torch.randn(count, generator=self.random)
            weight = None if self.weights is None else self.weights[i]
            if self.labels:
                told = torch.zeros(count // self.length, self.length, dtype=torch.int64)
                self.monitor.batch(told, shifted=True, weight="tokens" if weight is None else weight)
            share = count / sum(self.counts) if weight is None else weight
            loss = share * (self.model(x)[:, 0] - y).square().mean() / 2
            before = torch.zeros(self.dims) if self.model.weight.grad is None else self._grad()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.added[-1].append(self._grad() - before)
        if overflow:
            self.model.weight.grad[0, 0] = math.inf
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.monitor.step()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _grad(self) -> torch.Tensor:
        assert self.model.weight.grad is not None
        return self.model.weight.grad[0].double()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def forget(self) -> None:
        """Begin anew, as a run with other data would."""
        self.monitor._numbers.tiers.noise.scale = NoiseScale()

    @property
    def last(self) -> Reading:
        return self.readings[-1]

    @property
    def covered(self) -> bool:
        """Whether what is told of the noise scale is so."""
        found = self.last.scalars
        if GNS in found:
            return abs(found[GNS] - self.truth) <= 1.96 * found[f"{GNS}_se"]
        return found.get(f"{GNS}_lower", 0.0) <= self.truth


def coverage(source: str, each: int, **given: Any) -> None:
    """Of many runs on all problems, how many tell the truth."""
    of_all = []
    for seed, (name, (dims, ratio, counts)) in enumerate(PROBLEMS.items()):
        if source == "consecutive":
            if "unequal" in name:
                continue
            counts = (sum(counts),)
        if given.get("weights") == "means":
            weights = (1 / len(counts),) * len(counts)
            options = {**given, "weights": weights}
        else:
            options = given
        run = Regression(dims, ratio * sum(counts), counts, seed=seed, **options)
        covered, found = [], []
        for _ in range(TRIALS):
            run.forget()
            run.steps(each)
            covered.append(run.covered)
            assert run.last.step == run.monitor.global_step
            found.append(run.last.scalars.get(GNS, math.nan))
            assert run.last.labels == {"health/gns_source": source}
        if ratio <= 1:
            assert np.nanmedian(found) == pytest.approx(run.truth, rel=0.15), name
        assert np.mean(covered) >= 0.8, name
        of_all += covered
        assert not [event for event in run.events if event.event == "monitor_error"]
    assert np.mean(of_all) >= 0.9


def test_the_interval_covers_the_truth_micro_batches() -> None:
    coverage("microbatch", STEPS)


def test_the_interval_covers_the_truth_means_of_micro_batches() -> None:
    """Each micro-batch's mean counts the same, however many examples it has."""
    coverage("microbatch", STEPS, weights="means")


@pytest.mark.parametrize("every", [1, 2])
def test_the_interval_covers_the_truth_consecutive(every: int) -> None:
    """Where every step is looked at too: pairs of steps then have steps in common."""
    coverage("consecutive", 2 * STEPS, tier2_every=every)


# -- exactly -----------------------------------------------------------------------------------------------


def ratio_of_means(signal: list[float], noise: list[float]) -> float:
    weights = 0.97 ** np.arange(len(signal))[::-1]
    return float(weights @ noise / (weights @ signal))


@pytest.mark.parametrize("counts", [(8, 8, 8, 8), (2, 5, 9, 16)])
@pytest.mark.parametrize("means", [False, True])
def test_the_value_of_micro_batches(counts: tuple[int, ...], means: bool) -> None:
    """By hand, from copies: E‖g_j‖² = |G|² + tr(Σ)/n_j, and ‖g‖² with Σ w_j²/n_j instead of 1/n_j."""
    weights = (0.25,) * 4 if means else None
    run = Regression(15, 32.0, counts, weights=weights)
    run.steps(26)
    n = np.array(counts, dtype=np.float64)
    share = np.full(4, 0.25) if means else n / n.sum()
    signal, noise = [], []
    for added in run.added[1:]:  # hooks are put on for the step after the first
        parts = torch.stack(added).numpy()
        own = np.square(parts / share[:, None]).sum(1)
        whole = float(np.square(parts.sum(0)).sum())
        of_whole = float((share**2 / n).sum())
        noise.append((float(share @ own) - whole) / (float((share / n).sum()) - of_whole))
        signal.append(whole - noise[-1] * of_whole)
    assert run.last.scalars[TOKENS] == pytest.approx(ratio_of_means(signal, noise), rel=1e-4)


def test_the_value_of_consecutive_steps() -> None:
    run = Regression(15, 32.0, (32,), tier2_every=3)
    run.steps(60)
    signal, noise = [], []
    for step in range(3, 61, 3):
        before, now = run.added[step - 2][0], run.added[step - 1][0]
        signal.append(float(before @ now))
        noise.append(32 * (float(before @ before + now @ now) / 2 - signal[-1]))
    assert run.last.scalars[TOKENS] == pytest.approx(ratio_of_means(signal, noise), rel=1e-4)
    assert run.last.labels == {"health/gns_source": "consecutive"}


def test_units() -> None:
    run = Regression(3, 4.0, (40, 60), length=4)
    run.steps(12)
    found = run.last.scalars
    for end in ("", "_se"):
        assert found[f"{GNS}{end}"] == pytest.approx(found[f"{TOKENS}{end}"] / 4)
        assert found[f"{RATIO}{end}"] == pytest.approx(found[f"{TOKENS}{end}"] / 100)
    assert found[TOKENS] == pytest.approx(run.truth, rel=0.25)


def test_it_takes_eight_steps() -> None:
    run = Regression(3, 4.0, (40, 60))
    run.steps(10)
    told = {reading.step: reading.labels for reading in run.readings if RATIO in reading.scalars}
    source = {"health/gns_source": "microbatch"}
    assert told == {9: source, 10: source}
    assert not [
        event for event in run.events if event.event == "signal_unavailable" and "gns" in event.signal
    ]


def test_what_it_does_not_listen_to_it_does_not_tell() -> None:
    run = Regression(3, 4.0, (40, 60), noise_scale=False)
    for _ in range(12):
        assert not run.model.weight._backward_hooks
        run.step()
    assert not [name for reading in run.readings for name in reading.flat() if "gns" in name]
    assert not [event for event in run.events if "gns" in str(event.fields.get("signal"))]


def test_a_scale_far_above_the_batch_is_a_lower_bound() -> None:
    run = Regression(40, 800.0, (2, 2, 2, 2), seed=1)
    run.steps(20)
    found = run.last.scalars
    assert GNS not in found and 0 < found[f"{GNS}_lower"] <= 800
    assert found[f"{RATIO}_lower"] == pytest.approx(found[f"{GNS}_lower"] / 8)


# -- what is done to the gradient before step() ------------------------------------------------------------


def gns_of(reading: Reading) -> dict[str, float]:
    return {name: value for name, value in reading.scalars.items() if "gns" in name}


def gns(run: Regression) -> dict[str, float]:
    return gns_of(run.last)


@pytest.mark.parametrize("counts", [(8, 8, 8, 8), (2, 5, 9, 16)])
@pytest.mark.parametrize("clip", [1e-3, 1.0])
def test_clipping_before_step_changes_nothing(counts: tuple[int, ...], clip: float) -> None:
    """1.0 clips some steps and leaves others."""
    clipped, raw = (Regression(15, 32.0, counts, clip=one) for one in (clip, None))
    for run in (clipped, raw):
        run.steps(20)
    assert gns(clipped) == pytest.approx(gns(raw), rel=1e-4)
    assert {GNS, TOKENS, RATIO} <= gns(raw).keys()


@pytest.mark.parametrize(
    ("counts", "unscale", "clip"),
    [
        ((8, 8, 8, 8), True, None),
        ((8, 8, 8, 8), False, None),
        ((8, 8, 8, 8), True, 1e-2),
        ((32,), True, None),
        ((32,), False, None),
    ],
)
def test_the_loss_scale_changes_nothing(counts: tuple[int, ...], unscale: bool, clip: float | None) -> None:
    # It doubles on the way.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
    scaled = Regression(15, 32.0, counts, scaler=scaler, unscale=unscale, clip=clip)
    plain = Regression(15, 32.0, counts)
    for run in (scaled, plain):
        run.steps(24)
    assert scaler.get_scale() == 2.0**13
    assert gns(scaled) == pytest.approx(gns(plain), rel=1e-4)
    assert GNS in gns(plain)


@pytest.mark.parametrize("counts", [(8, 8, 8, 8), (32,)])
@pytest.mark.parametrize("unscale", [True, False])
def test_steps_that_the_scaler_skips_leave_no_trace(counts: tuple[int, ...], unscale: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    run, plain = Regression(15, 32.0, counts, scaler=scaler, unscale=unscale), Regression(15, 32.0, counts)
    for step in range(1, 41):
        run.step(overflow=step in (3, 4, 17))
    plain.steps(40)
    assert scaler.get_scale() == 2.0**7
    # As many steps less are known; the noise is the same.
    assert gns(run)[GNS] == pytest.approx(gns(plain)[GNS], rel=0.2)
    assert all(math.isfinite(value) for reading in run.readings for value in gns_of(reading).values())
    assert not [event for event in run.events if event.event == "monitor_error"]


# -- what is not known -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counts", "source"), [((8, 8, 8, 8), "microbatch"), ((32,), "consecutive")])
def test_without_sizes_only_the_ratio_to_the_batch_is_told(counts: tuple[int, ...], source: str) -> None:
    blind, sighted = (Regression(15, 32.0, counts, labels=labels) for labels in (False, True))
    for run in (blind, sighted):
        run.steps(30)
    assert gns(blind).keys() == {RATIO, f"{RATIO}_se"}
    # Nobody says that the micro-batches are of one size, so they are not compared.
    assert blind.last.labels == {"health/gns_source": "consecutive"}
    assert sighted.last.labels == {"health/gns_source": source}
    if source == "consecutive":
        expected = {name: value for name, value in gns(sighted).items() if name.startswith(RATIO)}
        assert gns(blind) == pytest.approx(expected, rel=1e-4)
    else:
        (why,) = [e for e in blind.events if e.event == "signal_unavailable" and e.signal == SOURCE]
        assert "call batch" in why.reason
    (event,) = [e for e in blind.events if e.event == "signal_unavailable" and e.signal == GNS]
    assert "not known" in event.reason


def test_labels_that_miss_a_micro_batch_are_not_guessed() -> None:
    """Two of three are told: nobody can say which."""
    run = Regression(15, 32.0, (8, 8, 8, 8), labels=False)
    for _ in range(20):
        run.monitor.batch(torch.zeros(8, 1, dtype=torch.int64), shifted=True)
        run.monitor.batch(torch.zeros(8, 1, dtype=torch.int64), shifted=True)
        run.step()
    assert gns(run).keys() == {RATIO, f"{RATIO}_se"}


def test_unequal_micro_batches_of_which_nobody_says_what_they_count_for() -> None:
    run = Regression(15, 32.0, (2, 5, 9, 16))
    batch = run.monitor.batch
    run.monitor.batch = lambda labels, **given: batch(labels, shifted=True)  # type: ignore[method-assign]
    run.steps(30)
    assert run.last.labels == {SOURCE: "consecutive"}
    assert TOKENS in gns(run)
    (why,) = [e for e in run.events if e.event == "signal_unavailable" and e.signal == SOURCE]
    assert "weight='tokens'" in why.reason


def test_two_backward_passes_over_one_batch_are_no_micro_batches() -> None:
    """A loss in two terms, each with its own backward: the terms are not two draws of the data."""
    run = Regression(15, 32.0, (32,))
    for _ in range(30):
        x = torch.randn(32, 15, generator=run.random)
        y = -run.sigma * torch.randn(32, generator=run.random)
        run.optimizer.zero_grad()
        run.monitor.batch(torch.zeros(32, 1, dtype=torch.int64), shifted=True)
        for _ in range(2):
            (0.25 * (run.model(x)[:, 0] - y).square().mean()).backward()
        run.monitor.step()
    assert run.last.labels == {SOURCE: "consecutive"}
    ratio, error = gns(run)[RATIO], gns(run)[f"{RATIO}_se"]
    assert abs(ratio - 1.0) < 3 * error


def test_accumulation_that_begins_later() -> None:
    """A run whose steps are one micro-batch is asked again now and then."""
    run = Regression(15, 32.0, (32,))
    run.steps(30)
    assert run.last.labels == {"health/gns_source": "consecutive"}
    run.counts = (8, 8, 8, 8)
    run.steps(30)
    assert run.last.labels == {"health/gns_source": "microbatch"}


def test_a_checkpoint_goes_on_with_what_was_seen() -> None:
    run = Regression(15, 32.0, (8, 8, 8, 8))
    run.steps(20)
    state = run.monitor.state_dict()
    again = Regression(15, 32.0, (8, 8, 8, 8))
    again.monitor.load_state_dict(state)
    again.random.set_state(run.random.get_state())
    for one in (run, again):
        one.steps(3)
    # Hooks are put on for the step after the first.
    assert gns(again)[GNS] == pytest.approx(gns(run)[GNS], rel=0.1)
    assert again.readings[0].step == 21 and RATIO in again.readings[0].scalars
