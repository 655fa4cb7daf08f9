"""Ranks that come apart are named; noise, estimates and first weights are those of one process."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from tests.distributed.apart_cases import BATCHES, LARGE, RATE, SINCE
from tests.distributed.language import Loop, named
from tests.distributed.launch import marks
from tests.distributed.launch import seen as seen_in
from tests.distributed.reading_cases import EVERYTHING, Experts

from palingenesis import MonitorConfig

pytestmark = marks


def seen(case: str, ranks: int = 2) -> list[dict[str, Any]]:
    return seen_in(case, ranks, "apart")


def alone(loop: Loop, **options: Any) -> dict[str, Any]:
    """The same in one process."""
    with loop.watched(config=MonitorConfig(**{**EVERYTHING, **options})) as mon:
        loop.run(mon)
    return loop.ran.json()


# -- ranks apart ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "ranks", "rank"), [("one differs", 2, 1), ("one shard differs", 4, 3)])
def test_one_rank_that_has_one_other_weight(case: str, ranks: int, rank: int) -> None:
    """One critical event, although it goes on to the end."""
    first, *others = seen(case, ranks)
    (event,) = named(first["events"], "replica_divergence")
    assert (event["step"], event["severity"]) == (SINCE, "critical")
    assert (event["layer"], event["parameter"], event["ranks"]) == ("h.1.down", "h.1.down.weight", [rank])
    looks = {int(step): row["health/replica_divergence"] for step, row in first["rows"].items()
             if "health/replica_divergence" in row}  # fmt: skip
    assert {step: found > 0 for step, found in looks.items()} == {
        step: step >= SINCE for step in (1, 5, 10, 15, 20)
    }
    assert not any(named(other["events"], "replica_divergence") for other in others)


@pytest.mark.parametrize(("case", "factor"), [("one fades", 1e-5), ("one explodes", 1e5)])
def test_one_rank_whose_gradients_are_far_from_the_others(case: str, factor: float) -> None:
    event = named(seen(case)[0]["events"], "rank_outlier")[0]
    assert (event["step"], event["severity"]) == (SINCE, "warning")
    assert (event["rank"], event["layer"]) == (1, "h.0.up")
    assert event["value"] / event["baseline"] == pytest.approx(factor, rel=0.7)
    row = seen(case)[0]["rows"][str(SINCE)]
    assert row["health/rank_gradient_ratio"] == pytest.approx(max(factor, 1 / factor), rel=0.7)


def test_a_rank_that_goes_on_so_is_named_once() -> None:
    assert len(named(seen("one fades")[0]["events"], "rank_outlier", "rank_outlier_cleared")) == 1


# -- the noise scale --------------------------------------------------------------------------------------


@functools.cache
def true_noise() -> dict[str, float]:
    """From every single sequence, of five times as many batches."""
    loop = Loop(micro=8, rate=0.0, steps=5 * BATCHES)
    rows = alone(loop, tier2_every=1, tier3_every=1000, check_every=20, rl_readiness=False)["rows"]
    found: dict[str, float] = list(rows.values())[-1]
    return found


@pytest.mark.parametrize(
    ("case", "source"),
    [("noise of ranks", "rank"), ("noise of micro-batches", "microbatch"), ("noise of steps", "consecutive")],
)
def test_every_source_finds_the_same_noise(case: str, source: str) -> None:
    row = list(seen(case)[0]["rows"].values())[-1]
    assert row["health/gns_source"] == source
    for name in ("health/gns", "health/gns_tokens", "health/gns_ratio"):
        error = math.hypot(row[f"{name}_se"], true_noise()[f"{name}_se"])
        assert abs(row[name] - true_noise()[name]) < 3 * error
        assert error < 0.3 * row[name]  # else nothing was said


def test_a_last_look_at_replicated_weights_asks_no_other_rank() -> None:
    """Nothing of it is theirs."""
    events = seen("noise of ranks")[0]["events"]
    assert named(events, "tier3_at_end")
    assert not [event for event in named(events, "signal_unavailable") if event["step"] == BATCHES]


# -- sketches and samples ---------------------------------------------------------------------------------


def test_estimates_of_shards_are_as_good_as_those_of_the_whole() -> None:
    exact = alone(Loop(inner=LARGE, rate=RATE))["rows"]
    found = seen("estimated")[0]["rows"]
    relative = {
        "weight_norm": 1e-3,
        "gw_ratio": 1e-3,
        "stable_rank": 0.01,
        "update_ratio": 0.05,
        "weight_drift": 0.05,
    }
    looked = 0
    for step, row in exact.items():
        for name, value in row.items():
            kind = name.split("/")[1]
            if kind in relative:
                assert found[step][name] == pytest.approx(value, rel=relative[kind], abs=1e-9), (step, name)
                looked += 1
            elif kind in ("grad_cosine", "grad_cosine_sim"):
                assert found[step][name] == pytest.approx(value, abs=0.02), (step, name)
                looked += 1
    assert looked > 150


def test_entropy_of_a_sample_on_every_rank() -> None:
    exact = alone(Loop(inner=LARGE, rate=RATE))["rows"]
    off = []
    for step, row in seen("estimated")[0]["rows"].items():
        error = row["health/output_entropy_se"]
        assert error > 0
        off.append((row["health/output_entropy"] - exact[step]["health/output_entropy"]) / error)
    assert max(map(abs, off)) < 3
    assert 0.5 < sum(one**2 for one in off) / len(off) < 2


# -- taken up again ---------------------------------------------------------------------------------------


@functools.cache
def uninterrupted(experts: bool) -> dict[str, Any]:
    found: dict[str, Any] = alone(Loop(make=lambda _: Experts()) if experts else Loop())["rows"]
    return found


@pytest.mark.parametrize("case", ["resumed ddp", "resumed fsdp", "resumed sketch", "resumed experts"])
def test_drift_is_from_the_first_start_on(case: str) -> None:
    first = seen(case)[0]
    for step in ("15", "20"):
        drifts = {
            name: drift
            for name, drift in uninterrupted(case == "resumed experts")[step].items()
            if "drift" in name
        }
        assert len(drifts) > 8
        assert {name: first["rows"][step][name] for name in drifts} == pytest.approx(drifts, rel=1e-3)
    missing = {event["signal"] for event in named(first["events"], "signal_unavailable")}
    assert missing <= {"health/rank_gradient_ratio"}  # which shards have not
    assert not named(first["events"], "monitor_error")


def test_every_rank_keeps_its_own_part_of_the_first_weights() -> None:
    def starts(case: str) -> list[str]:
        return [name for name in seen(case)[0]["kept"] if name.startswith("start")]

    assert starts("resumed ddp") == ["start.pt"]
    assert starts("resumed fsdp") == starts("resumed experts") == ["start-1.pt", "start.pt"]


def test_without_one_ranks_first_weights_there_is_no_drift() -> None:
    first = seen("resumed without")[0]
    missing = {event["signal"] for event in named(first["events"], "signal_unavailable")}
    assert missing - {"health/rank_gradient_ratio"} == {"health/weight_drift"}
    assert not any("drift" in name for step in ("11", "15", "20") for name in first["rows"][step])
