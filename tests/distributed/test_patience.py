"""Ranks that do not do the same: nothing hangs, training is the same, and what is told is right."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests.distributed.language import Loop, named
from tests.distributed.launch import marks
from tests.distributed.launch import seen as seen_in
from tests.distributed.patience_cases import CASES, GATES, HALF, PATIENCE_S, SPECTRUM_CASES
from tests.distributed.reading_cases import EVERYTHING

from palingenesis import MonitorConfig
from palingenesis.signals.gate import MISSES

pytestmark = marks

ALL = [*CASES[2], *SPECTRUM_CASES[2]]
# Those in which rank 0 goes through all steps.
TO_THE_END = [case for case in ALL if "rank 0 closes" not in case and "rank 0 stops" not in case]

# What one rank alone can know of a whole model, and of shards.
OF_A_MODEL = {
    "grad_cosine", "grad_cosine_sim", "gw_ratio", "stable_rank", "stable_rank_mean", "stable_rank_min",
    "update_ratio", "weight_drift", "weight_drift_max", "weight_drift_mean", "weight_norm",
    "weight_norm_ratio",
}  # fmt: skip
OF_RANKS = {"replica_divergence", "rank_gradient_ratio", "host_rss_gb_max"}
ALWAYS = {"loss_mean", "loss_std", "loss_cv", "output_entropy", "token_efficiency", "padding_pct"}


def seen(case: str) -> list[dict[str, Any]]:
    return seen_in(case, 2, "spectrum" if case in SPECTRUM_CASES[2] else "patience")


def names(row: dict[str, float]) -> set[str]:
    """Of the metrics in a row, without ``health/`` and layers."""
    return {name.split("/")[1] for name in row if name.startswith("health/")}


def told(case: str) -> set[str]:
    return {name for row in seen(case)[0]["rows"].values() for name in names(row)}


def missing(case: str) -> dict[str, str]:
    """Reasons by signal."""
    events = named(seen(case)[0]["events"], "signal_unavailable")
    return {event["signal"]: event["reason"] for event in events}


@functools.cache
def expected() -> dict[str, dict[str, float]]:
    """The same in one process."""
    loop = Loop()
    with loop.watched(config=MonitorConfig(**EVERYTHING)) as mon:
        loop.run(mon)
    found: dict[str, dict[str, float]] = loop.ran.json()["rows"]
    return found


@pytest.mark.parametrize("case", ALL)
def test_training_is_the_same_to_the_bit_on_both_ranks(case: str) -> None:
    assert [one["same"] for one in seen(case)] == [True, True]


@pytest.mark.parametrize("case", ALL)
def test_nobody_waits_for_long(case: str) -> None:
    """Replicas for nobody; shards at each of the gates for as often as it takes to shut it."""
    # Far above what a busy machine takes for 20 steps, far below what a collective waits.
    limit = 20.0 if case.startswith("ddp") else 20.0 + GATES * MISSES * PATIENCE_S
    for one in seen(case):
        assert one["trained"] < limit
        assert one["took"] - one["trained"] < 20.0


@pytest.mark.parametrize("case", TO_THE_END)
def test_rank_0_goes_on_with_its_rows(case: str) -> None:
    rows = seen(case)[0]["rows"]
    assert list(map(int, rows)) == list(range(1, 21))
    assert names(rows["20"]) >= ALWAYS
    assert not seen(case)[1]["rows"]


@pytest.mark.parametrize("case", ALL)
def test_what_is_told_of_the_model_is_right(case: str) -> None:
    for step, row in seen(case)[0]["rows"].items():
        found = {name: value for name, value in row.items() if name.split("/")[1] in OF_A_MODEL}
        right = {name: value for name, value in expected()[step].items() if name in found}
        assert found == pytest.approx(right, rel=1e-3, abs=1e-4), step


@pytest.mark.parametrize("case", [case for case in ALL if case.startswith("ddp")])
def test_a_whole_model_is_read_without_the_others(case: str) -> None:
    assert told(case) >= OF_A_MODEL


@pytest.mark.parametrize("case", ["ddp, monitor on rank 0", "ddp, step on rank 0", "ddp, another config"])
def test_without_other_ranks_nothing_is_told_of_them(case: str) -> None:
    assert not told(case) & OF_RANKS
    assert "other ranks" in missing(case)["health/rank_gradient_ratio"]


@pytest.mark.parametrize("case", ["ddp, rank 1 closes", "ddp, rank 1 stops"])
def test_until_a_rank_is_gone_it_is_heard(case: str) -> None:
    for step, row in seen(case)[0]["rows"].items():
        assert bool(names(row) & OF_RANKS) == (
            int(step) <= HALF and bool(names(row) & {"host_rss_gb", "weight_norm"})
        )
    assert "other ranks" in missing(case)["health/rank_gradient_ratio"]


def test_nothing_is_left_for_a_rank_that_has_closed() -> None:
    """Numbers that nobody takes would fill the memory of the store."""
    first, second = seen("ddp, rank 0 closes")
    assert first["store"] - first["store_before"] < 5
    assert second["store"] - second["store_before"] < 5


@pytest.mark.parametrize(
    ("case", "lost", "family"),
    [
        ("ddp, replicas fail", {"replica_divergence"}, "replicas"),
        ("ddp, memory fails", {"host_rss_gb", "host_rss_gb_max"}, "memory"),
        ("fsdp, cosine fails", {"grad_cosine", "grad_cosine_sim"}, "cosine"),
        ("fsdp, norms fail", {"weight_norm", "weight_norm_ratio", "gw_ratio"}, "weights"),
        ("fsdp, spectrum fails", {"stable_rank", "stable_rank_min", "stable_rank_mean"}, "spectrum"),
    ],
)
def test_one_family_that_fails_on_one_rank_costs_itself(case: str, lost: set[str], family: str) -> None:
    everything = OF_A_MODEL | {"host_rss_gb_max"} | (OF_RANKS if case.startswith("ddp") else set())
    assert told(case) & (everything | lost) == everything - lost
    (error,) = named(seen(case)[1]["events"], "monitor_error")
    assert family in error["message"]
    assert "no such luck" in error["message"]
    assert not [event for event in seen(case)[0]["events"] if event["event"] == "alarm"]


@pytest.mark.parametrize("case", ["fsdp, monitor on rank 0", "fsdp, another config", "fsdp, another check"])
def test_shards_of_which_others_do_not_tell_have_no_numbers(case: str) -> None:
    assert not told(case) & (OF_A_MODEL | OF_RANKS)
    assert missing(case)
    assert not [event for event in seen(case)[0]["events"] if event["event"] in ("alarm", "bound_crossed")]
