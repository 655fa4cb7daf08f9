"""Whether replicas of a parameter are still the same, bit for bit.

Ranks that start from the same weights and apply the same gradients hold the same bits for ever. A replica
that differs (a rank that loaded another checkpoint, a faulty memory cell, a parameter that one rank updates
by itself) trains another model than the others, and nothing else shows it. So each rank hashes the bits of
what it holds, and whoever has the hashes of all ranks compares those of the same shard.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from palingenesis.layers import Layers, Unit
from palingenesis.signals.meeting import ranks_and_own
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.sharding import local, meeting_device, shard_index, shard_weight, to_device
from palingenesis.signals.values import Values

METRIC = "health/replica_divergence"

# 32-bit words hashed in one row, and rows in one go: in the cache of a CPU, 32 MB on an accelerator.
_COLUMNS = 1 << 13
_ROWS_ON_CPU = 1 << 4
_ROWS = 1 << 10
# Any odd number: joins the hashes of one tensor's pieces in their order.
_STEP = 0x5851F42D4C957F2D

_HALF = 0xFFFFFFFF


@dataclass(frozen=True)
class Divergence:
    """A parameter whose replicas differ.

    Args:
        layer: the layer it counts for.
        parameter: its name.
        ranks: those that differ from most of the replicas (from the lowest rank's if none are more).
        spread: (largest - smallest) / largest norm of its replicas. 0 does not mean that they are equal.
    """

    layer: str
    parameter: str
    ranks: tuple[int, ...]
    spread: float


class Replicas:
    """Compares the replicas of watched parameters: whole ones, and shards that several ranks hold.

    Args:
        layers: of the same names on every rank; where some are sharded, as ``meeting.agree`` returned them.
    """

    def __init__(self, layers: Layers) -> None:
        first = {unit.name: unit for unit in reversed(layers.units)}
        self._units = [first[name] for name in dict.fromkeys(unit.name for unit in layers.units)]
        # Of a fused parameter the whole is compared, under the name of its first part's layer.
        self._names = [(unit.layer.split("[", 1)[0], unit.name) for unit in self._units]
        self._layers = layers
        self._size, _ = ranks_and_own()
        # Whether each is held by another rank too. Without sharding every rank holds all.
        self._copied = [not layers.together or _has_replicas(unit) for unit in self._units]
        # What differed when it was last compared.
        self.divergences: list[Divergence] = []

    @property
    def _compares(self) -> bool:
        """Whether anything has replicas; a rank that alone has none tells so, lest the others miss it."""
        if self._size == 1:
            return False
        return any(self._copied) or any(unit.holders < self._size for unit in self._units)

    @torch.no_grad()
    def compute(self) -> dict[str, torch.Tensor]:
        """What this rank holds.

        Returns:
            ``replicas``, ``[parameters, 4]``: the hash's halves, the norm, and which shard it is: −1 where
            this rank has nothing that another one has too. Empty where no rank has anything of the kind.
        """
        if not self._compares:
            return {}
        device = meeting_device(self._layers)
        nothing = torch.empty(0, device=device)
        known = list(zip(self._units, self._copied, strict=True))
        values = [local(unit.parameter).detach() if copied else nothing for unit, copied in known]
        hashed = torch.stack([fingerprint(one).to(device, non_blocking=True) for one in values])
        norms = torch.zeros(len(values), dtype=torch.float64, device=device)
        for place in dict.fromkeys(one.device for one in values):
            # Of what lies elsewhere: none, whose norm is 0.
            there = [one if one.device == place else None for one in values]
            norms += gradient_norms(there, place).to(device, non_blocking=True)
        shards = to_device([shard_index(unit.parameter) if copied else -1 for unit, copied in known], device)
        # Halves of 32 bits, each exact in fp64.
        low, high = hashed & _HALF, (hashed >> 32) & _HALF
        return {"replicas": torch.stack([low.double(), high.double(), norms, shards], dim=1)}

    def decode(self, arrays: Mapping[str, NDArray[np.float64]]) -> Values:
        """How many parameters differ somewhere; of each layer that does, the spread of its norms.

        Args:
            arrays: what ``compute`` returned on every rank, ``[ranks, parameters, 4]``.
        """
        self.divergences = []
        table = arrays.get("replicas")
        if table is None or len(table) < 2 or (table[..., 3] < 0).all():
            return Values()  # there is nothing that could have been compared
        same = (table[..., [0, 1, 3]] == table[0][..., [0, 1, 3]]).all(axis=(0, 2))
        differing = [self._compare(i, table[:, i]) for i in np.flatnonzero(~same).tolist()]
        self.divergences = [one for one in differing if one is not None]
        spreads: dict[str, float] = {}
        for one in self.divergences:
            spreads[one.layer] = max(one.spread, spreads.get(one.layer, 0.0))
        return Values({METRIC: float(len(self.divergences))}, {METRIC: spreads} if spreads else {})

    def _compare(self, index: int, table: NDArray[np.float64]) -> Divergence | None:
        """Compare ``[ranks, 4]`` within each group of ranks that hold the same shard."""
        odd: list[int] = []
        spread = 0.0
        for shard in np.unique(table[table[:, 3] >= 0, 3]):
            ranks = np.flatnonzero(table[:, 3] == shard)
            hashes = [(float(low), float(high)) for low, high in table[ranks, :2]]
            usual, _ = Counter(hashes).most_common(1)[0]  # of equally common ones, the first
            found = [int(rank) for rank, own in zip(ranks, hashes, strict=True) if own != usual]
            if found:
                odd += found
                spread = max(spread, _spread(table[ranks, 2]))
        return Divergence(*self._names[index], tuple(sorted(odd)), spread) if odd else None


def _has_replicas(unit: Unit) -> bool:
    return not unit.elsewhere and 0 < shard_weight(unit.parameter, unit.holders) < 1


def _spread(norms: NDArray[np.float64]) -> float:
    if not np.isfinite(norms).all():
        return float("inf")
    largest = float(norms.max())
    return (largest - float(norms.min())) / largest if largest else 0.0


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of a tensor's bits, in order: a scalar int64 on its device, without waiting for it.

    Each word of 32 bits is multiplied by an odd number that depends on its place, mixed, and added: one
    changed word always changes the hash, several do but for a chance of the order of 2^-32.
    """
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = flat.detach().reshape(-1)
    in_eight_bytes = 8 // flat.element_size()
    if flat.storage_offset() % in_eight_bytes or flat.stride(0) != 1:
        # To be read as wider numbers, it has to begin at a multiple of their size. One element, or none, has
        # any stride that it had before.
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    even = flat.numel() - flat.numel() % in_eight_bytes
    words, rest = flat[:even].view(torch.int64).view(torch.int32), flat[even:].view(torch.uint8)
    whole = len(words) - len(words) % _COLUMNS
    columns, rows = _factors(flat.device)
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    at_once = _ROWS_ON_CPU if flat.device.type == "cpu" else _ROWS
    for chunk in words[:whole].view(-1, _COLUMNS).split(at_once) if whole else ():
        found = found * _STEP + (_row_hashes(chunk, columns) * rows[: len(chunk)]).sum()
    if len(words) > whole:
        found = found * _STEP + _row_hashes(words[whole:], columns[: len(words) - whole])
    if len(rest):
        found = found * _STEP + (rest * rows[: len(rest)]).sum()
    return found


def _row_hashes(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Hashes of rows of words ``[..., n]``, n even: ``[...]``, int64."""
    # Multiplying moves differences up only: those of the upper half (a sign, a round number) come down first.
    # Shifting without the sign keeps this reversible, so that no two words give the same.
    mixed = (words >> 16).bitwise_and_(0xFFFF).bitwise_xor_(words).mul_(factors)
    # Two at a time: their sum in 64 bits keeps what a sum in 32 bits would lose.
    return mixed.view(torch.int64).sum(-1)


@functools.lru_cache(maxsize=16)
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd numbers, the same in every process: of 32 bits for columns, of 64 for rows."""
    random = np.random.Generator(np.random.PCG64(0x50616C69))
    columns = random.integers(-(2**31), 2**31, size=_COLUMNS, dtype=np.int32) | 1
    rows = random.integers(-(2**63), 2**63, size=_ROWS, dtype=np.int64) | 1
    with torch.inference_mode(False):
        return torch.from_numpy(columns).to(device), torch.from_numpy(rows).to(device)
