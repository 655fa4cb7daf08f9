"""Gradient norms of models that are spread over ranks, next to those of the same model in one process."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from palingenesis.errors import LayerError
from palingenesis.layers import find_layers
from palingenesis.signals.gradients import GradientReader
from palingenesis.signals.meeting import agree
from palingenesis.watch.reading import CheckReading

Seen = dict[str, Any]
BATCH = 12
# Long enough for a rank that waits in vain, short enough for a test.
PATIENCE_S = 0.5


class Net(nn.Module):
    """Layers whose first dimension is even, uneven, and smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)
        self.norm = nn.LayerNorm(6)
        self.odd = nn.Linear(6, 5)
        self.head = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.down(self.up(x).tanh()))
        out: torch.Tensor = self.head(self.odd(x).tanh()) * self.scale.sum()
        return out


def batch() -> torch.Tensor:
    return torch.randn(BATCH, 4, 6, generator=torch.Generator().manual_seed(3))


def exact(model: nn.Module) -> dict[str, float]:
    """Layer norms of whole gradients, in double precision."""
    squares: dict[str, float] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            layer = name.rpartition(".")[0] or name
            squares[layer] = squares.get(layer, 0.0) + float(p.grad.double().square().sum())
    return {layer: square**0.5 for layer, square in squares.items()}


def told(layers: Any, reading: CheckReading) -> Seen:
    found: Seen = {
        "norm": dict(zip(layers.names, reading.norm.tolist(), strict=True)),
        "absent": [name for name, gone in zip(layers.names, reading.absent, strict=True) if gone],
        "not_watched": dict(layers.not_watched),
        "together": layers.together,
    }
    if reading.between is not None:
        found["peak"] = reading.between.peak.tolist()
        found["peak_step"] = reading.between.peak_step.tolist()
        found["first_nonfinite"] = reading.between.first_nonfinite.tolist()
        found["present_steps"] = reading.layers.present_steps.tolist()
        found["last_present"] = reading.layers.last_present.tolist()
    return found


def read(reader: GradientReader, step: int, **options: Any) -> CheckReading:
    check = reader.send(step, {}, **options)
    return reader.decode(check, check.packet.arrays())


def compare(wrap: Callable[[Net], nn.Module], data_ranks: int | None = None) -> Seen:
    """One backward pass of a wrapped model, on this rank's share of the batch, and of a whole one."""
    torch.manual_seed(0)
    whole = Net()
    model = wrap(copy.deepcopy(whole))
    whole(batch()).square().mean().backward()
    shares = data_ranks or dist.get_world_size()
    mine = dist.get_rank() * shares // dist.get_world_size()
    model(batch().chunk(shares)[mine]).square().mean().backward()
    layers = agree(find_layers(model))
    reader = GradientReader(layers, guard=True, interval=5)
    reader.look(5)
    before = reader.total_norm()
    found = told(layers, read(reader, 5))
    total = reader.total_norm()
    assert total is not None
    return {
        **found,
        "exact": exact(whole),
        "total": float(total),
        "total_before": None if before is None else float(before),
    }


# -- two ranks --------------------------------------------------------------------------------------------


def fsdp(model: Net, **options: Any) -> nn.Module:
    for layer in (model.up, model.down, model.odd):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def offloaded(model: Net) -> nn.Module:
    return fsdp(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def half(model: Net) -> nn.Module:
    return fsdp(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def ddp(model: Net) -> nn.Module:
    return DistributedDataParallel(model)


def tensor_parallel(model: Net, mesh: DeviceMesh | None = None) -> nn.Module:
    """Columns of one matrix, rows of the next; the rest is whole on every rank."""
    mesh = mesh or init_device_mesh("cpu", (2,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)  # type: ignore[return-value]


class SequenceNet(nn.Module):
    """A norm layer that each rank applies to its part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(self.norm(x)).tanh())
        return out


def sequence_parallel() -> Seen:
    torch.manual_seed(0)
    whole = SequenceNet()
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (2,))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    for net in (whole, model):
        net(batch()).square().mean().backward()
    layers = agree(find_layers(model))
    reader = GradientReader(layers, guard=True, interval=5)
    reader.look(5)
    placed = str(model.norm.weight.grad.placements)  # type: ignore[union-attr]
    before = [p.grad.to_local().tolist() for p in model.parameters()]  # type: ignore[union-attr]
    found = told(layers, read(reader, 5))
    after = [p.grad.to_local().tolist() for p in model.parameters()]  # type: ignore[union-attr]
    return {**found, "exact": exact(whole), "placed": placed, "same": before == after}


class Holder(nn.ParameterDict):
    """Layers of one parameter each, whose gradients are written by hand."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__(parameters)


def sharded(values: torch.Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    return distribute_tensor(values, mesh or init_device_mesh("cpu", (2,)), [Shard(0)])


WRITTEN: dict[str, list[list[float] | None]] = {
    # Elements at each step; the first two are rank 0's, the rest rank 1's.
    "tiny": [[1e-25, 0, 0, 2e-25], [1e-25] * 4, [0, 0, 0, 1e-45]],
    "huge": [[1e20, 1e20, 1e20, 1e20], [0, 0, 0, 3e38], [1, 1, 1, 1]],
    "zero": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    "later": [[0, 0, 0, 0], [0, 0, 3, 4], [0, 0, 0, 0]],
    "nan": [[1, 1, 1, 1], [1, 1, 1, math.nan], [3, 4, 0, 0]],
    "inf": [[math.inf, 0, 0, 0], [1, 0, 0, 0], [0, 0, -math.inf, 0]],
    "gone": [[1, 2, 3, 4], None, None],
    "third": [[1, 0, 0], [0, 1, 0], [0, 0, 2]],
    "single": [[5], [6], [7]],
}


def write(model: Holder, step: int, steps: dict[str, list[Any]]) -> None:
    for name, series in steps.items():
        parameter = getattr(model, name)
        values = series[step]
        if values is None:
            parameter.grad = None
            continue
        whole = torch.tensor(values, dtype=torch.float32)
        # By hand: distribute_tensor would send rank 0's values.
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def extremes() -> Seen:
    """Three steps, written by hand, then a fourth interval in which nothing is left of them."""
    sizes = {name: len(series[0] or []) for name, series in WRITTEN.items()}
    model = Holder(**{name: sharded(torch.zeros(size)) for name, size in sizes.items()})
    layers = agree(find_layers(model))
    reader = GradientReader(layers, guard=True, interval=3)
    for step in range(3):
        write(model, step, WRITTEN)
        reader.look(4 + step)
    found = told(layers, read(reader, 6))
    found["local"] = {name: getattr(model, name).to_local().numel() for name in ("third", "single")}
    for p in model.parameters():
        p.grad = None
    reader.look(7)
    return {"first": found, "second": told(layers, read(reader, 7))}


def scaled() -> Seen:
    model = Holder(a=sharded(torch.zeros(3)))
    reader = GradientReader(agree(find_layers(model)), guard=True, interval=2)
    write(model, 0, {"a": [[3.0, 0.0, 4.0]]})
    reader.look(2, torch.tensor(1024.0))
    return {"norm": read(reader, 2).norm.tolist()}


def long_interval() -> Seen:
    """More steps between two checks than there are rows."""
    model = Holder(a=sharded(torch.zeros(4)), b=sharded(torch.zeros(1)))
    reader = GradientReader(agree(find_layers(model)), guard=True, interval=150)
    series = {
        "a": [[0.0, 0.0, 0.0, math.inf if at == 40 else float(at % 71)] for at in range(150)],
        "b": [[float(at == 9)] for at in range(150)],
    }
    for step in range(150):
        write(model, step, series)
        reader.look(151 + step)
    return told(reader.layers, read(reader, 300))


def no_guard() -> Seen:
    model = Holder(a=sharded(torch.zeros(4)))
    layers = agree(find_layers(model))
    reader = GradientReader(layers, guard=False, interval=50)
    write(model, 0, {"a": [[1.0, 2.0, 2.0, 4.0]]})
    reader.look(50)
    return told(layers, read(reader, 50))


def here_and_there() -> Seen:
    """One layer on both ranks, one on each of them only, and one whose mesh has no place for rank 0."""
    rank = dist.get_rank()
    both, second = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1])
    parts = {"shared": sharded(torch.zeros(3), both), "outside": sharded(torch.zeros(4), second)}
    parts["first_stage" if rank == 0 else "second_stage"] = torch.zeros(2)
    # A whole parameter that each rank has for itself, and that nothing averages.
    parts["alone"] = torch.zeros(2)
    model = Holder(**parts)
    write(model, 0, {"shared": [[1.0, 2.0, 2.0]]})
    if rank == 1:
        model.outside.grad = DTensor.from_local(torch.tensor([3.0, 0, 0, 4.0]), second, [Shard(0)])
        model.second_stage.grad = torch.tensor([6.0, 8.0])
    else:
        model.first_stage.grad = torch.tensor([0.0, 2.0])
    model.alone.grad = torch.tensor([3.0, 4.0]) if rank == 0 else torch.tensor([0.0, 0.0])
    layers = agree(find_layers(model))
    reader = GradientReader(layers, guard=True, interval=1)
    reader.look(1)
    found = told(layers, read(reader, 1))
    found["holders"] = {unit.name: unit.holders for unit in layers.units}
    found["elsewhere"] = [unit.name for unit in layers.units if unit.elsewhere]
    return found


def monitor_on_one_rank() -> Seen:
    """Rank 0 waits in vain and goes on; so does rank 1, too late. Then both come at once."""
    model = nn.ModuleDict({"plain": nn.Linear(2, 2), "spread": Holder(a=sharded(torch.zeros(4)))})
    began = time.perf_counter()
    if dist.get_rank() == 0:
        layers = agree(find_layers(model), patience_s=PATIENCE_S)
        dist.barrier()
    else:
        dist.barrier()
        layers = agree(find_layers(model), patience_s=PATIENCE_S)
    took = time.perf_counter() - began
    dist.barrier()
    return {
        "then": agree(find_layers(model), patience_s=PATIENCE_S).names,
        "names": layers.names,
        "not_watched": dict(layers.not_watched),
        "together": layers.together,
        "took": took,
    }


def closing_on_one_rank() -> Seen:
    model = Holder(a=sharded(torch.zeros(4)))
    reader = GradientReader(agree(find_layers(model)), guard=True, interval=9)
    write(model, 0, {"a": [[1.0, 1.0, 1.0, 1.0]]})
    reader.look(1)
    if dist.get_rank() == 0:
        return {"guarded": reader.send(1, {}, last=True).guarded_steps}
    return {"guarded": 0}


def failing_on_one_rank() -> Seen:
    """A gradient that cannot be read on rank 1: nobody waits for ever, and nobody takes half a norm."""
    model = Holder(a=sharded(torch.zeros(4)))
    layers = agree(find_layers(model))
    reader = GradientReader(layers, guard=True, interval=2)
    found: Seen = {"raised": None}
    for step in (1, 2):
        write(model, 0, {"a": [[3.0, 0.0, 0.0, 4.0]]})
        if step == 1 and dist.get_rank() == 1:
            try:
                reader.look(step, "no scale")  # type: ignore[arg-type]
            except AttributeError:
                continue
        reader.look(step)
    try:
        read(reader, 2)
    except LayerError as error:
        found["raised"] = str(error)
    for step in (3, 4):
        reader.look(step)
    return found | told(layers, read(reader, 4))


def not_agreed() -> Seen:
    try:
        GradientReader(find_layers(Holder(a=sharded(torch.zeros(4)))), guard=True)
    except LayerError as error:
        return {"raised": str(error)}
    return {"raised": None}


def times() -> Seen:
    """Seconds of a step, of a check of 50 steps, and of what reducing at every step would add."""
    model = Holder(**{f"p{i}": sharded(torch.zeros(8, 8)) for i in range(400)})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    reader = GradientReader(agree(find_layers(model)), guard=True, interval=50)
    looks, sends, every_step = [], [], []
    for check in range(4):
        for step in range(50):
            began = time.perf_counter()
            reader.look(check * 50 + step + 1)
            looks.append(time.perf_counter() - began)
        dist.barrier()
        began = time.perf_counter()
        reader.send(check * 50 + 50, {})
        sends.append(time.perf_counter() - began)
        vector = torch.zeros(400, dtype=torch.float64)
        for _ in range(10):
            began = time.perf_counter()
            dist.all_reduce(vector)
            every_step.append(time.perf_counter() - began)
    return {
        "look": statistics.median(looks),
        "send": statistics.median(sends),
        "reduce": statistics.median(every_step),
    }


# -- four ranks -------------------------------------------------------------------------------------------


def hsdp(model: Net) -> nn.Module:
    return fsdp(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def fsdp_of_tensor_parallel(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    return fsdp(model, mesh=mesh["data"])


def tensor_parallel_under_replicas() -> Seen:
    """Each pair of ranks shards the model over a mesh of its own; the same names on both meshes."""
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    mesh = first if dist.get_rank() < 2 else second
    copied = distribute_tensor(torch.zeros(2), mesh, [Replicate()])
    model = Holder(split=sharded(torch.zeros(4), mesh), copied=copied)
    write(model, 0, {"split": [[1.0, 2.0, 2.0, 4.0]], "copied": [[3.0, 4.0]]})
    layers = agree(find_layers(model))
    reader = GradientReader(layers, guard=True, interval=1)
    reader.look(1)
    return told(layers, read(reader, 1))


CASES: dict[int, dict[str, Callable[[], Seen]]] = {
    2: {
        "ddp": lambda: compare(ddp),
        "fsdp": lambda: compare(fsdp),
        "fsdp offloaded": lambda: compare(offloaded),
        "fsdp half": lambda: compare(half),
        "tensor parallel": lambda: compare(tensor_parallel, data_ranks=1),
        "sequence parallel": sequence_parallel,
        "extremes": extremes,
        "scaled": scaled,
        "long interval": long_interval,
        "no guard": no_guard,
        "here and there": here_and_there,
        "monitor on one rank": monitor_on_one_rank,
        "closing on one rank": closing_on_one_rank,
        "failing on one rank": failing_on_one_rank,
        "not agreed": not_agreed,
        "times": times,
    },
    4: {
        "hsdp": lambda: compare(hsdp),
        "fsdp of four": lambda: compare(fsdp),
        "fsdp of tensor parallel": lambda: compare(fsdp_of_tensor_parallel, data_ranks=2),
        "tensor parallel under replicas": tensor_parallel_under_replicas,
    },
}
