"""What CUDA's caching allocator would reserve for a step: its rules, applied to the traced allocations.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` at its defaults. Sizes are multiples of 512
bytes. Up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, and above from
segments of their own size in multiples of 2 MiB. The smallest free block that suffices is taken and its
rest split off; neighbours that are free are joined. Before it gives up, it returns segments with nothing in
use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
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
    pool: tuple[int, bool]
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None
    number: int = 0


def reserved(trace: Trace, capacity: float = float("inf"), *, apart: bool = False) -> int | None:
    """The most bytes reserved at any moment of the step.

    Args:
        trace: of a step.
        capacity: bytes that may be reserved; unused segments are returned before it is passed.
        apart: FSDP2 gathers weights and reduces gradients on streams of their own. Memory that was allocated
            on one stream is used again on that stream alone.

    Returns:
        ``None`` if the capacity does not suffice.
    """
    allocator = _Allocator(capacity)
    alive: dict[int, _Block] = {}
    streams = _streams(trace) if apart else {}
    for storage, size, became in _moves(trace):
        if size < 0:
            if storage in alive:
                allocator.release(alive.pop(storage))
            continue
        if became and storage in alive:
            continue  # it stays where it is
        block = allocator.allocate(size, streams.get(storage, 0))
        if block is None:
            return None
        alive[storage] = block
    return allocator.most


def _streams(trace: Trace) -> dict[int, int]:
    """The stream of every storage that is allocated on another than the model's own."""
    reduced = trace.rows[trace.rows[:, 2] == Category.GRADIENTS, 0]
    gathered = trace.rows[trace.rows[:, 2] == Category.GATHERED, 0]
    return dict.fromkeys(reduced.tolist(), 1) | dict.fromkeys(gathered.tolist(), 2)


def _moves(trace: Trace) -> Iterator[tuple[int, int, bool]]:
    """Storage, bytes, and whether it only became something else; first, in order, what the set-up leaves."""
    rows = trace.rows.tolist()
    left: dict[int, tuple[int, int, int]] = {}
    begins = next((at for at, row in enumerate(rows) if row[3] != Phase.SETUP), len(rows))
    for storage, size, category, _ in rows[:begins]:
        if size > 0:
            left[storage] = (storage, size, category)
        elif storage in left and left[storage][2] == category:
            del left[storage]
    for storage, size, _ in left.values():
        yield storage, size, False
    for at in range(begins, len(rows)):
        storage, size, *_ = rows[at]
        if size < 0 and at + 1 < len(rows) and _same(rows[at + 1], storage, -size):
            continue  # it becomes something else in the next row
        yield storage, size, size > 0 and _same(rows[at - 1], storage, -size)


def _same(row: list[int], storage: int, size: int) -> bool:
    return row[0] == storage and row[1] == size


class _Allocator:
    """Segments, and the blocks that they are divided into."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self.most = self._now = self._count = 0
        # Free blocks by size, by stream, small and large apart: (size, number), and the block of each number.
        self._free: defaultdict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
        self._by_number: dict[int, _Block] = {}

    def allocate(self, wanted: int, stream: int = 0) -> _Block | None:
        """A block of at least so many bytes."""
        size = max(_ROUND, -(-wanted // _ROUND) * _ROUND)
        small = size <= _SMALL
        pool = (stream, small)
        free = self._free[pool]
        at = bisect_left(free, (size, -1))
        block = self._take(free[at]) if at < len(free) else self._segment(size, pool)
        if block is None:
            return None
        block.free = False
        left = block.size - size
        if left >= _ROUND if small else left > _SMALL:
            rest = _Block(left, block.segment, pool, before=block, after=block.after)
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

    def _segment(self, size: int, pool: tuple[int, bool]) -> _Block | None:
        _, small = pool
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
        return _Block(whole, whole, pool)

    def _return_unused(self) -> None:
        for free in self._free.values():
            for key in [key for key in free if self._by_number[key[1]].segment == key[0]]:
                self._now -= self._take(key).segment

    def _give(self, block: _Block) -> None:
        self._count += 1
        block.free, block.number = True, self._count
        self._by_number[block.number] = block
        insort(self._free[block.pool], (block.size, block.number))

    def _take(self, key: tuple[int, int]) -> _Block:
        block = self._by_number.pop(key[1])
        free = self._free[block.pool]
        del free[bisect_left(free, key)]
        return block
