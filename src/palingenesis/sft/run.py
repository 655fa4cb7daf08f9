"""``train``: one configuration in, a monitored fine-tuning run out. This is where the parts are joined."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError, MissingExtraError
from palingenesis.sft.arguments import (
    monitor_config,
    objective_options,
    on_cpu,
    trainer_arguments,
    training_of,
)
from palingenesis.sft.quiet import quiet_libraries
from palingenesis.sft.resume import (
    Start,
    first_rows,
    order_of_data,
    require_same_order,
    require_same_rows,
    require_same_sharding,
    set_newer_aside,
    where_to_start,
)

if TYPE_CHECKING:
    from transformers import TrainerState

    from palingenesis.sft.config import TrainConfig
    from palingenesis.sft.evaluation import Evaluation
    from palingenesis.sft.stream import Stream
    from palingenesis.sft.telling import Teller
    from palingenesis.sft.trainer import FineTuner
    from palingenesis.trackers.queue import Worker

log = logging.getLogger("palingenesis")

MODEL_FOLDER = "model"


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

    state = PartialState(cpu=on_cpu())
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

    with telling(folder, main=state.is_main_process) as teller, quiet_libraries():
        for reason in start.passed_over:
            log.warning("a checkpoint is passed over: %s", reason)
        order = order_of_data(config, state.num_processes)
        require_same_order(start, order)
        require_same_sharding(start, config.parallel.strategy)
        _require_optimizer(config.train.optimizer)
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
            with _terminated_like_interrupted():
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.folder))
        except KeyboardInterrupt:
            log.warning(
                "interrupted at step %d: --train.resume_from auto goes on from the newest checkpoint",
                trainer.state.global_step,
            )
            raise
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
            if main and len(quarantine):
                log.warning("%s", quarantine.summary())
        arguments = trainer_arguments(config, self._folder, stream.steps, evaluates=bool(evaluated))
        model = load_model(config, tokenizer)
        return self._joined(arguments, model, tokenizer, stream, evaluated)

    def _joined(
        self, arguments: Any, model: Any, tokenizer: Any, stream: Stream, evaluated: Mapping[str, Any]
    ) -> FineTuner:
        from palingenesis.integrations.transformers import HealthCallback
        from palingenesis.sft.callbacks import Afterwards, MarkCallback, RowCallback
        from palingenesis.sft.data import collator
        from palingenesis.sft.flops import device_name, flops_of
        from palingenesis.sft.head import require_exact
        from palingenesis.sft.rows import RowMaker
        from palingenesis.sft.sample_order import SampleOrder
        from palingenesis.sft.stream import fingerprinting
        from palingenesis.sft.trainer import FineTuner

        config = self._config
        health = HealthCallback(
            out=self._folder,
            stop_on=config.logging.stop_on,
            config=monitor_config(config),
            name=config.logging.run_name or self._folder.resolve().name,
            resume=self._start.goes_on,
            on_row=self._tell,
            training=training_of(config, stream.steps, stream.steps_per_epoch, processes=_ranks()),
        )
        health.order = SampleOrder(
            stream,
            batch=config.train.per_device_batch_size,
            accumulation=config.train.gradient_accumulation_steps,
            rank=_rank(),
            processes=_ranks(),
        )
        maker = RowMaker(
            plain=config.plugins.objective == "ce",
            max_grad_norm=config.train.max_grad_norm,
            steps_per_epoch=stream.steps_per_epoch,
            tokens_before=float(self._start.facts.get("tokens", 0.0)),
            flops=flops_of(model, _mean_length(stream), device_name=device_name()),
        )
        rows = RowCallback(maker, health, steps_per_epoch=stream.steps_per_epoch, evaluates=bool(evaluated))
        trainer = FineTuner(
            **objective_options(config),
            evaluation=_evaluation(config, tokenizer, evaluated),
            on_numbers=rows.numbers,
            model=model,
            args=arguments,
            train_dataset=stream.dataset,
            # The trainer wants to see one; what is evaluated on is the evaluation's business.
            eval_dataset=next(iter(evaluated.values()), None),
            processing_class=tokenizer,
            data_collator=fingerprinting(collator(tokenizer.pad_token_id, packed=config.data.packing)),
        )
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


def _evaluation(config: TrainConfig, tokenizer: Any, evaluated: Mapping[str, Any]) -> Evaluation | None:
    """Over every source, unpacked; ``None`` if there is none."""
    from palingenesis.sft.data import collator
    from palingenesis.sft.evaluation import Evaluation
    from palingenesis.sft.stream import evaluation_sources

    if not evaluated:
        return None
    weights = {source.title: source.weight for source in evaluation_sources(config)}
    plain = collator(tokenizer.pad_token_id, packed=False)
    return Evaluation(evaluated, weights, plain, config.train.per_device_batch_size)


def _mean_length(stream: Stream) -> float:
    """Tokens of a sample: as far as attention reaches, packed or not."""
    return sum(one.tokens for one in stream.accounts) / sum(one.samples for one in stream.accounts)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """The time in which a polite request to end, as schedulers send it, ends the run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may listen to signals
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _rank() -> int:
    from palingenesis.describe import rank_and_world_size

    return rank_and_world_size()[0]


def _ranks() -> int:
    from palingenesis.describe import rank_and_world_size

    return rank_and_world_size()[1]


def _require_optimizer(name: str) -> None:
    import torch

    if name == "adamw_8bit" and not (torch.cuda.is_available() and find_spec("bitsandbytes")):
        raise ConfigError(
            "train.optimizer: adamw_8bit needs a CUDA device and bitsandbytes (pip install bitsandbytes); "
            "set it to adamw"
        )


def leave_together() -> None:
    """The end of a program of several processes: no one leaves while another still talks to it."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _require_packages() -> None:
    for package in ("torch", "transformers", "trl", "accelerate", "datasets"):
        if find_spec(package) is None:
            raise MissingExtraError(f"training needs {package!r}: pip install 'palingenesis[sft]'")
