"""The optimizer of a run, as transformers' trainer would make it on the device that is planned for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig

#: bitsandbytes: elements of a block that has one scale, and the smallest tensor whose moments are 8-bit.
BLOCK, SMALLEST = 256, 4096


def make_optimizer(config: TrainConfig, model: nn.Module, *, on_cuda: bool) -> torch.optim.Optimizer:
    """An optimizer over the model's trained parameters.

    Args:
        config: the run's.
        model: the run's, with adapters if it has any.
        on_cuda: whether the run will be on CUDA, where PyTorch takes the ``foreach`` variants. On the CPU it
            goes through one parameter after the other.
    """
    options = config.train
    groups = _groups(model, options.weight_decay)
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=options.learning_rate, foreach=on_cuda)
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, foreach=on_cuda)
    if options.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        kind: Any = Adafactor
        made: torch.optim.Optimizer = kind(
            groups, lr=options.learning_rate, scale_parameter=False, relative_step=False
        )
        return made
    return EightBitAdamW(groups, _embeddings(model))


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, as the trainer makes them: norms and biases are not decayed."""
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    norms = {
        id(parameter)
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = id(parameter) in norms or name.endswith("bias")
            (rest if plain else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def _embeddings(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor that it keeps."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value


class EightBitAdamW(torch.optim.Optimizer):
    """What bitsandbytes' 8-bit AdamW keeps, without what it computes: its kernels need CUDA.

    Two moments of a byte an element and a 4-byte scale for every 256 elements; in fp32 where a tensor has
    fewer than 4,096 elements, and for embeddings, which the trainer asks for. It steps in place, one tensor
    after the other.
    """

    def __init__(self, groups: list[dict[str, Any]], in_full: set[int]) -> None:
        super().__init__(groups, {})
        self._in_full = in_full

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the states of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = self._made(parameter)

    def _made(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        size = parameter.numel()
        if size < SMALLEST or id(parameter) in self._in_full:
            return {
                f"state{i}": torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
                for i in (1, 2)
            }
        made = {}
        for i in (1, 2):
            made[f"state{i}"] = torch.zeros(parameter.shape, dtype=torch.uint8, device=parameter.device)
            made[f"absmax{i}"] = torch.zeros(-(-size // BLOCK), dtype=torch.float32, device=parameter.device)
        return made
