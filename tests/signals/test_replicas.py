"""Replicas are compared bit by bit, and the one that differs is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.distributed.launch import seen
from torch import nn

from palingenesis.layers import find_layers
from palingenesis.signals.replicas import METRIC, Divergence, Replicas, fingerprint

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.complex64,
]  # fmt: skip
distributed = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


def hashed(tensor: torch.Tensor) -> int:
    return int(fingerprint(tensor))


# -- the hash ---------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.sampled_from(DTYPES),
    st.one_of(st.integers(1, 70), st.sampled_from([8191, 8192, 8193, 20_000, 140_001])),
    st.integers(0, 2**31),
)
def test_any_changed_byte_shows(dtype: torch.dtype, size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    data = torch.from_numpy(random.integers(0, 256, size * width, dtype=np.uint8))
    tensor = data.view(dtype) if width > 1 else data.view(torch.int8)
    before = hashed(tensor)
    assert hashed(tensor.clone()) == before
    at, bit = int(random.integers(len(data))), 1 << int(random.integers(8))
    data[at] ^= bit
    assert hashed(tensor) != before
    data[at] ^= bit
    assert hashed(tensor) == before


def test_changes_that_would_cancel_in_a_plain_sum() -> None:
    tensor = torch.linspace(-1, 1, 40_000)
    before = hashed(tensor)
    bits = tensor.view(torch.int32)
    for first, second in ((0, 1), (0, 2), (3, 20_000), (39_998, 39_999), (8191, 8192)):
        bits[first] += 1
        bits[second] -= 1
        assert hashed(tensor) != before
        bits[first] -= 1
        bits[second] += 1
        swapped = tensor.clone()
        swapped[first], swapped[second] = tensor[second], tensor[first]
        assert hashed(swapped) != before
        negated = tensor.clone()
        negated[[first, second]] *= -1
        assert hashed(negated) != before
    assert hashed(tensor) == before


def test_signed_zeros_and_nans_are_bits_too() -> None:
    zeros = torch.zeros(16)
    negative = zeros.clone()
    negative[[2, 4]] = -0.0
    assert hashed(zeros) != hashed(negative)
    nan = torch.full((4,), math.nan)
    assert hashed(nan) == hashed(nan.clone())
    nan.view(torch.int32)[1] ^= 1
    assert hashed(nan) != hashed(torch.full((4,), math.nan))


def test_layout_does_not_matter() -> None:
    base = torch.randn(6, 9)
    assert hashed(base.t()) == hashed(base.t().contiguous())
    assert hashed(base.flatten()[1:]) == hashed(base.flatten()[1:].clone())
    assert hashed(base) != hashed(base.t())
    assert hashed(torch.empty(0)) == 0
    # A column of one element, or of none, is flattened with the stride that it has.
    assert hashed(base[:1, 0]) == hashed(base[0, 0]) == hashed(base[0, 0].clone())
    assert hashed(base[:0, ::2]) == hashed(base.double()[:0, 0]) == 0
    assert hashed(torch.tensor(1.0)) != hashed(torch.tensor(2.0))


def test_no_two_of_many_are_alike() -> None:
    tensor = torch.zeros(64)
    found = {hashed(tensor)}
    for i in range(64):
        for value in (1.0, -1.0, 1e-45, math.inf):
            tensor[i] = value
            found.add(hashed(tensor))
        tensor[i] = 0.0
    assert len(found) == 1 + 64 * 4


# -- in one process ---------------------------------------------------------------------------------------


def test_one_process_has_nothing_to_compare() -> None:
    replicas = Replicas(find_layers(nn.Linear(2, 2)))
    assert replicas.compute() == {}
    values = replicas.decode({})
    assert (values.scalars, values.unavailable) == ({}, {})


def test_the_largest_group_of_equal_replicas_is_right() -> None:
    """Rows are ranks: the hash's halves, the norm, the shard's index."""
    replicas = Replicas(find_layers(nn.Sequential(nn.Linear(2, 2, bias=False), nn.MultiheadAttention(2, 1))))
    columns = len(replicas._units)
    table = np.zeros((5, columns, 4))
    table[:, 0, :3] = [[1, 1, 4.0], [2, 1, 5.0], [2, 1, 5.0], [2, 1, 5.0], [2, 9, 5.0]]
    # Of the fused projection: two shards on two ranks each, and none on the fifth rank.
    table[:, 1] = [[1, 1, 1, 0], [7, 7, 1, 1], [1, 1, 1, 0], [8, 7, 3, 1], [0, 0, 0, -1]]
    values = replicas.decode({"replicas": table})
    assert values.scalars == {METRIC: 2.0}
    assert values.layers == {METRIC: {"0": pytest.approx(0.2), "1.in_proj": pytest.approx(2 / 3)}}
    first, second = replicas.divergences
    assert (first.layer, first.parameter, first.ranks) == ("0", "0.weight", (0, 4))
    assert second == Divergence("1.in_proj", "1.in_proj_weight", (3,), pytest.approx(2 / 3))  # type: ignore[arg-type]
    assert replicas.decode({"replicas": table[:1]}).scalars == {}  # one rank alone
    table[..., 3] = -1
    assert replicas.decode({"replicas": table}).scalars == {}
    assert not replicas.divergences
    table[:] = 0.0
    assert replicas.decode({"replicas": table}).scalars == {METRIC: 0.0}
    assert not replicas.divergences


# -- over ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
class TestTwoRanks:
    pytestmark = distributed

    def test_ddp(self, rank: int) -> None:
        found = seen("replicas of ddp")[rank]
        assert found["equal"]["scalars"] == {METRIC: 0.0}
        assert found["equal"]["layers"] == {}
        assert found["one ulp"]["scalars"] == {METRIC: 1.0}
        assert found["one ulp"]["divergences"][0][:3] == ["odd", "odd.weight", [1]]
        assert [one[:3] for one in found["two layers"]["divergences"]] == [
            ["up", "up.bias", [1]],
            ["odd", "odd.weight", [1]],
        ]
        assert found["two layers"]["layers"][METRIC]["up"] == pytest.approx(0.5)

    def test_dtensors_in_bf16(self, rank: int) -> None:
        assert seen("replicas in bf16")[rank]["divergences"][0][:3] == ["a", "a", [1]]

    def test_shards_have_no_replicas(self, rank: int) -> None:
        found = seen("replicas of fsdp")[rank]
        assert (found["sent"], found["scalars"], found["unavailable"]) == ({}, {}, {})

    def test_what_lives_on_one_rank_has_none(self, rank: int) -> None:
        assert [one[:3] for one in seen("replicas here and there")[rank]["divergences"]] == [
            ["both", "both", [1]]
        ]

    def test_nobody_is_waited_for(self, rank: int) -> None:
        expected: list[dict[str, Any]] = [{"sent": {"replicas": [11, 4]}}, {}]
        assert seen("replicas on one rank")[rank] == expected[rank]


class TestFourRanks:
    pytestmark = distributed

    def test_hsdp(self) -> None:
        for found in seen("replicas of hsdp", 4):
            assert found["equal"]["scalars"] == {METRIC: 0.0}
            assert [one[:3] for one in found["one ulp"]["divergences"]] == [["down", "down.weight", [3]]]

    def test_ranks_without_replicas_do_not_keep_the_others_from_comparing(self) -> None:
        for found in seen("replicas of one stage", 4):
            assert found["sent"] == {"replicas": [2, 4]}
            assert [one[:3] for one in found["divergences"]] == [["first", "first", [1]]]

    def test_the_one_that_differs_from_most(self) -> None:
        for found in seen("replicas of four", 4):
            assert found["divergences"] == [["head", "head.bias", [0], math.inf]]
