"""When hooks are put on the parameters, and what is made of what they heard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from palingenesis import MonitorConfig
from palingenesis.layers import find_layers
from palingenesis.signals.cosine import GradientCosine
from palingenesis.signals.microbatch import MicroBatches
from palingenesis.tiers.hearing import ASK_AGAIN, Hearing
from palingenesis.tiers.schedule import Schedule


class Loop:
    """Steps of some micro-batches each, around a ``Hearing``.

    Args:
        micro: micro-batches of a step, by its number.
        ranks: how many there are.
        met: the first step at which they know of one another.
        noise: the noise scale is wanted.
        free: what frees gradients: ``"inside"`` backward, ``"after"`` it, or nothing.
        cadences: of the config.
    """

    def __init__(
        self,
        micro: Callable[[int], int] = lambda step: 1,
        *,
        ranks: int = 1,
        met: int | None = None,
        noise: bool = True,
        free: str | None = None,
        start: int = 1,
        **cadences: int,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
        layers = find_layers(self.model)
        never = 10**6
        given = {"check_every": never, "tier2_every": 5, "tier3_every": never, **cadences}
        self.schedule = Schedule(MonitorConfig(**given), None)
        self.hearing = Hearing(layers, GradientCosine(layers), self.schedule, noise=noise, ranks=ranks)
        self.micro, self.met, self.free, self.at = micro, met, free, start - 1
        self.listening: list[int] = []
        self.found: dict[int, MicroBatches] = {}
        self.norms: dict[int, list[float]] = {}
        # The norms of gradients that were freed, in the order of parameters.
        self.freed: dict[int, list[float]] = {}
        self.order = list(self.model.parameters())
        if free == "inside":
            for p in self.order:
                p.register_post_accumulate_grad_hook(self._free)

    def _free(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        place = next(i for i, one in enumerate(self.order) if one is p)
        self.freed.setdefault(self.at, [0.0] * len(self.order))[place] = float(p.grad.double().norm())
        p.grad = None

    @property
    def hooks(self) -> int:
        return sum(len(p._backward_hooks or ()) for p in self.model.parameters())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        self.at += 1
        with_others = self.met is not None and self.at >= self.met
        if self.hooks:
            self.listening.append(self.at)
        self.model.zero_grad()
        for _ in range(self.micro(self.at)):
            self.model(torch.randn(3, 4)).square().mean().backward()
        if self.free == "after":
            self.model.zero_grad()
        found = self.hearing.heard(self.at, None, with_others=with_others)
        if found is not None:
            self.found[self.at] = found
        norms = self.hearing.norms(found)
        if norms is not None:
            self.norms[self.at] = next(iter(norms.values())).tolist()
        assert not self.hooks
        if self.schedule.first is None:
            self.schedule.begin(self.at)
        self.hearing.listen(self.at + 1, with_others=with_others)


def test_micro_batches_are_listened_to_at_every_second_tier() -> None:
    loop = Loop(lambda step: 3)
    loop.steps(31)
    assert loop.listening == [5, 10, 15, 20, 25, 30]
    assert [one.count for one in loop.found.values()] == [3] * 6
    assert not loop.norms  # `.grad` is there


@pytest.mark.parametrize("start", [1, 5, 9, 10])
def test_of_steps_that_are_one_micro_batch_one_in_ten_is_listened_to(start: int) -> None:
    """Also where the first step that is seen is one that could not be listened to."""
    loop = Loop(start=start)
    loop.steps(120)
    first = loop.listening[0]
    assert first == (5 if start == 1 else 10 if start in (5, 9) else 15)
    assert loop.listening == list(range(first, start + 120, 5 * ASK_AGAIN))


def test_accumulation_that_begins_later_is_noticed() -> None:
    loop = Loop(lambda step: 2 if step > 60 else 1)
    loop.steps(130)
    assert loop.listening == [5, 55, 105, 110, 115, 120, 125, 130]


def test_accumulation_that_ends_is_noticed() -> None:
    loop = Loop(lambda step: 2 if step < 20 else 1)
    loop.steps(130)
    assert loop.listening == [5, 10, 15, 20, 70, 120]


def test_without_the_noise_scale_nothing_is_listened_to() -> None:
    loop = Loop(lambda step: 3, noise=False)
    loop.steps(40)
    assert not loop.listening


def test_ranks_are_listened_to_once_they_have_met() -> None:
    """The gradient that is left is an average over all of them: alone there is nothing to compare it with."""
    loop = Loop(ranks=2, met=17)
    loop.steps(41)
    assert loop.listening == [20, 25, 30, 35, 40]
    never = Loop(ranks=2)
    never.steps(41)
    assert not never.listening


@pytest.mark.parametrize("noise", [True, False])
def test_gradients_that_are_freed_are_found_out_and_then_always_heard(noise: bool) -> None:
    loop = Loop(free="inside", noise=noise, check_every=7, tier3_every=8)
    loop.steps(21)
    assert loop.hearing.released
    assert loop.listening == [2, 4, 5, 7, 8, 9, 10, 14, 15, 16, 19, 20, 21]
    assert list(loop.norms) == loop.listening


def test_told_of_freed_gradients_it_listens_from_the_first_step_on() -> None:
    loop = Loop(free="inside", check_every=7)
    loop.hearing.released = True
    loop.hearing.listen(1, with_others=False)
    loop.steps(8)
    assert loop.listening == [1, 4, 5, 7]


def test_gradients_that_are_gone_only_after_backward_are_asked_for_once() -> None:
    loop = Loop(free="after", noise=False)
    loop.steps(30)
    assert loop.listening == [2] and not loop.hearing.released


def test_steps_without_backward_are_asked_again() -> None:
    loop = Loop(lambda step: 0 if step < 4 else 1, free="inside")
    loop.steps(6)
    assert loop.listening[:3] == [2, 3, 4] and loop.hearing.released


def test_norms_of_freed_gradients_are_those_of_copies() -> None:
    loop = Loop(free="inside", tier2_every=1)
    loop.steps(6)
    assert list(loop.norms) == [2, 3, 4, 5, 6]
    for step, norms in loop.norms.items():
        assert norms == pytest.approx(loop.freed[step], rel=1e-6)


def test_who_had_no_gradient() -> None:
    loop = Loop(free="inside", tier2_every=1)
    loop.steps(3)
    found = loop.found[3]
    for heard, absent in (((0, 1, 2, 3), []), ((0, 2), [1, 3])):
        part = dataclasses.replace(found, heard=frozenset(heard))
        told = loop.hearing.absent(part)
        assert told is not None and told.nonzero()[0].tolist() == absent
    assert loop.hearing.absent(None) is None
    loop.hearing.released = False  # `.grad` tells then
    assert loop.hearing.absent(found) is None


def test_freed_gradients_of_several_micro_batches_have_no_norm() -> None:
    """Each was stepped by itself: there is no one gradient of the step."""
    loop = Loop(lambda step: 2, free="inside")
    loop.steps(11)
    assert loop.hearing.released and not loop.norms
    assert {one.count for one in loop.found.values()} == {2}


def test_stopped_in_the_middle_of_a_step() -> None:
    loop = Loop(lambda step: 3)
    loop.steps(4)
    assert loop.hooks
    loop.hearing.stop()
    assert not loop.hooks
    loop.steps(6)
    assert loop.listening == [10]
