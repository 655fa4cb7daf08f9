"""The allocator's rules, on sequences where the answer is known."""

from __future__ import annotations

import numpy as np

from palingenesis.preflight.memory.allocator import reserved
from palingenesis.preflight.memory.categories import Category, Phase
from palingenesis.preflight.memory.trace import Trace

MIB = 1 << 20


def trace(*moves: tuple[int, int], category: Category = Category.ACTIVATIONS) -> Trace:
    """Storages and bytes, negative for a release."""
    rows = [(storage, size, category, Phase.FORWARD) for storage, size in moves]
    return Trace(np.array(rows, dtype=np.int64))


def test_small_tensors_share_a_segment_of_two_mib() -> None:
    assert reserved(trace(*((number, 1000) for number in range(100)))) == 2 * MIB


def test_middle_ones_share_twenty_and_large_ones_have_their_own() -> None:
    assert reserved(trace((1, 4 * MIB), (2, 8 * MIB), (3, 8 * MIB))) == 20 * MIB
    assert reserved(trace((1, 4 * MIB), (2, 8 * MIB), (3, 9 * MIB))) == 40 * MIB
    assert reserved(trace((1, 33 * MIB))) == 34 * MIB


def test_what_is_released_is_used_again() -> None:
    assert reserved(trace((1, 40 * MIB), (1, -40 * MIB), (2, 30 * MIB), (3, 10 * MIB))) == 40 * MIB


def test_neighbours_are_joined() -> None:
    halves = ((1, 40 * MIB), (1, -40 * MIB), (2, 20 * MIB), (3, 20 * MIB), (2, -20 * MIB), (3, -20 * MIB))
    assert reserved(trace(*halves, (4, 40 * MIB))) == 40 * MIB


def test_a_hole_that_is_too_small_costs_another_segment_or_the_limit() -> None:
    moves = ((1, 40 * MIB), (1, -40 * MIB), (2, 20 * MIB), (3, 42 * MIB))
    assert reserved(trace(*moves)) == 82 * MIB
    assert reserved(trace(*moves), capacity=70 * MIB) is None


def test_unused_segments_are_returned_before_the_limit_is_passed() -> None:
    moves = ((1, 40 * MIB), (1, -40 * MIB), (2, 60 * MIB))
    assert reserved(trace(*moves)) == 100 * MIB
    assert reserved(trace(*moves), capacity=80 * MIB) == 60 * MIB


def test_memory_of_one_stream_is_not_used_on_another() -> None:
    moves = [(1, 40 * MIB, Category.ACTIVATIONS), (1, -40 * MIB, Category.ACTIVATIONS)]
    for storage, category in ((2, Category.GATHERED), (3, Category.GRADIENTS), (4, Category.BACKWARD)):
        moves += [(storage, 40 * MIB, category), (storage, -40 * MIB, category)]
    rows = [(*move, Phase.BACKWARD) for move in moves]
    step = Trace(np.array(rows, dtype=np.int64))
    assert reserved(step) == 40 * MIB
    assert reserved(step, apart=True) == 3 * 40 * MIB
    assert reserved(step, 80 * MIB, apart=True) == 80 * MIB  # what is unused is returned


def test_what_is_resized_in_place_is_allocated_anew() -> None:
    assert reserved(trace((1, 40 * MIB), (1, -40 * MIB), (1, 60 * MIB))) == 100 * MIB
