"""The order in which rows of several sources are drawn, from nothing but sizes, weights and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def order(
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    seed: int,
    epoch: int = 0,
    length: int | None = None,
) -> NDArray[np.int64]:
    """Indices into the sources laid end to end, in the order of one epoch.

    An epoch has ``length`` rows (all sources' together, if not given), of which each source gives its share
    of the weights, to the row; which comes when is drawn. Each source is gone through in an order of its own,
    without repetition until it is used up, then in another order; an epoch goes on where the one before it
    ended. The same arguments give the same order, so a run is resumed at a position by leaving out what comes
    before it.

    Raises:
        ConfigError: a weight is not above zero, or a source is empty.
    """
    import numpy as np

    if len(sizes) != len(weights) or not sizes:
        raise ConfigError(f"data.sources: {len(weights)} weights for {len(sizes)} sources")
    if any(not 0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"data.sources: every weight must be above 0, and they are {list(weights)}")
    if any(size < 1 for size in sizes):
        raise ConfigError("data.sources: a source without rows cannot be mixed in")
    counts = shares(weights, sum(sizes) if length is None else length)
    starts = np.cumsum([0, *sizes[:-1]])
    drawn = np.repeat(np.arange(len(sizes)), counts)
    np.random.default_rng([seed, epoch]).shuffle(drawn)
    indices = np.empty(len(drawn), dtype=np.int64)
    for number, (size, count, start) in enumerate(zip(sizes, counts, starts, strict=True)):
        rows = _passes(size, epoch * count, count, [seed, number])
        indices[drawn == number] = rows + start
    return indices


def shares(weights: Sequence[float], length: int) -> list[int]:
    """``length`` divided by weight into whole numbers, the largest remainders rounded up."""
    total = sum(weights)
    exact = [weight / total * length for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: length - sum(counts)]:
        counts[number] += 1
    return counts


def _passes(size: int, first: int, count: int, seed: list[int]) -> NDArray[Any]:
    """Rows ``first`` to ``first + count`` of a source's endless order: one shuffle after the other."""
    import numpy as np

    if not count:
        return np.empty(0, dtype=np.int64)
    begin, end = first // size, (first + count - 1) // size
    rounds = [np.random.default_rng([*seed, number, 1]).permutation(size) for number in range(begin, end + 1)]
    skipped = first - begin * size
    return np.concatenate(rounds)[skipped : skipped + count]
