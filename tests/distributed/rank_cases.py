"""Each rank's own gradients under DDP, next to those of a model that is not wrapped."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.gather import of_all_ranks
from tests.distributed.sharding_cases import Net, Seen, ddp, exact, fsdp
from torch import nn

from palingenesis.layers import find_layers
from palingenesis.signals.meeting import agree
from palingenesis.signals.ranks import RankGradients


def decoded(ranks: RankGradients) -> Seen:
    values = ranks.decode(of_all_ranks(ranks.compute()))
    found = ranks.found
    seen: Seen = {"scalars": values.scalars, "unavailable": values.unavailable}
    if found is not None:
        seen |= {
            "norms": found.norms.tolist(),
            "outliers": [[o.layer, o.rank, o.norm, o.others] for o in found.outliers],
        }
    return seen


def inputs(rank: int, passes: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(4, 4, 6, generator=random) for _ in range(passes)]


def own(passes: int, *, no_sync: bool) -> Seen:
    """Two optimizer steps; what is heard is of the second."""
    torch.manual_seed(0)
    model = ddp(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = agree(find_layers(model))
    ranks = RankGradients(layers, model)
    for step in range(2):
        optimizer.zero_grad(set_to_none=step == 0)
        bare = copy.deepcopy(model.module)
        bare.zero_grad()
        if step == 1:
            ranks.arm()
        for at, x in enumerate(inputs(dist.get_rank(), passes)):
            quiet = model.no_sync() if no_sync and at < passes - 1 else contextlib.nullcontext()  # type: ignore[operator]
            with quiet:
                model(x).square().mean().backward()
            bare(x).square().mean().backward()
        if step == 1:
            found = decoded(ranks)
        optimizer.step()
    hooks = [p._backward_hooks for p in model.parameters()]
    found |= {"exact": exact(bare), "names": layers.names, "hooks": sum(map(len, filter(None, hooks)))}
    found["plain"] = unheard(passes, no_sync=no_sync) == [p.tolist() for p in model.parameters()]
    return found


def unheard(passes: int, *, no_sync: bool) -> list[Any]:
    """The weights after the same training without anybody listening."""
    torch.manual_seed(0)
    model = ddp(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad(set_to_none=step == 0)
        for at, x in enumerate(inputs(dist.get_rank(), passes)):
            quiet = model.no_sync() if no_sync and at < passes - 1 else contextlib.nullcontext()  # type: ignore[operator]
            with quiet:
                model(x).square().mean().backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


def vanishing() -> Seen:
    """Rank 1's gradients of one layer fade at the second step."""
    torch.manual_seed(0)
    inner = Net()
    model = ddp(inner)
    ranks = RankGradients(agree(find_layers(model)), model)
    found: Seen = {}
    for name, factor in (("first", 1.0), ("second", 1e-5)):
        model.zero_grad()
        hooks = []
        if dist.get_rank() == 1:
            hooks = [p.register_hook(lambda g, f=factor: g * f) for p in inner.odd.parameters()]
        ranks.arm()  # after the hook above, so that it hears what that hook returns
        model(inputs(dist.get_rank(), 1)[0]).square().mean().backward()
        found[name] = decoded(ranks)
        for hook in hooks:
            hook.remove()
    return found


def no_history() -> Seen:
    model = nn.Linear(2, 2)
    ranks = RankGradients(agree(find_layers(model)))
    ranks.arm()
    (model.weight.sum() * (1.0 if dist.get_rank() == 0 else 1e9)).backward()
    return decoded(ranks)


def some_silent() -> Seen:
    """A layer that rank 1 does not use, in a model whose gradients the loop averages by itself."""
    model = Net()
    ranks = RankGradients(agree(find_layers(model)))
    ranks.arm()
    loss = model.up.weight.sum() + (model.odd.weight.sum() if dist.get_rank() == 0 else 0.0)
    loss.backward()
    return {**decoded(ranks), "names": find_layers(model).names}


def failing() -> Seen:
    """The hook fails on rank 1: its backward pass does not, and rank 0 has what it heard itself."""
    model = ddp(nn.Linear(2, 2))
    ranks = RankGradients(agree(find_layers(model)), model)
    ranks.arm()
    if dist.get_rank() == 1:
        ranks._by_parameter = {}
    model(torch.ones(1, 2)).sum().backward()
    try:
        return {"told": list(ranks.compute())}
    except KeyError:
        return {"raised": True}


def not_armed() -> Seen:
    """Rank 1 does not listen, and waits for nobody."""
    model = Net()
    ranks = RankGradients(agree(find_layers(model)))
    if dist.get_rank() == 0:
        ranks.arm()
    return {"told": {name: list(own.shape) for name, own in ranks.compute().items()}}


def of_shards() -> Seen:
    model = fsdp(Net())
    ranks = RankGradients(agree(find_layers(model)), model)
    ranks.arm()
    return decoded(ranks)


CASES: dict[int, dict[str, Callable[[], Seen]]] = {
    2: {
        "own gradients": lambda: own(1, no_sync=False),
        "own gradients under no_sync": lambda: own(3, no_sync=True),
        "own gradients reduced each time": lambda: own(2, no_sync=False),
        "a vanishing rank": vanishing,
        "two ranks without history": no_history,
        "a silent layer": some_silent,
        "a failing hook": failing,
        "ranks on one rank": not_armed,
        "ranks of shards": of_shards,
    },
    4: {},
}
