"""A program: tiny runs of the trainers that can be installed, logging in every way they have.

    python tests/runlogs/real_runs.py FOLDER

Each has a folder of its own: what it prints goes to ``printed.log``, what is true of the run to
``truth.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def _settings(folder: Path) -> None:
    os.environ |= {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "WANDB_PROJECT": "readers",
        "HF_HUB_OFFLINE": "1",
    }
    (folder / "tensorboard").mkdir(parents=True, exist_ok=True)


def run_transformers(folder: Path) -> None:
    """With evaluations, a checkpoint, and three trackers."""
    import wandb
    from tests.integrations.tiny import arguments, llama, token_rows
    from transformers import Trainer

    options = arguments(
        folder / "out",
        max_steps=24,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=8,
        save_strategy="steps",
        save_steps=24,
        disable_tqdm=False,
        report_to=["tensorboard", "wandb", "trackio"],
        project="readers",
        run_name="reader",
    )
    trainer = Trainer(llama(), options, train_dataset=token_rows(), eval_dataset=token_rows(8))
    trainer.train()
    wandb.finish()  # else its process may be killed, with this one, before it has written the end
    (folder / "truth.json").write_text(json.dumps(trainer.state.log_history))


def run_trl(folder: Path) -> None:
    from datasets import Dataset
    from tests.integrations.tiny import SENTENCES, llama, tokenizer
    from trl import SFTConfig, SFTTrainer

    options = SFTConfig(
        str(folder / "out"),
        max_steps=16,
        per_device_train_batch_size=2,
        logging_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        max_length=16,
    )
    data = Dataset.from_dict({"text": SENTENCES * 4})
    trainer = SFTTrainer(llama(), options, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    (folder / "truth.json").write_text(json.dumps(trainer.state.log_history))


def run_lightning(folder: Path) -> None:
    """With CSVLogger."""
    import lightning
    import torch
    from lightning.pytorch.loggers import CSVLogger

    truth: dict[str, list[float]] = {"train": [], "val": []}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = (self.net(batch) - 1).square().mean()
            self.log("train_loss", loss)
            truth["train"].append(float(loss))
            return loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            loss = (self.net(batch) - 1).square().mean()
            self.log("val_loss", loss)
            truth["val"].append(float(loss))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(24, 4)
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, 4), torch.utils.data.DataLoader(rows, 24))
    (folder / "truth.json").write_text(json.dumps(truth))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    for kind, function in {
        "transformers": run_transformers,
        "trl": run_trl,
        "lightning": run_lightning,
    }.items():
        own = Path(sys.argv[1]) / kind
        own.mkdir()
        _settings(own)
        printed = os.open(own / "printed.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        function(own)
