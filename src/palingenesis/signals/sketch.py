"""Fixed random linear sketches: a few thousand numbers that keep inner products of tensors of any size.

A tensor is viewed flat as ``[R, C]``, each element gets a fixed sign ±1, and the rows are added: the sketch
is ``S·g`` with ``S`` a ±1 matrix that has one entry in every column (a count sketch: Charikar, Chen and
Farach-Colton 2002; as feature hashing: Weinberger et al. 2009). Then ``⟨S·x, S·y⟩`` is an unbiased estimate
of ``⟨x, y⟩`` with variance at most ``(‖x‖²‖y‖² + ⟨x, y⟩²)/C`` for energy spread over the columns.

Signs of whole rows alone would do for random matrices, not for a matrix of rank one or constant entries:
there all rows of the view move together and the error is ``√(2/k)`` for ``k`` sketch rows however long they
are. Signs of single elements make it ``√(2/C)`` for every input. They need no memory of the tensor's size:
element ``i`` has the sign ``a[i // C]·b[start + i // W + i % W]``, where ``a`` and ``start`` belong to the
tensor's label, ``b`` is one table for all, and a window ``W`` is some rows long. Two elements of a column
have independent signs, and the row signs make errors of different pairs of rows, and of different tensors,
uncorrelated.

``C`` is prime, so that structures which repeat along a tensor's own rows (one hot input column, a touched row
of an embedding) do not all fall into the same few columns.

The signs come from a hash of the label: no random generator is read or moved, and they are the same in every
process, after a resume, and whatever the order of the layers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from palingenesis.signals.norms import plain_values

# Part of every hash: another way of drawing signs needs another name, or saved sketches would be misread.
_SEED = b"palingenesis sketch 1: "

# Places in the shared table where a tensor's signs may start. Two tensors of R rows share signs of some
# columns with probability about 2R/START, which only matters for constant tensors.
_STARTS = 1 << 14

# Elements of a window, and windows that are signed in one go: a copy of 1 MB that stays in a processor's
# cache, or enough to fill an accelerator.
_WINDOW = 1 << 18
_WINDOWS_ON_DEVICE = 1 << 6


class _Plan(NamedTuple):
    """How one tensor enters a sketch.

    Args:
        start: where its signs begin in the shared table.
        place: column of its first element; 0 unless the tensor is shorter than a row.
        row_signs: ``[rows + 1]`` on the device, the last for what is left over.
    """

    start: int
    place: int
    row_signs: torch.Tensor


class Scratch(NamedTuple):
    """What one round of sketching needs and nobody keeps: the table of signs in fp32, and room, once more by
    its columns."""

    signs: torch.Tensor
    room: torch.Tensor
    columns: torch.Tensor


class Sketcher:
    """Adds tensors to sketches of one width on one device.

    Args:
        elements: real elements of each tensor, by label.
        width: columns ``C`` of a sketch; best a prime (:func:`prime_up_to`).
        device: where the tensors are.
        weights: by label, what a tensor's inner products count; 1 where missing. Replicas that are added up
            over processes each count a share.

    Memory: ``min(2¹⁸, max(elements)) + 2¹⁴`` bytes for the table and ``elements/C`` fp32 numbers a tensor.
    """

    def __init__(
        self,
        elements: Mapping[str, int],
        width: int,
        device: torch.device,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.width, self.device = width, device
        most = max(elements.values(), default=0)
        self._rows = max(1, min(_WINDOW, most) // width)
        windows = most // (self._rows * width) + 1
        length = _STARTS + self._rows * width + windows
        self._table = self._here(_signs(hashed(b"table", (length + 7) // 8)))
        self._windows = min(windows, 1 if device.type == "cpu" else _WINDOWS_ON_DEVICE)
        self._plans = {
            label: self._plan(label, count, (weights or {}).get(label, 1.0))
            for label, count in elements.items()
        }

    def _plan(self, label: str, elements: int, weight: float) -> _Plan:
        rows = elements // self.width
        drawn = hashed(label.encode(), 8 + (rows + 8) // 8)
        start = int.from_bytes(drawn[:4].tobytes(), "little") % _STARTS
        room = self.width - elements + 1
        place = int.from_bytes(drawn[4:8].tobytes(), "little") % room if rows == 0 else 0
        row_signs = _signs(drawn[8:])[: rows + 1].astype(np.float32) * np.float32(math.sqrt(weight))
        return _Plan(start, place, self._here(row_signs))

    def _here(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._table.nbytes + sum(plan.row_signs.nbytes for plan in self._plans.values())

    def scratch(self) -> Scratch:
        """To be passed to :meth:`add`, and dropped after a round of it."""
        room = torch.empty(self._windows * self._rows * self.width, dtype=torch.float32, device=self.device)
        return Scratch(self._table.float(), room, room.view(-1, self.width).t())

    def add(self, label: str, values: torch.Tensor, sketch: torch.Tensor, scratch: Scratch) -> None:
        """Add ``S·values`` to ``sketch``, ``[C]`` in fp32; nothing is read on the host.

        Args:
            label: whose signs to use.
            values: the tensor, of as many elements as were announced: any dtype, strides, or sparse.
            sketch: where to add it.
            scratch: from :meth:`scratch`.
        """
        plan = self._plans[label]
        if values.layout is torch.sparse_coo:
            self._add_sparse(plan, values.coalesce(), sketch, scratch)
            return
        flat = plain_values(values).reshape(-1)
        window = self._rows * self.width
        for number, piece in enumerate(flat.split(window * self._windows)):
            first = number * self._windows
            if piece.numel() > window:
                whole = piece.numel() // window
                shape, size = (whole, window), whole * window
                signs = scratch.signs.as_strided(shape, (1, 1), plan.start + first)
                torch.mul(piece[:size].view(shape), signs, out=scratch.room[:size].view(shape))
                self._fold(plan, size, first * self._rows, sketch, scratch)
                piece, first = piece[size:], first + whole
            size, at = piece.numel(), plan.start + first
            torch.mul(piece, scratch.signs[at : at + size], out=scratch.room[:size])
            self._fold(plan, size, first * self._rows, sketch, scratch)

    def _fold(self, plan: _Plan, size: int, row: int, sketch: torch.Tensor, scratch: Scratch) -> None:
        """Add the rows of elements in the room, which have their own signs, each with its row's."""
        rows, rest = divmod(size, self.width)
        if rows:
            sketch.addmv_(scratch.columns[:, :rows], plan.row_signs[row : row + rows])
        if rest:
            place = sketch[plan.place : plan.place + rest]
            place.addcmul_(scratch.room[size - rest : size], plan.row_signs[row + rows])

    def _add_sparse(self, plan: _Plan, values: torch.Tensor, sketch: torch.Tensor, scratch: Scratch) -> None:
        """The stored elements only, each where it would have been in the dense tensor."""
        if not values.values().numel():
            return
        stored = plain_values(values).reshape(values.values().shape[0], -1)
        inner, window = stored.shape[1], self._rows * self.width
        first = torch.zeros_like(values.indices()[0])
        for index, size in zip(values.indices(), values.shape, strict=False):  # the sparse dimensions
            first = first * size + index
        within = torch.arange(inner, device=self.device)
        step = max(1, _WINDOW // max(inner, 1))
        for begin in range(0, stored.shape[0], step):
            at = (first[begin : begin + step, None] * inner + within).reshape(-1)
            signs = plan.row_signs[at // self.width] * scratch.signs[plan.start + at // window + at % window]
            signed = signs * stored[begin : begin + step].reshape(-1)
            sketch.index_add_(0, at % self.width + plan.place, signed.float())


def hashed(label: bytes, length: int) -> NDArray[np.uint8]:
    """``length`` pseudo-random bytes that depend on the label alone."""
    return np.frombuffer(hashlib.shake_256(_SEED + label).digest(length), dtype=np.uint8)


def _signs(drawn: NDArray[np.uint8]) -> NDArray[np.int8]:
    """One sign ±1 for every bit."""
    signs: NDArray[np.int8] = 2 * np.unpackbits(drawn).view(np.int8) - 1
    return signs


def dense_values(tensor: torch.Tensor) -> torch.Tensor:
    """A real, strided tensor with every element in its place, also those that a sparse one does not store."""
    return plain_values(tensor.to_dense() if tensor.layout is torch.sparse_coo else tensor)


def prime_dividing_none(lengths: Collection[int], number: int) -> int:
    """The largest prime that is not above ``number`` and divides none of the lengths above it; 2 at least.

    Columns of a sketch of that width cut across whatever repeats inside of a tensor. If the width divided
    a dimension, all that one hot column of a matrix holds would fall into one number.
    """
    width = prime_up_to(number)
    while width > 2 and any(length > width and length % width == 0 for length in lengths):
        width = prime_up_to(width - 1)
    return width


def prime_up_to(number: int) -> int:
    """The largest prime that is not above ``number``; 2 at least."""
    candidate = max(number, 2)
    while any(candidate % divisor == 0 for divisor in range(2, math.isqrt(candidate) + 1)):
        candidate -= 1
    return candidate
