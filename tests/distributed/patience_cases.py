"""Ranks that do not do the same: training goes on, and rank 0 makes do with what it gets."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed import language
from tests.distributed.gate_cases import keys
from tests.distributed.language import Loop
from tests.distributed.reading_cases import EVERYTHING, Seen
from torch import nn

from palingenesis import Monitor, MonitorConfig
from palingenesis.signals import gate
from palingenesis.signals.cosine import GradientCosine
from palingenesis.signals.meeting import agree
from palingenesis.signals.memory import Memory
from palingenesis.signals.replicas import Replicas
from palingenesis.signals.spectrum import Spectrum
from palingenesis.signals.weights import WeightNorms
from palingenesis.tiers import company

Wrap = Callable[[nn.Module], nn.Module]

# How long rank 0 waits for others, and ranks for each other before the first step: short enough for a test.
LATE_S, LAST_S, PATIENCE_S = 0.2, 1.0, 1.0
# Before norms, and before the spectrum.
GATES = 2
HALF = 10

_cases = itertools.count(1)


def on(rank: int) -> bool:
    return dist.get_rank() == rank


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    waits = mock.patch.multiple(company, LATE_S=LATE_S, LAST_S=LAST_S)
    gates = mock.patch.object(gate, "GATE_S", PATIENCE_S)
    with waits, gates, mock.patch.object(agree, "__defaults__", (PATIENCE_S,)):
        yield


def run(
    wrap: Wrap,
    *,
    watch: bool = True,
    step: Callable[[Monitor, torch.Tensor, int], object] | None = None,
    **options: Any,
) -> Seen:
    """A run of both ranks with whatever monitors they have, next to one without.

    Args:
        wrap: spreads the model.
        watch: this rank has a monitor.
        step: what this rank does instead of ``Monitor.step``.
        options: of this rank's config.
    """
    # Monitors meet that are of one mind, the first of such with the first: each case has a mind of its own.
    options["sigma"] = 2.5 + next(_cases) / 1000
    bare = Loop(wrap=wrap, shares=2).run(None)
    loop = Loop(wrap=wrap, shares=2)
    began = time.monotonic()
    with hurried():
        before = keys()
        mon = loop.watched(config=MonitorConfig(**{**EVERYTHING, **options})) if watch else None
        loop.run(mon) if step is None else loop.run(mon, step)
        dist.barrier()
        trained = time.monotonic() - began
        if mon is not None:
            with contextlib.suppress(Exception):
                mon.close()
    return {
        **loop.ran.json(),
        "same": loop.ran.weights == bare.weights and loop.ran.losses == bare.losses,
        "trained": trained,
        "took": time.monotonic() - began,
        "store_before": before,
        "store": keys(),
    }


def only_on_rank_0(wrap: Wrap) -> Seen:
    return run(wrap, watch=on(0))


def step_on_rank_0(wrap: Wrap) -> Seen:
    return run(wrap, step=lambda mon, loss, _: mon.step(loss) if on(0) else None)


def closes(wrap: Wrap, rank: int) -> Seen:
    def step(mon: Monitor, loss: torch.Tensor, at: int) -> None:
        if not on(rank) or at <= HALF:
            mon.step(loss)
        if on(rank) and at == HALF:
            mon.close()

    return run(wrap, step=step)


def stops(wrap: Wrap, rank: int) -> Seen:
    """As ``closes``, but without a word."""
    return run(wrap, step=lambda mon, loss, at: mon.step(loss) if not on(rank) or at <= HALF else None)


def fails(wrap: Wrap, family: type, rank: int = 1) -> Seen:
    if not on(rank):
        return run(wrap)
    with mock.patch.object(family, "compute", side_effect=ValueError("no such luck")):
        return run(wrap)


def differs(wrap: Wrap, **options: Any) -> Seen:
    return run(wrap, **(options if on(1) else {}))


CASES: dict[int, dict[str, Callable[[], Seen]]] = {
    2: {
        "ddp, monitor on rank 0": lambda: only_on_rank_0(language.ddp),
        "ddp, step on rank 0": lambda: step_on_rank_0(language.ddp),
        "ddp, rank 0 closes": lambda: closes(language.ddp, 0),
        "ddp, rank 1 closes": lambda: closes(language.ddp, 1),
        "ddp, rank 0 stops": lambda: stops(language.ddp, 0),
        "ddp, rank 1 stops": lambda: stops(language.ddp, 1),
        "ddp, replicas fail": lambda: fails(language.ddp, Replicas),
        "ddp, memory fails": lambda: fails(language.ddp, Memory),
        "ddp, another config": lambda: differs(language.ddp, tier2_every=3),
        "fsdp, monitor on rank 0": lambda: only_on_rank_0(language.fsdp),
        "fsdp, cosine fails": lambda: fails(language.fsdp, GradientCosine),
        "fsdp, norms fail": lambda: fails(language.fsdp, WeightNorms),
        "fsdp, another config": lambda: differs(language.fsdp, tier2_every=3),
        "fsdp, another check": lambda: differs(language.fsdp, check_every=3),
    },
    4: {},
}

# The spectrum of sharded matrices is found by collectives, for which the others have to be there.
SPECTRUM_CASES: dict[int, dict[str, Callable[[], Seen]]] = {
    2: {
        "fsdp, step on rank 0": lambda: step_on_rank_0(language.fsdp),
        "fsdp, rank 0 closes": lambda: closes(language.fsdp, 0),
        "fsdp, rank 1 closes": lambda: closes(language.fsdp, 1),
        "fsdp, rank 1 stops": lambda: stops(language.fsdp, 1),
        "fsdp, spectrum fails": lambda: fails(language.fsdp, Spectrum),
        "fsdp, another tier 3": lambda: differs(language.fsdp, tier3_every=4),
    },
    4: {},
}
