"""How far the weights have moved from where training began: ‖W − W0‖_F/‖W0‖_F, layer by layer.

``"sketch"`` keeps a count sketch of each tensor of W0 (``sketch.py``), 0.5% of the model's bytes.
‖S(W − W0)‖ has a relative standard error of 1/√(2C) for C numbers a tensor, whatever the change looks like:
dense, of rank one, or of single elements; it is zero for weights that have not moved. Tensors no longer than
C are kept whole, so that theirs is exact. ``"exact"`` keeps a copy of all weights.

A layer's drift is that of all its parameters together. Whatever is returned is a sum of squares, so that
shards, devices and ranks add up; each rank keeps the sketch of its own shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from palingenesis.errors import ConfigError
from palingenesis.layers import Layers, Unit
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.sharding import shard_index
from palingenesis.signals.sketch import Sketcher, hashed, prime_dividing_none
from palingenesis.signals.values import Values
from palingenesis.signals.vectors import on_device, spread, wide
from palingenesis.signals.weights import Floats, local_part, share_of, unpacked

NAME = "health/weight_drift"

Mode = Literal["sketch", "exact", "off"]

# Share of the model's bytes that all sketches may take, and bytes that no one misses.
BUDGET, LEAST_BUDGET = 0.005, 1 << 16
# Numbers a tensor beyond which more are no use: the relative standard error is 0.6% there.
WIDEST = 1 << 14
# Of an exact copy, the elements that are compared in one go.
PIECE = 1 << 22
_NUMBER = 4  # bytes; sketches are kept in fp32
# Shares of ranks do not add up to whole numbers exactly.
_ROUNDING = 1e-9
_NAMES = ("drift/moved", "drift/start", "drift/elements", "drift/known")
# Tells sketches with other signs.
_PROBE = hashed(b"drift", 8).tobytes().hex()


def widest_within(lengths: list[int], numbers: float) -> int:
    """The largest width C, a prime, at which ``Σ min(length, C)`` is within a budget.

    Equal widths make the largest error as small as it can be.
    """
    low, high = 2, WIDEST
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(length, middle) for length in lengths) <= numbers:
            low = middle
        else:
            high = middle - 1
    return prime_dividing_none(lengths, low)


def sketches_of(parts: Mapping[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """A sketch of each tensor, in fp32; of one with no more than ``width`` elements itself, flat.

    Args:
        parts: tensors by label, on any devices. Labels choose the signs.
        width: numbers a sketch.

    Returns:
        ``[min(elements, width)]`` by label, on the tensors' devices.
    """
    taken: dict[str, torch.Tensor] = {}
    long: dict[str, torch.Tensor] = {}
    for label, part in parts.items():
        if part.numel() <= width:
            dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
            taken[label] = part.reshape(-1).to(dtype, copy=True)
        else:
            long[label] = part
    for device, labels in _by_device(long).items():
        sketcher = Sketcher({label: long[label].numel() for label in labels}, width, device)
        scratch = sketcher.scratch()
        for label in labels:
            taken[label] = torch.zeros(width, dtype=torch.float32, device=device)
            sketcher.add(label, long[label], taken[label], scratch)
    return taken


def squared_norms(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum of squares of each tensor, ``[]`` in fp64 on its device."""
    return {
        label: square
        for device, labels in _by_device(tensors).items()
        for label, square in zip(
            labels,
            gradient_norms([tensors[label] for label in labels], device).square().unbind(),
            strict=True,
        )
    }


def _by_device(tensors: Mapping[str, torch.Tensor]) -> dict[torch.device, list[str]]:
    labels: dict[torch.device, list[str]] = {}
    for label, tensor in tensors.items():
        labels.setdefault(tensor.device, []).append(label)
    return labels


class _Start(NamedTuple):
    """What is kept of a tensor of W0: its sketch or copy, its squared norm, and what of it is here.

    ``extent`` is the number of elements and the index of the shard.
    """

    kept: torch.Tensor
    square: torch.Tensor
    extent: tuple[int, int]


class Drift:
    """``health/weight_drift/<layer>``, ``_max`` and ``_mean``.

    Args:
        layers: what to read.
        mode: how W0 is remembered. ``"off"``: not at all.
        model_bytes: bytes of all parameters on this rank, of which sketches take 0.5% (64 KiB at least); by
            default those of ``layers``, which are few where most of the model is frozen.
        copies_on: where exact copies lie: ``"cpu"``, or each on its parameter's ``"device"``.
    """

    def __init__(
        self,
        layers: Layers,
        mode: Mode = "sketch",
        *,
        model_bytes: int | None = None,
        copies_on: Literal["cpu", "device"] = "cpu",
    ) -> None:
        self._layers, self._mode, self._copies_on = layers, mode, copies_on
        self._start: dict[str, _Start] = {}
        self._now: dict[str, torch.Tensor] = {}
        lengths = [local_part(unit).numel() for unit in layers.units]
        if model_bytes is None:
            model_bytes = sum(local_part(unit).nbytes for unit in layers.units)
        self.width = widest_within(lengths, max(BUDGET * model_bytes, LEAST_BUDGET) / _NUMBER)

    @property
    def nbytes(self) -> int:
        """What is held."""
        return sum(start.kept.nbytes for start in self._start.values())

    @property
    def relative_error(self) -> float:
        """Relative standard error of a long tensor's drift; 0 for exact copies."""
        return 1 / math.sqrt(2 * self.width) if self._mode == "sketch" else 0.0

    @torch.no_grad()
    def begin(self) -> None:
        """Take every weight that is not remembered yet as where training began: before the first step.

        What ``load_state_dict`` brought stays.
        """
        if self._mode == "off":
            return
        units = {unit.label: unit for unit, _ in self._parts()}
        fresh = {unit.label: part for unit, part in self._parts() if unit.label not in self._start}
        if self._mode == "sketch":
            kept = sketches_of(fresh, self.width)
        else:
            kept = {label: self._copy(part) for label, part in fresh.items()}
        squares = squared_norms(fresh)
        for label, part in fresh.items():
            self._start[label] = _Start(kept[label], squares[label], _extent(units[label], part))

    def follow(self, layers: Layers) -> None:
        """Go on with changed layers. Those that were never seen begin now: what was frozen until now has not
        moved since training began."""
        self._layers = layers
        self.begin()

    @torch.no_grad()
    def compute(self, *, keep: bool = False) -> dict[str, torch.Tensor]:
        """``‖W − W0‖²``, ``‖W0‖²``, the number of elements, and of how many W0 is known: ``[units]`` each.

        Sums over ranks.

        Args:
            keep: keep today's sketches for ``hand_over``, so that another need not make them again.
        """
        if self._mode == "off":
            return {}
        index = {unit.label: i for i, unit in enumerate(self._layers.units)}
        parts = {unit.label: part for unit, part in self._parts()}
        known = {
            label: part
            for label, part in parts.items()
            if label in self._start
            and self._start[label].extent == _extent(self._layers.units[index[label]], part)
        }
        moved = self._moved(known, keep=keep)
        found: dict[str, list[tuple[list[int], torch.Tensor]]] = {name: [] for name in _NAMES}
        for device, labels in _by_device(parts).items():
            members = [index[label] for label in labels]
            shares = [share_of(self._layers.units[i], self._layers) for i in members]
            elements = [parts[label].numel() * share for label, share in zip(labels, shares, strict=True)]
            there = [label in known for label in labels]
            zero = torch.zeros((), dtype=wide(device), device=device)
            changes = [moved.get(label, zero) for label in labels]
            starts = [self._start[label].square if label in known else zero for label in labels]
            starts = [square.to(device, zero.dtype, non_blocking=True) for square in starts]
            counted = on_device(shares, device)
            numbers = (
                torch.stack(changes) * counted,
                torch.stack(starts) * counted,
                on_device(elements, device),
                on_device([n if here else 0.0 for n, here in zip(elements, there, strict=True)], device),
            )
            for name, values in zip(_NAMES, numbers, strict=True):
                found[name].append((members, values))
        vectors: dict[str, torch.Tensor] = {}
        for name in _NAMES:
            vectors |= spread(name, found[name], self._layers)
        return vectors

    def hand_over(self) -> dict[str, torch.Tensor]:
        """The sketches made by the last ``compute(keep=True)``, which are then no longer kept here."""
        now, self._now = self._now, {}
        return now

    def decode(self, arrays: Mapping[str, Floats]) -> Values:
        """The layers' drifts."""
        if self._mode == "off":
            return Values()
        owner = np.array(self._layers.owner, dtype=np.int64)
        size = len(self._layers.names)
        moved, start, elements, known = (
            np.bincount(owner, unpacked(name, arrays, self._layers), size) for name in _NAMES
        )
        drifts: dict[str, float] = {}
        unavailable: dict[str, str] = {}
        for i, layer in enumerate(self._layers.names):
            if known[i] < elements[i] * (1 - _ROUNDING):
                unavailable[f"{NAME}/{layer}"] = "not all of its weights at the start of training are known"
            elif start[i] == 0:
                unavailable[f"{NAME}/{layer}"] = "its weights were zero when training began"
            else:
                with np.errstate(invalid="ignore"):  # infinite weights have no drift: NaN, as it should be
                    drifts[layer] = math.sqrt(moved[i] / start[i])
        if not drifts:
            return Values(unavailable=unavailable)
        values = list(drifts.values())
        scalars = {f"{NAME}_max": float(np.max(values)), f"{NAME}_mean": float(np.mean(values))}
        return Values(scalars, {NAME: drifts}, unavailable)

    def state_dict(self) -> dict[str, Any]:
        """Where training began, for a checkpoint: this rank's tensors, on the CPU. Waits for the device."""
        start = {
            label: {"kept": one.kept.cpu(), "square": float(one.square), "extent": list(one.extent)}
            for label, one in self._start.items()
        }
        return {"mode": self._mode, "width": self.width, "signs": _PROBE, "start": start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where training began.

        Of tensors of which this rank has another shard now, or that were resized, the beginning stays
        unknown: their layers have no drift.

        Raises:
            ConfigError: the state was made with another ``mode``, or sketched another way.
        """
        if self._mode == "off":
            return
        if state["mode"] != self._mode:
            raise ConfigError(
                f"drift={self._mode!r}, but the checkpoint remembers the first weights as "
                f"drift={state['mode']!r}: resume with that"
            )
        if state["signs"] != _PROBE:
            raise ConfigError(
                "the checkpoint's weight sketches were drawn by another version of palingenesis: resume "
                "with that version, or with drift='off'"
            )
        self.width = int(state["width"])
        self._start = {}
        for label, one in state["start"].items():
            elements, shard = one["extent"]
            square = torch.tensor(one["square"], dtype=torch.float64)
            self._start[label] = _Start(one["kept"], square, (int(elements), int(shard)))

    def _parts(self) -> list[tuple[Unit, torch.Tensor]]:
        parts = [(unit, local_part(unit)) for unit in self._layers.units if not unit.elsewhere]
        return [(unit, part) for unit, part in parts if part.is_floating_point()]

    def _copy(self, part: torch.Tensor) -> torch.Tensor:
        flat = part.reshape(-1)
        if self._copies_on == "device" or part.device.type == "cpu":
            return flat.clone()
        copy = flat.to("cpu")
        return copy.pin_memory() if part.device.type == "cuda" else copy

    def _moved(self, parts: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
        """‖W − W0‖² of each part, ``[]`` in fp64."""
        if self._mode == "sketch":
            now = sketches_of(parts, self.width)
            self._now = now if keep else {}
            return squared_norms(
                {
                    label: sketch - self._start[label].kept.to(sketch.device, non_blocking=True)
                    for label, sketch in now.items()
                }
            )
        moved: dict[str, torch.Tensor] = {}
        for label, part in parts.items():
            dtype = torch.promote_types(part.dtype, torch.float32)
            pieces = zip(part.reshape(-1).split(PIECE), self._start[label].kept.split(PIECE), strict=True)
            squares = [
                gradient_norms(
                    [now.to(dtype) - before.to(part.device, dtype, non_blocking=True)], part.device
                ).square()
                for now, before in pieces
            ]
            moved[label] = torch.cat(squares).sum()
        return moved


def _extent(unit: Unit, part: torch.Tensor) -> tuple[int, int]:
    return part.numel(), shard_index(unit.parameter)
