"""Two processes over gloo: who writes, that norms are those of all ranks, and that nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from palingenesis import load_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]

WORKER = Path(__file__).with_name("distributed_worker.py")
TIMEOUT_S = 240
SHARDED = ["fully_shard", "fully_shard, loss on rank 0", "fully_shard, one rank closes"]
FLAT = ["FSDP", "FSDP, one flat parameter"]
DDP = ["ddp", "ddp, loss on rank 0", "ddp, loss on rank 1", "ddp, mixed losses"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers of all cases left what they saw."""
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(WORKER), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def seen(folder: Path, case: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{case}-{rank}.json").read_text())
    assert "error" not in found, found["error"]
    return found


def told(found: dict[str, Any], event: str) -> list[dict[str, Any]]:
    return [one for one in found["events"] if one["event"] == event]


@pytest.mark.parametrize("case", [*DDP, *SHARDED, *FLAT, "partly sharded"])
@pytest.mark.parametrize("rank", [0, 1])
def test_training_is_the_same_and_nothing_fails(folder: Path, case: str, rank: int) -> None:
    found = seen(folder, case, rank)
    assert found["same"]
    assert not told(found, "monitor_error")
    assert found["losses"] != seen(folder, case, 1 - rank)["losses"]


@pytest.mark.parametrize("case", [*DDP, *SHARDED, *FLAT, "partly sharded"])
def test_rank_0_writes_one_record_and_rank_1_none(folder: Path, case: str) -> None:
    assert seen(folder, case, 0)["wrote"]
    assert not seen(folder, case, 1)["wrote"]
    run = load_run(folder / f"{case}-run-0")
    assert run.verify().ok
    assert run.info["parallelism"] == {"world_size": 2, "rank": 0}
    assert run.info["end"]["steps"] == 12


@pytest.mark.parametrize("case", [*DDP, *SHARDED])
def test_norms_are_global_and_under_the_models_own_names(folder: Path, case: str) -> None:
    run = load_run(folder / f"{case}-run-0")
    assert run.verdict == "HEALTHY"
    assert run.info["layers"] == ["0", "2", "3"]
    for rank in (0, 1):
        exact = seen(folder, case, rank)["norms"]
        assert {layer: run.layers[layer][-1] for layer in exact} == pytest.approx(exact, rel=1e-5)
    assert run.layers["step"].tolist() == [2, 4, 6, 8, 10, 12]


def test_each_rank_may_pass_a_loss_or_not(folder: Path) -> None:
    rank_0 = load_run(folder / "ddp, loss on rank 0-run-0")
    assert rank_0.metrics["train/loss"].tolist() == pytest.approx(
        seen(folder, "ddp, loss on rank 0", 0)["losses"]
    )
    assert "train/loss" not in load_run(folder / "ddp, loss on rank 1-run-0").metrics


@pytest.mark.parametrize("case", FLAT)
def test_flat_shards_are_told_and_never_called_healthy(folder: Path, case: str) -> None:
    """A norm over one process's shard would be a wrong number: there is none."""
    for rank in (0, 1):
        found = seen(folder, case, rank)
        signals = told(found, "signal_unavailable")
        (unavailable,) = (one for one in signals if one["signal"] == "gradient_norm")
        assert unavailable["layers"]
        assert found["verdict"] != "HEALTHY"
    run = load_run(folder / f"{case}-run-0")
    assert run.verdict == "NOT MONITORED"
    assert run.info["layers"] == []
    assert all("sharded" in one["reason"] for one in run.info["not_watched"])
    assert len(run.metrics["train/loss"]) == 12


def test_the_blame_for_sharded_gradients_is_not_put_on_the_loop(folder: Path) -> None:
    """``step()`` is where it should be; there is nothing to see for another reason."""
    found = seen(folder, "FSDP", 0)
    run = load_run(folder / "FSDP-run-0")
    texts = [*(one["message"] for one in told(found, "no_gradients")), run.verdict_sentence]
    assert all("backward" not in text for text in texts), texts
    assert "shard" in run.verdict_sentence


def test_what_is_whole_is_watched_next_to_what_is_sharded(folder: Path) -> None:
    """Nothing averages the gradients of layers 2 and 3: their squared norms are averaged over the ranks."""
    run = load_run(folder / "partly sharded-run-0")
    assert run.info["layers"] == ["0", "2", "3"]
    own = [seen(folder, "partly sharded", rank)["norms"] for rank in (0, 1)]
    assert run.layers["0"][-1] == pytest.approx(own[0]["0"], rel=1e-5)
    for layer in ("2", "3"):
        both = [norms[layer] ** 2 for norms in own]
        assert run.layers[layer][-1] == pytest.approx((sum(both) / 2) ** 0.5, rel=1e-5)


def test_a_rank_that_cannot_look_keeps_no_other_waiting_and_makes_no_number(folder: Path) -> None:
    for rank in (0, 1):
        found = seen(folder, "fully_shard, failing look", rank)
        assert found["same"]
        assert told(found, "monitor_error")
        assert not told(found, "alarm")
        assert found["verdict"] != "HEALTHY"


def test_one_ranks_failing_record_keeps_no_other_waiting(folder: Path) -> None:
    for rank in (0, 1):
        assert seen(folder, "fully_shard, failing record", rank)["same"]
    assert told(seen(folder, "fully_shard, failing record", 0), "monitor_error")
    assert not told(seen(folder, "fully_shard, failing record", 1), "monitor_error")
