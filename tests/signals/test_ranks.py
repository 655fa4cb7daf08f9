"""Each rank's own gradients, heard before DDP averages them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.launch import seen
from tests.distributed.sharding_cases import Net
from torch import nn

from palingenesis.layers import find_layers
from palingenesis.signals.ranks import METRIC, RankGradients

distributed = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


# -- in one process: what is made of the numbers ----------------------------------------------------------


def heard(ranks: RankGradients, norms: list[list[float]]) -> tuple[float, list[tuple[str, int]]]:
    """The ratio and the outliers, for layers of one unit each."""
    table = np.hstack([np.array(norms), np.zeros((len(norms), 1))])
    values = ranks.decode({"ranks": table})
    assert ranks.found is not None
    return values.scalars[METRIC], [(one.layer, one.rank) for one in ranks.found.outliers]


def of_layers(count: int) -> RankGradients:
    return RankGradients(find_layers(nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(count)))))


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("factor", [1e-9, 1e-5, 1e5, 1e9])
def test_one_of_many_ranks_is_named(size: int, factor: float) -> None:
    norms = [[1.0 + 0.1 * rank, 3.0, 1e-6] for rank in range(size)]
    norms[2][1] *= factor
    ratio, outliers = heard(of_layers(3), norms)
    assert outliers == [("1", 2)]
    assert ratio == pytest.approx(max(factor, 1 / factor))


def test_ranks_that_agree_name_nobody() -> None:
    ratio, outliers = heard(of_layers(2), [[1.0, 1e-8], [9e3, 1e-8], [2.0, 3e-8]])
    assert outliers == []
    assert ratio == pytest.approx(9e3 / 2)


def test_the_worst_comes_first() -> None:
    _, outliers = heard(of_layers(2), [[1.0, 1.0], [1e5, 1.0], [1.0, 1e-7], [1.0, 1.0]])
    assert outliers == [("1", 2), ("0", 1)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_not_finite(bad: float, size: int) -> None:
    norms = [[1.0, 1.0] for _ in range(size)]
    norms[1][0] = bad
    ratio, outliers = heard(of_layers(2), norms)
    assert outliers == [("0", 1)]
    assert ratio == math.inf


def test_a_layer_without_gradients_on_a_rank_is_no_outlier() -> None:
    ratio, outliers = heard(of_layers(2), [[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    assert (ratio, outliers) == (1.0, [])
    ratio, outliers = heard(of_layers(1), [[0.0], [0.0]])
    assert (ratio, outliers) == (1.0, [])


def test_of_two_ranks_the_one_that_left_is_named() -> None:
    ranks = of_layers(1)
    assert heard(ranks, [[1.0], [1e5]])[1] == [("0", 0), ("0", 1)]  # who knows
    assert heard(ranks, [[1.0], [2.0]])[1] == []
    assert heard(ranks, [[1e-5], [2.0]])[1] == [("0", 0)]
    assert heard(ranks, [[1.0], [2e6]])[1] == [("0", 1)]


def test_a_layers_norm_is_that_of_all_its_parameters() -> None:
    ranks = RankGradients(find_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    ranks.decode({"ranks": np.array([[3, 4, 12, 0, 0], [1, 0, 0, 0, 0.0]])})
    assert ranks.found is not None
    assert ranks.found.norms.tolist() == [[5.0, 12.0], [1.0, 0.0]]


def test_one_rank_alone_is_compared_with_nobody() -> None:
    ranks = of_layers(1)
    values = ranks.decode({"ranks": np.array([[1.0, 0.0]])})
    assert (values.scalars, values.unavailable, ranks.found) == ({}, {}, None)


def test_one_process_hears_nothing() -> None:
    model = nn.Linear(2, 2)
    ranks = RankGradients(find_layers(model))
    ranks.arm()
    assert not model.weight._backward_hooks
    assert ranks.compute() == {}
    assert ranks.decode({}).unavailable == {}


# -- over ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
class TestTwoRanks:
    pytestmark = distributed

    @pytest.mark.parametrize("case", ["own gradients", "own gradients under no_sync"])
    def test_own_gradients(self, rank: int, case: str) -> None:
        found = seen(case)[rank]
        for other, theirs in enumerate(seen(case)):
            norms = dict(zip(found["names"], found["norms"][other], strict=True))
            assert norms == pytest.approx(theirs["exact"], rel=1e-6)
        assert found["outliers"] == []

    @pytest.mark.parametrize(
        "case", ["own gradients", "own gradients under no_sync", "own gradients reduced each time"]
    )
    def test_training_is_the_same_and_no_hook_is_left(self, rank: int, case: str) -> None:
        found = seen(case)[rank]
        assert found["plain"]
        assert found["hooks"] == 0

    def test_gradients_reduced_too_early_are_told(self, rank: int) -> None:
        found = seen("own gradients reduced each time")[rank]
        assert found["scalars"] == {}
        assert "no_sync" in found["unavailable"][METRIC]

    def test_a_rank_whose_layer_vanishes_is_named(self, rank: int) -> None:
        found = seen("a vanishing rank")[rank]
        assert found["first"]["outliers"] == []
        ((layer, odd, norm, others),) = found["second"]["outliers"]
        assert (layer, odd) == ("odd", 1)
        assert others / norm > 1e4

    def test_two_ranks_without_history_are_both_named(self, rank: int) -> None:
        outliers: list[Any] = seen("two ranks without history")[rank]["outliers"]
        assert sorted(one[1] for one in outliers) == [0, 1]

    def test_a_layer_that_one_rank_does_not_use(self, rank: int) -> None:
        found = seen("a silent layer")[rank]
        assert found["outliers"] == []
        assert found["norms"][1][found["names"].index("odd")] == 0.0

    def test_a_failing_hook_ends_no_backward_pass(self, rank: int) -> None:
        assert seen("a failing hook")[rank] == [{"told": ["ranks"]}, {"raised": True}][rank]

    def test_who_does_not_listen_is_not_waited_for(self, rank: int) -> None:
        units = len(find_layers(Net()).units)
        assert seen("ranks on one rank")[rank]["told"] == [{"ranks": [units + 1]}, {}][rank]

    def test_shards(self, rank: int) -> None:
        assert "sharded" in seen("ranks of shards")[rank]["unavailable"][METRIC]
