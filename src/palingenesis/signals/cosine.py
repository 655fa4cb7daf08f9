"""``health/grad_cosine_sim``: whether two consecutive optimizer steps pull in the same direction.

The cosine of the gradients of steps ``t-1`` and ``t`` over every parameter with a gradient in both, and
``health/grad_cosine/<block>`` of each block. Of step ``t-1`` a linear sketch a block is kept
(``sketch.py``), not a copy; a block that is smaller than its sketch is kept exactly. A block's cosine is
``⟨Sx, Sy⟩/(‖Sx‖‖Sy‖)``: its error is about ``(1-ρ²)/√C`` (0.008 at the least width and ρ = 0, nothing at
ρ = ±1), whereas with exact norms below the line it would be ``√((1+ρ²)/C)`` and leave [-1, 1]. Exact norms
weigh the blocks: ``cos = Σ_b cos_b ‖x_b‖‖y_b‖ / (‖x‖‖y‖)``, so that blocks which disagree do not add their
errors to one another. The bias of the ratio is of the order ``ρ/C``.

A block in which a parameter has a gradient in one of the steps only cannot be divided by its sketch's norm,
which contains that parameter. Its inner product is still unbiased; divided by exact norms of what the steps
have in common it is used where its standard error is small enough, and otherwise the number is absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from palingenesis.layers import Layers, Unit, block_of
from palingenesis.signals.cosine_sums import LARGEST_ERROR, NO_GRADIENT, ROWS, Cosines, Products, why_not
from palingenesis.signals.norms import plain_values
from palingenesis.signals.sharding import local, local_gradients, meeting_device, shard_index, shard_weight
from palingenesis.signals.sketch import Scratch, Sketcher, dense_values, prime_dividing_none
from palingenesis.signals.values import Values
from palingenesis.signals.weights import local_part

METRIC = "health/grad_cosine_sim"
BLOCK_METRIC = "health/grad_cosine"

# Of the parameters' bytes, what the sketches of one step may take; between these widths, a block.
SHARE = 0.005
LEAST_WIDTH = 16_381  # error of a block at ρ = 0: 0.0078
MOST_WIDTH = 65_521  # 0.0039

Norms = Mapping[torch.device, torch.Tensor]


@dataclass
class _Snapshot:
    """One step's gradients: on each device a vector of sketches and exact copies, and who had a gradient."""

    step: int
    sketches: dict[torch.device, torch.Tensor]
    present: list[bool]
    norms: Norms | None = None
    scratch: dict[torch.device, Scratch] = field(default_factory=dict)


class _OnDevice:
    """The units on one device, and where each goes in a vector ``[exact copies | one sketch a block]``."""

    def __init__(self, layers: Layers, members: Sequence[int], blocks: Sequence[int], width: int) -> None:
        units = [layers.units[i] for i in members]
        self.members = list(members)
        self.device = units[0].parameter.device
        self.blocks = [blocks[i] for i in members]
        sizes = [_elements(unit) for unit in units]
        weights = [shard_weight(u.parameter, u.holders) if layers.together else 1.0 for u in units]
        self.roots = [math.sqrt(weight) for weight in weights]
        self.labels = [f"{u.label}@{shard_index(u.parameter)}" for u in units]
        self._lay_out(sizes, width)
        sketched = [n for n, block in enumerate(self.blocks) if block in self.places]
        elements = {self.labels[n]: sizes[n] for n in sketched}
        shares = {self.labels[n]: weights[n] for n in sketched}
        self.sketcher = Sketcher(elements, width, self.device, shares)
        self._owner = self._indices(self.blocks)

    def _lay_out(self, sizes: Sequence[int], width: int) -> None:
        by_block: dict[int, list[int]] = {}
        for n, block in enumerate(self.blocks):
            by_block.setdefault(block, []).append(n)
        totals = {block: sum(sizes[n] for n in members) for block, members in by_block.items()}
        exact = [block for block, total in totals.items() if total <= width]
        sketched = [block for block, total in totals.items() if total > width]
        # Units kept exactly, in the order of their copies, and the slice of each.
        self.exact = [n for block in exact for n in by_block[block]]
        ends = np.cumsum([0, *(sizes[n] for n in self.exact)]).tolist()
        self.slots = {n: slice(ends[i], ends[i + 1]) for i, n in enumerate(self.exact)}
        self.exact_size: int = ends[-1]
        starts = [self.exact_size + i * width for i in range(len(sketched))]
        self.places = {block: slice(at, at + width) for block, at in zip(sketched, starts, strict=True)}
        self.size = self.exact_size + width * len(sketched)
        self._lengths = self._indices([totals[block] for block in exact])
        self._group_blocks = self._indices([*exact, *sketched])

    def _indices(self, numbers: Sequence[int]) -> torch.Tensor:
        """On the device, without waiting for it."""
        return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)

    @property
    def nbytes(self) -> int:
        held = self.sketcher, self._lengths, self._group_blocks, self._owner
        return sum(one.nbytes for one in held)

    def empty(self) -> torch.Tensor:
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return torch.zeros(self.size, dtype=torch.float32, device=self.device)

    def read(self, gradients: Sequence[torch.Tensor | None], vector: torch.Tensor) -> None:
        """Write one step's gradients, one entry a member, into an empty vector."""
        pieces = []
        for n in self.exact:
            gradient, slot = gradients[n], self.slots[n]
            if gradient is None:
                pieces.append(vector.new_zeros(slot.stop - slot.start))
            else:
                flat = dense_values(gradient).reshape(-1)
                pieces.append(flat if self.roots[n] == 1.0 else flat * self.roots[n])
        if pieces:
            torch.cat(pieces, out=vector[: self.exact_size])
        scratch = self.sketcher.scratch()
        for n, block in enumerate(self.blocks):
            gradient = gradients[n]
            if gradient is not None and block in self.places:
                self.sketcher.add(self.labels[n], gradient, vector[self.places[block]], scratch)

    def add(self, n: int, gradient: torch.Tensor, vector: torch.Tensor, scratch: Scratch) -> None:
        """Add one member's gradient to what the vector holds of it."""
        place = self.places.get(self.blocks[n])
        if place is not None:
            self.sketcher.add(self.labels[n], gradient, vector[place], scratch)
        else:
            vector[self.slots[n]].add_(dense_values(gradient).reshape(-1), alpha=self.roots[n])

    def _sums(self, products: torch.Tensor) -> torch.Tensor:
        """Over each block's elements, in the order of ``_group_blocks``."""
        sums = products[self.exact_size :].view(-1, self.sketcher.width).sum(1)
        if not self.exact_size:  # nothing, or blocks without elements
            return torch.cat([products.new_zeros(len(self._lengths)), sums])
        # `unsafe` leaves out a check that would wait for the device.
        exact = products[: self.exact_size]
        return torch.cat([torch.segment_reduce(exact, "sum", lengths=self._lengths, unsafe=True), sums])

    def compare(self, before: _Snapshot, now: _Snapshot, blocks: int) -> torch.Tensor:
        """``[6, blocks]`` in fp64, in the order of ``ROWS``."""
        x, y = before.sketches[self.device], now.sketches[self.device]
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        changed = [n for n, i in enumerate(self.members) if before.present[i] != now.present[i]]
        x, y = x.to(wide, copy=True), y.to(wide, copy=True)
        for n in self.slots.keys() & set(changed):
            x[self.slots[n]] = y[self.slots[n]] = 0.0
        sums = torch.stack([self._sums(x * y), self._sums(x.square()), self._sums(y.square())])
        found = torch.zeros(len(ROWS), blocks, dtype=wide, device=self.device)
        found[:3].index_copy_(1, self._group_blocks, sums)
        found[3:5] = found[1:3]
        if before.norms is not None and now.norms is not None:
            squares = torch.stack([before.norms[self.device], now.norms[self.device]]).to(wide).square()
            if changed:
                # A product with 0 would let a NaN of an excluded gradient through.
                squares = squares.index_fill(1, self._indices(changed), 0.0)
            found[3:5] = torch.zeros_like(found[3:5]).index_add_(1, self._owner, squares)
        for block in {self.blocks[n] for n in changed} & self.places.keys():
            inner, left, right = found[:3, block]
            found[5, block] = (left * right + inner.square()) / self.sketcher.width
            if before.norms is None or now.norms is None:
                found[5, block] = math.inf
        return found


class GradientCosine:
    """Compares the gradients of consecutive steps.

    Args:
        layers: whose gradients; where some are sharded, as ``meeting.agree`` returned them.
        share: of the watched parameters' bytes, what the sketches may take, apart from ``LEAST_WIDTH``
            numbers a block.

    All that :meth:`compute` returns are sums over elements: they add up over devices and over ranks.
    """

    def __init__(self, layers: Layers, *, share: float = SHARE) -> None:
        self.layers, self._share = layers, share
        names = [block_of(unit.layer) for unit in layers.units]
        self.blocks = list(dict.fromkeys(names))
        number = {name: i for i, name in enumerate(self.blocks)}
        self._plan([number[name] for name in names])

    def _plan(self, block_of_unit: Sequence[int]) -> None:
        self._block_of_unit = block_of_unit
        by_device: dict[torch.device, list[int]] = {}
        nbytes = 0
        for i, unit in enumerate(self.layers.units):
            by_device.setdefault(unit.parameter.device, []).append(i)
            nbytes += _elements(unit) * unit.parameter.element_size()
        numbers = int(self._share * nbytes / 4 / max(len(self.blocks), 1))
        lengths = {_elements(unit) for unit in self.layers.units}
        self.width = prime_dividing_none(lengths, min(max(numbers, LEAST_WIDTH), MOST_WIDTH))
        self._devices = [
            _OnDevice(self.layers, members, block_of_unit, self.width) for members in by_device.values()
        ]
        self._home = {i: (on, n) for on in self._devices for n, i in enumerate(on.members)}
        self._before: _Snapshot | None = None
        self._fed: _Snapshot | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        held = [one for one in (self._before, self._fed) if one is not None]
        vectors = sum(vector.nbytes for one in held for vector in one.sketches.values())
        return vectors + sum(on.nbytes for on in self._devices)

    def _follow_moves(self) -> None:
        """Plan again if the model went to another device; what is known of the step before is then lost."""
        units = self.layers.units
        if any(units[on.members[0]].parameter.device != on.device for on in self._devices):
            self._plan(self._block_of_unit)

    # -- one step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def arm(self, step: int, norms: Norms | None = None, scale: torch.Tensor | None = None) -> None:
        """Sketch a step's gradients, to be compared with the next step's.

        Args:
            step: the optimizer step.
            norms: each unit's exact gradient norm, ``[units on the device]`` in the order of ``layers``,
                unscaled, times the root of its ``shard_weight``; without them the sketches' own count.
            scale: loss scale that the gradients still carry.
        """
        self._follow_moves()
        self._before = self._take(step, norms, scale)

    @torch.no_grad()
    def compute(
        self, step: int, norms: Norms | None = None, scale: torch.Tensor | None = None, *, keep: bool = False
    ) -> dict[str, torch.Tensor]:
        """Compare with the step before; empty unless that one was armed.

        Args:
            step, norms, scale: as for :meth:`arm`.
            keep: arm this step for the next one too, at no further cost.

        Returns:
            ``cosine/<n>``, ``[6, blocks]`` (see ``ROWS``), one a device, or one where ranks are together.
        """
        self._follow_moves()
        before, self._before = self._before, None
        armed = before is not None and before.step == step - 1
        if not (armed or keep):
            self._fed = None
            return {}
        now = self._take(step, norms, scale)
        if keep:
            self._before = now
        if before is None or not armed or not self._devices:
            return {}
        found = [on.compare(before, now, len(self.blocks)) for on in self._devices]
        if self.layers.together:
            meeting = meeting_device(self.layers)
            found = [torch.stack([one.to(meeting, non_blocking=True) for one in found]).sum(0)]
        return {f"cosine/{number}": one for number, one in enumerate(found)}

    def _take(self, step: int, norms: Norms | None, scale: torch.Tensor | None) -> _Snapshot:
        fed, self._fed = self._fed, None
        taken = fed if fed is not None and fed.step == step else self._read(step)
        taken.norms, taken.scratch = norms, {}
        if scale is not None:
            for device, vector in taken.sketches.items():
                vector.div_(scale.to(device, non_blocking=True))
        return taken

    def _read(self, step: int) -> _Snapshot:
        units = self.layers.units
        whole = [unit.parameter.grad for unit in units]
        gradients = local_gradients(whole) if self.layers.together else whole
        sketches = {}
        for on in self._devices:
            own = [_part(units[i], gradients[i]) for i in on.members]
            sketches[on.device] = vector = on.empty()
            on.read(own, vector)
        return _Snapshot(step, sketches, [gradient is not None for gradient in whole])

    # -- gradients that are gone before the step ends ----------------------------------------------------

    def listen(self, step: int) -> None:
        """Begin a step whose gradients come one by one through :meth:`feed`, then to :meth:`arm` or
        :meth:`compute`, because they will be freed inside ``backward``."""
        self._follow_moves()
        vectors = {on.device: on.empty() for on in self._devices}
        scratch = {on.device: on.sketcher.scratch() for on in self._devices}
        self._fed = _Snapshot(step, vectors, [False] * len(self.layers.units), None, scratch)

    @torch.no_grad()
    def feed(self, unit: int, gradient: torch.Tensor) -> None:
        """Add one unit's gradient, or its part from one micro-batch, to the step begun by :meth:`listen`."""
        if self._fed is None:
            return
        on, n = self._home[unit]
        self._fed.present[unit] = True
        vector, scratch = self._fed.sketches[on.device], self._fed.scratch[on.device]
        on.add(n, local(gradient.detach()), vector, scratch)

    # -- on the host -------------------------------------------------------------------------------------

    def decode(self, arrays: Mapping[str, NDArray[np.float64]]) -> Values:
        """The cosines of all parameters and of each block."""
        found = Cosines.of(arrays)
        if found is None:
            return Values()
        by_block = {}
        unavailable = {}
        for i, name in enumerate(self.blocks):
            reason = why_not(found.cosine[i], found.error[i]) if found.present[i] else None
            if reason is not None:
                unavailable[f"{BLOCK_METRIC}/{name}"] = reason
            elif found.present[i]:
                by_block[name] = float(found.cosine[i])
        scalars = {}
        reason = why_not(found.total, found.total_error) if found.present.any() else NO_GRADIENT
        if reason is not None:
            unavailable[METRIC] = reason
        else:
            scalars[METRIC] = found.total
        return Values(scalars, {BLOCK_METRIC: by_block} if by_block else {}, unavailable)

    def products(self, arrays: Mapping[str, NDArray[np.float64]]) -> Products | None:
        """⟨g_t, g_{t-1}⟩ and the squared norms; ``None`` where the cosine is not known."""
        found = Cosines.of(arrays)
        if found is None or not found.present.any() or found.total_error > LARGEST_ERROR:
            return None
        return Products(float(found.inner.sum()), float(found.before.sum()), float(found.now.sum()))


def _part(unit: Unit, gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else local_part(unit, gradient)


def _elements(unit: Unit) -> int:
    """Real elements of a unit that are on this rank."""
    return plain_values(local_part(unit)).numel()
