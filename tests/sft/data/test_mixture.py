"""The order of several sources: exact shares, no repetition, the same for the same seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.errors import ConfigError
from palingenesis.sft.data import order
from palingenesis.sft.data.mixture import shares


def sources_of(indices: np.ndarray, sizes: list[int]) -> np.ndarray:
    return np.searchsorted(np.cumsum(sizes), indices, side="right")


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 10)), min_size=1, max_size=4),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 5),
)
def test_shares_are_exact_and_no_row_comes_twice_before_all_have_come(
    parts: list[tuple[int, float]], seed: int, epoch: int
) -> None:
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    found = order(sizes, weights, seed=seed, epoch=epoch)
    counts = np.bincount(sources_of(found, sizes), minlength=len(sizes))

    assert len(found) == sum(sizes)
    exact = np.array(weights) / sum(weights) * sum(sizes)
    assert np.all(np.abs(counts - exact) < 1)
    for number, size in enumerate(sizes):
        rows = found[sources_of(found, sizes) == number]
        # A window of as many rows as the source has spans at most two orders of it.
        assert max(Counter(rows.tolist()).values(), default=0) <= -(-len(rows) // size) + 1


def test_the_same_seed_gives_the_same_order_and_another_another() -> None:
    first, again, other, later = (
        order([50, 20], [1, 3], seed=seed, epoch=epoch) for seed, epoch in ((7, 0), (7, 0), (8, 0), (7, 1))
    )
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist() and first.tolist() != later.tolist()


def test_a_source_goes_on_where_the_epoch_before_left_it() -> None:
    """A large source with a small weight: ten epochs of a tenth each show every row once."""
    sizes, length = [100, 30], 20
    epochs = [order(sizes, [1, 1], seed=3, epoch=epoch, length=length) for epoch in range(10)]
    large = [index for found in epochs for index in found.tolist() if index < 100]
    assert sorted(large) == list(range(100))
    small = Counter(index for found in epochs[:3] for index in found.tolist() if index >= 100)
    assert set(small.values()) == {1} and len(small) == 30


def test_one_source_is_every_row_once() -> None:
    assert sorted(order([40], [2.5], seed=1).tolist()) == list(range(40))


def test_sources_come_mixed() -> None:
    which = sources_of(order([500, 500], [1, 1], seed=0), [500, 500])
    changes = np.count_nonzero(np.diff(which))
    assert abs(changes - 500) < 4 * np.sqrt(250)


def test_shares_add_up() -> None:
    assert shares([1, 1, 1], 10) == [4, 3, 3]
    assert shares([0.7, 0.2, 0.1], 10) == [7, 2, 1]


@pytest.mark.parametrize(
    ("sizes", "weights", "told"),
    [
        ([3, 3], [1, 0], "above 0"),
        ([3, 3], [1, -1], "above 0"),
        ([3, 3], [1, float("nan")], "above 0"),
        ([3, 0], [1, 1], "without rows"),
        ([3], [1, 1], "2 weights for 1 sources"),
    ],
)
def test_what_cannot_be_mixed(sizes: list[int], weights: list[float], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        order(sizes, weights, seed=0)
