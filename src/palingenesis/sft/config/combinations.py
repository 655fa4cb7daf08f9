"""Options that are each fine and cannot work together: which, why, and what to set instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palingenesis.sft.config.sections import Options, SourceOptions
    from palingenesis.sft.config.whole import TrainConfig


def conflicts(config: TrainConfig) -> list[str]:
    """One sentence for everything that cannot work."""
    return [sentence for rule in _RULES for sentence in rule(config)]


def _training_data(config: TrainConfig) -> Iterator[str]:
    data = config.data
    if data.dataset is None and not data.sources:
        yield (
            "data.dataset is missing: set it to a file, a folder or a hub name, or list several under "
            "data.sources"
        )
    if data.dataset is not None and data.sources:
        yield (
            "data.dataset and data.sources are both set: a run reads one of them; leave one out, or make the "
            "dataset one of the sources"
        )
    if data.sources and _differs(data, "dataset_split"):
        yield (
            "data.dataset_split belongs to data.dataset and nothing reads it with data.sources: set split in "
            "each source"
        )
    if data.sources and data.eval_dataset is None and data.messages_field is not None:
        yield (
            "data.messages_field belongs to data.dataset and nothing reads it with data.sources: set "
            "messages_field in each source"
        )
    if data.packing and data.max_seq_length is None:
        yield (
            "data.packing needs a length to pack to and data.max_seq_length is null: set "
            "data.max_seq_length, for example to 8192, or data.packing to false"
        )
    yield from _same_names("data.sources", data.sources)


def _evaluation_data(config: TrainConfig) -> Iterator[str]:
    data = config.data
    if data.eval_dataset is not None and data.eval_sources:
        yield (
            "data.eval_dataset and data.eval_sources are both set: leave one out, or make the dataset one of "
            "the sources"
        )
    yield from _same_names("data.eval_sources", data.eval_sources)


def _same_names(where: str, sources: tuple[SourceOptions, ...]) -> Iterator[str]:
    if len(sources) < 2:
        return
    from palingenesis.sft.data.sources import Source

    titles = Counter(Source(dataset=each.dataset, name=each.name or "").title for each in sources)
    for title, times in titles.items():
        if times > 1:
            yield (
                f"{where}: {times} sources are called {title!r} and their metrics could not be told apart: "
                "give each a name of its own"
            )


def _learning_rate(config: TrainConfig) -> Iterator[str]:
    train = config.train
    if train.min_learning_rate > train.learning_rate:
        yield (
            f"train.min_learning_rate ({train.min_learning_rate:g}) is above train.learning_rate "
            f"({train.learning_rate:g}), which the schedule starts from: set it to at most that"
        )
    if train.min_learning_rate > 0 and train.lr_scheduler == "constant":
        yield (
            f"train.min_learning_rate ({train.min_learning_rate:g}) is never reached with train.lr_scheduler "
            "constant: set train.lr_scheduler to cosine or linear, or train.min_learning_rate to 0"
        )


def _cadences(config: TrainConfig) -> Iterator[str]:
    steps = config.train.logging_steps
    for name in ("health_tier2_every", "health_tier3_every"):
        every: int = getattr(config.logging, name)
        if every % steps:
            # The nearest multiple, and at least one.
            fitting = max(1, round(every / steps)) * steps
            yield (
                f"logging.{name} ({every}) is no multiple of train.logging_steps ({steps}), and its numbers "
                f"are collected on logging steps only: set logging.{name} to {fitting}"
            )


def _objective(config: TrainConfig) -> Iterator[str]:
    plugins = config.plugins
    if len(plugins.chosen) > 1:
        names = " and ".join(f"plugins.{name}" for name in plugins.chosen)
        yield f"{names} are on together, and a run has one objective: set all but one to false"
    if _differs(plugins, "info_sft_pbar") and not plugins.info_sft:
        yield _unread("plugins.info_sft_pbar", "plugins.info_sft to true")
    if _differs(plugins, "cadft_beta") and not plugins.cadft:
        yield _unread("plugins.cadft_beta", "plugins.cadft to true")


def _other_unread(config: TrainConfig) -> Iterator[str]:
    if _differs(config.memory, "loss_num_chunks") and not config.memory.chunked_loss:
        yield _unread("memory.loss_num_chunks", "memory.chunked_loss to true")
    if _differs(config.logging, "rl_entropy_floor") and not config.logging.rl_readiness:
        yield _unread("logging.rl_entropy_floor", "logging.rl_readiness to true")


def _sharding(config: TrainConfig) -> Iterator[str]:
    if config.model.lora is not None and config.parallel.strategy == "fsdp2":
        yield (
            "model.lora does not work with parallel.strategy fsdp2 yet: set parallel.strategy to ddp, or "
            "model.lora to null"
        )


def _differs(options: Options, name: str) -> bool:
    """Whether an option was changed. One written out with its default, as `pgs config` does, was not."""
    return bool(getattr(options, name) != type(options).model_fields[name].default)


def _unread(name: str, instead: str) -> str:
    return f"{name} is set, and nothing reads it: set {instead}, or leave {name} out"


_RULES: tuple[Callable[[TrainConfig], Iterator[str]], ...] = (
    _training_data,
    _evaluation_data,
    _learning_rate,
    _cadences,
    _objective,
    _other_unread,
    _sharding,
)
