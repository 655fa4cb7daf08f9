"""From what was heard of single steps to the noise scale: parts, ranks and pairs of steps, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from palingenesis import MonitorConfig
from palingenesis.layers import find_layers
from palingenesis.signals.cosine import Products
from palingenesis.signals.microbatch import MicroBatches, MicroBatchNorms
from palingenesis.signals.noise_scale import Batch, Observation
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.packet import Packet
from palingenesis.tiers.noise import MOST, Noise
from palingenesis.tiers.outputs import Outputs

DIMS = 6
CPU = torch.device("cpu")


class Rank:
    """One rank's part of one step: gradients heard by real hooks.

    Args:
        noise: of the rank.
        ranks: how many there are.
        bias: the model has one. It is what is probed then.
    """

    def __init__(self, noise: Noise | None = None, ranks: int = 1, *, bias: bool = True) -> None:
        torch.manual_seed(0)
        self.noise = noise or Noise(ranks)
        self.model = nn.Linear(DIMS, 3, bias=bias)
        self.outputs = Outputs(MonitorConfig(), ranks=ranks)
        self.hooks = MicroBatchNorms(find_layers(self.model))
        self.heard: MicroBatches | None = None
        self.parts: list[torch.Tensor] = []

    def flat(self) -> torch.Tensor:
        return torch.cat([p.grad.double().flatten() for p in self.model.parameters()])

    def backward(
        self,
        counts: list[int],
        seed: int,
        *,
        weights: list[float] | None = None,
        told: list[int] | None = None,
        scale: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        """The micro-batches of a step.

        Args:
            counts: examples of each.
            seed: of the examples.
            weights: of their mean losses, which the monitor is told; by default their shares of the examples.
            told: the sizes that the monitor is told.
            scale: loss scale.
            factor: on every loss.
        """
        random = torch.Generator().manual_seed(seed)
        self.model.zero_grad()
        self.parts = []
        self.hooks.arm()
        for i, count in enumerate(counts):
            x = torch.randn(count, DIMS, generator=random)
            weight = count / sum(counts) if weights is None else weights[i]
            before = 0.0 if self.model.weight.grad is None else self.flat()
            (scale * factor * weight * self.model(x).square().sum(1).mean()).backward()
            self.parts.append((self.flat() - before) / scale)
        for i, count in enumerate(counts if told is None else told):
            labels = torch.zeros(count, 1, dtype=torch.int64)
            weight = "tokens" if weights is None else weights[i]
            self.outputs.batch(labels, None, shifted=True, weight=weight)
        self.heard = self.hooks.collect(scale=None if scale == 1.0 else torch.tensor(scale))

    def send(self, *, still_scaled: float | None = None) -> dict[str, np.ndarray]:
        parameters = list(self.model.parameters())
        norms = gradient_norms([p.grad for p in parameters], CPU) / (still_scaled or 1.0)
        scale = None if still_scaled is None else torch.tensor(still_scaled)
        found = self.noise.compute(self.heard, self.outputs, {CPU: norms}, scale)
        self.outputs.end_step(1, logged=False, needed=True)
        return Packet(found).arrays() if found else {}


def joined(sent: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([one[name] for one in sent]) for name in sent[0]}


def observed(noise: Noise, source: str = "microbatch") -> Observation:
    (found,) = noise.scale._seen[source]
    return found


def by_hand(parts: list[torch.Tensor], counts: list[int], shares: list[float]) -> tuple[float, float]:
    """|G|² and tr(Σ) from what each part added, by solving the two equations for their expectations."""
    n, w = np.array(counts, dtype=np.float64), np.array(shares)
    added = torch.stack(parts).numpy()
    of_parts = float(w @ (np.square(added).sum(1) / w**2))
    of_whole = float(np.square(added.sum(0)).sum())
    # E of_parts = |G|² + tr(Σ) Σ w/n,  E of_whole = |G|² + tr(Σ) Σ w²/n
    equations = np.array([[1.0, (w / n).sum()], [1.0, (w**2 / n).sum()]])
    signal, noise = np.linalg.solve(equations, [of_parts, of_whole])
    return float(signal), float(noise)


# -- parts of one step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 3, 12]])
@pytest.mark.parametrize("bias", [True, False])
def test_micro_batches(counts: list[int], bias: bool) -> None:
    rank = Rank(bias=bias)
    rank.backward(counts, 1)
    rank.noise.take_parts(7, joined([rank.send()]))
    found = observed(rank.noise)
    assert (found.signal, found.noise) == pytest.approx(
        by_hand(rank.parts, counts, [n / sum(counts) for n in counts]), rel=1e-4
    )
    assert (found.step, found.items, found.sequences) == (7, sum(counts), sum(counts))


@pytest.mark.parametrize("factor", [1.0, 7.0])
def test_weights_that_the_loop_tells(factor: float) -> None:
    """Only their shares count: a loss that is a sum of means is one of means times their number."""
    counts, shares = [1, 3, 12], [0.2, 0.3, 0.5]
    rank = Rank()
    rank.backward(counts, 1, weights=[factor * one for one in shares])
    rank.noise.take_parts(1, joined([rank.send()]))
    found = observed(rank.noise)
    signal, noise = by_hand([part / factor for part in rank.parts], counts, shares)
    assert found.noise / found.signal == pytest.approx(noise / signal, rel=1e-4)


@pytest.mark.parametrize("factor", [1e-4, 0.5, 0.9995, 1.0, 30.0])
def test_what_was_done_to_the_gradient_since_is_taken_out(factor: float) -> None:
    rank = Rank()
    rank.backward([2, 6], 1)
    for p in rank.model.parameters():
        p.grad.mul_(factor)
    rank.noise.take_parts(1, joined([rank.send()]))
    found = observed(rank.noise)
    # Less than a thousandth is left alone.
    assert (found.signal, found.noise) == pytest.approx(by_hand(rank.parts, [2, 6], [0.25, 0.75]), rel=5e-3)


@pytest.mark.parametrize("unscaled", [True, False])
def test_the_loss_scale(unscaled: bool) -> None:
    rank = Rank()
    rank.backward([2, 6], 1, scale=1024.0)
    if unscaled:
        for p in rank.model.parameters():
            p.grad.div_(1024.0)
    sent = rank.send(still_scaled=None if unscaled else 1024.0)
    rank.noise.take_parts(1, joined([sent]))
    found = observed(rank.noise)
    assert (found.signal, found.noise) == pytest.approx(by_hand(rank.parts, [2, 6], [0.25, 0.75]), rel=1e-4)


def test_sizes_that_do_not_fit_are_not_guessed() -> None:
    rank = Rank()
    rank.backward([4, 4, 4], 1, told=[4, 8])
    rank.noise.take_parts(1, joined([rank.send()]))
    assert not rank.noise.scale._seen["microbatch"]
    values, _ = rank.noise.values()
    assert "before each backward" in values.unavailable["health/gns_source"]


def test_one_part_tells_nothing() -> None:
    rank = Rank()
    rank.backward([12], 1)
    rank.noise.take_parts(1, joined([rank.send()]))
    assert not any(rank.noise.scale._seen.values())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["everywhere", "weight", "bias"])
def test_a_gradient_that_is_not_finite(bad: float, where: str) -> None:
    """A warning of numpy's would be an error here."""
    rank = Rank()
    rank.backward([2, 6], 1)
    for name, p in rank.model.named_parameters():
        if where in (name, "everywhere"):
            p.grad.fill_(bad)
    rank.noise.take_parts(1, joined([rank.send()]))
    assert not any(rank.noise.scale._seen.values())


def test_gradients_of_zero_tell_nothing() -> None:
    rank = Rank()
    rank.backward([2, 6], 1)
    for p in rank.model.parameters():
        p.grad.zero_()
    rank.noise.take_parts(1, joined([rank.send()]))
    assert not any(rank.noise.scale._seen.values())


def test_gradients_that_are_gone_tell_nothing() -> None:
    rank = Rank()
    rank.backward([2, 6], 1)
    heard = rank.heard
    assert heard is not None
    norms = {CPU: torch.ones(2, dtype=torch.float64)}
    rank.model.zero_grad()
    rank.hooks.arm()
    gone = rank.hooks.collect()
    for what in (None, gone):
        assert rank.noise.compute(what, rank.outputs, norms, None) == {}
    assert rank.noise.compute(heard, rank.outputs, None, None) == {}


# -- parts on several ranks --------------------------------------------------------------------------------


def ddp(counts: list[list[int]]) -> list[Rank]:
    """Each rank's loss is a mean over its own examples times its share of all times the number of ranks, so
    that the average over ranks is the gradient of the mean over all."""
    ranks = [Rank(ranks=len(counts)) for _ in counts]
    total = sum(map(sum, counts))
    for i, (rank, own) in enumerate(zip(ranks, counts, strict=True)):
        rank.backward(own, i, factor=len(counts) * sum(own) / total)
    for group in zip(*(rank.model.parameters() for rank in ranks), strict=True):
        mean = torch.stack([p.grad for p in group]).mean(0)
        for p in group:
            p.grad.copy_(mean)
    return ranks


@pytest.mark.parametrize(
    ("counts", "source"),
    [
        ([[8], [8]], "rank"),
        ([[3], [13]], "rank"),
        ([[2], [5], [9]], "rank"),
        ([[4, 4], [4, 4]], "microbatch"),
        ([[1, 2], [5, 8]], "microbatch"),
        ([[1, 2, 3], [10]], "microbatch"),
    ],
)
@pytest.mark.parametrize("clipped", [1.0, 0.01])
def test_ranks(counts: list[list[int]], source: str, clipped: float) -> None:
    ranks = ddp(counts)
    for rank in ranks:
        for p in rank.model.parameters():
            p.grad.mul_(clipped)
    noise = ranks[0].noise
    noise.take_parts(3, joined([rank.send() for rank in ranks]))
    found = observed(noise, source)
    flat = [n for own in counts for n in own]
    added = [part / len(counts) for rank in ranks for part in rank.parts]
    exact = by_hand(added, flat, [n / sum(flat) for n in flat])
    assert (found.signal, found.noise) == pytest.approx(exact, rel=1e-4)
    assert (found.items, found.sequences) == (sum(flat), sum(flat))


def test_more_micro_batches_than_fit_are_not_compared() -> None:
    ranks = ddp([[1] * (MOST + 1), [1] * 4])
    sent = [rank.send() for rank in ranks]
    assert sent[0]["parts/table"].shape == sent[1]["parts/table"].shape == (4, MOST)
    ranks[0].noise.take_parts(1, joined(sent))
    assert not any(ranks[0].noise.scale._seen.values())
    alone = Rank()
    alone.backward([1] * (MOST + 1), 1)
    alone.noise.take_parts(1, joined([alone.send()]))
    assert observed(alone.noise).items == MOST + 1


def test_a_rank_that_is_missing_is_not_made_up_for() -> None:
    ranks = ddp([[8], [8]])
    ranks[0].noise.take_parts(1, joined([ranks[0].send()]))
    assert not any(ranks[0].noise.scale._seen.values())


# -- pairs of steps ----------------------------------------------------------------------------------------


def take(noise: Noise, step: int) -> None:
    for one in (step - 1, step):
        noise.note_batch(one, Batch(100.0, 10.0))
    noise.take_consecutive(step, Products(2.0, 2.5, 2.7))


def test_two_consecutive_steps() -> None:
    noise = Noise(1)
    noise.note_batch(4, Batch(100.0, 10.0))
    noise.note_batch(5, Batch(300.0, 30.0))
    noise.take_consecutive(5, Products(2.0, 2.5, 2.7))
    found = observed(noise, "consecutive")
    # (2.5 + 2.7)/2 = |G|² + tr(Σ)(1/100 + 1/300)/2
    assert found.signal == 2.0
    assert found.noise == pytest.approx(0.6 / ((1 / 100 + 1 / 300) / 2))
    assert (found.items, found.sequences) == (300.0, 30.0)
    noise.take_consecutive(6, None)
    assert len(noise.scale._seen["consecutive"]) == 1


@pytest.mark.parametrize("lost", [4, 5])
def test_without_both_sizes_the_batch_is_the_unit(lost: int) -> None:
    noise = Noise(1)
    for step in (4, 5):
        noise.note_batch(step, None if step == lost else Batch(100.0, 10.0))
    noise.take_consecutive(5, Products(2.0, 2.5, 2.7))
    assert observed(noise, "consecutive").items == 1.0


def test_sizes_of_older_steps_are_forgotten() -> None:
    noise = Noise(1)
    for step in range(1, 1000):
        noise.note_batch(step, Batch(100.0, 10.0))
    assert sorted(noise._batches) == [998, 999]


@pytest.mark.parametrize(
    ("every", "taken"), [(1, [2, 4, 6, 8, 10, 12]), (2, [2, 4, 6, 8, 10, 12]), (3, [3, 6, 9, 12])]
)
def test_pairs_have_no_step_in_common(every: int, taken: list[int]) -> None:
    """⟨g₂, g₁⟩ and ⟨g₃, g₂⟩ err alike, by g₂: taken for independent, their interval would be too short."""
    noise = Noise(1)
    for step in range(every, 13, every):
        if step > 1:
            take(noise, step)
    assert [one.step for one in noise.scale._seen["consecutive"]] == taken


def test_a_step_back_begins_anew() -> None:
    """As when a run goes on from a checkpoint."""
    noise = Noise(1)
    for step in (100, 50, 52, 51):
        take(noise, step)
    assert [one.step for one in noise.scale._seen["consecutive"]] == [100, 50, 52, 51]
