"""A few real steps on a few samples, with the model, data, objective and trainer of the run.

Nothing is kept: the model that learns a little is the copy in memory, the run folder is a temporary one, and
random numbers go on afterwards as if nothing had been drawn.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback

from palingenesis.findings import Finding
from palingenesis.preflight import first_steps_checks as checks
from palingenesis.preflight import first_steps_parameters as parameters
from palingenesis.preflight.first_steps_trainer import (
    MICRO_BATCHES,
    batches_of_ranks,
    make_trainer,
    row_of,
    samples_for,
    untouched_random_numbers,
    without_dropout,
)
from palingenesis.sft.forward_only import forward_only

if TYPE_CHECKING:
    from palingenesis.preflight.samples import Sample
    from palingenesis.sft.config import TrainConfig
    from palingenesis.sft.trainer import FineTuner

STEPS, OVERFIT_STEPS, OVERFIT_SAMPLES = 3, 10, 2
#: Samples whose first loss is looked at.
COMPARED = 16
#: Bytes that whole logits of the compared rows, in fp32 with their gradient, may take.
_WHOLE_LOGITS = 4 * 10**9
_LOGITS_BYTES = 10


@dataclass
class Outcome:
    """What was found, the numbers that were seen, and what was not looked at."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    not_checked: list[str] = field(default_factory=list)


def first_steps(
    config: TrainConfig, *, steps: int | None = None, pretrained: bool | None = None, world_size: int = 1
) -> Outcome:
    """Try a run out.

    Args:
        config: the run's.
        steps: optimizer steps that it will have, for its schedule; by default 1000 where ``train.max_steps``
            says nothing.
        pretrained: whether the model has been trained before; by default all are but those made on the spot.
        world_size: processes that the run will have.

    Raises:
        ConfigError, MissingExtraError: training would refuse the same.
    """
    from palingenesis.sft.builtin import is_builtin
    from palingenesis.sft.model import load_model, load_tokenizer

    if pretrained is None:
        pretrained = not is_builtin(config.model.name_or_path)
    with untouched_random_numbers(), tempfile.TemporaryDirectory(prefix="pgs-first-steps-") as folder:
        tokenizer = load_tokenizer(config)
        samples = samples_for(config, tokenizer)
        model = load_model(config, tokenizer)
        planned = steps or config.train.max_steps or 1000
        trainer = make_trainer(config, tokenizer, model, samples, Path(folder), planned)
        outcome = _Trial(config, trainer, samples, planned, pretrained).go()
        outcome.findings += checks.check_ranks(batches_of_ranks(trainer, world_size))
        return outcome


class _Trial:
    """The checks, in the order in which the model changes."""

    def __init__(
        self,
        config: TrainConfig,
        trainer: FineTuner,
        samples: Sequence[Sample],
        planned: int,
        pretrained: bool,
    ) -> None:
        self._config, self._trainer = config, trainer
        self._samples, self._planned, self._pretrained = samples, planned, pretrained
        self._model: Any = trainer.network
        self._dtype = next(one.dtype for one in self._model.parameters() if one.is_floating_point())
        self._outcome = Outcome()

    def go(self) -> Outcome:
        facts = self._outcome.facts
        facts["device"] = str(self._trainer.args.device)
        facts["samples"] = len(self._samples)
        rows = self._chosen()
        with without_dropout(self._model):
            if self._compare_losses():
                return self._outcome  # a loss that is no number says nothing of what follows
            self._compare_gradients(rows)
        self._train()
        with without_dropout(self._model):
            self._overfit(rows)
        return self._outcome

    # -- before any step ---------------------------------------------------------------------------------

    def _rows(self) -> list[dict[str, Any]]:
        """The samples that bear loss, from short to long."""
        rows = [row_of(sample, packed=self._config.data.packing) for sample in self._samples]
        return sorted((row for row in rows if _targets(row)), key=lambda row: len(row["input_ids"]))

    def _chosen(self) -> list[dict[str, Any]]:
        """A few short rows with as unequal numbers of loss-bearing tokens as there are."""
        rows = self._rows()
        wanted = MICRO_BATCHES * min(2, self._config.train.per_device_batch_size)
        return sorted(rows[: 2 * wanted], key=_targets)[:: 2 if len(rows) >= 2 * wanted else 1][:wanted]

    def _collated(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return dict(self._trainer.data_collator(list(rows)))

    def _fits(self, rows: Sequence[dict[str, Any]]) -> bool:
        vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        positions = len(rows) * max(len(row["input_ids"]) for row in rows)
        return positions * vocabulary * _LOGITS_BYTES <= _WHOLE_LOGITS

    def _compare_losses(self) -> bool:
        """Whether there is no loss to go on with."""
        rows = self._rows()
        # From short to long: as long a choice as there is memory for.
        rows = rows[:: -(-len(rows) // COMPARED)]
        while len(rows) > 1 and not self._fits(rows):
            rows.pop()
        if not self._fits(rows):
            self._outcome.not_checked.append(
                "the first loss: whole logits of one sample would take too much memory"
            )
            return False
        batch = self._trainer._prepare_inputs(self._collated(rows))
        with forward_only(self._model):
            summed, tokens = checks.whole_cross_entropy(self._model, batch)
        ours, independent = self._cross_entropy(batch), float(summed) / max(1, tokens)
        vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._outcome.facts["first_loss"] = {
            "training": ours,
            "independent": independent,
            "ln_vocabulary": math.log(vocabulary),
            "tokens": tokens,
        }
        self._outcome.findings += checks.check_first_loss(
            ours, independent, vocabulary=vocabulary, pretrained=self._pretrained, dtype=self._dtype
        )
        return not math.isfinite(ours)

    def _cross_entropy(self, batch: Mapping[str, Any], *, training: bool = False) -> float:
        """Mean cross-entropy of a batch, as training reads it."""
        from palingenesis.sft.objectives import objective

        with forward_only(self._model, training=training):
            value = objective("ce", self._model(**batch, token_statistics=True).statistics)
        return float(value.ce_sum / value.tokens.clamp(min=1))

    def _compare_gradients(self, rows: Sequence[dict[str, Any]]) -> None:
        if len(rows) < MICRO_BATCHES or not self._fits(rows):
            self._outcome.not_checked.append("accumulated gradients: there are too few short samples")
            return
        half = len(rows) // MICRO_BATCHES
        parts = [self._collated(rows[:half]), self._collated(rows[half:])]
        whole = self._collated(rows)
        accumulated = parameters.gradients_of(self._model, lambda: self._backward(parts))
        if self._config.plugins.objective == "ce":
            together = parameters.gradients_of(self._model, lambda: self._independent_backward(whole))
        else:
            together = parameters.gradients_of(self._model, lambda: self._backward([whole]))
        found = checks.compare(accumulated, together)
        self._outcome.facts["accumulation"] = {
            "error": found.error,
            "ratio": found.ratio,
            "cosine": found.cosine,
        }
        self._outcome.findings += checks.check_accumulation(
            found, micro_batches=len(parts), dtype=self._dtype
        )

    def _backward(self, batches: Sequence[dict[str, Any]]) -> float:
        """The backward passes of one optimizer step, as the trainer does them; its loss."""
        trainer: Any = self._trainer
        device = trainer.args.device
        window, tokens = trainer.get_batch_samples(iter([dict(one) for one in batches]), len(batches), device)
        losses = [trainer.training_step(self._model, batch, tokens) for batch in window]
        return float(sum(losses))

    def _independent_backward(self, batch: Mapping[str, Any]) -> None:
        summed, tokens = checks.whole_cross_entropy(self._model, self._trainer._prepare_inputs(dict(batch)))
        (summed / tokens).backward()

    # -- a few steps -------------------------------------------------------------------------------------

    def _train(self) -> None:
        steps = min(STEPS, self._planned)
        watcher = _Watcher(self._model, steps)
        self._trainer.add_callback(watcher)
        _reset_peak()
        self._trainer.train()
        self._outcome.findings += watcher.findings
        self._outcome.findings += checks.check_schedule(
            watcher.rates, lambda done: checks.planned_rate(self._config, self._planned, done)
        )
        facts = self._outcome.facts
        facts["learning_rates"] = watcher.rates
        facts["planned_steps"] = self._planned
        facts["step_seconds"] = watcher.seconds
        later = watcher.seconds[1:] or watcher.seconds  # the first one warms up
        dataset = self._trainer.train_dataset
        lengths = [len(row) for row in dataset["input_ids"]]  # type: ignore[index]
        args = self._trainer.args
        rows = min(len(lengths), args.per_device_train_batch_size * args.gradient_accumulation_steps)
        facts["tokens_per_second"] = rows * float(np.mean(lengths)) / float(np.mean(later)) if later else None
        facts["micro_batches"] = args.gradient_accumulation_steps
        facts |= _peak()

    def _overfit(self, rows: Sequence[dict[str, Any]]) -> None:
        """The same few samples again and again, at the highest learning rate."""
        optimizer: Any = self._trainer.optimizer
        rate = self._config.train.learning_rate
        batch = self._collated(rows[-OVERFIT_SAMPLES:])
        prepared = self._trainer._prepare_inputs(dict(batch))
        before = parameters.fingerprints(self._model)
        largest: dict[str, float] = {}
        losses = [self._cross_entropy(prepared, training=True)]
        for _ in range(OVERFIT_STEPS):
            self._model.zero_grad(set_to_none=True)
            self._backward([batch])
            if self._config.train.max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.train.max_grad_norm)
            for name, one in parameters.trained_parameters(self._model).items():
                if one.grad is not None:
                    largest[name] = max(largest.get(name, 0.0), float(one.grad.abs().max()))
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            losses.append(self._cross_entropy(prepared, training=True))
        self._model.zero_grad(set_to_none=True)
        self._outcome.facts["overfit_losses"] = losses
        self._outcome.findings += checks.check_overfit(losses, learning_rate=rate)
        self._outcome.findings += parameters.check_moves(
            self._model,
            before,
            largest,
            learning_rate=rate,
            steps=OVERFIT_STEPS,
            adaptive=self._config.train.optimizer != "sgd",
        )


class _Watcher(TrainerCallback):
    """Looks at optimizer, gradients and learning rates of some steps, and ends the training after them."""

    def __init__(self, model: Any, steps: int) -> None:
        self._model, self._steps = model, steps
        self.findings: list[Finding] = []
        self.rates: list[float] = []
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.findings += parameters.check_optimizer(self._model, more["optimizer"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._started = _now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not self.rates:
            trained = parameters.trained_parameters(self._model)
            there = {name: one.grad for name, one in trained.items() if one.grad is not None}
            self.findings += parameters.check_gradients(self._model, there)
        self.rates.append(float(more["optimizer"].param_groups[0]["lr"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seconds.append(_now() - self._started)
        control.should_training_stop = state.global_step >= self._steps


# -- parts -------------------------------------------------------------------------------------------------


def _targets(row: Mapping[str, Any]) -> int:
    return sum(label != checks.IGNORED for label in row["labels"][1:])


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> dict[str, Any]:
    """The most memory that was in use: of the device, or of this process."""
    if torch.cuda.is_available():
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    if sys.platform == "win32":
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
