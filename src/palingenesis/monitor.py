"""Monitor: what a training loop calls. It schedules the checks and joins the parts; it owns nothing else.

``step`` notes the loss and lets the guard fold the gradients on the device; every ``check_every`` steps it
sends the norms to the host, and when they have arrived they go through ``watch/`` into the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from palingenesis import lifecycle
from palingenesis.arguments import check_arguments
from palingenesis.changes import Inventory, unwrap_optimizers
from palingenesis.config import MonitorConfig, configured
from palingenesis.describe import describe_layers, describe_run, rank_and_world_size
from palingenesis.errors import ConfigError, MonitorClosedError
from palingenesis.events import Event
from palingenesis.interval import Gatherer, Interval
from palingenesis.journal import Journal
from palingenesis.order import forward_order
from palingenesis.record.reader import Run, load_run
from palingenesis.record.verdict import Verdict, judge
from palingenesis.recording import check_metrics, write_check, write_metrics
from palingenesis.run_folder import learn_from, open_record, write_report
from palingenesis.scaling import Scaler
from palingenesis.watch.reading import CheckReading
from palingenesis.watchers import Watchers

Gradients = Literal["raw", "clipped", "unknown"]


class Monitor:
    """Watches the gradients and the loss of a training loop.

    Call :meth:`step` once an optimizer step, after ``backward`` (and ``scaler.unscale_``, if used) and
    before ``optimizer.step()``; at the end :meth:`close`, or use it as a context manager.

    Args:
        model: the model, wrapped (DDP, ``torch.compile``, …) or not. Nothing is registered on it.
        optimizer: the optimizer, or several. Without one, every parameter that requires a gradient counts
            as trained.
        out: folder of the record; ``None`` keeps none.
        config: every threshold.
        check_every, warmup, sigma, layers: shortcuts that override ``config``.
        scaler: the ``torch.amp.GradScaler``, if there is one.
        name: a name for the run, shown in reports.
        resume: continue the record in ``out``, and the baselines in it.
        overwrite: replace the record in ``out``.
        on_event: called with every :class:`~palingenesis.Event`. What it raises is logged, not passed on.
        gradients: ``"raw"`` if they are known to be unclipped at :meth:`step`, ``"clipped"`` if they are
            clipped, ``"unknown"`` to find out.
        start_step: the step that training goes on from; by default the last one recorded when resuming,
            else 0.

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
        gradients: Gradients = "unknown",
        start_step: int | None = None,
    ) -> None:
        check_arguments(
            {
                "model": model,
                "out": out,
                "scaler": scaler,
                "on_event": on_event,
                "gradients": gradients,
                "start_step": start_step,
                "resume": resume,
                "overwrite": overwrite,
            }
        )
        self.config = configured(config, check_every=check_every, warmup=warmup, sigma=sigma, layers=layers)
        self._optimizers = unwrap_optimizers(optimizer)
        self._scaler = Scaler(scaler, self._optimizers)
        self._inventory = Inventory(model, self._optimizers, self.config.layers)
        self._watchers = Watchers(self._inventory, self.config, raw=gradients == "raw")
        self._gatherer = Gatherer(self._inventory.layers, self.config, self._scaler, self._optimizers)
        self._gradients: str = gradients
        self._noted: torch.Tensor | float | None = None
        self._on_the_way: deque[Interval] = deque()
        self._loss_reduced = self._closed = self._order_is_known = False
        self._judged = 0
        self._changed: Event | None = None
        self._sent: Interval | None = None
        self._before: Run | None = None
        rank, _ = rank_and_world_size()
        info = describe_run(model, self._inventory.layers, self._optimizers)
        info |= {"name": name, "gradients": gradients, "config": self.config.model_dump(mode="json")}
        writer = open_record(out, info, resume=resume, overwrite=overwrite) if rank == 0 else None
        self._journal = Journal(writer, on_event, quiet=rank != 0)
        self._resuming = writer is not None and writer.resumed
        recorded = writer.last_step if writer is not None and writer.resumed else 0
        self._step = recorded if start_step is None else start_step
        if not self._resuming:
            self._journal.tell([lifecycle.started(name, self._step)])
        not_watched = self._inventory.layers.not_watched
        sharded = {layer: reason for layer, reason in not_watched if reason.startswith("sharded")}
        if sharded:
            self._journal.tell([lifecycle.sharded_layers(self._step, sharded)])
        if stray := self._inventory.not_optimized():
            self._journal.tell([lifecycle.not_optimized(self._step, stray)])

    # -- what a training loop calls ----------------------------------------------------------------------

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """Count one optimizer step and look at it.

        Args:
            loss: the step's loss, a number or a tensor of any dtype, on the graph or not. More than one
                element is recorded as the mean. Without it, the last :meth:`note_loss` counts.

        Raises:
            MonitorClosedError: the monitor was closed. Nothing else is ever raised from here.
        """
        if self._closed:
            raise MonitorClosedError(
                "step() after close(): make a new Monitor (resume=True goes on with the record)"
            )
        self._step += 1
        # What only one rank does, such as writing the record, comes last: where layers are sharded, the other
        # ranks wait for this one's share of them.
        gathered = self._try(self._note, loss)
        together = self._inventory.layers.together
        if self._due:
            gathered = (gathered or together) and self._try(self._refresh)
        gathered = (gathered or together) and self._try(self._look)
        if self._due and (gathered or together):
            self._try(self._send)
        self._try(self._judge)

    def _try(self, part: Callable[..., None], *given: Any) -> bool:
        """Whether a part of a step went well: a failing monitor must never end the run."""
        try:
            part(*given)
        except Exception as error:  # noqa: BLE001 - as above
            self._journal.failed(error, "step", self._step)
            self._gatherer.bound()
            return False
        return True

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """Remember a loss for the next :meth:`step` that is called without one."""
        self._noted = loss.detach() if isinstance(loss, torch.Tensor) else loss

    def learn_order(self, loss: torch.Tensor) -> None:
        """Learn from a loss with its graph in which order the layers run; needed once.

        :meth:`step` does so by itself where its loss is on the graph. Without either, layers are taken to
        run in the order of their registration.
        """
        if self._order_is_known or loss.grad_fn is None:
            return
        self._order_is_known = True
        self._inventory.forward_order = forward_order(loss)
        self._watchers.layers.order = self._inventory.order()

    def close(self) -> None:
        """Judge what is left, write the end of the record and the report.

        Raises:
            MonitorClosedError: it was closed before.
        """
        if self._closed:
            raise MonitorClosedError("close() after close(): the record and the report are written already")
        self._end(None)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    def verdict(self) -> str:
        """One word on the run as if it ended now."""
        return self._verdict().word

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
        """Step and baselines, as plain numbers and lists: put it into your checkpoint."""
        self._arrive(wait=True)
        return {"step": self._step, "watchers": self._watchers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's :meth:`state_dict`.

        Raises:
            ConfigError: it is no such thing; nothing was changed.
        """
        watchers = Watchers(self._inventory, self.config, raw=self._gradients == "raw")
        try:
            step = int(state["step"])
            watchers.load_state_dict(state["watchers"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"this is no state of a monitor of this version ({type(error).__name__}: {error}): "
                "pass what Monitor.state_dict() returned"
            ) from None
        self._step, self._watchers = step, watchers
        if self._resuming:
            self._resume(self._step, learn=False)

    def _verdict(self) -> Verdict:
        events, checks, silent = self.events, self.counts["checks"], self.counts["checks_without_gradients"]
        judged = self._judged
        if self._before is not None:
            events = [*self._before.events, *events]
            checks += len(self._before.judged)
            silent += self._before.checks_without_gradients
            judged += int((self._before.judged > 0).sum())
        # An alarm needs the same condition on several checks in a row.
        fired = judged if judged >= self.config.consecutive else 0
        return judge(events, checks, silent, fired, {"reason": "completed", "steps": self._step})

    # -- one step ----------------------------------------------------------------------------------------

    def _note(self, loss: torch.Tensor | float | None) -> None:
        noted, self._noted = self._noted, None
        loss = noted if loss is None else loss
        self._gatherer.note(self._step, loss)
        if isinstance(loss, torch.Tensor):
            self.learn_order(loss)
            if loss.numel() != 1 and not self._loss_reduced:
                self._loss_reduced = True
                self._journal.tell([lifecycle.loss_reduced(self._step, loss.shape)])

    @property
    def _due(self) -> bool:
        return self._step % self.config.check_every == 0

    def _refresh(self) -> None:
        self._changed = self._inventory.refresh(self._step)
        if self._changed is not None:
            self._gatherer.follow(self._inventory.layers)

    def _look(self) -> None:
        if self._due or self.config.guard_every_step:
            self._gatherer.look(self._step)

    def _send(self) -> None:
        self._sent = self._gatherer.send(self._step)

    def _judge(self) -> None:
        if self._resuming:
            self._resume(self._step - 1, learn=True)
        self._arrive(wait=False)
        self._follow_changes()
        if self._sent is not None:
            sent, self._sent = self._sent, None
            self._on_the_way.append(sent)
            self._arrive(wait=False)

    def _follow_changes(self) -> None:
        changed, self._changed = self._changed, None
        if changed is None:
            return
        self._arrive(wait=True)
        self._watchers.follow(self._inventory)
        if self._journal.writer is not None:
            self._journal.writer.update_info(**describe_layers(self._inventory.layers))
        self._journal.tell([changed])

    # -- when the numbers have arrived -------------------------------------------------------------------

    def _arrive(self, *, wait: bool) -> None:
        while self._on_the_way and (wait or self._on_the_way[0].ready):
            self._check(self._on_the_way.popleft())

    def _check(self, interval: Interval) -> None:
        reading, losses, scales = interval.decode()
        counts = self._journal.counts
        counts["checks"] += 1
        counts["checks_without_gradients"] += not reading.saw_gradients
        events = self._watchers.check(reading, losses, scales)
        self._judged += self._watchers.layers.judged > 0
        events += self._find_clipping(reading.step)
        self._record(interval, reading, losses)
        self._journal.tell(events)

    def _find_clipping(self, step: int) -> list[Event]:
        norm = self._watchers.layers.clipped_norm
        if self._gradients != "unknown" or norm is None:
            return []
        self._gradients = "clipped"
        if self._journal.writer is not None:
            self._journal.writer.update_info(gradients="clipped")
        return [lifecycle.clipped_gradients(step, norm)]

    def _record(self, interval: Interval, reading: CheckReading, losses: list[tuple[int, float]]) -> None:
        writer = self._journal.writer
        if writer is None:
            return
        clipped = self._gradients == "clipped"
        found = {reading.step: check_metrics(reading, interval.learning_rate, clipped=clipped)}
        write_metrics(writer, interval.times, losses, found)
        write_check(writer, reading, self._watchers.layers.judged, interval.layers.names)

    # -- beginning and end -------------------------------------------------------------------------------

    def _resume(self, from_step: int, *, learn: bool) -> None:
        """Tell the record where it goes on, and take its past into account."""
        self._resuming = False
        self._journal.tell([lifecycle.resumed(from_step)])
        assert self._journal.writer is not None
        self._before = load_run(self._journal.writer.folder)
        if learn:
            learn_from(self._before, from_step, self._watchers)

    def _end(self, error: BaseException | None) -> None:
        self._closed = True
        for part in (self._judge_the_rest, lambda: self._close_record(error)):
            try:
                part()
            except Exception as failure:  # noqa: BLE001 - as above; an exception of the loop's own passes through
                self._journal.failed(failure, "close", self._step)

    def _judge_the_rest(self) -> None:
        self._arrive(wait=True)
        self._close_interval()

    def _close_record(self, error: BaseException | None) -> None:
        seal = {} if self._journal.writer is None else self._journal.writer.seal()
        self._journal.tell([lifecycle.ended(self._step, error, seal)])
        if self._journal.writer is not None:
            self._journal.writer.close(lifecycle.end_of(self._step, error, self.counts))
            write_report(self._journal.writer.folder)

    def _close_interval(self) -> None:
        """Judge the steps after the last check: their losses, and what the guard saw."""
        interval = self._gatherer.send(self._step, last=True)
        reading, losses, scales = interval.decode()
        scale = self._scaler.scale
        guarded = reading if interval.check.guarded_steps else None
        events = self._watchers.close(
            self._step, guarded, losses, scales, None if scale is None else float(scale)
        )
        if self._journal.writer is not None:
            write_metrics(self._journal.writer, interval.times, losses, {})
        self._journal.tell(events)
