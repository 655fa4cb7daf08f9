"""Ranks that come apart: by their weights, by their own gradients; and runs that are taken up again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import language
from tests.distributed.language import Loop
from tests.distributed.reading_cases import EVERYTHING, Experts, Seen, folder, of_mean_loss, spread_experts

from palingenesis import MonitorConfig

# From this step on something is wrong; ranks are compared at it for the second time.
SINCE = 10
BATCHES = 80


def run(loop: Loop, **options: Any) -> Seen:
    with loop.watched(config=MonitorConfig(**{**EVERYTHING, **options})) as mon:
        loop.run(mon)
    return loop.ran.json()


# -- ranks apart ------------------------------------------------------------------------------------------


def one_differs(wrap: Any, shares: int, rank: int) -> Seen:
    """One element of a rank's weights is a little off, from one step on."""

    def disturb(loop: Loop, step: int) -> None:
        if step == SINCE and loop.rank == rank:
            weight = dict(loop.model.named_parameters())
            (name,) = (name for name in weight if name.endswith("h.1.down.weight"))
            here: Any = weight[name].detach()
            (here.to_local() if hasattr(here, "to_local") else here)[2, 3] += 1e-3

    return run(Loop(wrap=wrap, shares=shares, before=disturb))


def one_fades(factor: float) -> Seen:
    """Rank 1's own gradients of a layer are far from rank 0's, from one step on."""

    def faded(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (factor if at[0] >= SINCE else 1.0)

    def follow(_: Loop, step: int) -> None:
        at[0] = step + 1

    at = [1]
    loop = Loop(wrap=language.ddp, shares=2, before=follow)
    if dist.get_rank() == 1:
        for parameter in loop.model.module.h[0].up.parameters():  # type: ignore[union-attr,index]
            parameter.register_hook(faded)
    return run(loop)


# -- many batches, the same weights -----------------------------------------------------------------------


def noise(wrap: Any, micro: int = 1) -> Seen:
    loop = Loop(wrap=wrap, shares=2, micro=micro, rate=0.0, steps=BATCHES)
    return run(loop, tier2_every=1, tier3_every=1000, check_every=20)


# -- sketches and samples ---------------------------------------------------------------------------------

# A matrix has 32 times as many elements as it is wide: more than a sketch has numbers.
LARGE, RATE = 2049, 0.02


def estimated(wrap: Any) -> Seen:
    return run(Loop(wrap=wrap, shares=2, inner=LARGE, rate=RATE), drift="sketch", entropy_positions=8)


# -- taken up again ---------------------------------------------------------------------------------------


def resumed(name: str, drift: str, lose: str | None = None, **options: Any) -> Seen:
    """Ten steps, then ten more with a new monitor, whose model has moved.

    Args:
        name: of the run's folder.
        drift: how the first weights are remembered.
        lose: a file of the record that is gone before the second start.
        options: of the loop.
    """
    config = MonitorConfig(**{**EVERYTHING, "drift": drift})
    out = folder() / name
    loop = Loop(shares=2, steps=10, **options)
    with loop.watched(out, config=config) as mon:
        loop.run(mon)
    dist.barrier()
    kept = sorted(file.name for file in out.iterdir())
    if lose is not None and dist.get_rank() == 0:
        (out / lose).unlink()
    dist.barrier()
    loop.first = 11
    with loop.watched(out, config=config, resume=True) as mon:
        loop.run(mon)
    return {**loop.ran.json(), "kept": kept}


def resumed_experts() -> Seen:
    own = (str(dist.get_rank()),)
    return resumed("experts", "exact", wrap=spread_experts, make=lambda _: Experts(own), before=of_mean_loss)


CASES: dict[int, dict[str, Callable[[], Seen]]] = {
    2: {
        "one differs": lambda: one_differs(language.ddp, 2, 1),
        "one fades": lambda: one_fades(1e-5),
        "one explodes": lambda: one_fades(1e5),
        "noise of ranks": lambda: noise(language.ddp),
        "noise of micro-batches": lambda: noise(language.ddp, 2),
        "noise of steps": lambda: noise(language.fsdp),
        "estimated": lambda: estimated(language.fsdp),
        "resumed ddp": lambda: resumed("ddp", "exact", wrap=language.ddp),
        "resumed fsdp": lambda: resumed("fsdp", "exact", wrap=language.fsdp),
        "resumed sketch": lambda: resumed("sketch", "sketch", wrap=language.fsdp),
        "resumed experts": resumed_experts,
        "resumed without": lambda: resumed("without", "exact", "start-1.pt", wrap=language.fsdp),
    },
    4: {"one shard differs": lambda: one_differs(language.hsdp, 4, 3)},
}
