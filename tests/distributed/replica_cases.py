"""Replicas that stay the same, and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.gather import of_all_ranks
from tests.distributed.sharding_cases import Holder, Net, Seen, ddp, fsdp, hsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from palingenesis.layers import find_layers
from palingenesis.signals.meeting import agree
from palingenesis.signals.replicas import Replicas


def look(model: nn.Module, replicas: Replicas | None = None) -> Seen:
    replicas = replicas or Replicas(agree(find_layers(model)))
    sent = replicas.compute()
    values = replicas.decode(of_all_ranks(sent))
    return {
        "scalars": values.scalars,
        "layers": values.layers,
        "unavailable": values.unavailable,
        "sent": {name: list(tensor.shape) for name, tensor in sent.items()},
        "divergences": [[d.layer, d.parameter, list(d.ranks), d.spread] for d in replicas.divergences],
    }


def next_up(tensor: torch.Tensor, index: int) -> None:
    """Move one element by the least that its type can."""
    bits = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    tensor.detach().view(bits).view(-1)[index] += 1


def trained(wrap: Callable[[Net], nn.Module], steps: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 4, 6, generator=random)).square().mean().backward()
        optimizer.step()
    return model


def equal_then_not() -> Seen:
    model = trained(ddp)
    replicas = Replicas(agree(find_layers(model)))
    found = {"equal": look(model, replicas)}
    if dist.get_rank() == 1:
        next_up(model.module.odd.weight, 7)  # type: ignore[union-attr,operator]
    found["one ulp"] = look(model, replicas)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.module.up.bias *= 2.0  # type: ignore[union-attr,operator]
    found["two layers"] = look(model, replicas)
    return found


def whole(tensor: torch.Tensor) -> Any:
    return distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Replicate()])


def half_precision_dtensor() -> Seen:
    model = Holder(a=whole(torch.ones(33, dtype=torch.bfloat16)), b=whole(torch.zeros(3)))
    if dist.get_rank() == 0:
        next_up(model.a.to_local(), 32)
    return look(model)


def alone() -> Seen:
    """Made on rank 0 only, which waits for nobody."""
    if dist.get_rank() > 0:
        return {}
    found = Replicas(agree(find_layers(Net()))).compute()
    return {"sent": {name: list(tensor.shape) for name, tensor in found.items()}}


def here_and_there() -> Seen:
    """A parameter of both ranks next to one of each rank alone, whose values differ, as they may."""
    rank = dist.get_rank()
    stage = {"first" if rank == 0 else "second": torch.full((2,), float(rank))}
    mesh = init_device_mesh("cpu", (2,))
    spread = distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh, [Shard(0)])
    return look(Holder(both=torch.full((3,), 1.0 + rank), spread=spread, **stage))


def pipeline() -> Seen:
    """Two stages: the first has two replicas, of which the second differs; the last has none."""
    rank = dist.get_rank()
    stages = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    values = torch.arange(3.0)
    if rank < 2:
        model = Holder(first=distribute_tensor(values, stages[0], [Replicate()]))
    else:
        model = Holder(last=distribute_tensor(values, stages[1], [Shard(0)]))
    if rank == 1:
        next_up(model.first.to_local(), 0)
    return look(model)


def hsdp_one_differs() -> Seen:
    model = trained(hsdp)
    found = {"equal": look(model)}
    if dist.get_rank() == 3:
        next_up(model.down.weight.to_local(), 0)  # type: ignore[union-attr,operator]
    found["one ulp"] = look(model)
    return found


def most_are_right() -> Seen:
    model = trained(ddp)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.module.head.bias.fill_(float("nan"))  # type: ignore[union-attr,operator]
    return look(model)


CASES: dict[int, dict[str, Callable[[], Seen]]] = {
    2: {
        "replicas of ddp": equal_then_not,
        "replicas of fsdp": lambda: look(trained(fsdp)),
        "replicas in bf16": half_precision_dtensor,
        "replicas on one rank": alone,
        "replicas here and there": here_and_there,
    },
    4: {
        "replicas of hsdp": hsdp_one_differs,
        "replicas of four": most_are_right,
        "replicas of one stage": pipeline,
    },
}
