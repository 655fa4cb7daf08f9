"""The same run on one process and on two: DDP and FSDP2, killed and gone on with, all with equal numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.sft.runs import rows_of, settings

from palingenesis.record.reader import load_run
from palingenesis.sft.config import TrainConfig
from palingenesis.sft.run import train

# Trains several configurations one after the other: starting processes takes longer than training.
PROGRAM = """
import os, sys
import torch.distributed as dist
from palingenesis.errors import ConfigError
from palingenesis.sft.config import load_config
from palingenesis.sft.run import train

for path in sys.argv[1:]:
    try:
        train(load_config(path))
    except ConfigError as error:
        print("REFUSED", path, error, flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort the interpreter's own end
"""

SAME = (
    "train/loss",
    "train/ce_loss",
    "train/token_gate",
    "train/grad_norm_raw",
    "eval/loss",
    "eval/one/loss",
)


def variant(tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Eval rows are an odd number, so that ranks have unequally many."""
    made = settings(
        tmp_path,
        train__save_steps=4,
        train__output_dir=str(tmp_path / name),
        data__eval_every=3,
        data__eval_sources=[
            {"dataset": str(tmp_path / "held_out.jsonl"), "name": "one"},
            {"dataset": str(tmp_path / "held_out.jsonl"), "name": "two", "weight": 2.0},
        ],
        logging__rl_readiness=True,
        **changes,
    )
    made["train"]["gradient_accumulation_steps"] = 4 if name.startswith("one") else 2
    return made


def on_two_processes(tmp_path: Path, variants: list[dict[str, Any]]) -> str:
    import yaml

    (tmp_path / "program.py").write_text(PROGRAM)
    paths = []
    for number, made in enumerate(variants):
        paths.append(str(tmp_path / f"config-{number}.yaml"))
        Path(paths[-1]).write_text(yaml.safe_dump(made), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
    done = subprocess.run(
        [
            *command,
            "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0",
            str(tmp_path / "program.py"),
            *paths,
        ],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_same(one: Path, two: Path) -> None:
    first, second = rows_of(one), rows_of(two)
    assert [row["train/global_step"] for row in first] == [row["train/global_step"] for row in second]
    for row, other in zip(first, second, strict=True):
        assert row["train/batch"] == other["train/batch"]
        assert row["train/tokens_total_all"] == other["train/tokens_total_all"]
        assert other["train/tokens_total"] < row["train/tokens_total"]
        for name in SAME:
            if name in row:
                assert other[name] == pytest.approx(row[name], rel=1e-5), name
            else:
                assert name not in other
    for name in ("health/weight_drift_max", "health/stable_rank_min", "health/token_efficiency"):
        if name in first[-1]:
            assert second[-1][name] == pytest.approx(first[-1][name], rel=1e-3), name
    expected, found = weights(one), weights(two)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path: Path) -> None:
    plain, gated = {}, {"plugins__cadft": True}
    for name, more in (("one", plain), ("one_gated", gated)):
        train(TrainConfig(**variant(tmp_path, name, **more)))
    sharded = {"parallel__strategy": "fsdp2"}
    two = [
        variant(tmp_path, "ddp", **plain),
        variant(tmp_path, "ddp_gated", **gated),
        variant(tmp_path, "fsdp2", **plain, **sharded),
        variant(tmp_path, "fsdp2_gated", **gated, **sharded),
    ]
    told = on_two_processes(tmp_path, two)
    assert "REFUSED" not in told
    for name in ("ddp", "fsdp2"):
        assert_same(tmp_path / "one", tmp_path / name)
        assert_same(tmp_path / "one_gated", tmp_path / f"{name}_gated")
        assert load_run(tmp_path / name).verify().ok


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_go_on(tmp_path: Path, strategy: str) -> None:
    """From a checkpoint in the middle, a run ends with the same weights."""
    made = variant(tmp_path, "run", parallel__strategy=strategy)
    made["train"] |= {"max_steps": 8, "keep_checkpoints": 9}
    again = variant(tmp_path, "run", parallel__strategy=strategy)
    again["train"] |= {"max_steps": 8, "resume_from": str(tmp_path / "run" / "checkpoint-4")}
    on_two_processes(tmp_path, [made])
    before = weights(tmp_path / "run")
    told = on_two_processes(tmp_path, [again])
    assert "REFUSED" not in told
    after = weights(tmp_path / "run")
    assert all(torch.equal(before[name], after[name]) for name in before)
    rows = rows_of(tmp_path / "run")
    assert [row["train/global_step"] for row in rows] == [*range(1, 9), *range(5, 9)]
    for first, second in zip(rows[4:8], rows[8:], strict=True):
        assert first["train/batch"] == second["train/batch"]
        assert first["train/loss"] == second["train/loss"]
