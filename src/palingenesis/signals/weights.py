"""The size of the weights, block by block; and how families of weight signals read and pack what they find.

``health/weight_norm/<block>`` is the RMS of a block's elements, so that a large block is not a heavy one.
``health/weight_norm_ratio`` is the largest over the smallest RMS among matrices of equal shape that have the
same name in different blocks, for the name where it is largest. ``health/gw_ratio/<block>`` is ‖g‖/‖W‖ over
a block's parameters. Norms are exact (relative error 1e-5; see ``norms.py``).

Every family of this kind returns sums over units: vectors with one entry a unit of ``Layers``, which add up
over devices and, times ``share_of`` a unit, over ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.conv import _ConvNd

from palingenesis.layers import Layers, Unit, block_of, is_sharded, peel
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.sharding import local, meeting_device, shard_weight
from palingenesis.signals.values import Values
from palingenesis.signals.vectors import on_device, spread
from palingenesis.signals.vectors import wide as wide

Floats = NDArray[np.float64]
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

# A matrix has at least this many rows and columns; a smaller one cannot collapse much.
SMALLEST = 8

# Embeddings and output heads, by any component of the layer's name.
OUTSIDE = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|(\w+_)?head|classifier|score)($|\.|\[)")


def local_part(unit: Unit, tensor: torch.Tensor | None = None) -> torch.Tensor:
    """A unit's elements that are on this rank, in the shape of the fused part or the shard; no copy.

    Args:
        unit: the unit.
        tensor: of the parameter's shape, such as its gradient; by default the parameter itself.
    """
    here = local(unit.parameter.detach() if tensor is None else tensor)
    return here if unit.part is None or unit.elsewhere else unit.part.of(here)


def share_of(unit: Unit, layers: Layers) -> float:
    """What a sum over this rank's part of a unit counts for in the sum over ranks."""
    return shard_weight(unit.parameter, unit.holders) if layers.together else 1.0


def packed(name: str, found: Mapping[int, torch.Tensor], layers: Layers) -> dict[str, torch.Tensor]:
    """Values of units as vectors ``[units]`` in fp64, one a device; one alone where ranks are ``together``.

    Args:
        name: what they are; the keys are ``<name>/<number>``.
        found: a value ``[]`` by the unit's index; 0 for the rest.
        layers: whose units.
    """
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    meeting = meeting_device(layers) if layers.together else None
    if meeting is not None:
        by_device[meeting] = {}
    for i, value in found.items():
        device = meeting or value.device
        by_device.setdefault(device, {})[i] = value.to(device, wide(device), non_blocking=True)
    vectors = {}
    for number, (device, values) in enumerate(by_device.items()):
        zero = torch.zeros((), dtype=wide(device), device=device)
        if layers.units:
            each = [values.get(i, zero) for i in range(len(layers.units))]
            vectors[f"{name}/{number}"] = torch.stack(each)
    return vectors


def unpacked(name: str, arrays: Mapping[str, Floats], layers: Layers) -> Floats:
    """The values of ``packed``, ``[units]``: what lay on different devices, added up."""
    total = np.zeros(len(layers.units))
    for key, array in arrays.items():
        if key.rpartition("/")[0] == name:
            total = total + array
    return total


class Shards(NamedTuple):
    """Process groups over which products with a matrix are summed, or of whose matrices the worst counts."""

    summed: tuple[Any, ...] = ()
    largest: tuple[Any, ...] = ()

    def sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each tensor summed over the groups, in one all-reduce a group."""
        if not self.summed:
            return tensors
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        for group in self.summed:
            dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]

    def worst(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The largest of each number of the pairs over the groups; infinite where one is NaN."""
        if not self.largest:
            return pairs
        flat = torch.stack([number for pair in pairs for number in pair]).nan_to_num_(math.inf)
        for group in self.largest:
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
        return [(value, residual) for value, residual in flat.view(-1, 2).unbind()]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A unit whose weight is a matrix, or a stack of them (``[E, m, n]``, one an expert).

    Convolutions are matrices ``[out, in·kh·kw]``, also those whose weight is kept ``[in, out, kh, kw]``.
    """

    unit: Unit
    index: int
    convolution: bool
    stacked: bool
    transposed: bool = False

    def local(self) -> torch.Tensor:
        """What of the weight is here: ``[m, n]``, or ``[E, m, n]`` for a stack; a view where there is one."""
        part = local_part(self.unit)
        if self.unit.part is not None and self.unit.part.view is not None:
            part = part.reshape(-1, *self.unit.parameter.shape[1:])
        if self.transposed:
            part = part.transpose(0, 1)
        return part if part.dim() == 2 or self.stacked else part.reshape(part.shape[0], -1)

    def tall(self) -> torch.Tensor:
        """The same, transposed if ``WᵀW`` is then smaller, or the one of which shards hold summands."""
        matrix = self.local()
        for dim in _sharded_dims(self.unit.parameter):
            if not (self.stacked and dim == 0):
                return matrix if self.convolution or dim == matrix.dim() - 2 else matrix.mT
        return matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT

    def sides(self) -> list[int]:
        """Rows and columns of the whole matrix."""
        shape = list(self.unit.parameter.shape)
        part = self.unit.part
        if part is not None:
            whole = shape
            shape = list(part.of(torch.empty(whole, device="meta")).shape)
            if part.view is not None:
                shape = [math.prod(shape) // math.prod(whole[1:]), *whole[1:]]
        if self.transposed:
            shape = [shape[1], shape[0], *shape[2:]]
        return shape[1:] if self.stacked else [shape[0], math.prod(shape[1:])]

    def shards(self) -> Shards | str | None:
        """How a matrix lies over ranks; in words why that is not read; ``None`` if none of it is here."""
        parameter: Any = self.unit.parameter
        if not is_sharded(parameter):
            return Shards()
        if parameter.device_mesh.get_coordinate() is None:
            return None
        if any(place.is_partial() for place in parameter.placements):
            return "kept as partial sums"
        dims = _sharded_dims(parameter)
        if len(dims) > 1:
            return "cut over ranks along two dimensions at once"
        if self.convolution and dims - {0}:
            return "a convolution cut over ranks other than by its outputs"
        places = enumerate(parameter.placements)
        groups = tuple(parameter.device_mesh.get_group(i) for i, place in places if not place.is_replicate())
        return Shards(largest=groups) if self.stacked and dims == {0} else Shards(summed=groups)

    @property
    def holders(self) -> int:
        """How many ranks find the value of a unit."""
        parameter: Any = self.unit.parameter
        return (
            max(self.unit.holders, parameter.device_mesh.size())
            if is_sharded(parameter)
            else self.unit.holders
        )


def matrices(layers: Layers, model: nn.Module | None = None) -> list[Matrix]:
    """The matrices among the units with at least ``SMALLEST`` rows and columns.

    Args:
        layers: whose units.
        model: tells convolutions from stacks; without it, a tensor of three dimensions is taken for a stack.
    """
    # Of a transposed one in groups, inputs and outputs cannot be told apart by dimension.
    kernels = {
        id(parameter): module.transposed and module.groups == 1
        for module in (() if model is None else model.modules())
        if isinstance(module, _ConvNd)
        for parameter in module.parameters()
    }
    found = []
    for i, unit in enumerate(layers.units):
        parameter = unit.parameter
        if parameter.dim() < 2 or not parameter.is_floating_point() or not parameter.numel():
            continue
        convolution = id(parameter) in kernels
        stacked = parameter.dim() == 3 and unit.part is None and not convolution
        transposed = kernels.get(id(parameter), False) and not is_sharded(parameter)
        one = Matrix(unit, i, convolution, stacked, transposed)
        if min(one.sides()) >= SMALLEST:
            found.append(one)
    return found


def norms_of(
    members: list[Matrix], device: torch.device, shards: Shards, known: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    """Frobenius norms of whole matrices in fp64: ``[1, 1]`` for each, ``[E, 1, 1]`` for a stack.

    ``known`` are norms of what is here, by the unit's index.
    """
    norms: dict[Matrix, torch.Tensor] = {}
    unknown: dict[Matrix, list[torch.Tensor]] = {}
    for one in members:
        if one.stacked:
            unknown[one] = list(one.local().unbind(0))
        elif one.index in known:
            norms[one] = known[one.index].view(1)
        else:
            unknown[one] = [one.local()]
    flat = [matrix for own in unknown.values() for matrix in own]
    found = gradient_norms(flat, device) if flat else torch.zeros(0, dtype=wide(device), device=device)
    norms |= zip(unknown, found.split([len(own) for own in unknown.values()]), strict=True)
    listed = [norms[one] for one in members]
    if shards.summed:
        listed = [square.sqrt() for square in shards.sum([norm.square() for norm in listed])]
    return [
        norm[:, None, None] if one.stacked else norm[:, None]
        for one, norm in zip(members, listed, strict=True)
    ]


def outside_of_blocks(layers: Layers, model: nn.Module | None = None) -> set[str]:
    """Layers that are embeddings or output heads: by what they are, if the model is given, and by name."""
    modules: list[nn.Module] = []
    if model is not None:
        modules += [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
        head = getattr(peel(model), "get_output_embeddings", lambda: None)()
        modules += [head] if isinstance(head, nn.Module) else []
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    return {unit.layer for unit in layers.units if OUTSIDE.search(unit.layer) or id(unit.parameter) in known}


def _sharded_dims(parameter: Any) -> set[int]:
    """Dimensions along which a tensor is cut over ranks."""
    if not is_sharded(parameter):
        return set()
    return {place.dim for place in parameter.placements if not place.is_replicate()}


class WeightNorms:
    """Block norms, their imbalance, and gradients against weights.

    Args:
        layers: what to read.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._blocks = [block_of(layer) for layer in layers.names]
        self._alike = _alike(layers)
        # Norm of what is here of each unit, as last computed; by the unit's index.
        self.norms: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def compute(self) -> dict[str, torch.Tensor]:
        """Squared norms and numbers of elements, ``[units]``: sums over ranks."""
        by_device: dict[torch.device, list[int]] = {}
        for i, unit in enumerate(self._layers.units):
            by_device.setdefault(local(unit.parameter).device, []).append(i)
        squares: list[tuple[list[int], torch.Tensor]] = []
        counts: list[tuple[list[int], torch.Tensor]] = []
        for device, members in by_device.items():
            units = [self._layers.units[i] for i in members]
            parts = [local_part(unit) for unit in units]
            shares = [share_of(unit, self._layers) for unit in units]
            norms = gradient_norms(parts, device)
            self.norms |= zip(members, norms.unbind(), strict=True)
            squares.append((members, norms.square() * on_device(shares, device)))
            elements = [part.numel() * share for part, share in zip(parts, shares, strict=True)]
            counts.append((members, on_device(elements, device)))
        tensors = spread("weights/square", squares, self._layers)
        return tensors | spread("weights/count", counts, self._layers)

    def decode(
        self,
        arrays: Mapping[str, Floats],
        of_gradients: Floats | None = None,
        absent: NDArray[np.bool_] | None = None,
    ) -> Values:
        """The blocks' values.

        Args:
            arrays: what ``compute`` returned, summed over ranks.
            of_gradients: global norm of each layer's gradient at the same step, ``[layers]``.
            absent: layers that had no gradient at all, ``[layers]``; a block of such has no ``gw_ratio``.
        """
        squares = unpacked("weights/square", arrays, self._layers)
        counts = unpacked("weights/count", arrays, self._layers)
        owner = self._layers.owner
        square: dict[str, float] = {}
        count: dict[str, float] = {}
        for i, layer in enumerate(owner):
            block = self._blocks[layer]
            square[block] = square.get(block, 0.0) + squares[i]
            count[block] = count.get(block, 0.0) + counts[i]
        layers = {
            "health/weight_norm": {
                block: math.sqrt(square[block] / count[block]) for block in square if count[block]
            }
        }
        scalars = {}
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self._imbalance(np.sqrt(squares / counts), counts)
        if ratio is not None:
            scalars["health/weight_norm_ratio"] = ratio
        unavailable: dict[str, str] = {}
        if of_gradients is not None:
            layers["health/gw_ratio"] = self._against(of_gradients, absent, square, unavailable)
        return Values(scalars, {name: found for name, found in layers.items() if found}, unavailable)

    def _imbalance(self, rms: Floats, counts: Floats) -> float | None:
        """Largest over smallest; infinite where one is zero and another is not."""
        ratios = []
        for members in self._alike:
            values = rms[[i for i in members if counts[i] > 0]]
            if len(values) < 2:
                continue
            if values.max() == 0:
                continue  # nothing to compare yet, as in adapters that start at zero
            ratios.append(float(values.max() / values.min()) if values.min() != 0 else math.inf)
        return float(np.max(ratios)) if ratios else None

    def _against(
        self,
        norms: Floats,
        absent: NDArray[np.bool_] | None,
        square: dict[str, float],
        unavailable: dict[str, str],
    ) -> dict[str, float]:
        gradient: dict[str, float] = {}
        for layer, block in enumerate(self._blocks):
            if absent is None or not absent[layer]:
                # hypot: a gradient's square may leave fp64 where its norm does not.
                gradient[block] = math.hypot(gradient.get(block, 0.0), norms[layer])
        found = {}
        for block, norm in gradient.items():
            if square[block] == 0:
                unavailable[f"health/gw_ratio/{block}"] = "every weight of the block is zero"
            elif not math.isfinite(norm):
                unavailable[f"health/gw_ratio/{block}"] = "its gradient is not finite"
            else:
                found[block] = norm / math.sqrt(square[block])
        return found


def _alike(layers: Layers) -> list[list[int]]:
    """Indices of units that are matrices of one shape with one name in different blocks."""
    groups: dict[tuple[str, torch.Size], list[int]] = {}
    away: dict[str, list[int]] = {}
    for i, unit in enumerate(layers.units):
        kind = _kind(unit)
        if kind is None:
            continue
        if unit.elsewhere:
            away.setdefault(kind, []).append(i)
        elif unit.parameter.dim() >= 2:
            shape = unit.parameter.shape if is_sharded(unit.parameter) else local_part(unit).shape
            groups.setdefault((kind, shape), []).append(i)
    for kind, members in away.items():
        shapes = [key for key in groups if key[0] == kind]
        if len(shapes) == 1:  # else it is not known here what those of other ranks are
            groups[shapes[0]] += members
    return [members for members in groups.values() if len(members) > 1]


def _kind(unit: Unit) -> str | None:
    """The unit's label with its block's number taken out; ``None`` outside of numbered blocks."""
    block = block_of(unit.layer)
    stem, _, number = block.rpartition(".")
    if not number.isdecimal() or not unit.label.startswith(f"{block}."):
        return None
    return f"{stem}.*{unit.label[len(block) :]}"
