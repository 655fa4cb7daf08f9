"""Monitor: what a training loop calls. It schedules the checks and joins the parts; it owns nothing else.

``step`` notes the loss and lets the guard fold the gradients on the device; every ``check_every`` steps it
sends the norms to the host, and when they have arrived they go through ``watch/`` into the journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from palingenesis import lifecycle
from palingenesis.arguments import check_arguments
from palingenesis.changes import Inventory, unwrap_optimizers
from palingenesis.config import MonitorConfig, configured
from palingenesis.describe import describe_run, learning_rate
from palingenesis.errors import MonitorClosedError
from palingenesis.events import Event
from palingenesis.interval import Gatherer, Interval, one_number
from palingenesis.judging import Judging
from palingenesis.reading import Reading
from palingenesis.run_folder import close_record, open_journal, recorded_step
from palingenesis.scaling import Scaler
from palingenesis.signals.microbatch import MicroBatches
from palingenesis.tiers.look import Tiers
from palingenesis.tiers.numbers import Numbers
from palingenesis.tiers.outputs import Weight
from palingenesis.tiers.schedule import Schedule

Gradients = Literal["raw", "clipped", "unknown", "released"]


class Monitor:
    """Watches the gradients, the weights and the loss of a training loop.

    Call :meth:`step` once an optimizer step, after ``backward`` (and ``scaler.unscale_``, if used) and
    before ``optimizer.step()``; at the end :meth:`close`, or use it as a context manager.

    Args:
        model: wrapped (DDP, ``torch.compile``, …) or not. Nothing is registered on it but, for the steps that
            need them, hooks on parameters.
        optimizer: one or several. Without one, every parameter that requires a gradient counts as trained.
        out: folder of the record; ``None`` keeps none.
        config: every threshold and cadence.
        check_every, warmup, sigma, layers: shortcuts that override ``config``.
        scaler: the ``torch.amp.GradScaler``, if there is one.
        name: a name for the run, shown in reports.
        resume: continue the record in ``out``, and the baselines in it.
        overwrite: replace the record in ``out``.
        on_event, on_reading, on_row: called with every :class:`~palingenesis.Event`, :class:`Reading` and row
            of metrics (a dict) as it is recorded; of several ranks, the last two on rank 0. What they raise
            is logged, and they are not called again. With ``on_row`` readings are not logged: it has them.
        gradients: ``"raw"`` if they are known to be unclipped at :meth:`step`, ``"clipped"`` if they are
            clipped, ``"released"`` if they are freed inside ``backward``, ``"unknown"`` to find out.
        start_step: the step that training goes on from; by default the last recorded when resuming, else 0.
        max_steps: the run's last step, if known: a run too short for tier 3 then looks at its weights there.
        training: what the loop is configured with, for the record: ``load_run(out).training``.

    Raises:
        ConfigError: an option that cannot work.
        LayerError: nothing to watch.
        RecordExistsError, RecordBusyError: ``out`` holds a run, or another process writes to it. A folder
            that cannot be written at all is only logged: the run is then monitored without a record.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        out: str | Path | None = "pgs_run",
        *,
        config: MonitorConfig | None = None,
        check_every: int | None = None,
        warmup: int | None = None,
        sigma: float | None = None,
        layers: Sequence[str] | None = None,
        scaler: Any = None,
        name: str | None = None,
        resume: bool = False,
        overwrite: bool = False,
        on_event: Callable[[Event], object] | None = None,
        on_reading: Callable[[Reading], object] | None = None,
        on_row: Callable[[dict[str, Any]], object] | None = None,
        gradients: Gradients = "unknown",
        start_step: int | None = None,
        max_steps: int | None = None,
        training: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(locals())
        self.config = configured(config, check_every=check_every, warmup=warmup, sigma=sigma, layers=layers)
        self._optimizers = unwrap_optimizers(optimizer)
        self._scaler = Scaler(scaler, self._optimizers)
        self._inventory = Inventory(model, self._optimizers, self.config.layers)
        self._gatherer = Gatherer(self._inventory.layers, self.config, self._scaler, self._optimizers)
        self._noted: torch.Tensor | float | None = None
        self._closed = self._begun = False
        self._look_at_last = True
        self._changed: Event | None = None
        self._heard: MicroBatches | None = None
        self._sent: Interval | None = None
        info = describe_run(model, self._inventory.layers, self._optimizers)
        info |= {"name": name, "gradients": gradients, "training": dict(training or {})}
        self._journal = open_journal(
            out, info, self.config, on_event, on_reading, on_row, resume=resume, overwrite=overwrite
        )
        self.batches = self._journal.batches
        if start_step is None:
            start_step = recorded_step(out, self._journal.writer, resume=resume)
        self._step = start_step
        schedule, watched = Schedule(self.config, max_steps), self._inventory.layers
        tiers = Tiers(model, watched, self.config, self._optimizers, self._scaler, schedule, self._failed)
        self._numbers = Numbers(tiers, self.config)
        self._judging = Judging(self._inventory, self.config, self._journal, self._numbers, gradients)
        if gradients == "released":
            tiers.expect_released(self._step + 1)
        self._journal.tell(
            lifecycle.opening(name, self._step, self._inventory, resuming=self._judging.resuming)
        )

    # -- what a training loop calls ----------------------------------------------------------------------

    def step(self, loss: torch.Tensor | float | None = None) -> Reading | None:
        """Count one optimizer step and look at it.

        Args:
            loss: the step's loss, a number or a tensor of any dtype, on the graph or not. More than one
                element is recorded as the mean. Without it, the last :meth:`note_loss` counts.

        Returns:
            The newest reading that has arrived, if there is one.

        Raises:
            MonitorClosedError: the monitor was closed. Nothing else is ever raised from here.
        """
        if self._closed:
            raise MonitorClosedError(
                "step() after close(): make a new Monitor (resume=True goes on with the record)"
            )
        if not self._begun:
            self._try(self._begin)
        self._step += 1
        self._try(self.batches.end_step, self._step)
        # What only one rank does, such as writing the record, comes last: where layers are sharded, the other
        # ranks wait for this one's share of them.
        gathered = self._try(self._note, loss)
        together = self._inventory.layers.together
        if self._due:
            gathered = (gathered or together) and self._try(self._refresh)
        gathered = (gathered or together) and self._try(self._look)
        self._try(self._look_at_tiers)
        if self._due and (gathered or together):
            self._try(self._send)
        self._try(self._judge)
        return self._judging.newest

    def _try(self, part: Callable[..., None], *given: Any) -> bool:
        """Whether a part of a step went well. A failing monitor must never end the run."""
        try:
            part(*given)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error, "step")
            self._gatherer.bound()
            return False
        return True

    def _failed(self, error: Exception, where: str) -> None:
        self._journal.failed(error, where, self._step)

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """Remember a loss for the next :meth:`step` that is called without one."""
        self._noted = loss.detach() if isinstance(loss, torch.Tensor) else loss

    def note_batch(self, batch: object, *, indices: Sequence[int] | None = None) -> None:
        """Remember a micro-batch of the coming step, by reference: a spike's is told of in ``spikes/``.

        Args:
            batch: what goes into the model: a mapping, a sequence or one tensor.
            indices: where its samples are in the data set.
        """
        self._try(lambda: self.batches.note(batch, indices=indices))

    def batch(
        self,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        shifted: bool = False,
        weight: Weight | None = None,
    ) -> None:
        """Count the tokens of one micro-batch of the coming step; call it before its ``backward``.

        Args:
            labels: ``[..., T]``; −100 bears no loss.
            attention_mask: ``[B, T]``, 0 where padding is.
            shifted: labels are targets as they stand; by default a row's first label is nobody's target.
            weight: what its mean loss counts for in the step's loss: ``"tokens"`` for its share of the step's
                loss-bearing tokens; the same number with each where the step's loss is a mean of means.
                Without it micro-batches of unequal size are not compared for the noise scale.
        """
        outputs = self._numbers.tiers.outputs
        self._try(lambda: outputs.batch(labels, attention_mask, shifted=shifted, weight=weight))

    @property
    def wants_output(self) -> bool:
        """Whether :meth:`observe_output` is of use at the coming step."""
        return self.config.rl_readiness and self._numbers.tiers.schedule.first_tier(self._step + 1)

    def observe_output(self, **given: Any) -> None:
        """Show the outputs of one micro-batch, for their entropy; see ``signals.entropy.Entropy``."""
        if self.wants_output:
            self._try(lambda: self._numbers.tiers.outputs.entropy.observe_output(**given))

    def cannot_observe(self, reason: str) -> None:
        """Outputs of the coming step cannot be had, for a reason in words."""
        self._numbers.tiers.outputs.entropy.cannot_observe(reason)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add numbers of your own to the row of a step that is over, which is then written without delay.

        Once it is called, rows (up to a few thousand) wait for it, and not for checks, with their losses.

        Args:
            values: by flat name, ``train/loss`` among them. They hold against the monitor's own.
            step: by default the last one; 0 before the first.

        Raises:
            MonitorClosedError: the monitor was closed.
        """
        if self._closed:
            raise MonitorClosedError("log() after close(): the record is written already")
        if not self._begun:  # rows up to here were written before this start
            self._numbers.rows.restart(self._step)
        at = self._step if step is None else step
        self._try(lambda: self._judging.log(at, {"time": time.time(), **values}, self._step))

    def learn_order(self, loss: torch.Tensor) -> None:
        """Learn once, from a loss with its graph, in which order the layers run. :meth:`step` does it too.

        Without it they are taken to run in the order of their registration.
        """
        if self._inventory.learn_order(loss):
            self._judging.watchers.layers.order = self._inventory.order()

    def close(self, *, last_weights: bool = True) -> None:
        """Judge what is left, write the end of the record and the report.

        Args:
            last_weights: the model still has the weights of the last step: a short run looks at them now.

        Raises:
            MonitorClosedError: it was closed before.
        """
        if self._closed:
            raise MonitorClosedError("close() after close(): the record and the report are written already")
        self._look_at_last = last_weights
        self._end(None)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._closed:
            self._end(error)

    # -- what it knows -----------------------------------------------------------------------------------

    @property
    def events(self) -> list[Event]:
        """Everything that was told so far."""
        return list(self._journal.events)

    @property
    def counts(self) -> dict[str, int]:
        """How many alarms, clearings, spikes, … so far."""
        return dict(self._journal.counts)

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of every number that is not one a layer, for a tracker."""
        return dict(self._numbers.latest)

    @property
    def verdict(self) -> str:
        """One word on the run as if it ended now."""
        return self._judging.verdict(self._step)

    @property
    def run_id(self) -> str | None:
        """The id of the record, which a resumed run keeps; ``None`` without a record."""
        return None if self._journal.writer is None else self._journal.writer.run_id

    def grad_norm(self) -> torch.Tensor | None:
        """Norm over the watched layers at the last step that was looked at, left on its device.

        ``None`` if none was yet, or if the layers lie on several devices.
        """
        return self._gatherer.reader.total_norm()

    @property
    def global_step(self) -> int:
        """The number of the last step."""
        return self._step

    def state_dict(self) -> dict[str, Any]:
        """Step, baselines and windows, as plain numbers and lists: put it into your checkpoint."""
        return {"step": self._step, **self._judging.state_dict(self._step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's :meth:`state_dict`.

        Raises:
            ConfigError: it is no such thing; nothing was changed.
        """
        self._step = self._judging.load_state_dict(state)

    # -- one step ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Before the first step: what a run that goes on has to know before anything is looked at."""
        self._begun = True
        self._numbers.rows.restart(self._step)
        self._numbers.begin(self.batches.folder, goes_on=self._step > 0)

    def _note(self, loss: torch.Tensor | float | None) -> None:
        noted, self._noted = self._noted, None
        loss = noted if loss is None else loss
        if isinstance(loss, torch.Tensor):
            self.learn_order(loss)
            if loss.numel() != 1:
                self._judging.loss_is_reduced(loss.shape, self._step)
            loss = one_number(loss)
        self._gatherer.note(self._step, loss)
        self._judging.console.note(self._step, learning_rate(self._optimizers))
        if loss is not None:
            self._numbers.tiers.note_loss(self._step, loss)

    @property
    def _due(self) -> bool:
        return self._step % self.config.check_every == 0

    def _refresh(self) -> None:
        self._changed = self._inventory.refresh(self._step)
        if self._changed is not None:
            # What is on its way belongs to the layers as they were.
            self._try(lambda: self._judging.arrive(self._step, wait=True))
            self._gatherer.follow(self._inventory.layers)
            self._numbers.follow(self._inventory.layers)

    def _look(self) -> None:
        tiers = self._numbers.tiers
        self._heard = tiers.hear(self._step)
        known = tiers.hearing.norms(self._heard)
        if tiers.released:
            self._judging.gradients_are("released", lambda: lifecycle.gradients_released(self._step))
        wanted = self._due or self.config.guard_every_step or tiers.schedule.needs_norms(self._step)
        if wanted and (known is not None or not tiers.released):
            self._gatherer.look(self._step, known)

    def _look_at_tiers(self) -> None:
        self._numbers.look(self._step, self._gatherer.reader.norms(self._step), self._heard)

    def _send(self) -> None:
        self._sent = self._gatherer.send(self._step, absent=self._numbers.tiers.hearing.absent(self._heard))

    def _judge(self) -> None:
        changed, self._changed = self._changed, None
        sent, self._sent = self._sent, None
        self._judging.judge(self._step, changed, sent)

    # -- beginning and end -------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> None:
        self._closed = True
        for part in (self._look_back, self._close_interval, partial(close_record, self._journal, self._step)):
            try:
                part(error)
            except Exception as failure:  # noqa: BLE001 - as above; an exception of the loop's own passes through
                self._failed(failure, "close")

    def _look_back(self, error: BaseException | None) -> None:
        """Take in what is still on its way, and look at the weights once more if the run was short."""
        self._numbers.tiers.stop()
        self._judging.arrive(self._step, wait=True)
        if error is None and self._look_at_last:
            self._journal.tell(self._numbers.look_at_end(self._step))
        self._numbers.rest(self._step)

    def _close_interval(self, error: BaseException | None) -> None:
        """Judge the steps after the last check: their losses, and what the guard saw."""
        scale = self._scaler.scale
        interval = self._gatherer.send(self._step, last=True)
        self._judging.close(self._step, interval, None if scale is None else float(scale))
