"""What stands between the trainer and the monitor: rows when they are whole, and checkpoints that say so.

The trainer logs, evaluates and saves at the end of a step, in this order. A row belongs to a step, so it is
handed to the monitor after all of that: before a checkpoint is marked as whole, before the next step, or at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from palingenesis.integrations.transformers import HealthCallback
from palingenesis.sft.checkpoints import mark
from palingenesis.sft.ledger import Ledger
from palingenesis.sft.rows import RowMaker
from palingenesis.sft.stopwatch import Stopwatch

# In the trainer's own log, trainer_state.json, numbers have its names.
_TRAINERS_NAMES = {
    "loss": "train/loss",
    "ce_loss": "train/ce_loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/lr",
    "num_tokens": "train/tokens_total_all",
}


class RowCallback(TrainerCallback):
    """Collects a step's row and hands it to the monitor. Comes before the :class:`HealthCallback`.

    Args:
        maker: makes rows.
        health: whose monitor takes them.
        steps_per_epoch: may be a fraction.
        evaluates: there is something to evaluate on, which is done after the last step too.
    """

    def __init__(
        self, maker: RowMaker, health: HealthCallback, *, steps_per_epoch: float, evaluates: bool
    ) -> None:
        self._maker, self._health = maker, health
        self._steps_per_epoch, self._evaluates = steps_per_epoch, evaluates
        self._ledger: Ledger | None = None
        self._stopwatch: Stopwatch | None = None
        # The monitor is told before the first step that rows come from here.
        self._waiting: dict[int, dict[str, Any]] = {0: {}}
        self._best: float | None = None
        self._began = False

    def join(self, ledger: Ledger, stopwatch: Stopwatch) -> None:
        """The trainer's own; they exist once it does."""
        self._ledger, self._stopwatch = ledger, stopwatch

    def numbers(self, step: int, logs: Mapping[str, float]) -> dict[str, float]:
        """A step is to be logged: its row, and what the trainer keeps of it. All ranks call it."""
        assert self._ledger is not None and self._stopwatch is not None
        taken = self._ledger.take()
        self._add(self._maker.step(step, taken, logs, self._stopwatch.lap()))
        self._waiting[step] |= self._health.alarms()
        row = self._waiting[step]
        return {name: row[key] for name, key in _TRAINERS_NAMES.items() if key in row}

    def _add(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        for step, row in rows.items():
            self._waiting.setdefault(step, {}).update(row)

    def _settle(self) -> None:
        """Read what the steps since the last row add up to, without ending that row."""
        assert self._ledger is not None
        for step, sums in self._ledger.take().items():
            self._add({step: self._maker.losses(sums)})
            self._maker.count(sums)

    def _hand_over(self, step: int) -> None:
        """The rows up to a step are whole."""
        assert self._stopwatch is not None
        if apart := self._stopwatch.take_apart():
            self._add({step: apart})
        monitor = self._health.monitor
        if monitor is not None:
            for at in sorted(self._waiting):
                monitor.log(self._waiting[at], at)
        self._waiting = {}

    # -- the trainer's events ----------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._best = state.best_metric

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._stopwatch is not None
        self._hand_over(state.global_step)
        if not self._began:  # trackers are open by now
            self._began = True
            self._stopwatch.restart()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._ledger is not None
        self._ledger.end_step(state.global_step)
        # To the trainer the whole stream is one epoch.
        state.epoch = state.global_step / self._steps_per_epoch
        last = state.global_step >= state.max_steps
        if last:
            control.should_log = True
            control.should_evaluate |= self._evaluates

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self._settle()
        metrics = metrics or {}
        self._add({state.global_step: self._maker.evaluation(metrics)})
        loss = metrics["eval_loss"]
        if math.isfinite(loss) and (self._best is None or not self._best <= loss):  # the best may be NaN
            self._best = loss
            # The trainer keeps the best checkpoint only if there is one of that step.
            control.should_save = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle()
        self._hand_over(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle()
        self._hand_over(state.global_step)


class MarkCallback(TrainerCallback):
    """Marks checkpoints as whole. Comes after everything that writes into them.

    Args:
        facts: what a run that goes on from it has to know.
        wait_for_everyone: returns when all ranks have called it.
    """

    def __init__(self, facts: Callable[[], Mapping[str, Any]], wait_for_everyone: Callable[[], None]) -> None:
        self._facts, self._wait_for_everyone = facts, wait_for_everyone

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            mark(folder, state.global_step, self._facts())
        self._wait_for_everyone()


class Afterwards(TrainerCallback):
    """Calls something once the record is open. Comes after the :class:`HealthCallback`."""

    def __init__(self, then: Callable[[TrainerState], None]) -> None:
        self._then = then

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._then(state)
