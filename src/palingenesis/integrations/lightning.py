"""HealthCallback for Lightning 2, imported as ``lightning.pytorch`` or as ``pytorch_lightning``.

    trainer = Trainer(..., callbacks=[HealthCallback(out="pgs_run", stop_on="critical")])
    trainer.fit(module, loader)

Lightning calls ``on_before_optimizer_step`` with gradients that are unscaled and not clipped yet, so nothing
has to be wrapped.
"""

from __future__ import annotations

import glob
import importlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from palingenesis.errors import ConfigError
from palingenesis.integrations._data import LoaderOrder
from palingenesis.integrations._outputs import Model, OutputFeed, model_within
from palingenesis.integrations._shared import Session, StopOn, check_options, missing_extra
from palingenesis.integrations._training import known, training_of_lightning
from palingenesis.layers import find_layers
from palingenesis.monitor import Monitor
from palingenesis.scaling import Scaler

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> Any:
    """Lightning's ``Callback``, of the package that is in use already, or of the one that is installed."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    for name in imported or _PACKAGES:
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", *_PACKAGES):
                raise
    raise missing_extra("palingenesis.integrations.lightning", "lightning", "lightning")


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = _callback_class()


class HealthCallback(Callback):
    """Watches a Lightning run layer by layer.

    Every step of the optimizer is one step of the monitor, with the gradients before clipping and the loss of
    the whole accumulation window; with one optimizer it is numbered as ``trainer.global_step`` will be after
    it. Where batches are mappings with ``labels``, tokens are counted from them. Where the configuration has
    ``rl_readiness``, the entropy of the output is read from a transformers model that is given labels; any
    other output can be given to ``observe_output`` of :attr:`monitor` in ``training_step``.

    Args:
        out: folder of the record; ``None`` keeps none.
        stop_on: end training cleanly at the first event of this severity: ``"critical"``, ``"warning"`` (or
            worse), ``None`` for never.
        optimizer: which of several to watch, by its place in ``configure_optimizers``. Its own steps are
            counted, and only layers that it trains are watched. Two callbacks with two folders watch two.
        **monitor_options: what :class:`~palingenesis.Monitor` takes: ``check_every``, ``warmup``, ``sigma``,
            ``layers``, ``config``, ``name``, ``on_event``, ``on_reading``, ``resume``, ``overwrite``.

    Raises:
        ConfigError: an option that cannot work.
    """

    def __init__(
        self,
        *,
        out: str | Path | None = "pgs_run",
        stop_on: StopOn | None = None,
        optimizer: int = 0,
        **monitor_options: Any,
    ) -> None:
        super().__init__()
        check_options(stop_on, monitor_options)
        if not isinstance(optimizer, int) or optimizer < 0:
            raise ConfigError(
                f"optimizer={optimizer!r} cannot be used: give its place in configure_optimizers, from 0"
            )
        self.out, self.stop_on, self.optimizer = out, stop_on, optimizer
        self.monitor_options = monitor_options
        self._restored: dict[str, Any] | None = None
        self._forget_run()

    def _forget_run(self) -> None:
        self._session: Session | None = None
        self._feed: OutputFeed | None = None
        self._scaler: Any = None
        self._watched: Any = None
        self._stepped = False
        self._norm: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is a callback with the same options, watching nothing."""
        kept = ("out", "stop_on", "optimizer", "monitor_options", "_restored")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_run()

    @property
    def state_key(self) -> str:
        return self._generate_state_key(optimizer=self.optimizer)

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the current run, or of the last one."""
        return None if self._session is None else self._session.monitor

    # -- begin and end -----------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget_run()
        restored, self._restored = self._restored, None
        optimizers = trainer.optimizers
        if self.optimizer >= len(optimizers):
            raise ConfigError(
                f"optimizer={self.optimizer} does not exist: {type(pl_module).__name__} configures "
                f"{len(optimizers)}, counted from 0"
            )
        self._watched = _plain(optimizers[self.optimizer])
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        last = _last_step(trainer, pl_module)
        training = known(lambda: training_of_lightning(trainer, pl_module, self._watched, last))
        options = {"training": training, **self.monitor_options}
        start_step = trainer.global_step
        if len(optimizers) > 1:
            # The trainer counts the steps of all of them together.
            start_step = 0 if restored is None else int(restored["step"])
            if options.get("layers") is None and options.get("config") is None:
                options["layers"] = _layers_trained_by(self._watched, pl_module)
        self._session = Session(
            pl_module,
            self._watched,
            self.out,
            options,
            stop_on=self.stop_on,
            scaler=self._scaler,
            gradients="raw",
            start_step=start_step,
            max_steps=last,
            restored=restored,
        )
        # Batches are named by epoch and number; what is shuffled by the global random numbers is not found.
        self._session.know_batches(LoaderOrder(trainer.train_dataloader), _tokenizer(trainer, pl_module))
        self._feed = OutputFeed(self._session.monitor, _transformers_model, strict=False)

    def _end(self, error: BaseException | None) -> None:
        self._outputs_are_there()
        if self._session is not None:
            self._session.end(error)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(None)

    # -- steps -------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._session is not None:
            self._session.note_batch(batch, (trainer.current_epoch, batch_idx))
        if self._feed is not None:
            # The mean of the micro-batches' losses is what is minimised, whatever their tokens.
            self._feed.begin(pl_module, batch, lambda model: 1.0)

    def _outputs_are_there(self) -> None:
        if self._feed is not None:
            self._feed.end()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._outputs_are_there()
        # Divided by accumulate_grad_batches already, and multiplied by the scale of mixed precision.
        if self._session is not None:
            self._session.monitor.learn_order(loss)
            scale = Scaler(self._scaler, ()).scale
            self._session.add_loss(loss if scale is None else loss.detach() / scale.to(loss.device))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        session = self._session
        if session is None:
            return
        if _plain(optimizer) is not self._watched:
            session.forget_loss()
            return
        if len(trainer.optimizers) == 1 and session.monitor.global_step > trainer.global_step:
            return  # an optimizer that evaluates its closure again within one step
        session.step()
        self._stepped = True
        if self._is_logged(trainer, session):
            self._norm = session.monitor.grad_norm()

    def _is_logged(self, trainer: Trainer, session: Session) -> bool:
        every: int = vars(trainer)["log_every_n_steps"]  # set where its type is not declared
        return bool(trainer.loggers) and every > 0 and session.monitor.global_step % every == 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._outputs_are_there()
        session = self._session
        if session is None or not self._stepped:
            return
        self._stepped = False
        if session.should_stop():
            trainer.should_stop = True
        if not self._is_logged(trainer, session):
            return
        values: dict[str, float] = dict(session.values())
        if self._norm is not None:
            values["train/grad_norm_raw"] = float(self._norm)
            self._norm = None
        # The axis of everything else that Lightning logs, which counts batches from 0.
        at = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", session.monitor.global_step - 1)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=at)

    # -- checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._session is None:
            return self._restored or {}
        return self._session.checkpoint()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict


def _tokenizer(trainer: Trainer, module: LightningModule) -> Any:
    """Where modules and data modules keep theirs, as a rule."""
    owners = (module, getattr(trainer, "datamodule", None))
    found = (getattr(owner, "tokenizer", None) for owner in owners)
    return next((tokenizer for tokenizer in found if tokenizer is not None), None)


def _plain(optimizer: Any) -> Any:
    """The optimizer itself, where Lightning has put its own around it."""
    return getattr(optimizer, "_optimizer", optimizer)


def _last_step(trainer: Trainer, module: LightningModule) -> int | None:
    """The step that training ends with, if it is known."""
    if len(trainer.optimizers) > 1:
        return None  # what the trainer counts are the steps of all of them together
    try:
        # Of manual optimisation nothing tells how many batches make a step.
        steps = trainer.estimated_stepping_batches if module.automatic_optimization else trainer.max_steps
    except Exception:  # noqa: BLE001 - Lightning refuses where the accumulation changes from epoch to epoch
        steps = trainer.max_steps
    return int(steps) if 0 < steps < math.inf else None


def _transformers_model(module: Any) -> Model:
    found = model_within(module)
    # Where the whole of training_step is compiled, a hook would become part of the graph.
    step = getattr(module, "training_step", None)
    compiled = getattr(module, "_compiler_ctx", None) is not None or hasattr(
        step, "_torchdynamo_orig_callable"
    )
    return found._replace(inner=None) if compiled else found


def _layers_trained_by(optimizer: Any, module: torch.nn.Module) -> tuple[str, ...]:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = [unit.layer for unit in find_layers(module).units if id(unit.parameter) in held]
    # Names are taken as patterns: the part of a fused layer, `attn.in_proj[q]`, must not be read as one.
    return tuple(glob.escape(name) for name in dict.fromkeys(names))
