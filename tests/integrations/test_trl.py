"""HealthCallback in a real run of TRL's ``SFTTrainer``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datasets import Dataset
from tests.integrations.tiny import SENTENCES, llama, tokenizer
from trl import SFTConfig, SFTTrainer

from palingenesis import load_run
from palingenesis.integrations.transformers import HealthCallback


def test_supervised_fine_tuning_is_watched(tmp_path: Path) -> None:
    trainer = SFTTrainer(
        llama(),
        SFTConfig(
            str(tmp_path / "t"),
            max_steps=10,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_grad_norm=0.05,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            max_length=16,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": SENTENCES * 4}),
        processing_class=tokenizer(),
        callbacks=[HealthCallback(out=tmp_path / "run", check_every=1, warmup=3)],
    )
    trainer.train()
    run = load_run(tmp_path / "run")
    assert run.verdict == "HEALTHY"
    assert run.metrics["step"].tolist() == list(range(1, 11))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    # SFTTrainer's own log adds to the same row.
    assert all("mean_token_accuracy" in row and row["health/checks"] == row["step"] for row in rows)
    np.testing.assert_allclose(run.metrics["train/loss"], [row["loss"] for row in rows], rtol=1e-5)
    np.testing.assert_allclose(
        run.metrics["train/grad_norm_raw"], [row["grad_norm_raw"] for row in rows], rtol=1e-4
    )
    assert run.metrics["train/grad_norm_raw"].min() > 2 * 0.05
