"""The configuration by itself: numbers that exclude nothing and still cannot have been meant.

Options that cannot work together are refused when the configuration is read
(:mod:`palingenesis.sft.config.combinations`); here are those that work, badly. What is not known of the run
(how large the model is, how many rows there are) leaves the checks that need it out: see :class:`Known`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from palingenesis.findings import Finding
from palingenesis.preflight.sanity_known import Known, SanityLimits
from palingenesis.preflight.words import counted

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig


#: Bytes of logits at the peak of a loss that holds them whole: in fp32, their gradient, and as the head gave
#: them.
_LOGITS_BYTES = 4 + 4 + 2
#: A forward pass, as a share of forward and backward passes.
_FORWARD = 1 / 3


@dataclass(frozen=True)
class _Run:
    """A configuration with what follows from it."""

    config: TrainConfig
    known: Known
    limits: SanityLimits

    @property
    def rows_per_step(self) -> int:
        train = self.config.train
        return train.per_device_batch_size * train.gradient_accumulation_steps * self.known.world_size

    @property
    def steps(self) -> int | None:
        train = self.config.train
        if train.max_steps is not None:
            return train.max_steps
        if self.known.rows is None:
            return None
        return math.ceil(self.known.rows * train.epochs / self.rows_per_step)

    @property
    def evaluates(self) -> bool:
        data = self.config.data
        return data.eval_dataset is not None or bool(data.eval_sources)


#: Options whose defaults are made for longer runs, by the finding that they make in a short one.
_CADENCES = {
    "config.few_steps": ("train.gradient_accumulation_steps", "train.max_steps", "train.epochs"),
    "config.save_never": ("train.save_steps",),
    "config.eval_never": ("data.eval_every",),
    "config.health_never": (
        "logging.check_every",
        "logging.health_tier3_every",
        "logging.health_tier2_every",
    ),
}


def planned_steps(config: TrainConfig, known: Known) -> int | None:
    """Optimizer steps of the run; ``None`` where neither the configuration nor the data tell."""
    return _Run(config, known, SanityLimits()).steps


def check_config(
    config: TrainConfig, known: Known | None = None, limits: SanityLimits | None = None
) -> list[Finding]:
    """Everything about a configuration that needs neither weights nor batches."""
    run = _Run(config, known or Known(), limits or SanityLimits())
    changed = config.changed()
    return [_softened(finding, changed) for rule in _RULES for finding in rule(run)]


def _softened(finding: Finding, changed: Mapping[str, Any]) -> Finding:
    """What follows from defaults alone, in a run that happens to be short, is nobody's mistake."""
    options = _CADENCES.get(finding.check)
    if options is None or any(option in changed for option in options):
        return finding
    return replace(finding, severity="info")


def highest_rate(parameters: int | None, *, lora: bool, limits: SanityLimits) -> float:
    """The highest learning rate that a model of this size takes; of unknown size, the highest but of toys."""
    if lora:
        return limits.lora_rate
    if parameters is None:
        return limits.full_rates[1][1]
    return next(rate for size, rate in limits.full_rates if parameters <= size)


# -- learning rate -----------------------------------------------------------------------------------------


def _rate_too_high(run: _Run) -> Iterator[Finding]:
    train, lora = run.config.train, run.config.model.lora is not None
    if train.optimizer == "sgd":
        return
    most = highest_rate(run.known.parameters, lora=lora, limits=run.limits)
    if train.learning_rate <= most:
        return
    size = run.known.parameters
    of = "a model of unknown size" if size is None else f"a model of {_size(size)} parameters"
    how = "adapters on " if lora else "every weight of "
    yield Finding(
        "config.learning_rate_high",
        "critical" if train.learning_rate > run.limits.far * most else "warning",
        f"train.learning_rate {train.learning_rate:g} trains {how}{of}, and {most:g} is the most that is in "
        f"use for that",
        {"learning_rate": train.learning_rate, "highest": most, "parameters": size, "lora": lora},
        f"set train.learning_rate to {_usual(run):g}",
    )


def _rate_too_low(run: _Run) -> Iterator[Finding]:
    train, limits = run.config.train, run.limits
    if train.optimizer == "sgd":
        least, kind = limits.least_sgd_rate, "SGD, which takes steps of the gradient's own size"
    elif run.config.model.lora is not None:
        least, kind = limits.least_lora_rate, "adapters, which begin at zero"
    else:
        least, kind = limits.least_full_rate, "any model"
    if train.learning_rate < least:
        usual = 1e-2 if train.optimizer == "sgd" else _usual(run)
        yield Finding(
            "config.learning_rate_low",
            "warning",
            f"train.learning_rate {train.learning_rate:g} is less than the {least:g} that moves {kind}",
            {"learning_rate": train.learning_rate, "lowest": least},
            f"set train.learning_rate to {usual:g}" + _or_adamw(train.optimizer),
        )


def _or_adamw(optimizer: str) -> str:
    return ", or train.optimizer to adamw" if optimizer == "sgd" else ""


def _usual(run: _Run) -> float:
    """A learning rate that is no surprise: a fifth of the highest, for adapters 2e-4."""
    if run.config.model.lora is not None:
        return 2e-4
    return highest_rate(run.known.parameters, lora=False, limits=run.limits) / 5


# -- batch, steps, schedule --------------------------------------------------------------------------------


def _few_rows(run: _Run) -> Iterator[Finding]:
    rows, limits = run.rows_per_step, run.limits
    if rows >= limits.least_rows or run.config.data.packing:  # a packed row holds several samples
        return
    train = run.config.train
    wanted = math.ceil(limits.least_rows * 4 / (train.per_device_batch_size * run.known.world_size))
    yield Finding(
        "config.small_batch",
        "warning",
        f"an optimizer step sees {rows} row{'s' if rows > 1 else ''} (train.per_device_batch_size "
        f"{train.per_device_batch_size}, train.gradient_accumulation_steps "
        f"{train.gradient_accumulation_steps}, {run.known.world_size} "
        f"process{'es' if run.known.world_size > 1 else ''})",
        {"rows_per_step": rows, "world_size": run.known.world_size},
        f"set train.gradient_accumulation_steps to {wanted}",
    )


def _few_steps(run: _Run) -> Iterator[Finding]:
    steps, limits = run.steps, run.limits
    if steps is None or steps >= limits.least_steps:
        return
    train = run.config.train
    if train.max_steps is not None:
        fix = f"raise train.max_steps to {limits.least_steps} or more, unless this run is a trial"
    else:
        smaller = max(1, train.gradient_accumulation_steps * steps // (2 * limits.least_steps))
        fix = f"set train.gradient_accumulation_steps to {smaller}, or raise train.epochs"
    yield Finding(
        "config.few_steps",
        "info" if train.max_steps is not None else "warning",
        f"the run has {counted(steps, 'optimizer step')} of {counted(run.rows_per_step, 'row')}, and a "
        f"schedule needs at least {limits.least_steps}",
        {"steps": steps, "rows_per_step": run.rows_per_step, "rows": run.known.rows},
        fix,
    )


def _long_warmup(run: _Run) -> Iterator[Finding]:
    share = run.config.train.warmup_ratio
    if share > run.limits.warmup:
        yield Finding(
            "config.long_warmup",
            "warning",
            f"the learning rate rises for {share:.0%} of the run (train.warmup_ratio {share:g}), and reaches "
            "its highest only then",
            {"warmup_ratio": share, "steps": run.steps},
            "set train.warmup_ratio to 0.05",
        )


def _repeated_data(run: _Run) -> Iterator[Finding]:
    train, rows = run.config.train, run.known.rows
    if train.max_steps is None:
        passes = float(train.epochs)
    elif rows:
        passes = train.max_steps * run.rows_per_step / rows
    else:
        return
    if passes <= run.limits.passes:
        return
    option = "train.epochs" if train.max_steps is None else "train.max_steps"
    wanted = 3 if train.max_steps is None else max(1, round(3 * (rows or 0) / run.rows_per_step))
    yield Finding(
        "config.data_repeated",
        "warning",
        f"the run goes over its data {passes:.3g} times ({option} {train.max_steps or train.epochs}"
        + (f", {rows} rows)" if rows else ")"),
        {"passes": passes, "rows": rows, "steps": run.steps},
        f"set {option} to {wanted}, or give more data",
    )


# -- cadences ----------------------------------------------------------------------------------------------


def _evaluation(run: _Run) -> Iterator[Finding]:
    data, steps = run.config.data, run.steps
    if not run.evaluates:
        return
    if steps is not None and data.eval_every > steps:
        yield Finding(
            "config.eval_never",
            "warning",
            f"data.eval_every is {data.eval_every} and the run has {counted(steps, 'step')}: the evaluation "
            "data is never looked at",
            {"eval_every": data.eval_every, "steps": steps},
            f"set data.eval_every to {max(1, steps // 4)}",
        )
    rows = run.known.eval_rows
    if rows is None:
        return
    share = _FORWARD * rows / (data.eval_every * run.rows_per_step)
    if share > run.limits.evaluation:
        yield Finding(
            "config.eval_costs",
            "warning",
            f"every {counted(data.eval_every, 'step')} of {counted(run.rows_per_step, 'row')}, {rows} are "
            f"evaluated, which takes about {share:.1f} times as long as training does in between",
            {"eval_rows": rows, "eval_every": data.eval_every, "times": share},
            f"set data.eval_samples to {max(1, rows // math.ceil(10 * share))}, or data.eval_every to "
            f"{data.eval_every * math.ceil(10 * share)}",
        )


def _checkpoints(run: _Run) -> Iterator[Finding]:
    save, steps = run.config.train.save_steps, run.steps
    if steps is None:
        return
    if save > steps >= run.limits.long_run:
        yield Finding(
            "config.save_never",
            "warning",
            f"train.save_steps is {save} and the run has {steps} steps: an interruption loses all of them",
            {"save_steps": save, "steps": steps},
            f"set train.save_steps to {max(1, steps // 5)}",
        )


def _health(run: _Run) -> Iterator[Finding]:
    options, steps = run.config.logging, run.steps
    if steps is None:
        return
    never = {
        name: every
        for name in ("check_every", "health_tier2_every", "health_tier3_every")
        if (every := getattr(options, name)) > steps
    }
    if never:
        logging_steps = run.config.train.logging_steps
        wanted = max(logging_steps, steps // 2 // logging_steps * logging_steps)
        told = " and ".join(f"logging.{name} ({every})" for name, every in never.items())
        yield Finding(
            "config.health_never",
            "warning",
            f"{told} {'is' if len(never) == 1 else 'are'} beyond the run's {counted(steps, 'step')}: what "
            "is measured there is never measured",
            {**never, "steps": steps},
            " and ".join(f"set logging.{name} to {wanted}" for name in never),
        )


# -- memory ------------------------------------------------------------------------------------------------


def _logits(run: _Run) -> Iterator[Finding]:
    memory, data, vocabulary = run.config.memory, run.config.data, run.known.vocabulary
    if vocabulary is None or data.max_seq_length is None:
        return
    positions = run.config.train.per_device_batch_size * data.max_seq_length
    whole = positions * vocabulary * _LOGITS_BYTES / 1e9
    if not memory.chunked_loss:
        if whole > run.limits.logits_gb:
            yield Finding(
                "config.whole_logits",
                "warning",
                f"the logits of a micro-batch ({positions} positions, {vocabulary} tokens) and their "
                f"gradient take up to {whole:.1f} GB, and memory.chunked_loss is false",
                {"gb": whole, "positions": positions, "vocabulary": vocabulary},
                "set memory.chunked_loss to true",
            )
        return
    chunk = whole / memory.loss_num_chunks
    if chunk > run.limits.chunk_gb:
        wanted = 2 ** math.ceil(math.log2(whole / (run.limits.chunk_gb / 2)))
        yield Finding(
            "config.few_chunks",
            "warning",
            f"one of memory.loss_num_chunks {memory.loss_num_chunks} chunks of logits takes up to "
            f"{chunk:.1f} GB",
            {"gb": chunk, "positions": positions, "vocabulary": vocabulary},
            f"set memory.loss_num_chunks to {wanted}",
        )


def _size(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.3g} billion"
    return f"{parameters / 1e6:.3g} million" if parameters >= 1e6 else str(parameters)


_RULES: tuple[Callable[[Any], Iterator[Finding]], ...] = (
    _rate_too_high,
    _rate_too_low,
    _few_rows,
    _few_steps,
    _long_warmup,
    _repeated_data,
    _evaluation,
    _checkpoints,
    _health,
    _logits,
)
