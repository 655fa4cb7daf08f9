"""Tensors of which every rank holds a shard: local sums, and the one all-reduce that makes them global.

A squared norm is a sum over elements, so each rank sums over its own shard, divides by how many ranks hold
the same elements (``shard_weight``), and one all-reduce over all ranks of the run adds everything up. Groups
differ from mesh to mesh (FSDP, HSDP, tensor and expert parallelism may meet in one model); dividing by the
number of replicas makes one sum over the world right for all of them.

What every rank has to do alike: make the monitor (see ``meeting.py``), call ``step`` equally often, and
change which parameters train between the same two checks. A rank that does not would keep the others waiting
for ever, so all of them pass a gate before the reduction, or none.

Squares are summed in double precision: norms from 1e-154 to 1e154 keep their squares, which holds for every
fp32, bf16 and fp16 tensor, so that a sum is zero only where every element on every rank is. NaN and infinity
pass through the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from palingenesis.layers import Layers, Unit, is_sharded
from palingenesis.signals.gate import Gate
from palingenesis.signals.guard import Guard

__all__ = [
    "JointNorms",
    "RootWeights",
    "is_sharded",
    "local",
    "local_gradients",
    "meeting_device",
    "shard_index",
    "shard_weight",
    "sum_over_ranks",
    "to_device",
]

# Steps that wait for one reduction. It bounds the memory: 64 rows of 1,000 norms are half a megabyte.
MOST_ROWS = 64


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a ``DTensor`` (empty where it has none), and any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    shard: Any = tensor.to_local()  # type: ignore[attr-defined]
    # The result of a collective that is still under way waits for it in its own way.
    found: torch.Tensor = shard.wait() if hasattr(shard, "trigger_wait") else shard
    return found


def shard_weight(tensor: torch.Tensor, holders: int = 1) -> float:
    """What this rank's sum over ``local(tensor)`` counts for in a sum over all ranks: 1 over its replicas.

    Args:
        tensor: sharded or not. A dimension of its mesh in which it is a ``Partial`` sum counts as replicated:
            ``local_gradients`` has made it so.
        holders: how many ranks have the tensor, or a shard of it (``Unit.holders``).

    Returns:
        1/replicas; 0 on a rank outside of the tensor's mesh. A tensor that is no ``DTensor`` is whole on
        each of its holders: their sum is the mean over them.
    """
    if not is_sharded(tensor):
        return 1.0 / holders
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    if mesh.get_coordinate() is None:
        return 0.0
    copies: int = math.prod(mesh.size(dim) for dim in _dimensions(tensor, "is_replicate", "is_partial"))
    # Several meshes may hold the same parameter, such as one for each of the groups that DDP joins.
    meshes: float = max(holders / mesh.size(), 1.0)
    return 1.0 / (copies * meshes)


def _dimensions(tensor: Any, *kinds: str) -> list[int]:
    """Dimensions of a ``DTensor``'s mesh whose placement is one of some kinds.

    ``_StridedShard`` does not answer to ``is_shard``, so what is neither replicated nor partial is sharded.
    """
    return [
        dim
        for dim, placement in enumerate(tensor.placements)
        if any(getattr(placement, kind)() for kind in kinds)
    ]


def shard_index(tensor: torch.Tensor) -> int:
    """Which shard of a tensor this rank has: equal on replicas of one another; -1 for none at all."""
    if not is_sharded(tensor):
        return 0
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    place = mesh.get_coordinate()
    if place is None:
        return -1
    index = 0
    replicated = _dimensions(tensor, "is_replicate")
    for dim, at in enumerate(place):
        if dim not in replicated:
            index = index * int(mesh.size(dim)) + int(at)
    return index


def local_gradients(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Each gradient's local shard.

    A gradient may be left as summands (``Partial``), as those of norm layers under sequence parallelism are:
    their squares cannot be added, so the summands are: one all-reduce for all gradients of a mesh.
    """
    found = [None if gradient is None else local(gradient) for gradient in gradients]
    unsummed: dict[Any, list[int]] = {}
    for i, gradient in enumerate(gradients):
        if gradient is not None and is_sharded(gradient):
            dims = _dimensions(gradient, "is_partial")
            mesh: Any = gradient.device_mesh  # type: ignore[attr-defined]
            if dims and mesh.get_coordinate() is not None:
                kinds = tuple(gradient.placements[dim].reduce_op for dim in dims)  # type: ignore[attr-defined]
                unsummed.setdefault((mesh, tuple(dims), kinds, gradient.dtype, gradient.device), []).append(i)
    for (mesh, dims, kinds, *_), members in unsummed.items():
        for i, whole in zip(members, _summed(mesh, dims, kinds, [found[i] for i in members]), strict=True):
            found[i] = whole
    return found


def _summed(mesh: Any, dims: tuple[int, ...], kinds: tuple[str, ...], parts: list[Any]) -> list[torch.Tensor]:
    """Copies of the summands, reduced over some dimensions of their mesh."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    for dim, kind in zip(dims, kinds, strict=True):
        operation = getattr(dist.ReduceOp, "SUM" if kind == "avg" else kind.upper())
        dist.all_reduce(flat, operation, group=mesh.get_group(dim))
        if kind == "avg":
            flat /= mesh.size(dim)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def meeting_device(layers: Layers) -> torch.device:
    """Where tensors have to lie to be reduced: the mesh's device, even if parameters are offloaded."""
    sharded: list[Any] = [unit.parameter for unit in layers.units if is_sharded(unit.parameter)]
    kinds = [parameter.device_mesh.device_type for parameter in sharded]
    if not kinds:
        return layers.units[0].parameter.device if layers.units else torch.device("cpu")
    if kinds[0] == "cpu":
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def sum_over_ranks(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Sums over all ranks, packed into one vector: one all-reduce, which no host waits for on CUDA.

    Args:
        tensors: of the same names and shapes on every rank, on any devices. What is replicated must have been
            multiplied by its ``shard_weight``.
        device: see :func:`meeting_device`.

    Returns:
        fp64 on ``device``, in the same shapes.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors.values()]
    if not flat:
        return {}
    packed = torch.cat([part.to(device, torch.float64, non_blocking=True) for part in flat])
    dist.all_reduce(packed)
    pieces = packed.split([part.numel() for part in flat])
    return {
        name: piece.view(tensor.shape) for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
    }


class RootWeights:
    """Roots of the ``shard_weight`` of gradients, on their device, remembered as long as they stay the same.

    Args:
        units: whose gradients they are.
        device: where the gradients lie.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._holders = [unit.holders for unit in units]
        self._device = device
        self._placed: list[Any] = [None] * len(units)
        # Of gradients that are not there yet: any number will do.
        self._roots = [1.0] * len(units)
        self._on_device: torch.Tensor | None = None

    def of(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """``[len(gradients)]``, fp64."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            placed = getattr(gradient, "placements", ())
            if placed != self._placed[i]:
                self._placed[i] = placed
                self._roots[i] = math.sqrt(shard_weight(gradient, self._holders[i]))
                self._on_device = None
        if self._on_device is None:
            self._on_device = to_device(self._roots, self._device)
        return self._on_device


def to_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Numbers of the host on a device, in fp64, without waiting for it."""
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(device, non_blocking=True)


class JointNorms:
    """The norms of units that are spread over ranks: every step's local ones, made global at the check.

    The guard needs every step's global norms. Reducing at every step would make each step wait for the
    slowest rank; kept on the device until the check, all steps together cost one reduction, and are exact.
    A step's row is chosen by its number, so that the ranks' vectors have one size and one meaning even if a
    step failed on one of them.

    Args:
        layers: those the ranks agreed on.
        guard: fold every step, not only the check's own.
        interval: steps between two checks.
    """

    def __init__(self, layers: Layers, *, guard: bool, interval: int) -> None:
        size = len(layers.units)
        self._device = meeting_device(layers)
        self._gate = Gate("norms", repr(([unit.label for unit in layers.units], guard, interval)))
        self._rows = min(interval, MOST_ROWS) if guard else 1
        self._early = guard and interval > self._rows
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._local = torch.zeros(self._rows, size, dtype=torch.float64, device=self._device)
            # On how many ranks a row is filled, and the least of it since the last check.
            self._filled = torch.zeros(self._rows, 1, dtype=torch.float64, device=self._device)
        self._least: torch.Tensor | None = None
        self._row_of: dict[int, int] = {}
        self._places: dict[bytes, torch.Tensor] = {}
        self.guard = Guard(size, self._local) if guard else None
        # The global norms of the step last looked at, `[size]`; known after a reduction.
        self.norms: torch.Tensor | None = None

    def begin(self, step: int) -> None:
        """Make room for a step's norms. Where checks are far apart, the rows are reduced in between."""
        if self._early and step % self._rows == 0:
            self._reduce({})
        self.norms = None
        row = step % self._rows
        self._row_of = {at: taken for at, taken in self._row_of.items() if taken != row}
        self._row_of[step] = row
        self._current = row
        self._filled[row] = 0.0

    def put(self, members: NDArray[np.int64], norms: torch.Tensor) -> None:
        """Some units' local norms, each times the root of its ``shard_weight``."""
        row = self._local[self._current]
        norms = norms.to(self._device, torch.float64, non_blocking=True)
        if len(members) == len(row):
            row.copy_(norms)
            return
        key = members.tobytes()
        if key not in self._places:
            self._places[key] = torch.from_numpy(members).to(self._device, non_blocking=True)
        row.index_copy_(0, self._places[key], norms)

    def end(self) -> None:
        """All of the step's norms are there."""
        self._filled[self._current] = 1.0

    def add(self, tensors: dict[str, torch.Tensor], absent: NDArray[np.bool_]) -> int:
        """Reduce, and add what is then known of all ranks to a packet's tensors.

        Args:
            tensors: gain ``norms/0``, ``guard/0``, ``holding`` (how many ranks have a gradient of each unit),
                ``complete`` (how many filled every row). If not all ranks come, only the last one, as 0.
            absent: which units have no gradient here.

        Returns:
            How many steps the guard folded.
        """
        holding = to_device((~absent).astype(np.float64).tolist(), self._device)
        found = self._reduce({"holding": holding})
        tensors |= found
        if self._least is not None:
            tensors["complete"], self._least = self._least, None
        if self.norms is not None:
            tensors["norms/0"] = self.norms
        if self.guard is None:
            return 0
        tensors["guard/0"] = self.guard.values
        return self.guard.steps

    def leave(self) -> None:
        """This rank reduces nothing any more; the others need not wait for it."""
        self._gate.leave()

    def _reduce(self, along: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self._gate.passes():
            self._least = torch.zeros(1, dtype=torch.float64, device=self._device)
            self._row_of = {}
            return {}
        found = sum_over_ranks(
            {"squares": self._local.square(), "filled": self._filled, **along}, self._device
        )
        norms, filled = found.pop("squares").sqrt_(), found.pop("filled")
        for step, row in sorted(self._row_of.items()):
            self.norms = norms[row]
            self._least = filled[row] if self._least is None else torch.minimum(self._least, filled[row])
            if self.guard is not None:
                self.guard.fold(step, norms[row])
        self._row_of = {}
        self._filled.zero_()
        return found
