"""Tensors and models of every kind, for tests that hold whatever comes against an exact computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from palingenesis.layers import Layers, Unit
from palingenesis.signals.packet import Packet

Shape = tuple[int, ...]


def examples(count: int) -> Callable[[Any], Any]:
    return settings(max_examples=count, deadline=None, derandomize=True)


# -- tensors ----------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SMALL: list[Shape] = [
    (), (0,), (1,), (13,), (1, 1), (1, 17), (17, 1), (5, 0), (0, 7), (13, 17), (2, 3, 5), (3, 0, 4),
    (1, 8, 13), (4, 3, 3), (6, 4, 3, 3), (2, 3, 2, 2, 2),
]  # fmt: skip
NOT_EMPTY = [shape for shape in SMALL if math.prod(shape)]
# More elements than a sketch of the least width has numbers.
LARGE: list[Shape] = [(16_411,), (127, 131), (1, 17_011), (16_901, 1), (3, 71, 83), (64, 31, 3, 3)]
# Matrices, and what is read as some: at least 8 rows and columns.
MATRICES: list[Shape] = [(8, 8), (8, 9), (11, 13), (8, 101), (97, 8), (31, 37), (64, 48)]
STACKS: list[Shape] = [(1, 8, 9), (3, 11, 8), (5, 13, 17)]
KERNELS: list[Shape] = [(8, 3, 3), (9, 2, 5), (16, 3, 3, 3), (11, 8, 1, 1), (8, 2, 2, 2, 2)]

POWERS: dict[str, tuple[float, float]] = {
    "plain": (0, 0), "tiny": (-30, -30), "huge": (30, 30), "mixed": (-30, 30), "uneven": (-3, 3),
}  # fmt: skip
# What half precision with five bits of exponent can hold of them.
FP16_POWERS: dict[str, tuple[float, float]] = {
    "plain": (0, 0), "tiny": (-6, -6), "huge": (4, 4), "mixed": (-7, 4), "uneven": (-3, 3),
}  # fmt: skip
ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Kind:
    """How a tensor is made; all of it shows in a falsifying example."""

    shape: Shape
    dtype: torch.dtype
    layout: str
    size: str
    form: str
    seed: int

    def tensor(self) -> torch.Tensor:
        values = FORMS[self.form](self.shape, torch.Generator().manual_seed(self.seed))
        low, high = (FP16_POWERS if self.dtype == torch.float16 else POWERS).get(self.size, (0, 0))
        if self.size == "zero":
            values = torch.zeros_like(values)
        elif low != high:
            source = torch.Generator().manual_seed(self.seed + 1)
            low, high = torch.tensor([low, high], dtype=torch.float64)
            values = values * 10 ** (low + (high - low) * uniform(self.shape, source))
        else:
            values = values * 10.0**low
        most = torch.finfo(self.dtype).max
        values = values.clamp(-most, most).to(self.dtype)
        if self.size in ODD and values.numel():
            values.view(-1)[self.seed % values.numel()] = ODD[self.size]
        return LAYOUTS[self.layout](values)


def uniform(shape: Shape, source: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=source, dtype=torch.float64)


def gaussian(shape: Shape, source: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float64)


def low_rank(shape: Shape, source: torch.Generator, rank: int) -> torch.Tensor:
    """Of the last two dimensions of a stack, of the first against the rest of anything else."""
    if len(shape) < 2 or not math.prod(shape):
        return gaussian(shape, source)
    sides = shape if len(shape) == 3 else (shape[0], math.prod(shape[1:]))
    left = gaussian((*sides[:-1], rank), source)
    return (left @ gaussian((*sides[:-2], rank, sides[-1]), source)).reshape(shape)


def _power_law(shape: Shape, source: torch.Generator) -> torch.Tensor:
    if len(shape) < 2 or not math.prod(shape):
        return gaussian(shape, source)
    flat = gaussian((shape[0], math.prod(shape[1:])), source)
    u, s, v = torch.linalg.svd(flat, full_matrices=False)
    return (u * torch.arange(1, len(s) + 1).double() ** -1.0 @ v).reshape(shape)


def _few(shape: Shape, source: torch.Generator) -> torch.Tensor:
    return torch.where(uniform(shape, source) < 0.1, gaussian(shape, source), 0.0)


FORMS: dict[str, Callable[[Shape, torch.Generator], torch.Tensor]] = {
    "gaussian": gaussian,
    "constant": lambda shape, _: torch.full(shape, 0.7, dtype=torch.float64),
    "positive": uniform,
    "few": _few,
    "rank one": lambda shape, source: low_rank(shape, source, 1),
    "low rank": lambda shape, source: low_rank(shape, source, 3),
    "power law": _power_law,
}


def _every_second(values: torch.Tensor) -> torch.Tensor:
    if not values.dim():
        return values
    room = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 5.0, dtype=values.dtype)
    return room[..., ::2].copy_(values)


def transposed(values: torch.Tensor) -> torch.Tensor:
    order = tuple(range(values.dim()))[::-1]
    return values.permute(order).contiguous().permute(order)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda values: values,
    "transposed": transposed,
    "every second": _every_second,
    "offset": lambda values: (
        torch.full((values.numel() + 1,), 5.0).to(values)[1:].view_as(values).copy_(values)
    ),
}


def kinds(
    shapes: Sequence[Shape],
    sizes: Sequence[str] = (*POWERS, "zero", *ODD),
    dtypes: Sequence[torch.dtype] = DTYPES,
    forms: Iterable[str] = FORMS,
) -> st.SearchStrategy[Kind]:
    return st.builds(
        Kind,
        st.sampled_from(shapes),
        st.sampled_from(dtypes),
        st.sampled_from(list(LAYOUTS)),
        # Most examples are finite and not zero, else little is compared.
        st.one_of(st.sampled_from([*POWERS]), st.sampled_from(sizes)),
        st.sampled_from([*forms]),
        st.integers(0, 999),
    )


# -- models -----------------------------------------------------------------------------------------------


def module_of(weight: torch.Tensor, kernel: bool = False) -> nn.Module:
    """A module with this weight: a convolution where it is a kernel, else one of no known kind."""
    made: Any = nn.Module()
    if kernel:
        made = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[weight.dim() - 3](1, 1, 1, bias=False)
    made.weight = nn.Parameter(weight)
    return made  # type: ignore[no-any-return]


def model_of(*weights: torch.Tensor, in_blocks_of: int = 2, kernel: bool = False) -> nn.Module:
    """``layers.0.a.weight``, ``layers.0.b.weight``, ``layers.1.a.weight``, …"""
    blocks = []
    for at in range(0, len(weights), in_blocks_of):
        members = zip("abcdef", weights[at : at + in_blocks_of], strict=False)
        blocks.append(nn.ModuleDict({name: module_of(weight, kernel) for name, weight in members}))
    model = nn.Module()
    model.layers = nn.ModuleList(blocks)
    return model


def block_names(layers: Layers) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in layers.names))


def in_block(layers: Layers, block: str) -> list[Unit]:
    return [unit for unit in layers.units if unit.name.startswith(f"{block}.")]


def numbers(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return Packet(tensors).arrays() if tensors else {}


def close(found: float, expected: float, rel: float, abs_: float = 0.0) -> bool:
    """Like ``approx``, but whatever is not finite matches whatever is not."""
    if not math.isfinite(expected):
        return not math.isfinite(found)
    return abs(found - expected) <= max(rel * abs(expected), abs_)


def doubles(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Elements in double precision, in the order of dense tensors."""
    flat = [tensor.detach().to_dense().double().reshape(-1) for tensor in tensors]
    return torch.cat([*flat, torch.zeros(0, dtype=torch.float64)])
