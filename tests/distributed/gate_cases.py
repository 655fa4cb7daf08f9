"""Gates: before a collective all ranks pass, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist
from tests.distributed.sharding_cases import Seen

from palingenesis.signals import gate
from palingenesis.signals.gate import Gate

# Long against what a busy machine takes to come to a gate.
PATIENCE_S = 3.0


def hurried(case: Callable[[], Seen]) -> Callable[[], Seen]:
    def run() -> Seen:
        began = time.monotonic()
        with mock.patch.object(gate, "GATE_S", PATIENCE_S):
            found = case()
        return {**found, "took": time.monotonic() - began}

    return run


def keys() -> int:
    store: Any = dist.distributed_c10d._get_default_store()
    dist.barrier()
    found = int(store.num_keys())
    dist.barrier()
    return found


def together() -> Seen:
    gate = Gate("together", "of one mind")
    assert gate.passes()
    before = keys()
    passed = [gate.passes() for _ in range(20)]
    return {"passed": passed, "more_keys": keys() - before}


def of_another_mind() -> Seen:
    gate = Gate("another mind", f"every {dist.get_rank()}")
    dist.barrier()
    return {"passed": [gate.passes() for _ in range(3)]}


def one_never_comes() -> Seen:
    gate = Gate("never", "")
    passed = [gate.passes() for _ in range(5)] if dist.get_rank() == 0 else []
    return {"passed": passed}


def one_comes_no_more() -> Seen:
    gate = Gate("no more", "")
    passed = [gate.passes() for _ in range(2 if dist.get_rank() == 1 else 6)]
    return {"passed": passed}


def one_leaves() -> Seen:
    gate = Gate("leaves", "")
    passed = [gate.passes() for _ in range(2)]
    if dist.get_rank() == 1:
        gate.leave()
    dist.barrier()
    return {"passed": passed + [gate.passes() for _ in range(3)]}


def one_is_late() -> Seen:
    """Too late for one time; for the next it is there again."""
    gate = Gate("late", "")
    passed = [gate.passes()]
    if dist.get_rank() == 1:
        time.sleep(2 * PATIENCE_S)
    return {"passed": passed + [gate.passes() for _ in range(3)]}


def store_gone() -> Seen:
    gate = Gate("gone", "")
    assert gate.passes()
    gate._store = mock.Mock(**{"check.side_effect": RuntimeError, "set.side_effect": RuntimeError})
    found = gate.passes()
    gate.leave()
    return {"passed": [found, gate.passes()]}


CASES: dict[int, dict[str, Callable[[], Seen]]] = {
    2: {
        name: hurried(case)
        for name, case in {
            "together": together,
            "of another mind": of_another_mind,
            "one never comes": one_never_comes,
            "one comes no more": one_comes_no_more,
            "one leaves": one_leaves,
            "one is late": one_is_late,
            "the store is gone": store_gone,
        }.items()
    },
    4: {},
}
