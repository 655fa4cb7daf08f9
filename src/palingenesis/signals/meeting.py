"""What the ranks have to know of each other before they may wait for one another.

A collective that one rank does not join never ends. Many a training script makes its monitor on rank 0 only,
which is right where nothing is sharded. So ranks announce themselves in the store that torch.distributed was
started with, and the first of them that need not or will not wait any longer settles whether everybody has
come: every rank gets that same answer, and none ever waits for a collective that another will not join.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from palingenesis.fused import Part
from palingenesis.layers import Layers, Unit, is_sharded
from palingenesis.signals.sharding import meeting_device, shard_index

# How long a rank waits for the others to make their monitors too, in seconds, where parameters are sharded.
PATIENCE_S = 120.0

_SHARDED_ALONE = "sharded, and not every rank has made a monitor: norms over one rank's shards would be wrong"

# How often this process has met the others under each name.
_rounds: Counter[str] = Counter()


def ranks_and_own() -> tuple[int, int]:
    """How many ranks there are, and which one this is; 1 and 0 where torch.distributed is not in use."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def _next_place(store: Any, name: str) -> str:
    while True:
        _rounds[name] += 1
        place = f"palingenesis/{name}/{_rounds[name]}"
        if not store.check([f"{place}/held"]):
            return place


class Meeting:
    """Whether every rank takes part in something.

    Args:
        name: of what; the n-th meeting of that name on one rank is the n-th on every other. Those that were
            settled without this rank, because it made none, are not counted.
        word: what this rank has to say to the others.
    """

    def __init__(self, name: str, word: str = "") -> None:
        self.size, rank = ranks_and_own()
        # Whether all came, once it is settled.
        self._held: bool | None = None
        if self.size == 1:
            self._held = True
            return
        store: Any = dist.distributed_c10d._get_default_store()
        if store is None:  # as under MPI
            self._held = False
            return
        self._store = store
        self._prefix = _next_place(store, name)
        self._keys = [f"{self._prefix}/{one}" for one in range(self.size)]
        self._store.set(self._keys[rank], f"here {word}")
        # Setting does not wait for the store; asking it does, and what comes after is then seen to be later.
        self._store.get(self._keys[rank])

    def wait(self, patience_s: float) -> bool:
        """Whether all ranks have come by the time that the first of them has waited so long.

        Every rank gets the same answer.
        """
        if self._held is None:
            try:
                self._store.wait(self._keys, timedelta(seconds=patience_s))
                came = "yes"
            except RuntimeError:  # the time is over; some stores have no error of their own for it
                came = "no"
            answer: bytes = self._store.compare_set(f"{self._prefix}/held", "", came)
            self._held = answer == b"yes"
        return self._held

    def words(self) -> list[str]:
        """What each rank had to say, in the order of ranks. Only where the meeting was held."""
        return [value.decode().removeprefix("here ") for value in self._store.multi_get(self._keys)]

    def leave(self, key: str, text: str) -> None:
        """Leave a text for all under a key that says which text it is: what is there already stays."""
        if self._held is None and not self._store.check([f"{self._prefix}/{key}"]):
            self._store.set(f"{self._prefix}/{key}", text)

    def find(self, key: str) -> str:
        """A text that was left, or is just about to be."""
        text: bytes = self._store.get(f"{self._prefix}/{key}")
        return text.decode()


def agree(layers: Layers, patience_s: float = PATIENCE_S) -> Layers:
    """The layers of all ranks, in the same order on each of them, where any parameter is sharded.

    A unit that lives on other ranks only is an empty parameter here (``Unit.elsewhere``); every unit knows
    how many ranks have it. Without sharded parameters nothing is asked of the other ranks: what is replicated
    has the same gradients everywhere.

    Args:
        layers: those of this rank's model.
        patience_s: how long to wait for the other ranks.

    Returns:
        ``layers`` itself where nothing is sharded or there is one rank only. If not every rank comes, the
        layers without the sharded ones.
    """
    ranks, _ = ranks_and_own()
    if ranks == 1 or not any(is_sharded(unit.parameter) for unit in layers.units):
        return layers
    listed = json.dumps([_entry(unit) for unit in layers.units])
    digest = hashlib.sha256(listed.encode()).hexdigest()
    meeting = Meeting("layers", digest)
    meeting.leave(digest, listed)
    if not meeting.wait(patience_s):
        return _without_sharded(layers)
    words = meeting.words()
    lists = {
        word: [tuple(entry) for entry in json.loads(meeting.find(word))] for word in dict.fromkeys(words)
    }
    return _joined(layers, lists, Counter(words))


def _entry(unit: Unit) -> tuple[Any, ...]:
    """What other ranks have to know of a unit; the last item is whether this rank has any of it."""
    part = None if unit.part is None else unit.part.name
    return unit.layer, unit.name, part, shard_index(unit.parameter) >= 0


def _joined(layers: Layers, lists: dict[str, list[tuple[Any, ...]]], ranks: Counter[str]) -> Layers:
    own = {_entry(unit)[:3]: unit for unit in layers.units}
    holders: Counter[tuple[Any, ...]] = Counter()
    by_layer: dict[str, dict[tuple[Any, ...], None]] = {}
    for word, entries in lists.items():
        for *key, has in entries:
            by_layer.setdefault(key[0], {}).setdefault(tuple(key))
            holders[tuple(key)] += ranks[word] * has
    device = meeting_device(layers)
    units = [
        dataclasses.replace(own[key], holders=holders[key])
        if key in own
        else _elsewhere(key, holders[key], device)
        for keys in by_layer.values()
        for key in keys
    ]
    index = {name: i for i, name in enumerate(by_layer)}
    return Layers(
        tuple(by_layer),
        tuple(units),
        tuple(index[unit.layer] for unit in units),
        tuple((name, reason) for name, reason in layers.not_watched if name not in by_layer),
        together=True,
    )


def _elsewhere(key: tuple[Any, ...], holders: int, device: torch.device) -> Unit:
    layer, name, part = key
    nothing = nn.Parameter(torch.empty(0, device=device))
    whole = None if part is None else Part(part, 0, 0, 0)
    return Unit(nothing, name, layer, whole, holders=holders, elsewhere=True)


def _without_sharded(layers: Layers) -> Layers:
    kept = [unit for unit in layers.units if not is_sharded(unit.parameter)]
    names = list(dict.fromkeys(unit.layer for unit in kept))
    index = {name: i for i, name in enumerate(names)}
    gone: Iterable[str] = (name for name in layers.names if name not in index)
    return Layers(
        tuple(names),
        tuple(kept),
        tuple(index[unit.layer] for unit in kept),
        (*layers.not_watched, *((name, _SHARDED_ALONE) for name in gone)),
    )
