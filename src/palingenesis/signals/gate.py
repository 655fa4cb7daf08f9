"""A gate before a collective: all ranks pass it together, or none of them does."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# How long the first rank at a gate waits for the last, in seconds; and how often in a row in vain.
GATE_S, MISSES = 30.0, 2

# How many gates of each name this process has made; equal on all ranks that do the same.
_gates: Counter[str] = Counter()


class Gate:
    """Lets all ranks through together, or none of them: before a collective that one may not come to.

    A collective that one rank does not join never ends. Ranks that come to the gate wait for the others
    there, in the store that torch.distributed was started with; whoever has waited too long closes it for
    all. Every rank gets the same answer.

    Args:
        name: of what is behind it; the n-th gate of that name on one rank is the n-th on every other.
        word: what all ranks have to be of one mind about.
    """

    def __init__(self, name: str, word: str) -> None:
        self._size = dist.get_world_size()
        self._store: Any = dist.distributed_c10d._get_default_store()
        _gates[name] += 1
        self._place = f"palingenesis/gates/{name}/{_gates[name]}"
        self._times = self._missed = 0
        # For good: some rank has another mind, or comes no more.
        self.shut = self._store is None
        if self._store is not None:
            self._words = [f"{self._place}/{rank}" for rank in range(self._size)]
            self._store.set(self._words[dist.get_rank()], hashlib.sha256(word.encode()).hexdigest())

    def passes(self) -> bool:
        """Whether all ranks have come here for the n-th time, as this one has."""
        if self.shut:
            return False
        self._times += 1
        try:
            opened = not self._is_pointless() and self._settled(f"{self._place}/at {self._times}")
        except RuntimeError:  # the store is gone: training ends
            opened, self.shut = False, True
        self._missed = 0 if opened else self._missed + 1
        self.shut = self.shut or self._missed >= MISSES
        return opened

    def leave(self) -> None:
        """Tell the others that this rank comes no more: they need not wait for it."""
        if not self.shut:
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it those who would wait
                self._store.set(f"{self._place}/left", "yes")
        self.shut = True

    def _is_pointless(self) -> bool:
        """Whether a rank has left, or is of another mind."""
        left = bool(self._store.check([f"{self._place}/left"]))
        known = self._times == 1 and self._store.check(self._words)
        self.shut = left or (known and len(set(self._store.multi_get(self._words))) > 1)
        return self.shut

    def _settled(self, key: str) -> bool:
        if self._store.add(f"{key}/here", 1) == self._size:
            self._store.compare_set(f"{key}/open", "", "yes")
        try:
            self._store.wait([f"{key}/open"], timedelta(seconds=GATE_S))
        except RuntimeError:  # the time is over; some stores have no error of their own for it
            self._store.compare_set(f"{key}/open", "", "no")
        opened: bytes = self._store.get(f"{key}/open")
        if opened == b"yes" and dist.get_rank() == 0 and self._times > 1:
            # All are here, and need what was settled before no more.
            for what in ("here", "open"):
                self._store.delete_key(f"{self._place}/at {self._times - 1}/{what}")
        return opened == b"yes"
