"""What TRL's trainer and the monitor are told of a configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.config import MonitorConfig

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig
    from palingenesis.sft.config.sections import TrainOptions

_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}


def trainer_arguments(config: TrainConfig, folder: Path, steps: int, *, evaluates: bool) -> Any:
    """A ``trl.SFTConfig``.

    Args:
        config: what the run was told.
        folder: where checkpoints go.
        steps: optimizer steps of the whole run.
        evaluates: there is something to evaluate on.
    """
    import torch
    from trl.trainer.sft_config import SFTConfig

    options = config.train
    schedule, more = schedule_of(options)
    return SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=options.per_device_batch_size,
        per_device_eval_batch_size=options.per_device_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        # The stream holds all epochs, one after the other.
        num_train_epochs=1,
        learning_rate=options.learning_rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=more,
        warmup_steps=warmup_steps(options, steps),
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        optim=_OPTIMIZERS[options.optimizer],
        **_checkpointing(SFTConfig, options.gradient_checkpointing),
        seed=options.seed,
        # Weights are in the format they were loaded in; TRL would compute in bf16 beside it.
        bf16=False,
        fp16=False,
        logging_steps=options.logging_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=config.data.eval_every,
        save_strategy="steps",
        save_steps=options.save_steps,
        save_total_limit=options.keep_checkpoints,
        metric_for_best_model="eval_loss" if evaluates else None,
        greater_is_better=False,
        dataloader_num_workers=config.data.num_workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=on_cpu(),
        # Tokens are ready, rows have all their columns, and the order is that of the stream.
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        packing=False,
        padding_free=False,
        max_length=None,
        shuffle_dataset=False,
        router_aux_loss_coef=0.0,
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )


def warmup_steps(options: TrainOptions, steps: int) -> int:
    """In how many steps the learning rate rises."""
    return math.ceil(options.warmup_ratio * steps)


def training_of(config: TrainConfig, steps: int, steps_per_epoch: float, *, processes: int) -> dict[str, Any]:
    """What the record says of the configuration, in the words that it has for any training loop."""
    options = config.train
    evaluated = config.data.eval_dataset or config.data.eval_sources
    told = {
        "by": "pgs train",
        "learning_rate": options.learning_rate,
        "min_learning_rate": options.min_learning_rate,
        "schedule": options.lr_scheduler,
        "warmup_steps": warmup_steps(options, steps),
        "total_steps": steps,
        "steps_per_epoch": steps_per_epoch,
        "epochs": options.epochs if options.max_steps is None else None,
        "batch_size": options.per_device_batch_size,
        "accumulation": options.gradient_accumulation_steps,
        "processes": processes,
        "rows_a_step": options.per_device_batch_size * options.gradient_accumulation_steps * processes,
        "max_grad_norm": options.max_grad_norm,
        "weight_decay": options.weight_decay,
        "optimizer": options.optimizer,
        "precision": config.model.torch_dtype,
        "attention": config.model.attn_implementation,
        "packing": config.data.packing,
        "max_length": config.data.max_seq_length,
        "objective": config.plugins.objective,
        "seed": options.seed,
        "logging_steps": options.logging_steps,
        "eval_every": config.data.eval_every if evaluated else None,
        "save_every": options.save_steps,
    }
    return {**{name: value for name, value in told.items() if value is not None}, "options": config.flat()}


def schedule_of(options: TrainOptions) -> tuple[str, dict[str, float]]:
    """A schedule's name and arguments, as transformers has them."""
    least = options.min_learning_rate
    if options.lr_scheduler == "constant":
        return "constant_with_warmup", {}
    if not least:
        return options.lr_scheduler, {}
    if options.lr_scheduler == "cosine":
        return "cosine_with_min_lr", {"min_lr": least}
    return "polynomial", {"lr_end": least, "power": 1.0}


def _checkpointing(kind: type, wanted: bool) -> dict[str, Any]:
    """Activation checkpointing, under the name that the installed version has for it."""
    name = "activation_checkpointing"
    if not hasattr(kind, name):
        name = "gradient_checkpointing"
    return {name: wanted, **({f"{name}_kwargs": {"use_reentrant": False}} if wanted else {})}


def objective_options(config: TrainConfig) -> dict[str, Any]:
    """What ``FineTuner`` is told of the objective and of how the LM head is read."""
    from palingenesis.sft.head import can_cut
    from palingenesis.sft.objectives import ObjectiveParams

    plugins, memory = config.plugins, config.memory
    return {
        "objective_name": plugins.objective,
        "params": ObjectiveParams(pbar=plugins.info_sft_pbar, beta=plugins.cadft_beta),
        "chunks": memory.loss_num_chunks if memory.chunked_loss else 1,
        "cut": memory.chunked_loss and can_cut(),
    }


def monitor_config(config: TrainConfig) -> MonitorConfig:
    """Cadences and bounds of the monitor."""
    options = config.logging
    return MonitorConfig(
        check_every=options.check_every,
        logging_steps=config.train.logging_steps,
        tier2_every=options.health_tier2_every,
        tier3_every=options.health_tier3_every,
        rl_readiness=options.rl_readiness,
        rl_entropy_floor=options.rl_entropy_floor,
        spike_files=options.spike_files,
    )


def on_cpu() -> bool:
    """Several processes find each other on the CPU only if they are told that it is the CPU."""
    import torch

    return not (torch.cuda.is_available() or torch.backends.mps.is_available())
