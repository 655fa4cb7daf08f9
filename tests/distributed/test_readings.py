"""Whatever a model is spread over, rank 0 reads what one process would on the joined batch."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from tests.distributed.language import EVEN, Loop
from tests.distributed.launch import marks, seen
from tests.distributed.reading_cases import EVERYTHING, Experts

from palingenesis import MonitorConfig

pytestmark = marks

# Each way to spread a model: on how many ranks, and the one process with the same batches. Under DDP its
# micro-batches are the ranks' own.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"micro": 2}),
    "ddp, micro-batches": (2, {"micro": 4}),
    "fsdp": (2, {}),
    "fsdp, micro-batches": (2, {}),
    "offloaded": (2, {}),
    "tensor parallel": (2, {"inner": EVEN}),
    "experts": (2, {"make": lambda _: Experts()}),
    "hsdp": (4, {}),
    "fsdp of tensor parallel": (4, {"inner": EVEN}),
}
REPLICATED = [way for way in WAYS if way.startswith("ddp")]
COMPARED = [*REPLICATED, "tensor parallel", "hsdp", "fsdp of tensor parallel"]
SHARDED = [way for way in WAYS if way not in REPLICATED]

# Relative; of what may be small, absolute.
TOLERANCE = 1e-3
SMALL = {"health/grad_cosine": 1e-4, "health/grad_cosine_sim": 1e-4, "health/update_lost_pct": 1e-3}
# Of a step that several looks are late for, and of this process alone.
NOT_COMPARED = {"health/warnings", "health/host_rss_gb", "health/gns_source"}


def family(name: str) -> str:
    return "/".join(name.split("/")[:2])


@functools.cache
def expected(way: str) -> dict[str, Any]:
    """The same in one process."""
    loop = Loop(**WAYS[way][1])
    with loop.watched(config=MonitorConfig(**EVERYTHING)) as mon:
        loop.run(mon)
    return loop.ran.json()


def found(way: str) -> list[dict[str, Any]]:
    return seen(way, WAYS[way][0], "readings")


@pytest.mark.parametrize("way", WAYS)
def test_every_number_of_every_step(way: str) -> None:
    rows, right = found(way)[0]["rows"], expected(way)["rows"]
    assert list(rows) == list(right)
    for step, row in right.items():
        values = {name: value for name, value in row.items() if family(name) not in NOT_COMPARED}
        if way in REPLICATED:  # ranks compare their parts only once they know of each other
            values = {name: value for name, value in values.items() if "health/gns" not in name}
        if way == "fsdp of tensor parallel":  # some matrices are cut along both dimensions
            values = {name: value for name, value in values.items() if "stable_rank" not in name}
        told = {name: rows[step].get(name, math.nan) for name in values}
        assert told == {
            name: pytest.approx(value, rel=TOLERANCE, abs=SMALL.get(family(name), 1e-12))
            for name, value in values.items()
        }


@pytest.mark.parametrize("way", WAYS)
def test_no_number_is_left_out(way: str) -> None:
    """What is compared above is what there should be."""
    names = {family(name) for row in expected(way)["rows"].values() for name in row}
    assert names >= {
        f"health/{name}"
        for name in (
            "grad_cosine_sim", "grad_cosine", "weight_norm", "weight_norm_ratio", "gw_ratio", "weight_drift",
            "weight_drift_max", "weight_drift_mean", "stable_rank", "stable_rank_min", "stable_rank_mean",
            "update_ratio", "update_lost_pct", "token_efficiency", "padding_pct", "output_entropy",
            "entropy_trend", "loss_mean", "loss_std", "loss_cv", "host_rss_gb", "gns_source",
        )
    }  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same_to_the_bit_on_every_rank(way: str) -> None:
    assert all(one["same"] for one in found(way))


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_weights_are_those_of_one_process(way: str) -> None:
    """Else nothing above would say anything."""
    for one in found(way):
        assert one["losses"] == pytest.approx(expected(way)["losses"], rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_only_rank_0_reads_and_nothing_is_wrong(way: str) -> None:
    for rank, one in enumerate(found(way)):
        assert bool(one["rows"]) == (rank == 0)
        assert {event["event"] for event in one["events"]} <= {
            "run_started",
            "run_ended",
            "signal_unavailable",
            "bound_crossed",  # random weights drift far
        }


@pytest.mark.parametrize("way", WAYS)
def test_the_largest_memory_of_all_ranks(way: str) -> None:
    rows = [row for row in found(way)[0]["rows"].values() if "health/host_rss_gb" in row]
    assert rows
    for row in rows:
        assert 0 < row["health/host_rss_gb"] <= row["health/host_rss_gb_max"] < 10


@pytest.mark.parametrize("way", WAYS)
def test_what_ranks_have_in_common_is_compared(way: str) -> None:
    """Replicas wherever there are some; gradients before their average wherever hooks hear them."""
    rows = found(way)[0]["rows"]
    looks = ["1", "5", "10", "15", "20"]
    replicas = {
        step: row["health/replica_divergence"]
        for step, row in rows.items()
        if "health/replica_divergence" in row
    }
    assert replicas == (dict.fromkeys(looks, 0.0) if way in COMPARED else {})
    ratios = {
        step: row["health/rank_gradient_ratio"]
        for step, row in rows.items()
        if "health/rank_gradient_ratio" in row
    }
    assert list(ratios) == (looks[1:] if way in REPLICATED else [])
    assert all(1 <= ratio < 30 for ratio in ratios.values())


@pytest.mark.parametrize(
    ("way", "source"),
    [("ddp", "rank"), ("ddp, micro-batches", "microbatch"), *((way, "consecutive") for way in SHARDED)],
)
def test_where_the_noise_scale_comes_from(way: str, source: str) -> None:
    labels = [label["health/gns_source"] for label in found(way)[0]["labels"].values() if label]
    # Parts are compared from step 4 on, so that their eighth is of step 18.
    assert labels[-2:] == [source] * 2
