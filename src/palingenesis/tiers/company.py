"""What the ranks of a run tell one another of their looks, through the store of torch.distributed.

A collective would make every rank wait for the slowest, and for ever for one that does not come: many a
script makes its monitor, or calls ``step``, on rank 0 only. So ranks leave what they found in the store, as
numbers that are on the host already, and rank 0 takes it when all of it is there. Nobody waits for anybody.
Ranks that do not tell in time are done without.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from palingenesis.signals.meeting import ranks_and_own

_log = logging.getLogger("palingenesis")

Arrays = Mapping[str, NDArray[np.float64]]

# Rank 0 goes on alone when a look is this old, in steps and in seconds, and not all have told theirs.
LATE_STEPS, LATE_S = 3, 20.0
# Looks that another rank keeps while rank 0 has not said that it listens.
KEPT = 3
# Looks that it has left in the store when it takes rank 0 for gone.
IGNORED = 32
# How long rank 0 waits for the last looks when a run ends.
LAST_S = 5.0

# How many companies this process has made; equal on all ranks that do the same.
_made: Counter[str] = Counter()


class Company:
    """The ranks that look together.

    Args:
        word: what all have to be of one mind about: layers, cadences, options.
    """

    def __init__(self, word: str) -> None:
        self.size, self.rank = ranks_and_own()
        self._store: Any = dist.distributed_c10d._get_default_store() if self.size > 1 else None
        self._prefix = self._next_place(word)
        # Steps of what this rank left in the store, and rank 0 may not have taken yet.
        self._left: deque[int] = deque()
        self._untold: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._since: dict[int, float] = {}
        # Others have told something: rank 0 is heard by them, and they by it.
        self.met = False
        self.given_up = self._store is None
        if self.rank == 0 and self._store is not None:
            self._store.set(f"{self._prefix}/open", "yes")

    def _next_place(self, word: str) -> str:
        """Where in the store: the next one that rank 0 has not closed before this rank came."""
        while True:
            _made[word] += 1
            place = f"palingenesis/tiers/{hashlib.sha256(word.encode()).hexdigest()}/{_made[word]}"
            if self._store is None or self.rank == 0 or not self._store.check([f"{place}/closed"]):
                return place

    @property
    def alone(self) -> bool:
        """Whether this process has only what it found itself."""
        return self.size == 1 or self.given_up

    def tell(self, step: int, found: Arrays) -> None:
        """Leave what this rank found at a step, for rank 0."""
        self._untold.append((step, _packed(found)))
        with self._or_alone():
            self._tell()

    @contextlib.contextmanager
    def _or_alone(self) -> Iterator[None]:
        """Go on alone where the store is gone, as at the end of a run."""
        try:
            yield
        except RuntimeError as error:  # what all errors of torch.distributed are
            _log.debug("the ranks' store cannot be reached: %s", error)
            self.given_up = True

    def _tell(self) -> None:
        if not self.met:
            self.met = bool(self._store.check([f"{self._prefix}/open"]))
        if not self.met:
            return
        if self._store.check([f"{self._prefix}/closed"]) or self._is_ignored():
            self.given_up = True
            self._untold.clear()
            for step in self._left:
                self._store.delete_key(self._key(step, self.rank))
        while self._untold:
            step, told = self._untold.popleft()
            self._store.set(self._key(step, self.rank), told)
            self._left.append(step)

    def _is_ignored(self) -> bool:
        """Whether rank 0 has not taken what was left for it long ago: it has stopped, and would never."""
        while self._left and not self._store.check([self._key(self._left[0], self.rank)]):
            self._left.popleft()
        return len(self._left) > IGNORED

    def hear(self, step: int, now: int, *, last: bool = False) -> list[Arrays] | None:
        """What the other ranks found at a step, in their order; ``None`` as long as one has not told.

        Args:
            step: the step of the look.
            now: the step that training is at.
            last: the run ends: give them a moment.
        """
        found = None
        with self._or_alone():
            found = self._hear(step, now, last=last)
        return found

    def _hear(self, step: int, now: int, *, last: bool) -> list[Arrays] | None:
        keys = [self._key(step, rank) for rank in range(1, self.size)]
        if last and not self._store.check(keys):
            try:
                self._store.wait(keys, timedelta(seconds=LAST_S if self.met else 0.01))
            except RuntimeError:  # the time is over; some stores have no error of their own for it
                return None
        if not self._store.check(keys):
            since = self._since.setdefault(step, time.monotonic())
            if now - step >= LATE_STEPS and time.monotonic() - since > LATE_S:
                self.give_up()
            return None
        self._since.pop(step, None)
        self.met = True
        found: list[Arrays] = [_unpacked(bytes(told)) for told in self._store.multi_get(keys)]
        for key in keys:
            self._store.delete_key(key)
        return found

    def give_up(self) -> None:
        """Go on alone; the others are told that nobody listens any more."""
        self.leave()

    def leave(self) -> None:
        """The run ends, or this rank goes on alone: what others still leave, nobody takes."""
        if not self.given_up and self.rank == 0:
            with self._or_alone():
                self._store.set(f"{self._prefix}/closed", "yes")
        self.given_up = True

    def _key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"


def _packed(found: Arrays) -> bytes:
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name.replace("/", "|"): array for name, array in found.items()}
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _unpacked(told: bytes) -> dict[str, NDArray[np.float64]]:
    with np.load(io.BytesIO(told), allow_pickle=False) as found:
        return {name.replace("|", "/"): found[name] for name in found.files}


def combined(
    own: Arrays, others: list[Arrays], *, summed: frozenset[str], each: frozenset[str]
) -> tuple[dict[str, NDArray[np.float64]], dict[str, list[int]]]:
    """What all ranks found together.

    Args:
        own: of this rank, by ``<family>/…``.
        others: of the other ranks.
        summed: families of which ranks hold shares, to be added.
        each: families of which every rank has its own: ``[ranks, …]``, also where this one is alone.

    Returns:
        the arrays, and the ranks that could not tell theirs by family, none where ranks tell of different
        sizes: that family is then left out.
    """
    found: dict[str, NDArray[np.float64]] = {}
    silent: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for one in (own, *others) for name in one):
        family = name.split("/")[0]
        if family not in summed and family not in each:
            if name in own:
                found[name] = own[name]
            continue
        tables = [one.get(name) for one in (own, *others)]
        shapes = {table.shape for table in tables if table is not None}
        there = [table for table in tables if table is not None]
        if len(there) < len(tables) or len(shapes) > 1:
            before = silent.get(family, [])
            silent[family] = sorted({*before, *(i for i, table in enumerate(tables) if table is None)})
            continue
        found[name] = np.stack(there) if family in each else np.sum(there, axis=0)
    return {name: one for name, one in found.items() if name.split("/")[0] not in silent}, silent
