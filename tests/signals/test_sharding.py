"""Norms of models that are spread over ranks equal those of the same model in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.distributed.launch import seen
from torch import nn

from palingenesis.layers import find_layers
from palingenesis.signals.meeting import Meeting, agree
from palingenesis.signals.sharding import is_sharded, local, shard_weight

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]

SPREAD = [
    ("fsdp", 2),
    ("fsdp offloaded", 2),
    ("tensor parallel", 2),
    ("sequence parallel", 2),
    ("hsdp", 4),
    ("fsdp of four", 4),
    ("fsdp of tensor parallel", 4),
]


# fp32 rounding of the gradients themselves, which are summed in another order.
def close(values: Any) -> Any:
    return pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize(("case", "ranks"), SPREAD)
def test_every_layer_as_in_one_process(case: str, ranks: int) -> None:
    for found in seen(case, ranks):
        assert found["together"]
        assert found["norm"] == close(found["exact"])
        assert found["norm"] == seen(case, ranks)[0]["norm"]  # the same on every rank, to the bit
        assert not found["absent"]
        assert not found["not_watched"]


@pytest.mark.parametrize(("case", "ranks"), [one for one in SPREAD if one[0] != "sequence parallel"])
def test_total_norm_is_known_after_the_reduction(case: str, ranks: int) -> None:
    for found in seen(case, ranks):
        assert found["total"] == close(math.hypot(*found["exact"].values()))
        assert found["total_before"] is None


def test_replicated_gradients_are_read_without_the_other_ranks() -> None:
    for found in seen("ddp"):
        assert not found["together"]
        assert found["norm"] == close(found["exact"])
        assert found["total_before"] == found["total"]


def test_compute_in_bf16() -> None:
    for found in seen("fsdp half"):
        assert found["norm"] == pytest.approx(found["exact"], rel=1e-2)


def test_summands_are_added_before_they_are_squared() -> None:
    for found in seen("sequence parallel"):
        assert "Partial" in found["placed"]
        assert found["same"]  # the gradients themselves are left as they were


def written(rank: int) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """What was seen of the gradients written by hand: the whole, and the guard's rows by layer."""
    first = seen("extremes")[rank]["first"]
    names = list(first["norm"])
    rows = ("peak", "peak_step", "first_nonfinite", "present_steps", "last_present")
    return first, {row: dict(zip(names, first[row], strict=True)) for row in rows}


@pytest.mark.parametrize("rank", [0, 1])
def test_small_large_and_non_finite_shards(rank: int) -> None:
    first, _ = written(rank)
    expected = {
        "tiny": 1.401298464324817e-45,  # the smallest number of fp32
        "huge": 2.0,
        "zero": 0.0,
        "later": 0.0,
        "nan": 5.0,
        "inf": math.inf,
        "gone": 0.0,
        "third": 2.0,
        "single": 7.0,
    }
    assert first["norm"] == close(expected)
    assert first["absent"] == ["gone"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_guard_sees_every_steps_global_norms(rank: int) -> None:
    _, guard = written(rank)
    assert guard["peak"]["tiny"] == close(math.sqrt(5) * 1e-25)
    assert guard["peak"]["huge"] == close(3e38)
    assert guard["peak"]["later"] == close(5.0)
    assert (guard["peak_step"]["tiny"], guard["peak_step"]["huge"], guard["peak_step"]["later"]) == (4, 5, 5)
    assert {name: step for name, step in guard["first_nonfinite"].items() if step} == {"nan": 5, "inf": 4}
    assert guard["present_steps"] == {
        "tiny": 3, "huge": 3, "zero": 0, "later": 1, "nan": 3, "inf": 3, "gone": 1, "third": 3, "single": 3,
    }  # fmt: skip
    assert (guard["last_present"]["later"], guard["last_present"]["zero"]) == (5, 0)


def test_the_shards_were_uneven_and_one_was_empty() -> None:
    assert [one["first"]["local"] for one in seen("extremes")] == [
        {"third": 2, "single": 1},
        {"third": 1, "single": 0},
    ]


def test_nothing_of_an_interval_is_left_in_the_next() -> None:
    for found in seen("extremes"):
        second = found["second"]
        assert set(second["absent"]) == set(second["norm"])
        rows = ("peak", "peak_step", "first_nonfinite", "present_steps", "last_present")
        assert not any(value for row in rows for value in second[row])


def test_the_loss_scale_is_taken_out() -> None:
    for found in seen("scaled"):
        assert found["norm"] == close([5.0 / 1024.0])


def test_more_steps_between_checks_than_rows() -> None:
    """The first value is of layer a, the second of layer b, whose one element rank 0 holds."""
    for found in seen("long interval"):
        assert found["norm"] == {"a": 7.0, "b": 0.0}
        assert found["peak"] == [70.0, 1.0]
        assert found["peak_step"] == [221.0, 160.0]
        assert found["first_nonfinite"] == [191.0, 0.0]
        assert found["present_steps"] == [147.0, 1.0]
        assert found["last_present"] == [300.0, 160.0]


def test_without_the_guard() -> None:
    for found in seen("no guard"):
        assert found["norm"] == close({"a": 5.0})
        assert "peak" not in found


def test_parameters_of_some_ranks_only() -> None:
    """Every rank knows all layers; what both ranks have for themselves is averaged in squares."""
    for found in seen("here and there"):
        assert found["norm"] == close(
            {"shared": 3.0, "outside": 5.0, "first_stage": 2.0, "second_stage": 10.0, "alone": 5 / 2**0.5}
        )
        assert found["holders"] == {
            "shared": 2, "outside": 1, "first_stage": 1, "second_stage": 1, "alone": 2,
        }  # fmt: skip
        assert not found["absent"]
    assert [one["elsewhere"] for one in seen("here and there")] == [["second_stage"], ["first_stage"]]


def test_the_same_names_on_several_meshes_are_replicas() -> None:
    for found in seen("tensor parallel under replicas", 4):
        assert found["norm"] == close({"split": 5.0, "copied": 5.0})


def test_a_monitor_on_one_rank_waits_for_nobody() -> None:
    for found in seen("monitor on one rank"):
        assert found["names"] == ["plain"]
        assert not found["together"]
        assert "not every rank has made a monitor" in found["not_watched"]["spread.a"]
        assert found["took"] < 10.0


def test_ranks_meet_again_after_one_has_come_alone() -> None:
    for found in seen("monitor on one rank"):
        assert set(found["then"]) == {"plain", "spread.a"}


def test_closing_on_one_rank_waits_for_nobody() -> None:
    assert [one["guarded"] for one in seen("closing on one rank")] == [0, 0]


def test_a_rank_that_cannot_read_spoils_one_check_and_not_the_next() -> None:
    for found in seen("failing on one rank"):
        assert "could not read" in found["raised"]
        assert found["norm"] == {"a": 5.0}
        assert found["present_steps"] == [2.0]


def test_sharded_layers_have_to_be_agreed_on() -> None:
    for found in seen("not agreed"):
        assert "agree" in found["raised"]


def test_all_steps_are_cheaper_together_than_each_by_itself() -> None:
    """400 layers, 50 steps a check: one reduction of all of them against one a step."""
    for found in seen("times"):
        assert found["send"] < 50 * max(found["reduce"], 1e-3), found


# -- without other ranks ----------------------------------------------------------------------------------


def test_without_torch_distributed_nothing_changes() -> None:
    layers = find_layers(nn.Linear(2, 2))
    assert agree(layers) is layers
    assert not layers.together
    assert Meeting("test").wait(60.0)
    weight = layers.units[0].parameter
    assert local(weight) is weight
    assert not is_sharded(weight)
    assert shard_weight(weight) == 1.0
