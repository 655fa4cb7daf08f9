"""A small language model and its training loop, the same in one process and spread over ranks.

Whatever the number of ranks and micro-batches, a step's objective is the mean over all loss-bearing tokens of
its eight sequences, so that gradients are those of one process on the joined batch, but for rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from palingenesis import Event, Monitor
from palingenesis.reading import Reading

VOCABULARY, WIDTH = 33, 16
ROWS, LENGTH = 8, 10
# Divides by no number of ranks; tensor parallelism needs one that does.
UNEVEN, EVEN = 41, 40


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return out


class Net(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, inner: int = UNEVEN) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(Block(inner) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


class Batch(NamedTuple):
    """A step's sequences, or some of them, and the loss-bearing tokens of the whole step."""

    ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    tokens: int

    def part(self, at: int, of: int) -> Batch:
        ids, labels, mask = (one.chunk(of)[at] for one in self[:3])
        return Batch(ids, labels, mask, self.tokens)


def batch(step: int) -> Batch:
    """Sequences of different lengths, whose first tokens are a prompt without loss.

    Some tokens are more frequent than others, so that there is something to learn.
    """
    random = torch.Generator().manual_seed(1000 + step)
    ids = (torch.rand((ROWS, LENGTH), generator=random) ** 2 * VOCABULARY).long()
    lengths = torch.randint(6, LENGTH + 1, (ROWS, 1), generator=random)
    prompts = torch.randint(1, 4, (ROWS, 1), generator=random)
    at = torch.arange(LENGTH)
    mask = (at < lengths).long()
    labels = torch.where((mask == 1) & (at >= prompts), ids, -100)
    return Batch(ids, labels, mask, int((labels[:, 1:] != -100).sum()))


def objective(logits: torch.Tensor, part: Batch) -> torch.Tensor:
    """This part's share of the step's mean loss."""
    flat = logits[:, :-1].reshape(-1, VOCABULARY)
    return F.cross_entropy(flat, part.labels[:, 1:].reshape(-1), reduction="sum") / part.tokens


@dataclass
class Ran:
    """What one rank saw of a run."""

    readings: list[Reading] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        rows: dict[str, dict[str, float]] = {}
        labels: dict[str, dict[str, str]] = {}
        for reading in self.readings:
            rows.setdefault(str(reading.step), {}).update(reading.flat())
            labels.setdefault(str(reading.step), {}).update(reading.labels)
        return {
            "rows": rows,
            "labels": labels,
            "events": [
                {"event": e.event, "step": e.step, "severity": e.severity, "message": e.message, **e.fields}
                for e in self.events
            ],
            "losses": self.losses,
            "weights": self.weights,
        }


@dataclass
class Loop:
    """A training loop on this rank's share of each batch.

    Args:
        wrap: spreads the model over ranks.
        shares: into how many shares a batch is cut: ranks that hold the same data have the same share.
        micro: micro-batches a step and rank.
        inner: of the model's matrices.
        rate: learning rate.
        steps: how many.
        first: the first step's number.
        make: makes the model.
        before: called with the loop, the step and the monitor before each ``Monitor.step``.
    """

    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    shares: int = 1
    micro: int = 1
    inner: int = UNEVEN
    rate: float = 0.5
    steps: int = 20
    first: int = 1
    make: Callable[[int], nn.Module] = Net
    before: Callable[[Loop, int], object] = lambda loop, step: None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.share = self.rank * self.shares // self.ranks
        self.model = self.wrap(self.make(self.inner))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate)
        self.ran = Ran()

    def watched(self, out: Path | None = None, **options: Any) -> Monitor:
        ran = self.ran
        return Monitor(
            self.model,
            self.optimizer,
            out,
            on_reading=ran.readings.append,
            on_event=ran.events.append,
            **options,
        )

    def run(
        self, mon: Monitor | None, look: Callable[[Monitor, torch.Tensor, int], object] | None = None
    ) -> Ran:
        """Train; without a monitor, unwatched. It is left open.

        Args:
            mon: the monitor.
            look: what to do instead of ``Monitor.step``, with the loss and the step.
        """
        look = look or (lambda mon, loss, step: mon.step(loss))
        for step in range(self.first, self.first + self.steps):
            self.optimizer.zero_grad()
            loss = self.backward(batch(step).part(self.share, self.shares), mon)
            self.before(self, step)
            if mon is not None:
                look(mon, loss, step)
            self.optimizer.step()
            self.ran.losses.append(loss.item())
        self.ran.weights = [_here(p).detach().flatten().tolist() for p in self.model.parameters()]
        return self.ran

    def backward(self, own: Batch, mon: Monitor | None) -> torch.Tensor:
        """All micro-batches; the loss of the whole step."""
        total = torch.zeros(())
        for at in range(self.micro):
            part = own.part(at, self.micro)
            if mon is not None:
                mon.batch(part.labels, part.mask, weight="tokens")
            with self._accumulating(last=at == self.micro - 1):
                logits = self.model(part.ids)
                loss = objective(logits, part)
                (loss * self.shares).backward()
            if mon is not None:
                mon.observe_output(logits=logits, labels=part.labels)
            total += loss.detach()
        if self.shares > 1:
            dist.all_reduce(total)
            total /= self.ranks / self.shares
        return total

    def _accumulating(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()


def _here(tensor: torch.Tensor) -> torch.Tensor:
    here: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return here


# -- ways to spread a model over ranks --------------------------------------------------------------------


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.h:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(model, **options)


def hsdp(model: nn.Module) -> nn.Module:
    return fsdp(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def offloaded(model: nn.Module) -> nn.Module:
    return fsdp(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def tensor_parallel(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Columns of one matrix, rows of the next; the rest is whole on every rank."""
    plan = {}
    for i in range(2):
        plan |= {f"h.{i}.up": ColwiseParallel(), f"h.{i}.down": RowwiseParallel()}
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, plan)  # type: ignore[return-value]


def fsdp_of_tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return fsdp(tensor_parallel(model, mesh["tensor"]), mesh=mesh["data"])


def named(events: Iterable[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Of events, those of some kinds."""
    return [event for event in events if event["event"] in names]
