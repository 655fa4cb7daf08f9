"""TRL's trainer with the objectives of this package, batches in a fixed order, and numbers that add up.

What is overridden, and why:

    get_batch_samples   remembers the window, which some objectives look at first
    items in a batch    the divisor: loss-bearing tokens of the whole window, on all ranks
    compute_loss        the objective, from per-token statistics read inside the model's forward pass
    evaluate            sums over tokens, each row once, by source
    checkpoints         of sharded models too
    log                 the trainer's own means of means are replaced by ours
    sampler             none: the order of the stream is the order of training
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer
from trl.trainer.sft_trainer import SFTTrainer

from palingenesis.sft.checkpoints import unmark
from palingenesis.sft.evaluation import Evaluation
from palingenesis.sft.forward_only import forward_only
from palingenesis.sft.head import read_head_inside
from palingenesis.sft.ledger import Ledger
from palingenesis.sft.objectives import (
    NEED_WINDOW,
    ObjectiveParams,
    ObjectiveValue,
    Window,
    objective,
    samples_of,
    window_sums,
)
from palingenesis.sft.sharded_state import load_shards, save_shards
from palingenesis.sft.stopwatch import Stopwatch
from palingenesis.sft.token_statistics import IGNORED

FINGERPRINT = "fingerprint"
SCHEDULER_NAME = "scheduler.pt"


class FineTuner(SFTTrainer):
    """A supervised fine-tuning run.

    Args:
        objective_name: one of ``objectives.OBJECTIVES``.
        params: its parameters.
        chunks: into how many pieces loss-bearing positions are split at the LM head.
        cut: use the cut-cross-entropy kernels where they can be used.
        evaluation: what to evaluate on, and when.
        on_numbers: called on every rank with what the trainer would log of a step (its number, the gradient's
            norm, the learning rate).
        **options: what :class:`trl.SFTTrainer` takes. The data is ready to train on.
    """

    def __init__(
        self,
        *,
        objective_name: str,
        params: ObjectiveParams,
        chunks: int,
        cut: bool,
        evaluation: Evaluation | None,
        on_numbers: Callable[[int, Mapping[str, float]], dict[str, float]],
        **options: Any,
    ) -> None:
        # transformers refuses to save a model that it sharded when it loaded it; we do.
        sharded = bool(getattr(options["model"], "is_distributed_loading_by_transformers", False))
        options["args"].save_only_model = sharded
        super().__init__(**options)
        self.args.save_only_model = False
        for callback in (PrinterCallback, ProgressCallback):  # lines and bar are those of `telling.py`
            self.remove_callback(callback)
        self._sharded = sharded
        model: Any = self.model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        read_head_inside(inner, chunks=chunks, cut=cut and objective_name == "ce")
        # The loss below is divided by the tokens of the whole window.
        self.model_accepts_loss_kwargs = True
        self.ledger = Ledger(self.args.device)
        self.stopwatch = Stopwatch()
        self.evaluation = evaluation
        self._objective, self._params, self._on_numbers = objective_name, params, on_numbers
        self._batches: list[dict[str, Any]] = []
        self._window: Window | None = None

    # -- data --------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """The micro-batches of an optimizer step, and its loss-bearing tokens on all ranks."""
        batches, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._batches, self._window = batches, None
        return batches, tokens

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> torch.Tensor:
        tokens = torch.zeros((), dtype=torch.int64, device=device)
        for batch in batch_samples:
            # The first label of a row is nobody's target.
            tokens += (batch["labels"][..., 1:] != IGNORED).sum().to(device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(tokens)
        return tokens

    # -- loss --------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """A micro-batch's share of the step's loss, times the ranks over which gradients are averaged."""
        if self._objective in NEED_WINDOW and self._window is None:
            self._window = self._look_at_window(model)
        value, output = self._value(model, inputs, self._window)
        count = inputs["input_ids"].numel()
        mask = inputs.get("attention_mask")
        self.ledger.add(value, inputs.get(FINGERPRINT), count if mask is None else mask.sum())
        tokens = value.tokens if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss = value.loss_sum / tokens.to(value.loss_sum.device).clamp(min=1) * self.args.world_size
        return (loss, output) if return_outputs else loss

    def _look_at_window(self, model: torch.nn.Module) -> Window:
        """What the gates of an objective need to know of all micro-batches on all ranks: one more forward."""
        sums = torch.zeros(5, dtype=torch.float64, device=self.args.device)
        # In training mode: the gates are those of the forward pass that has the gradient.
        with forward_only(model, training=True):
            for batch in self._batches:
                batch = self._prepare_inputs(batch)
                statistics = self._read(model, batch).statistics
                sums += window_sums(statistics, self._params, samples=_samples(batch))
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        return Window.of(sums)

    def _value(
        self, model: torch.nn.Module, batch: dict[str, Any], window: Window | None
    ) -> tuple[ObjectiveValue, Any]:
        output = self._read(model, batch)
        statistics = output.statistics
        value = objective(self._objective, statistics, self._params, samples=_samples(batch), window=window)
        return value, output

    def _read(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
        inputs = {name: value for name, value in batch.items() if name != FINGERPRINT}
        return model(**inputs, token_statistics=True)

    # -- numbers -----------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """What the trainer would log of a step goes to ``on_numbers``, and what that returns is logged."""
        if "loss" in logs:
            logs = self._on_numbers(self.state.global_step, logs)
        Trainer.log(self, logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate every source on the whole of its rows.

        Returns:
            ``eval_loss`` and the like, as the trainer's own evaluation does.
        """
        assert self.evaluation is not None
        with self.stopwatch.apart("train/eval_s"):
            # Not the wrapped model: DDP would wait for ranks that have fewer rows.
            losses = self.evaluation.run(self.network, self._read, self._prepare_inputs)
        metrics = {f"eval_{name}": value for name, value in losses.items()}
        Trainer.log(self, dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # -- checkpoints -------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.stopwatch.apart("train/checkpoint_s"):
            unmark(Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}")
            super()._save_checkpoint(model, trial)  # type: ignore[no-untyped-call]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_shards(Path(output_dir), *self._trained())
        if self.args.should_save:
            torch.save(self._schedule.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._sharded:  # else the weights come with the optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The state of both; rates, decay and schedule are those of the configuration now."""
        if checkpoint is None:
            return
        _, optimizer = self._trained()
        wanted = [_settings(group) for group in optimizer.param_groups]
        self._load_states(checkpoint)
        schedule = self._schedule
        for number, (group, settings) in enumerate(zip(optimizer.param_groups, wanted, strict=True)):
            group.update(settings)
            schedule.base_lrs[number] = settings["initial_lr"]
            group["lr"] = settings["initial_lr"] * schedule.lr_lambdas[number](schedule.last_epoch)
        schedule._last_lr = [group["lr"] for group in optimizer.param_groups]

    def _load_states(self, checkpoint: str) -> None:
        if not self._sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_shards(Path(checkpoint), *self._trained())
        self._schedule.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _trained(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Model and optimizer, without what accelerate wraps around it."""
        wrapped: Any = self.optimizer
        return self.network, wrapped.optimizer

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: TRL's names a model on the hub, which this one is not."""

    @property
    def network(self) -> torch.nn.Module:
        """The model, without what distributes it."""
        model: torch.nn.Module = self.model  # type: ignore[assignment]
        return model

    @property
    def _schedule(self) -> Any:
        return self.lr_scheduler


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of parameters is configured with; its rate follows from the schedule."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


def _samples(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Which document each position belongs to, in packed rows."""
    positions = batch.get("position_ids")
    return None if positions is None else samples_of(positions)
