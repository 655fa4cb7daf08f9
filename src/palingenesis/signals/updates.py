"""What one optimizer step did to the weights.

``health/update_ratio/<block>`` is ‖W_after − W_before‖/‖W_before‖ over a block's parameters, from count
sketches taken just before the step and after it (``sketch.py``; relative standard error 1/√(2C) a tensor for
C numbers, exact for tensors no longer than C; blocks of many tensors are better). A sketch adds n/C elements
in fp32, which rounds by about 2⁻²⁵·√(n/C) of ‖W‖, mostly below 1e-6: a ratio that is not well above this
is withheld. One of exactly zero means that nothing moved.

``health/update_lost_pct`` is the share of elements with a non-zero gradient, and a learning rate above 0,
whose stored value is the same after the step: their update was smaller than half the distance to the next
number of the parameter's dtype. That is what stalls training in pure bf16, where this distance is 0.4–0.8%
of the value. It is counted on a fixed private sample; ``health/update_lost_pct_se`` is its standard error
(stratified by tensor, ratio estimator: Cochran, *Sampling Techniques*, §6.11). Where an optimizer keeps
fp32 master weights, an update that is not stored yet is not lost: the number then says how often the stored
weights move.

Nothing is held but between ``arm`` and ``compute``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from palingenesis.layers import Layers, Unit, block_of
from palingenesis.signals.drift import sketches_of, squared_norms, widest_within
from palingenesis.signals.sketch import hashed
from palingenesis.signals.values import Values
from palingenesis.signals.vectors import on_device, spread
from palingenesis.signals.weights import Floats, local_part, share_of, unpacked

RATIO, LOST = "health/update_ratio", "health/update_lost_pct"

# Share of the layers' bytes that sketches may take, and samples as much again; bytes that no one misses.
BUDGET, LEAST_BUDGET = 0.0025, 1 << 14
# Most elements of a tensor that are looked at: of 50 tensors, a half is known to 0.3%.
SAMPLE = 1 << 9
_NUMBER = 4  # bytes of a sketched number
_PLACES = 31  # bits of a place in a tensor
# Relative rounding of one addition in fp32, squared; how much larger a squared change has to be than of all.
_ROUNDING, _CLEAR = 2.0**-50, 9.0

# ‖ΔW‖², ‖W‖² and the square of what rounding adds to ‖ΔW‖; then estimated numbers of elements with a
# gradient, of those of them that did not change, and the variance of lost − p·touched, a polynomial in p.
_NAMES = ("moved", "before", "rounding", "touched", "lost", "variance_0", "variance_1", "variance_2")


class _Sample(NamedTuple):
    """Sampled elements of one tensor before the step: values ``[n]``, and whether they have a gradient."""

    before: torch.Tensor
    touched: torch.Tensor


@dataclass(frozen=True)
class _Armed:
    """What is remembered of the weights before a step, by unit label."""

    step: int
    sketches: dict[str, torch.Tensor]
    squares: dict[str, torch.Tensor]
    samples: dict[str, _Sample]


class Updates:
    """What single steps do: ``arm`` just before the optimizer's step, ``compute`` after it.

    Args:
        layers: what to read.
        optimizers: those that step the parameters, for their learning rates. Without any, every parameter
            with a gradient is taken to be updated.
        width: numbers a sketch, where ``arm`` is given sketches; by default what 0.25% of the bytes allow.
    """

    def __init__(self, layers: Layers, optimizers: Sequence[Any] = (), *, width: int | None = None) -> None:
        self._layers, self._optimizers = layers, optimizers
        parts = [local_part(unit) for unit in layers.units]
        budget = max(BUDGET * sum(part.nbytes for part in parts), LEAST_BUDGET)
        self.width = width or widest_within([part.numel() for part in parts], budget / _NUMBER)
        self._sample = _largest_sample([(part.numel(), part.element_size() + 1) for part in parts], budget)
        drawn = np.frombuffer(hashed(b"places", 4 * SAMPLE).tobytes(), dtype=np.uint32)
        self._places = torch.from_numpy((drawn >> (32 - _PLACES)).astype(np.int64))
        self._armed: _Armed | None = None

    @property
    def nbytes(self) -> int:
        """What is held now."""
        if self._armed is None:
            return 0
        held = [*self._armed.sketches.values(), *(x for one in self._armed.samples.values() for x in one)]
        return sum(tensor.nbytes for tensor in held)

    @torch.no_grad()
    def arm(
        self,
        step: int,
        norms: Mapping[int, torch.Tensor] | None = None,
        sketches: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Remember the weights before a step, with its gradients still there.

        Args:
            step: the step about to be made.
            norms: ``WeightNorms.norms`` of the same weights, if they are known already.
            sketches: ``Drift.hand_over`` of the same weights, if they were made already; those of
                another ``width`` are made anew.
        """
        parts = self._parts()
        ready = {
            label: sketch
            for label, sketch in (sketches or {}).items()
            if label in parts and sketch.numel() == min(parts[label].numel(), self.width)
        }
        taken = sketches_of({label: part for label, part in parts.items() if label not in ready}, self.width)
        known = {} if norms is None else {self._layers.units[i].label: norm for i, norm in norms.items()}
        squares = squared_norms({label: part for label, part in parts.items() if label not in known})
        squares |= {label: known[label].square() for label in parts if label in known}
        rates = self._learning_rates()
        samples: dict[str, _Sample] = {}
        for unit in self._layers.units:
            gradient = unit.parameter.grad
            if unit.label not in parts or gradient is None or not rates.get(id(unit.parameter), not rates):
                continue
            part = parts[unit.label]
            at = self._chosen(unit.label, part)
            samples[unit.label] = _Sample(_values_at(part, at), _touched(unit, gradient, at))
        self._armed = _Armed(step, taken | ready, squares, samples)

    @torch.no_grad()
    def compute(self, step: int) -> dict[str, torch.Tensor]:
        """What the armed step changed; nothing if none was, or if ``step`` is not the one right after it.

        Returns:
            the vectors of ``_NAMES``, ``[units]`` each: sums over ranks.
        """
        armed, self._armed = self._armed, None
        if armed is None or step != armed.step + 1:
            return {}
        parts = {
            label: part
            for label, part in self._parts().items()
            if label in armed.sketches and armed.sketches[label].numel() == min(part.numel(), self.width)
        }
        now = sketches_of(parts, self.width)
        moved = squared_norms({label: sketch - armed.sketches[label] for label, sketch in now.items()})
        by_device: dict[torch.device, list[int]] = {}
        for i, unit in enumerate(self._layers.units):
            if unit.label in parts:
                by_device.setdefault(parts[unit.label].device, []).append(i)
        found: dict[str, list[tuple[list[int], torch.Tensor]]] = {name: [] for name in _NAMES}
        for device, members in by_device.items():
            units = [self._layers.units[i] for i in members]
            labels = [unit.label for unit in units]
            shares = on_device([share_of(unit, self._layers) for unit in units], device)
            before = torch.stack([armed.squares[label] for label in labels])
            lengths = [parts[label].numel() / self.width for label in labels]
            rounding = on_device([_ROUNDING * length if length > 1 else 0.0 for length in lengths], device)
            numbers = {
                "moved": torch.stack([moved[label] for label in labels]),
                "before": before,
                "rounding": before * rounding,
                **self._lost([parts[label] for label in labels], labels, armed.samples),
            }
            for name, vector in numbers.items():
                found[name].append((members, vector * shares))
        vectors: dict[str, torch.Tensor] = {}
        for name in _NAMES:
            vectors |= spread(f"updates/{name}", found[name], self._layers)
        return vectors

    def decode(self, arrays: Mapping[str, Floats], *, skipped: bool = False) -> Values:
        """The blocks' ratios, and the share of updates that were lost.

        Args:
            arrays: what ``compute`` returned, summed over ranks.
            skipped: the optimizer did not step after all, as a gradient scaler decides on overflow.
        """
        if not any(key.startswith("updates/") for key in arrays):
            return Values()
        if skipped:
            reason = "the optimizer step that was looked at was skipped"
            return Values(unavailable={RATIO: reason, LOST: reason})
        numbers = {name: unpacked(f"updates/{name}", arrays, self._layers) for name in _NAMES}
        ratios, unavailable = self._ratios(numbers["moved"], numbers["before"], numbers["rounding"])
        touched, lost, *variance = (float(numbers[name].sum()) for name in _NAMES[3:])
        scalars = {}
        if touched:
            share = lost / touched
            square = variance[0] - 2 * share * variance[1] + share**2 * variance[2]
            scalars[LOST] = 100 * share
            scalars[f"{LOST}_se"] = 100 * math.sqrt(max(square, 0.0)) / touched
        else:
            unavailable[LOST] = (
                "no sampled element could move: it had no gradient (left), or a learning rate of 0"
            )
        return Values(scalars, {RATIO: ratios} if ratios else {}, unavailable)

    def _ratios(
        self, moved: Floats, before: Floats, rounding: Floats
    ) -> tuple[dict[str, float], dict[str, str]]:
        """The blocks' ratios, and why others have none."""
        blocks = [block_of(self._layers.names[layer]) for layer in self._layers.owner]
        sums = {block: np.zeros(3) for block in blocks}
        for block, *squares in zip(blocks, moved, before, rounding, strict=True):
            sums[block] += squares
        ratios: dict[str, float] = {}
        unavailable: dict[str, str] = {}
        for block, (change, weight, noise) in sums.items():
            if weight == 0:
                unavailable[f"{RATIO}/{block}"] = "every weight of the block was zero"
            elif 0 < change < _CLEAR * noise:
                unavailable[f"{RATIO}/{block}"] = "the step is too small to be told from rounding"
            else:
                ratios[block] = math.sqrt(change / weight)
        return ratios, unavailable

    def _parts(self) -> dict[str, torch.Tensor]:
        parts = {unit.label: local_part(unit) for unit in self._layers.units if not unit.elsewhere}
        return {label: part for label, part in parts.items() if part.numel() and part.is_floating_point()}

    def _learning_rates(self) -> dict[int, bool]:
        """Whether the learning rate is above 0, by the parameter's id. One on a device is not read."""
        return {
            id(parameter): _above_zero(group.get("lr"))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def _chosen(self, label: str, part: torch.Tensor) -> torch.Tensor:
        """Places of the sample in the tensor as if flat, the same at every call; all of a short tensor."""
        elements = part.numel()
        if elements <= self._sample:
            return torch.arange(elements, device=part.device)
        turn = int.from_bytes(hashed(label.encode(), 4).tobytes(), "little") >> (32 - _PLACES)
        places = self._places[: self._sample].to(part.device, non_blocking=True) + turn
        return places.bitwise_and_((1 << _PLACES) - 1).mul_(elements).bitwise_right_shift_(_PLACES)

    def _lost(
        self, parts: list[torch.Tensor], labels: list[str], samples: Mapping[str, _Sample]
    ) -> dict[str, torch.Tensor]:
        """Numbers of elements, estimated from samples, and coefficients of their variance: ``[parts]``."""
        device = parts[0].device
        nothing = torch.zeros(1, dtype=torch.bool, device=device)
        touched: list[torch.Tensor] = []
        lost: list[torch.Tensor] = []
        for part, label in zip(parts, labels, strict=True):
            sample = samples.get(label)
            touched.append(nothing if sample is None else sample.touched)
            same = nothing if sample is None else _values_at(part, self._chosen(label, part)) == sample.before
            lost.append(touched[-1] & same)
        sizes = [one.numel() for one in touched]
        elements = [part.numel() for part in parts]
        # Where all elements are looked at, nothing is estimated.
        weights = [n * n / size if size < n else 0.0 for n, size in zip(elements, sizes, strict=True)]
        count, size, weight = (on_device(numbers, device) for numbers in (elements, sizes, weights))
        lengths = torch.tensor(sizes, device="cpu").to(device, non_blocking=True)
        # `unsafe` leaves out a check that would wait for the device.
        t, u = (
            torch.segment_reduce(torch.cat(each).to(size.dtype), "sum", lengths=lengths, unsafe=True) / size
            for each in (touched, lost)
        )
        return {
            "touched": t * count,
            "lost": u * count,
            "variance_0": (u - u * u) * weight,
            "variance_1": (u - u * t) * weight,
            "variance_2": (t - t * t) * weight,
        }


def _largest_sample(tensors: list[tuple[int, int]], budget: float) -> int:
    """The largest sample a tensor within a budget, given each one's elements and bytes an element."""
    low, high = 1, SAMPLE
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(elements, middle) * size for elements, size in tensors) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _above_zero(rate: Any) -> bool:
    """Whether a group is stepped at all; with a rate that the optimizer finds, or that is not read, it is."""
    unread = isinstance(rate, torch.Tensor) and rate.device.type != "cpu"
    return True if rate is None or unread else float(rate) > 0


def _values_at(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Elements at places of the tensor as if it were flat."""
    if tensor.is_contiguous():
        return tensor.view(-1).index_select(0, at)
    index: list[torch.Tensor] = []
    for size in reversed(tensor.shape):  # torch.unravel_index waits for the device
        index.append(at % size)
        at = at // size
    return tensor[tuple(reversed(index))]


def _touched(unit: Unit, gradient: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Whether the gradient is not zero at some elements."""
    if gradient.layout is torch.sparse_coo:
        stored = gradient.coalesce()
        rows, inner = stored.indices()[0], gradient.shape[1:].numel()
        # One more row, of zeros, for those that are not stored.
        place = torch.full((gradient.shape[0],), len(rows), device=at.device).index_copy_(
            0, rows, torch.arange(len(rows), device=at.device)
        )
        values = torch.cat([stored.values().reshape(len(rows), inner), stored.values().new_zeros(1, inner)])
        return values[place[at // inner], at % inner] != 0
    return _values_at(local_part(unit, gradient), at) != 0
