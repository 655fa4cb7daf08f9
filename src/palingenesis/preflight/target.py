"""What the commands before a run look at: a configuration, or a model and data alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError
from palingenesis.sft.builtin import is_builtin
from palingenesis.sft.config import TrainConfig, load_config
from palingenesis.sft.config.load import override

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: One of these is in every folder that holds a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
    "spiece.model",
)


def target_of(
    config_path: Path | str | None,
    overrides: Sequence[tuple[str, str]] = (),
    model: str | None = None,
    data: str | None = None,
    *,
    needs_data: bool = True,
) -> TrainConfig:
    """The configuration that a command is about.

    Args:
        config_path: a YAML file.
        overrides: ``section.option`` and text, put over the file or over the defaults.
        model: a model's folder or name, instead of a configuration.
        data: training data, to go with ``model``.
        needs_data: whether ``model`` is of no use without ``data``.

    Raises:
        ConfigError: neither way or both were given, a folder or file is missing, or the options are wrong.
    """
    given = " and ".join(name for name, value in (("--model", model), ("--data", data)) if value is not None)
    if config_path is not None:
        if given:
            raise ConfigError(
                f"--config and {given} were given: take --config FILE, with --model.name_or_path or "
                "--data.dataset to change what it says, or --model DIR --data FILE alone"
            )
        return load_config(config_path, overrides)
    if model is None or (data is None and needs_data):
        there = f"{given} alone was given" if given else "nothing was given to look at"
        needed = "--model DIR --data FILE" if needs_data else "--model DIR"
        raise ConfigError(f"{there}: give --config FILE, or {needed}")
    _require_folder(model)
    settings: dict[str, Any] = {"model": {"name_or_path": model}, "data": {"dataset": data}}
    if data is None:
        settings["data"] = {"dataset": "none"}  # never read: the command needs no data
    for name, text in overrides:
        override(settings, name, text)
    try:
        return TrainConfig(**settings)
    except ConfigError as error:
        told = str(error)
        named = any(told.startswith(f"{name}: ") for name, _ in overrides)
        raise ConfigError(f"--{told}" if named else told) from None


def tokenizer_of(config: TrainConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that training would use.

    Raises:
        ConfigError: the model's folder is missing or holds no tokenizer, or training would refuse it.
    """
    name = config.model.name_or_path
    _require_folder(name)
    folder = Path(name).expanduser()
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"the folder {name!r} holds no tokenizer (none of {', '.join(TOKENIZER_FILES[:4])}): save the "
            "model's tokenizer there with tokenizer.save_pretrained, or give the model's own folder "
            "(pgs profile needs none)"
        )
    from palingenesis.sft.model import load_tokenizer

    return load_tokenizer(config)


def _require_folder(name: str) -> None:
    """Say of a path that it is missing, and not that the hub has nothing under it."""
    if is_builtin(name):
        return
    path = Path(name).expanduser()
    if path.is_file():
        raise ConfigError(f"the model {name!r} is a file; the folder that holds it is needed")
    if not path.is_dir() and name.startswith((".", "/", "~")):
        raise ConfigError(f"there is no model folder {name!r}: give one that save_pretrained wrote")
