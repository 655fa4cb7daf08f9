"""Session: one training run under watch, from its first step to its end, whoever owns the loop.

What the callbacks have in common lives here: options checked early, the loss of an accumulation window,
alarms that are open, when to stop, what goes into a checkpoint and how a run goes on from one.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from palingenesis.batches import Locate
from palingenesis.config import MonitorConfig
from palingenesis.describe import rank_and_world_size
from palingenesis.errors import ConfigError, MissingExtraError, MonitorClosedError
from palingenesis.events import Event
from palingenesis.integrations._data import Order
from palingenesis.monitor import Gradients, Monitor
from palingenesis.record.folder import read_info
from palingenesis.record.verdict import WORDS

log = logging.getLogger("palingenesis")

StopOn = Literal["warning", "critical"]

#: Trackers take numbers: 0 is HEALTHY, the larger the worse.
VERDICT_NUMBERS = {word: number for number, word in enumerate(reversed(WORDS))}

# What the callbacks find out by themselves.
_SET_BY_CALLBACK = frozenset(
    {"self", "model", "optimizer", "out", "scaler", "gradients", "start_step", "max_steps"}
)
_CONFIG_SHORTCUTS = ("check_every", "warmup", "sigma", "layers")

_STOPPING = {None: (), "critical": ("critical",), "warning": ("warning", "critical")}
# Not findings about the training: the run's own end, and a failure of the monitor, which never stops a run.
_NEVER_STOPPING = frozenset({"run_ended", "monitor_error"})


def missing_extra(feature: str, package: str, extra: str) -> MissingExtraError:
    return MissingExtraError(f"{feature} needs {package}: pip install 'palingenesis[{extra}]'")


def check_options(stop_on: StopOn | None, options: Mapping[str, Any]) -> None:
    """Refuse what cannot work when the callback is made, not after the model and the data are loaded.

    Raises:
        ConfigError: a bad value, or an option that ``Monitor`` does not have.
    """
    if stop_on not in (None, *get_args(StopOn)):
        raise ConfigError(f"stop_on={stop_on!r} cannot be used: give 'critical', 'warning' or None")
    known = sorted(set(inspect.signature(Monitor.__init__).parameters) - _SET_BY_CALLBACK)
    for name in options:
        if name in _SET_BY_CALLBACK:
            raise ConfigError(f"HealthCallback sets {name!r} itself, from the trainer: leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"HealthCallback has no option {name!r}; {hint}")
    shortcuts = {name: options[name] for name in _CONFIG_SHORTCUTS if options.get(name) is not None}
    if shortcuts and not isinstance(shortcuts.get("layers"), str):
        MonitorConfig(**shortcuts)


class Session:
    """A monitor for one call of the trainer's ``train`` or ``fit``.

    Args:
        model, optimizer, out, scaler, gradients, start_step, max_steps: as :class:`~palingenesis.Monitor`
            takes them.
        options: the user's options for it.
        stop_on: least severity of an event that ends training.
        restored: what :meth:`checkpoint` gave, when training goes on from that checkpoint.
        go_on: resume the record in ``out`` whatever the options say.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        out: str | Path | None,
        options: Mapping[str, Any],
        *,
        stop_on: StopOn | None,
        scaler: Any,
        gradients: Gradients,
        start_step: int,
        max_steps: int | None = None,
        restored: Mapping[str, Any] | None = None,
        go_on: bool = False,
    ) -> None:
        if restored is not None and restored.get("step") != start_step:
            log.warning(
                "the checkpoint holds the monitor's state of step %s but training goes on from step %d: "
                "baselines are learned anew",
                restored.get("step"),
                start_step,
            )
            restored = None
        options = dict(options)
        if go_on or (restored is not None and _holds(out, restored.get("run_id"))):
            options.update(resume=True, overwrite=False)
        self.monitor = Monitor(
            model,
            optimizer,
            out,
            scaler=scaler,
            gradients=gradients,
            start_step=start_step,
            max_steps=max_steps,
            **options,
        )
        self.run_id = self.monitor.run_id
        self.ended = False
        self._device = next(model.parameters()).device
        self._loss: torch.Tensor | float | None = None
        self._order: Order | None = None
        self._micro = 0
        self._cannot_note = False
        self._stopping = _STOPPING[stop_on]
        self._stop_reason: Event | None = None
        self._stop_told = self._agreed = False
        self._open_alarms: set[tuple[str, str, str | None]] = set()
        if restored is not None:
            self._restore(restored)
        # Events of opening the record stop nothing.
        self._seen = len(self.monitor.events)

    # -- a step ------------------------------------------------------------------------------------------

    def know_batches(self, locate: Locate, tokenizer: object, order: Order | None = None) -> None:
        """What finds samples in the data set and makes text of tokens, if a spike asks for it.

        Args:
            locate: finds samples.
            tokenizer: makes text.
            order: names micro-batches for ``locate``, where :meth:`note_batch` is not told a name.
        """
        self._order = order
        self.monitor.batches.locate = locate
        self.monitor.batches.fingerprint = None if order is None else order.fingerprint
        self.monitor.batches.tokenizer = tokenizer if hasattr(tokenizer, "decode") else None

    def note_batch(self, batch: object, key: Hashable = None) -> None:
        """A micro-batch of the coming step, by reference. Nothing is raised from here.

        Args:
            batch: what the model gets.
            key: what ``locate`` finds its samples by.
        """
        if self._cannot_note:
            return
        step, micro = self.monitor.global_step + 1, self._micro
        self._micro += 1
        try:
            if key is None and self._order is not None:
                key = self._order.key(step, micro)
            self.monitor.batches.note(batch, key=key)
        except Exception as error:  # noqa: BLE001 - what cannot be watched must not end the training
            self._cannot_note = True
            log.warning("batches of spikes are not kept: %s: %s", type(error).__name__, error)

    def forget_loss(self) -> None:
        """A new accumulation window begins."""
        self._loss, self._micro = None, 0
        self.monitor.batches.forget_open()

    def add_loss(self, loss: object) -> None:
        """Add a micro-batch's share of the step's loss, where it is; nothing is read on the host."""
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        elif not isinstance(loss, int | float):
            return
        self.monitor.batches.note_loss(loss)
        if self._loss is None:
            self._loss = loss
        elif isinstance(self._loss, torch.Tensor) and isinstance(loss, torch.Tensor):
            self._loss = self._loss + loss.to(self._loss.device)
        else:
            self._loss = self._loss + loss

    def step(self) -> None:
        """Count one optimizer step, with the loss added since the last."""
        loss, self._loss, self._micro = self._loss, None, 0
        if not self.ended:
            self.monitor.step(loss)
            self._follow()

    def _follow(self) -> None:
        # Not through on_event: that belongs to the user, and is dropped once it raises.
        events = self.monitor.events
        for event in events[self._seen :]:
            alarm = (event.layer, event.diagnosis, event.parameter)
            if event.event == "alarm":
                self._open_alarms.add(alarm)
            elif event.event == "alarm_cleared":
                self._open_alarms.discard(alarm)
            stops = event.severity in self._stopping and event.event not in _NEVER_STOPPING
            stops = stops and not event.ordinary
            if stops and self._stop_reason is None:
                self._stop_reason = event
        self._seen = len(events)

    def should_stop(self) -> bool:
        """Whether training should end. Call it once a step: all ranks answer alike, at the same step."""
        if not self._stopping:
            return False
        stop = self._agree(self._stop_reason is not None)
        reason = self._stop_reason
        if stop and reason is not None and not self._stop_told:
            self._stop_told = True
            log.warning(
                "training is stopped at step %d because of %s at step %d: %s",
                self.monitor.global_step,
                reason.event,
                reason.step,
                reason.message,
            )
        return stop

    def _agree(self, stop: bool) -> bool:
        """What any rank wants, asked once between two checks: a rank that stops alone hangs the others."""
        _, world_size = rank_and_world_size()
        if world_size == 1:
            return stop
        due = (self.monitor.global_step - 1) % self.monitor.config.check_every == 0
        if due and not self._agreed:
            wish = torch.tensor(float(stop), device=self._device)
            torch.distributed.all_reduce(wish, torch.distributed.ReduceOp.MAX)
            self._agreed = bool(wish.item())
        return self._agreed

    # -- what others get to see --------------------------------------------------------------------------

    def values(self) -> dict[str, float]:
        """What goes into the trainer's own logs: numbers only, as trackers want them."""
        return self.monitor.latest | self.alarms()

    def alarms(self) -> dict[str, float]:
        """How many alarms and the like there are, and were."""
        counts = self.monitor.counts
        return {
            "health/alarms_active": len(self._open_alarms),
            "health/alarms": counts["alarms"],
            "health/loss_spikes": counts["loss_spikes"],
            "health/nonfinite": counts["nonfinite"],
            "health/checks": counts["checks"],
            "health/verdict": VERDICT_NUMBERS[self.monitor.verdict],
        }

    # -- checkpoints and the end -------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any]:
        """Step, baselines and open alarms as plain numbers, strings and lists."""
        state = self.monitor.state_dict()
        self._follow()
        return {
            "run_id": self.run_id,
            "step": self.monitor.global_step,
            "open_alarms": sorted([list(alarm) for alarm in self._open_alarms], key=str),
            "monitor": state,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            self.monitor.load_state_dict(state["monitor"])
            self._open_alarms = {(layer, kind, name) for layer, kind, name in state["open_alarms"]}
        except Exception as error:  # noqa: BLE001 - a state of another version must not keep training from starting
            log.warning(
                "the monitor's state in the checkpoint cannot be used (%s: %s): baselines are learned anew",
                type(error).__name__,
                error,
            )

    def end(self, error: BaseException | None = None, *, last_weights: bool = True) -> None:
        """Close the record, with what ended the run; later calls do nothing.

        Args:
            error: what ended it, if it did not complete.
            last_weights: the model still has the weights of the last step.
        """
        if self.ended:
            return
        self.ended = True
        if error is None:
            with contextlib.suppress(MonitorClosedError):  # by the user
                self.monitor.close(last_weights=last_weights)
        else:
            self.monitor.__exit__(type(error), error, error.__traceback__)


def _run_id(folder: Path) -> str | None:
    try:
        info, _ = read_info(folder)
    except OSError:
        return None  # no such run, or none that may be read: Monitor says what that means
    run_id = info.get("run_id")
    return None if run_id is None else str(run_id)


def _holds(out: str | Path | None, run_id: str | None) -> bool:
    return out is not None and run_id is not None and _run_id(Path(out)) == run_id
