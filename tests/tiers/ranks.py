"""Several ranks in one process: what each makes believes that it is one of them; they share a real store."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from palingenesis.tiers import company


class Ranks:
    """Ranks ``0 … size − 1`` of a run.

    Args:
        size: how many.
        store: what torch.distributed was started with; by default one in memory.
    """

    def __init__(self, size: int = 2, store: Any = None) -> None:
        self.size = size
        self.store = dist.HashStore() if store is None else store
        self._made: list[Counter[str]] = [Counter() for _ in range(size)]

    @contextlib.contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        """Whatever asks meanwhile is told that this process is this rank."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "is_initialized", lambda: True)
            patch.setattr(dist, "get_world_size", lambda: self.size)
            patch.setattr(dist, "get_rank", lambda: rank)
            patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: self.store)
            patch.setattr(company, "_made", self._made[rank])
            yield

    def company(self, rank: int, word: str = "alike") -> company.Company:
        with self.rank(rank):
            return company.Company(word)

    def companies(self, word: str = "alike") -> list[company.Company]:
        return [self.company(rank, word) for rank in range(self.size)]
