"""Where a run begins: anew, or from a checkpoint of its own, and whether that is possible at all."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from palingenesis.errors import ConfigError
from palingenesis.record.format import RUN_FILE
from palingenesis.sft.checkpoints import SHARDS, Checkpoint, given, newer, newest, unmark
from palingenesis.sft.stream import fingerprint

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig
    from palingenesis.sft.stream import Stream

log = logging.getLogger("palingenesis")

AUTO = "auto"
_FIRST = 64


class Start(NamedTuple):
    """Where a run begins.

    Attributes:
        checkpoint: what it goes on from; ``None`` at the beginning.
        goes_on: the folder holds the run's record, to which this adds.
        passed_over: checkpoints that are not whole, with the reason.
    """

    checkpoint: Checkpoint | None
    goes_on: bool
    passed_over: list[str]

    @property
    def step(self) -> int:
        """The last step that is done."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def facts(self) -> dict[str, Any]:
        """What the checkpoint was told to remember."""
        return {} if self.checkpoint is None else self.checkpoint.facts


def where_to_start(config: TrainConfig) -> Start:
    """Look at the output folder, before anything is loaded. Changes nothing.

    Raises:
        ConfigError: the folder holds another run, cannot be one, or there is no such checkpoint.
    """
    folder, wanted = _usable(config.train.output_dir), config.train.resume_from
    there = (folder / RUN_FILE).exists()
    holds_a_run = there or any(folder.glob("checkpoint-*"))
    if wanted is None:
        if holds_a_run:
            raise ConfigError(
                f"train.output_dir: {str(folder)!r} holds a run: set train.resume_from to auto to go on with "
                "it, or give another folder"
            )
        return Start(None, goes_on=False, passed_over=[])
    if wanted == AUTO:
        checkpoint, passed_over = newest(folder)
        return Start(checkpoint, there, passed_over)
    checkpoint = given(wanted)
    if holds_a_run and checkpoint.folder.resolve().parent != folder.resolve():
        raise ConfigError(
            f"train.output_dir: {str(folder)!r} holds another run than the checkpoint {wanted!r}: give a new "
            "folder, or a checkpoint in this one"
        )
    return Start(checkpoint, there, [])


def _usable(output_dir: str) -> Path:
    try:
        folder = Path(output_dir).expanduser()
        for path in (folder, *folder.parents):
            if path.exists() and not path.is_dir():
                raise ConfigError(f"train.output_dir: {str(path)!r} is a file; give a folder for the run")
    except (OSError, RuntimeError) as error:  # not allowed to look, a name too long, a home that nobody has
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"train.output_dir: {output_dir!r} cannot be used ({reason}); give another folder"
        ) from None
    return folder


def order_of_data(config: TrainConfig, world_size: int) -> dict[str, str]:
    """What the order of samples follows from, to be kept in checkpoints: option to a digest of its value."""
    train, data = config.train, config.data.model_dump(mode="json")
    kept = {f"data.{name}": value for name, value in data.items() if not name.startswith("eval_")}
    del kept["data.num_workers"]
    window = train.per_device_batch_size * train.gradient_accumulation_steps * world_size
    kept |= {"train.seed": train.seed, "model.chat_template": config.model.chat_template}
    kept["train.per_device_batch_size × gradient_accumulation_steps × processes"] = window
    return {name: _digest(value) for name, value in kept.items()}


def first_rows(stream: Stream) -> str:
    """A fingerprint of the first rows of a run: other data, or another tokenizer, have another."""
    rows = (stream.dataset[place] for place in range(min(_FIRST, len(stream.dataset))))
    return f"{fingerprint(list(rows)):012x}"


def require_same_rows(start: Start, found: str) -> None:
    """See that the rows themselves are those that the run began with.

    Raises:
        ConfigError: they are not.
    """
    before = start.facts.get("first_rows")
    if before not in (None, found):
        assert start.checkpoint is not None
        raise ConfigError(
            "train.resume_from: the data, the tokenizer or its chat template are not what they were when "
            f"{str(start.checkpoint.folder)!r} was written, so rows would be skipped or repeated: set them "
            "back, or begin anew in another train.output_dir"
        )


def set_newer_aside(start: Start, output_dir: Path) -> None:
    """Let no later start go on from a checkpoint that this one leaves behind: it is on another way."""
    for folder in newer(output_dir, start.step):
        unmark(folder)
        log.warning("%s is left behind by going on from step %d: it counts as not whole", folder, start.step)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def require_same_sharding(start: Start, strategy: str) -> None:
    """See that a checkpoint holds weights and optimizer in the form that they are read in.

    Raises:
        ConfigError: it does not.
    """
    if start.checkpoint is None:
        return
    written = "fsdp2" if (start.checkpoint.folder / SHARDS).is_dir() else "ddp"
    if written != strategy:
        raise ConfigError(
            f"train.resume_from: {str(start.checkpoint.folder)!r} was written with parallel.strategy "
            f"{written} and this run has {strategy}: set it to {written}, or begin anew in another "
            "train.output_dir with model.name_or_path set to the checkpoint"
        )


def require_same_order(start: Start, order: dict[str, str]) -> None:
    """See that a resumed run leaves out the samples that were trained on, and no others.

    Raises:
        ConfigError: something that the order follows from has changed.
    """
    before = start.facts.get("order")
    if start.checkpoint is None or before is None:
        return
    changed = sorted(name for name, digest in order.items() if before.get(name) != digest)
    if changed:
        raise ConfigError(
            f"train.resume_from: {changed[0]} is not what it was when {str(start.checkpoint.folder)!r} was "
            "written, so samples would be skipped or repeated: set it back, or begin anew in another "
            "train.output_dir"
        )
