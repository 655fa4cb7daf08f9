"""HealthCallback for the Hugging Face ``Trainer`` and everything built on it, such as TRL's ``SFTTrainer``.

    trainer = SFTTrainer(..., callbacks=[HealthCallback(out="pgs_run", stop_on="critical")])
    trainer.train()

The trainer shows its callbacks gradients after clipping only, and no loss at all. So the callback looks for
the trainer whose ``train`` is calling it and, until that returns or raises, listens to the few of its methods
that have them.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palingenesis.integrations._data import Order, TrainerOrder
from palingenesis.integrations._hooks import Listener, listen
from palingenesis.integrations._outputs import Model, OutputFeed, model_called
from palingenesis.integrations._shared import Session, StopOn, check_options, log, missing_extra
from palingenesis.integrations._training import known, training_of
from palingenesis.monitor import Gradients, Monitor
from palingenesis.tiers.outputs import Weight

try:
    from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from transformers.training_args import TrainingArguments
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise missing_extra("palingenesis.integrations.transformers", "transformers", "sft") from None

STATE_FILE = "palingenesis_state.json"

# Together they run nearly everything between on_train_begin and on_train_end. Which of them exist depends on
# the version: where there is no `_run_epoch`, the loop is part of a method that is running by then.
_LOOP = (
    "_run_epoch",
    "_finalize_training",
    "_evaluate",
    "get_batch_samples",
    "training_step",
    "_maybe_log_save_evaluate",
)


class HealthCallback(TrainerCallback):
    """Watches a ``Trainer``'s run layer by layer.

    Every optimizer step is one step of the monitor, numbered as ``state.global_step`` will be after it, with
    the gradients before clipping and the unfiltered loss of the whole accumulation window. Tokens are counted
    from the labels of every micro-batch. Where the configuration has ``rl_readiness``, the entropy of the
    output is read from what the model computes anyway: logits, TRL's fused output, or the hidden states that
    a fused loss starts from.

    Args:
        out: folder of the record; ``None`` keeps none.
        stop_on: end training cleanly at the first event of this severity: ``"critical"``, ``"warning"`` (or
            worse), ``None`` for never.
        **monitor_options: what :class:`~palingenesis.Monitor` takes: ``check_every``, ``warmup``, ``sigma``,
            ``layers``, ``config``, ``name``, ``on_event``, ``on_reading``, ``resume``, ``overwrite``.

    Raises:
        ConfigError: an option that cannot work.
    """

    #: Finds samples in the data set, where something knows better than the trainer's own loader.
    order: Order | None = None

    def __init__(
        self, *, out: str | Path | None = "pgs_run", stop_on: StopOn | None = None, **monitor_options: Any
    ) -> None:
        check_options(stop_on, monitor_options)
        self.out, self.stop_on, self.monitor_options = out, stop_on, monitor_options
        self._forget_run()

    def _forget_run(self) -> None:
        self._session: Session | None = None
        self._undo: list[Callable[[], None]] = []
        self._stepped = self._retried = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy is a callback with the same options, watching nothing."""
        return {"out": self.out, "stop_on": self.stop_on, "monitor_options": self.monitor_options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_run()

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the current run, or of the last one."""
        return None if self._session is None else self._session.monitor

    def alarms(self) -> dict[str, float]:
        """Counts of alarms as ``health/…``, and the verdict so far as a number: 0 is HEALTHY."""
        return {} if self._session is None else self._session.alarms()

    # -- begin and end -----------------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if self._session is not None and not self._session.ended:
            self._end(RuntimeError("training was left by an exception that the callback did not get to see"))
        trainer, checkpoint = _find_trainer(state)
        training = known(lambda: training_of(args, state, trainer, optimizer))
        options = {"training": training, **self.monitor_options}
        gradients: Gradients = "raw"
        if trainer is None and (args.max_grad_norm or 0) > 0:
            gradients = "clipped"
        self._session = Session(
            model,
            optimizer,
            self.out,
            options,
            stop_on=self.stop_on,
            scaler=getattr(optimizer, "scaler", None),
            gradients=gradients,
            start_step=state.global_step,
            max_steps=state.max_steps if state.max_steps > 0 else None,
            restored=_saved_state(args, state, checkpoint),
            go_on=self._retried,
        )
        self._retried = False
        if trainer is None:
            log.warning(
                "HealthCallback was called by no transformers.Trainer that it can find: the loss is not "
                "watched, gradients are read %s, and nothing is added to the trainer's logs",
                "after clipping" if gradients == "clipped" else "as they are",
            )
        else:
            self._listen(trainer, args)
            order = self.order or TrainerOrder(
                kwargs.get("train_dataloader"), trainer.train_dataset, args.gradient_accumulation_steps
            )
            self._session.know_batches(order, getattr(trainer, "processing_class", None), order)

    def _listen(self, trainer: Any, args: TrainingArguments) -> None:
        accelerator = trainer.accelerator

        def failed(error: BaseException) -> None:
            self._retried = bool(args.auto_find_batch_size) and _is_out_of_memory(error)
            self._end(error)

        def before_clip(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            if accelerator.sync_gradients:
                self._step()

        assert self._session is not None
        self._undo = [
            *_feed(trainer, self._session.monitor),
            listen(trainer, "compute_loss", Listener(after=self._learn_order)),
            listen(trainer, "training_step", Listener(before=self._note_batch, after=self._session.add_loss)),
            listen(trainer, "log", Listener(before=self._add_values)),
            listen(accelerator, "clip_grad_norm_", Listener(before=before_clip)),
            listen(trainer.callback_handler, "call_event", Listener(failed=failed)),
        ]
        if hasattr(trainer, "_clip_grad_norm"):
            # Some ways of sharding clip without the accelerator.
            self._undo.append(listen(trainer, "_clip_grad_norm", Listener(before=before_clip)))
        self._undo += [
            listen(trainer, name, Listener(failed=failed)) for name in _LOOP if hasattr(trainer, name)
        ]

    def _note_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._session is not None:
            self._session.note_batch(_argument(1, "inputs", args, kwargs))

    def _learn_order(self, result: Any) -> None:
        loss = result[0] if isinstance(result, tuple) else result
        if self._session is not None and hasattr(loss, "grad_fn"):
            self._session.monitor.learn_order(loss)

    def _end(self, error: BaseException | None, *, last_weights: bool = True) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        if self._session is not None:
            self._session.end(error, last_weights=last_weights)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The best model may have been loaded by now.
        self._end(None, last_weights=not args.load_best_model_at_end)

    # -- steps -------------------------------------------------------------------------------------------

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stepped = False
        if self._session is not None:
            self._session.forget_loss()

    def _step(self) -> None:
        """Whichever comes first in a window: one of the ways to clip, or the event after it."""
        if self._session is not None and not self._stepped:
            self._stepped = True
            self._session.step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._session is not None and self._session.should_stop():
            control.should_training_stop = True

    # -- logs and checkpoints ----------------------------------------------------------------------------

    def _add_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        logs = args[0] if args else kwargs.get("logs")
        # Evaluation, the summary at the end and what users log are left alone.
        if self._session is None or not isinstance(logs, dict) or "loss" not in logs:
            return
        if "grad_norm" in logs:
            # The trainer's is the norm before clipping, which its trackers then file under train/.
            logs["grad_norm_raw"] = logs["grad_norm"]
        logs.update(self._session.values())

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        folder = _checkpoint_folder(args, state)
        if self._session is None or not args.should_save or not folder.is_dir():
            return
        try:
            text = json.dumps(self._session.checkpoint())
            (folder / STATE_FILE).write_text(text, encoding="utf-8")
        except Exception as error:  # noqa: BLE001 - a checkpoint is whole without the baselines
            log.warning(
                "the monitor's state was not saved in %s: %s: %s", folder, type(error).__name__, error
            )


def _feed(trainer: Any, monitor: Monitor) -> list[Callable[[], None]]:
    """Hand the labels and outputs of every micro-batch to the monitor; what is returned ends that."""
    feed = OutputFeed(monitor, model_called)
    training = False

    def step_begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal training
        training = True

    def step_is_over(_: object) -> None:
        nonlocal training
        training = False

    def loss_begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if training:  # evaluation computes losses too
            model, batch = _argument(0, "model", args, kwargs), _argument(1, "inputs", args, kwargs)
            items = _argument(3, "num_items_in_batch", args, kwargs)
            feed.begin(model, batch, functools.partial(_weight, trainer, items))

    def loss_is_there(_: object) -> None:
        feed.end()

    step = Listener(before=step_begins, after=step_is_over, failed=step_is_over)
    loss = Listener(before=loss_begins, after=loss_is_there, failed=loss_is_there)
    return [listen(trainer, "training_step", step), listen(trainer, "compute_loss", loss), feed.end]


def _argument(place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _weight(trainer: Any, items: object, model: Model) -> Weight:
    """What a micro-batch's mean loss counts for: 1 where the loss of the step is made of such means.

    That is where the trainer divides by the number of micro-batches, and where a loss that is meant to be
    divided by the items of all of them is not, because a model has no use for their number. Elsewhere
    its share of the tokens.
    """
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is not None:
        return "tokens" if scaled else 1.0
    if items is None:
        return 1.0
    if trainer.compute_loss_func is not None:
        return "tokens"
    if not trainer.model_accepts_loss_kwargs:
        return 1.0
    if trainer.label_smoother is not None:
        taken = "num_items_in_batch" in inspect.signature(trainer.label_smoother).parameters
        return "tokens" if taken else 1.0
    if _trl_computes_loss(trainer):
        return "tokens"
    divided = _divides_by_items(trainer.model if model.inner is None else model.inner)
    return "tokens" if divided else 1.0


def _trl_computes_loss(trainer: Any) -> bool:
    return any(
        "compute_loss" in vars(kind) and kind.__module__.startswith("trl.") for kind in type(trainer).__mro__
    )


def _divides_by_items(model: Any) -> bool:
    """Whether a model has a use for the number of items that the trainer gives it, told by its code."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None:
        return True
    return "loss_function" in code.co_names or "num_items_in_batch" in (*code.co_varnames, *code.co_consts)


def _find_trainer(state: TrainerState) -> tuple[Any, str | None]:
    """The trainer that is calling, told by its state, and the checkpoint it resumes from."""
    from transformers import Trainer  # late: takes seconds, and has been imported by whoever trains

    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and owner.state is state:
            checkpoint = frame.f_locals.get("resume_from_checkpoint")
            return owner, checkpoint if isinstance(checkpoint, str) else None
        frame = frame.f_back
    return None, None


def _is_out_of_memory(error: BaseException) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size  # type: ignore[import-untyped]

    return isinstance(error, Exception) and bool(should_reduce_batch_size(error))


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _saved_state(
    args: TrainingArguments, state: TrainerState, checkpoint: str | None
) -> dict[str, Any] | None:
    """What :meth:`HealthCallback.on_save` left in the checkpoint that training goes on from."""
    if state.global_step == 0:
        return None
    folder = _checkpoint_folder(args, state) if checkpoint is None else Path(checkpoint)
    try:
        saved = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.warning("no state of the monitor in %s (%s): baselines are learned anew", folder, error)
        return None
    return saved if isinstance(saved, dict) else None
