"""What CUDA's caching allocator would reserve for a step: its rules, applied to the traced allocations.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` at its defaults. Sizes are multiples of 512
bytes. Up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, and above from
segments of their own size in multiples of 2 MiB. The smallest free block that suffices is taken and its
rest split off; neighbours that are free are joined. Before it gives up, it returns segments with nothing in
use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from palingenesis.preflight.memory.categories import Category, Phase
from palingenesis.preflight.memory.trace import Trace

_ROUND = 512
_MIB = 1 << 20
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
_MIDDLE, _MIDDLE_SEGMENT = 10 * _MIB, 20 * _MIB
_SEGMENT_ROUND = 2 * _MIB


@dataclass(eq=False)
class _Block:
    size: int
    segment: int
    small: bool
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None
    number: int = 0


def reserved(
    trace: Trace, shares: dict[Category, float] | None = None, capacity: float = float("inf")
) -> int | None:
    """The most bytes reserved at any moment of the step.

    Args:
        trace: of a step.
        shares: of each category, what a rank holds.
        capacity: bytes that may be reserved; unused segments are returned before it is passed.

    Returns:
        ``None`` if the capacity does not suffice.
    """
    allocator = _Allocator(capacity)
    alive: dict[int, _Block] = {}
    shares = shares or {}
    for storage, size, category, earlier in _moves(trace):
        share = shares.get(category, 1.0)
        if size < 0:
            if storage in alive:
                allocator.release(alive.pop(storage))
            continue
        if storage in alive:
            if share == shares.get(earlier, 1.0):
                continue  # it stays where it is
            allocator.release(alive.pop(storage))
        block = allocator.allocate(int(size * share))
        if block is None:
            return None
        alive[storage] = block
    return allocator.most


def _moves(trace: Trace) -> Iterator[tuple[int, int, Category, Category]]:
    """Storage, bytes, what it is and what it was before; first, in order, what the set-up leaves behind."""
    rows = trace.rows.tolist()
    left: dict[int, tuple[int, int, int]] = {}
    begins = next((at for at, row in enumerate(rows) if row[3] != Phase.SETUP), len(rows))
    for storage, size, category, _ in rows[:begins]:
        if size > 0:
            left[storage] = (storage, size, category)
        elif storage in left and left[storage][2] == category:
            del left[storage]
    for storage, size, category in left.values():
        yield storage, size, Category(category), Category(category)
    for at in range(begins, len(rows)):
        storage, size, category, _ = rows[at]
        after = rows[at + 1] if at + 1 < len(rows) else (0, 0)
        if size < 0 and after[0] == storage and after[1] > 0:
            continue  # it becomes something else in the next row
        before = rows[at - 1]
        became = size > 0 and before[0] == storage and before[1] < 0
        yield storage, size, Category(category), Category(before[2] if became else category)


class _Allocator:
    """Segments, and the blocks that they are divided into."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self.most = self._now = self._count = 0
        # Free blocks by size, small and large apart: (size, number), and the block of each number.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._by_number: dict[int, _Block] = {}

    def allocate(self, wanted: int) -> _Block | None:
        """A block of at least so many bytes."""
        size = max(_ROUND, -(-wanted // _ROUND) * _ROUND)
        small = size <= _SMALL
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        block = self._take(free[at]) if at < len(free) else self._segment(size, small)
        if block is None:
            return None
        block.free = False
        left = block.size - size
        if left >= _ROUND if small else left > _SMALL:
            rest = _Block(left, block.segment, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._give(rest)
        return block

    def release(self, block: _Block) -> None:
        """Give a block back, joined with what is free beside it."""
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take((other.size, other.number))
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._give(block)

    def _segment(self, size: int, small: bool) -> _Block | None:
        if small:
            whole = _SMALL_SEGMENT
        elif size < _MIDDLE:
            whole = _MIDDLE_SEGMENT
        else:
            whole = -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
        if self._now + whole > self._capacity:
            self._return_unused()
            if self._now + whole > self._capacity:
                return None
        self._now += whole
        self.most = max(self.most, self._now)
        return _Block(whole, whole, small)

    def _return_unused(self) -> None:
        for free in self._free.values():
            for key in [key for key in free if self._by_number[key[1]].segment == key[0]]:
                self._now -= self._take(key).segment

    def _give(self, block: _Block) -> None:
        self._count += 1
        block.free, block.number = True, self._count
        self._by_number[block.number] = block
        insort(self._free[block.small], (block.size, block.number))

    def _take(self, key: tuple[int, int]) -> _Block:
        block = self._by_number.pop(key[1])
        free = self._free[block.small]
        del free[bisect_left(free, key)]
        return block
