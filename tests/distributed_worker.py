"""What each of two processes does for ``test_distributed.py``; started there with torchrun.

Each case writes what this rank saw to ``<folder>/<case>-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from palingenesis import Monitor

STEPS = 12


class Run:
    """Training of one model on this rank's share of the batches."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = wrap(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4), nn.Linear(4, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.random = torch.Generator().manual_seed(1 + dist.get_rank())
        self.losses: list[float] = []

    def backward(self) -> torch.Tensor:
        x = torch.randn(8, 6, generator=self.random)
        loss: torch.Tensor = (self.model(x).squeeze(-1) - x.sum(-1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def steps(self, mon: Monitor | None, loss_of: Callable[[torch.Tensor], Any] = lambda loss: loss) -> None:
        for _ in range(STEPS):
            loss = self.backward()
            if mon is not None:
                mon.step(loss_of(loss))
            self.optimizer.step()
            self.losses.append(loss.item())

    def weights(self) -> list[list[float]]:
        found = []
        for p in self.model.parameters():
            local = p.to_local() if hasattr(p, "to_local") else p
            found.append(local.detach().flatten().tolist())
        return found


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)  # type: ignore[return-value]


def partly_sharded(model: nn.Module) -> nn.Module:
    fully_shard(model[0])  # type: ignore[index]
    return model


def flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def flat_as_one(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=False, device_id=torch.device("cpu"))


def rank_zero_only(loss: torch.Tensor) -> Any:
    return loss if dist.get_rank() == 0 else None


def other_rank_only(loss: torch.Tensor) -> Any:
    return loss if dist.get_rank() == 1 else None


def tensor_here_number_there(loss: torch.Tensor) -> Any:
    return loss if dist.get_rank() == 0 else loss.item()


def whole(loss: torch.Tensor) -> Any:
    return loss


CASES: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[torch.Tensor], Any]]] = {
    "ddp": (ddp, whole),
    "ddp, loss on rank 0": (ddp, rank_zero_only),
    "ddp, loss on rank 1": (ddp, other_rank_only),
    "ddp, mixed losses": (ddp, tensor_here_number_there),
    "fully_shard": (sharded, whole),
    "fully_shard, loss on rank 0": (sharded, rank_zero_only),
    "fully_shard, failing record": (sharded, whole),
    "fully_shard, failing look": (sharded, whole),
    "fully_shard, one rank closes": (sharded, whole),
    "partly sharded": (partly_sharded, whole),
    "FSDP": (flat, whole),
    "FSDP, one flat parameter": (flat_as_one, whole),
}


def one(case: str, folder: Path) -> dict[str, Any]:
    wrap, loss_of = CASES[case]
    bare = Run(wrap)
    bare.steps(None)
    watched = Run(wrap)
    # Rank 1 gets a folder of its own, to show that it writes none.
    out = folder / f"{case}-run-{dist.get_rank()}"
    with Monitor(watched.model, watched.optimizer, out, check_every=2, warmup=2) as mon:
        if case == "fully_shard, failing record" and dist.get_rank() == 0:
            mon._judge = fail  # type: ignore[method-assign]
        if case == "fully_shard, failing look" and dist.get_rank() == 1:
            mon._look = fail  # type: ignore[method-assign]
        watched.steps(mon, loss_of)
        if case == "fully_shard, one rank closes" and dist.get_rank() == 0:
            mon.close()
            dist.barrier()  # rank 1 closes long after
        elif case == "fully_shard, one rank closes":
            dist.barrier()
    return {
        "same": watched.weights() == bare.weights() and watched.losses == bare.losses,
        "losses": watched.losses,
        "norms": exact_norms(watched),
        "verdict": mon.verdict,
        "events": [{"event": e.event, "message": e.message, **dict(e.fields)} for e in mon.events],
        "wrote": out.exists(),
    }


def fail() -> None:
    """Stands in for a record that one rank alone cannot write."""
    raise OSError("no space left on device")


def exact_norms(run: Run) -> dict[str, float]:
    """Norm of the last gradient of each layer, in double precision; nothing under FSDP's first version."""
    if isinstance(run.model, FullyShardedDataParallel):
        return {}
    squares: dict[str, float] = {}
    for name, p in run.model.named_parameters():
        if p.grad is not None:
            gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            layer = name.removeprefix("module.").rpartition(".")[0]
            squares[layer] = squares.get(layer, 0.0) + float(gradient.double().square().sum())
    return {layer: square**0.5 for layer, square in squares.items()}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    for case in CASES:
        try:
            seen = one(case, folder)
        except Exception:  # noqa: BLE001 - told to the test, which fails with it
            seen = {"error": traceback.format_exc()}
        (folder / f"{case}-{dist.get_rank()}.json").write_text(json.dumps(seen, default=str))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
