"""``train``: one configuration in, a monitored fine-tuning run out. This is where the parts are joined."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.config import MonitorConfig
from palingenesis.errors import ConfigError, MissingExtraError
from palingenesis.sft.resume import (
    Start,
    first_rows,
    order_of_data,
    require_same_order,
    require_same_rows,
    set_newer_aside,
    where_to_start,
)

if TYPE_CHECKING:
    from transformers import TrainerState

    from palingenesis.sft.config import TrainConfig
    from palingenesis.sft.config.sections import TrainOptions
    from palingenesis.sft.stream import Stream
    from palingenesis.sft.telling import Teller
    from palingenesis.sft.trainer import FineTuner
    from palingenesis.trackers.queue import Worker

log = logging.getLogger("palingenesis")

MODEL_FOLDER = "model"
_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        folder: of the run: record, log, checkpoints, and the trained model in ``model``.
        verdict, verdict_sentence: as the record has it.
        steps: optimizer steps done, of all starts.
        loss: of the last step; ``None`` if there was none to do.
        eval_loss: the best, and ``best_checkpoint`` the one that has it; ``None`` without evaluation.
        main: this is the process that speaks for all, of ``processes``.
    """

    folder: Path
    verdict: str
    verdict_sentence: str
    steps: int
    loss: float | None
    eval_loss: float | None
    best_checkpoint: Path | None
    main: bool
    processes: int


def train(config: TrainConfig) -> TrainResult:
    """Fine-tune a model as configured, on this process or on all that a launcher started.

    Returns:
        What the record says of the run. All ranks return the same.

    Raises:
        ConfigError, MissingExtraError, RecordError: something given cannot work; nothing was trained.
    """
    start = where_to_start(config)
    _require_packages()
    from accelerate import PartialState  # type: ignore[import-untyped]

    state = PartialState(cpu=_on_cpu())
    folder = Path(config.train.output_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"train.output_dir: {str(folder)!r} cannot be made ({error.strerror}); give a folder that can"
        ) from None
    # From here on rank 0 writes into the folder, which all have looked at.
    state.wait_for_everyone()
    from palingenesis.sft.telling import telling

    with telling(folder, main=state.is_main_process) as teller, _quiet_libraries():
        for reason in start.passed_over:
            log.warning("a checkpoint is passed over: %s", reason)
        order = order_of_data(config, state.num_processes)
        require_same_order(start, order)
        return _Run(config, start, folder, order, teller).go()


class _Run:
    """One start of a run."""

    def __init__(
        self, config: TrainConfig, start: Start, folder: Path, order: dict[str, str], teller: Teller
    ) -> None:
        self._config, self._start, self._folder = config, start, folder
        self._order, self._teller = order, teller
        self._workers: list[Worker] = []

    def go(self) -> TrainResult:
        from palingenesis.record.reader import load_run
        from palingenesis.trackers.queue import close_all

        trainer = self._trainer()
        checkpoint = self._start.checkpoint
        if checkpoint is not None:
            log.info("going on from %s", checkpoint.folder)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.folder))
        finally:
            close_all(self._workers)
        # The record has its end once rank 0 is here.
        trainer.save_model(str(self._folder / MODEL_FOLDER))
        trainer.accelerator.wait_for_everyone()
        run, best = load_run(self._folder), trainer.state.best_model_checkpoint
        losses = run.metrics.get("train/loss")
        return TrainResult(
            folder=self._folder,
            verdict=run.verdict,
            verdict_sentence=run.verdict_sentence,
            steps=trainer.state.global_step,
            loss=None if losses is None or not len(losses) else float(losses[-1]),
            eval_loss=trainer.state.best_metric,
            best_checkpoint=None if best is None else Path(best),
            main=_rank() == 0,
            processes=_ranks(),
        )

    # -- the parts ---------------------------------------------------------------------------------------

    def _trainer(self) -> FineTuner:
        from palingenesis.sft.data import Quarantine
        from palingenesis.sft.model import load_model, load_tokenizer
        from palingenesis.sft.stream import evaluation_sets, training_stream
        from palingenesis.trackers.choose import require

        config = self._config
        require(config.logging.trackers)
        main = _rank() == 0
        tokenizer = load_tokenizer(config)
        with Quarantine(self._folder if main else None) as quarantine:
            stream = training_stream(config, tokenizer, quarantine, world_size=_ranks())
            self._first_rows = first_rows(stream)
            require_same_rows(self._start, self._first_rows)
            evaluated = evaluation_sets(config, tokenizer, quarantine)
        arguments = _arguments(config, self._folder, stream.steps, evaluates=bool(evaluated))
        model = load_model(config, tokenizer)
        return self._joined(arguments, model, tokenizer, stream, evaluated)

    def _joined(
        self, arguments: Any, model: Any, tokenizer: Any, stream: Stream, evaluated: Mapping[str, Any]
    ) -> FineTuner:
        from palingenesis.integrations.transformers import HealthCallback
        from palingenesis.sft.callbacks import Afterwards, MarkCallback, RowCallback
        from palingenesis.sft.data import collator
        from palingenesis.sft.evaluation import Evaluation
        from palingenesis.sft.flops import device_name, flops_of
        from palingenesis.sft.head import can_cut, require_exact
        from palingenesis.sft.objectives import ObjectiveParams
        from palingenesis.sft.rows import RowMaker
        from palingenesis.sft.stream import evaluation_sources, fingerprinting
        from palingenesis.sft.trainer import FineTuner

        config, plugins = self._config, self._config.plugins
        health = HealthCallback(
            out=self._folder,
            stop_on=config.logging.stop_on,
            config=_monitor_config(config),
            name=config.logging.run_name or self._folder.resolve().name,
            resume=self._start.goes_on,
            on_row=self._tell,
        )
        maker = RowMaker(
            plain=plugins.objective == "ce",
            max_grad_norm=config.train.max_grad_norm,
            steps_per_epoch=stream.steps_per_epoch,
            tokens_before=float(self._start.facts.get("tokens", 0.0)),
            flops=flops_of(model, _mean_length(stream), device_name=device_name()),
        )
        rows = RowCallback(maker, health, steps_per_epoch=stream.steps_per_epoch, evaluates=bool(evaluated))
        evaluation = None
        if evaluated:
            weights = {source.title: source.weight for source in evaluation_sources(config)}
            plain = collator(tokenizer.pad_token_id, packed=False)
            evaluation = Evaluation(evaluated, weights, plain, config.train.per_device_batch_size)
        trainer = FineTuner(
            objective_name=plugins.objective,
            params=ObjectiveParams(pbar=plugins.info_sft_pbar, beta=plugins.cadft_beta),
            chunks=config.memory.loss_num_chunks if config.memory.chunked_loss else 1,
            cut=config.memory.chunked_loss and can_cut(),
            evaluation=evaluation,
            on_numbers=rows.numbers,
            model=model,
            args=arguments,
            train_dataset=stream.dataset,
            # The trainer wants to see one; what is evaluated on is the evaluation's business.
            eval_dataset=next(iter(evaluated.values()), None),
            processing_class=tokenizer,
            data_collator=fingerprinting(collator(tokenizer.pad_token_id, packed=config.data.packing)),
        )
        _use_own_lines(trainer)
        rows.join(trainer.ledger, trainer.stopwatch)
        require_exact(trainer.network, len(tokenizer))

        def facts() -> dict[str, Any]:
            return {"order": self._order, "first_rows": self._first_rows, "tokens": maker.tokens_of_all}

        for callback in (
            rows,
            health,
            Afterwards(self._record_is_open),
            MarkCallback(facts, trainer.accelerator.wait_for_everyone),
        ):
            trainer.add_callback(callback)
        return trainer

    def _record_is_open(self, state: TrainerState) -> None:
        """Trackers come after the record, from which they get what they miss."""
        from palingenesis.trackers import start

        self._teller.begin(state.global_step, state.max_steps)
        options = self._config.logging
        if not state.is_world_process_zero:
            return
        set_newer_aside(self._start, self._folder)
        if not options.trackers:
            return
        self._workers = start(
            options.trackers,
            self._folder,
            project=options.project,
            name=options.run_name,
            config=self._config.flat(),
            resumed_from=state.global_step if self._start.goes_on else None,
        )

    def _tell(self, row: Mapping[str, Any]) -> None:
        self._teller.row(row)
        for worker in self._workers:
            worker.log(int(row["train/global_step"]), row)


# -- what the trainer is told ------------------------------------------------------------------------------


def _arguments(config: TrainConfig, folder: Path, steps: int, *, evaluates: bool) -> Any:
    import torch
    from trl.trainer.sft_config import SFTConfig

    options = config.train
    schedule, more = _schedule(options)
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
        warmup_steps=math.ceil(options.warmup_ratio * steps),
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
        use_cpu=_on_cpu(),
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


def _schedule(options: TrainOptions) -> tuple[str, dict[str, float]]:
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


def _monitor_config(config: TrainConfig) -> MonitorConfig:
    options = config.logging
    return MonitorConfig(
        check_every=options.check_every,
        logging_steps=config.train.logging_steps,
        tier2_every=options.health_tier2_every,
        tier3_every=options.health_tier3_every,
        rl_readiness=options.rl_readiness,
        rl_entropy_floor=options.rl_entropy_floor,
    )


def _mean_length(stream: Stream) -> float:
    """Tokens of a sample: as far as attention reaches, packed or not."""
    return sum(one.tokens for one in stream.accounts) / sum(one.samples for one in stream.accounts)


def _use_own_lines(trainer: FineTuner) -> None:
    """Lines and bar are ours; the trainer's own would print numbers beside them."""
    from transformers import PrinterCallback, ProgressCallback

    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """The time in which other libraries' bars and information stay off the terminal."""
    import datasets  # type: ignore[import-untyped]
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    theirs.set_verbosity(logging.ERROR)
    theirs.disable_progress_bar()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        theirs.enable_progress_bar()  # type: ignore[no-untyped-call]
        datasets.enable_progress_bars()


def _rank() -> int:
    from palingenesis.describe import rank_and_world_size

    return rank_and_world_size()[0]


def _ranks() -> int:
    from palingenesis.describe import rank_and_world_size

    return rank_and_world_size()[1]


def _on_cpu() -> bool:
    """Several processes find each other on the CPU only if they are told that it is the CPU."""
    import torch

    return not (torch.cuda.is_available() or torch.backends.mps.is_available())


def leave_together() -> None:
    """The end of a program of several processes: no one leaves while another still talks to it."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _require_packages() -> None:
    from importlib.util import find_spec

    for package in ("torch", "transformers", "trl", "accelerate", "datasets"):
        if find_spec(package) is None:
            raise MissingExtraError(f"training needs {package!r}: pip install 'palingenesis[sft]'")
