"""What rank 0 reads of models that are spread over ranks; the test computes what it should be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import language
from tests.distributed.language import EVEN, WIDTH, Block, Loop
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from palingenesis import MonitorConfig

Seen = dict[str, Any]

# Every tier often, and everything exactly: all positions, copies of the first weights.
EVERYTHING: dict[str, Any] = {
    "check_every": 2,
    "warmup": 2,
    "tier2_every": 2,
    "tier3_every": 5,
    "rl_readiness": True,
    "entropy_positions": 1000,
    "drift": "exact",
}


class Experts(nn.Module):
    """Experts by name and experts in one stack; each takes its part of the rows.

    Args:
        own: names of the experts that are here.
        stack: ``[experts, WIDTH, WIDTH]``.
    """

    def __init__(self, own: tuple[str, ...] = ("0", "1")) -> None:
        super().__init__()
        whole = language.Net()
        self.emb, self.lm_head = whole.emb, whole.lm_head
        self.h = nn.ModuleList([Block(language.UNEVEN)])
        every = {name: nn.Linear(WIDTH, WIDTH) for name in ("0", "1")}
        self.expert = nn.ModuleDict({name: every[name] for name in own})
        self.stack = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.h[0](self.emb(ids))
        named = [one(rows) for one, rows in zip(self.expert.values(), x.chunk(len(self.expert)), strict=True)]
        x = x + torch.cat(named)
        stack: Any = self.stack
        here = stack.to_local() if hasattr(stack, "to_local") else stack
        rows = x.chunk(len(here))
        x = x + torch.cat([torch.tanh(part @ one) for part, one in zip(rows, here, strict=True)])
        logits: torch.Tensor = self.lm_head(x)
        return logits


def spread_experts(model: nn.Module) -> nn.Module:
    """Dense layers sharded, each expert on one rank."""
    for layer in (model.emb, model.lm_head, model.h[0]):  # type: ignore[index]
        fully_shard(layer)
    mesh = init_device_mesh("cpu", (2,))
    model.stack = nn.Parameter(distribute_tensor(model.stack.detach(), mesh, [Shard(0)]))  # type: ignore[operator]
    return model


def of_mean_loss(loop: Loop, step: int) -> None:
    """Nothing averages the experts' gradients: they are of this rank's loss times the number of ranks."""
    for name, parameter in loop.model.named_parameters():
        if name.startswith(("expert", "stack")):
            parameter.grad /= loop.shares


def folder() -> Path:
    """Shared by all ranks."""
    return Path(sys.argv[1])


def watched(**options: Any) -> Seen:
    """A run with a monitor next to one without."""
    bare = Loop(**options).run(None)
    loop = Loop(**options)
    with loop.watched(config=MonitorConfig(**EVERYTHING)) as mon:
        loop.run(mon)
    return {**loop.ran.json(), "same": loop.ran.weights == bare.weights and loop.ran.losses == bare.losses}


def experts() -> Seen:
    own = (str(dist.get_rank()),)
    return watched(wrap=spread_experts, shares=2, make=lambda _: Experts(own), before=of_mean_loss)


CASES: dict[int, dict[str, Callable[[], Seen]]] = {
    2: {
        "ddp": lambda: watched(wrap=language.ddp, shares=2),
        "ddp, micro-batches": lambda: watched(wrap=language.ddp, shares=2, micro=2),
        "fsdp": lambda: watched(wrap=language.fsdp, shares=2),
        "fsdp, micro-batches": lambda: watched(wrap=language.fsdp, shares=2, micro=2),
        "offloaded": lambda: watched(wrap=language.offloaded, shares=2),
        "tensor parallel": lambda: watched(wrap=language.tensor_parallel, inner=EVEN),
        "experts": experts,
    },
    4: {
        "hsdp": lambda: watched(wrap=language.hsdp, shares=4),
        "fsdp of tensor parallel": lambda: watched(
            wrap=language.fsdp_of_tensor_parallel, shares=2, inner=EVEN
        ),
    },
}
