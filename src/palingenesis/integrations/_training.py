"""What a trainer is configured with, in the words of a record: common names, and all options of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palingenesis.describe import rank_and_world_size

log = logging.getLogger("palingenesis")

_SECRETS = ("token", "key", "password", "secret")
_PLAIN = (str, int, float, bool, type(None))


def known(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``find`` tells; nothing if it fails: a record is of use without."""
    try:
        return find()
    except Exception as error:  # noqa: BLE001 - versions of trainers differ, and must not keep one from training
        log.warning("the training configuration is not recorded: %s: %s", type(error).__name__, error)
        return {}


def training_of(args: Any, state: Any, trainer: Any, optimizer: Any) -> dict[str, Any]:
    """The configuration of a transformers ``Trainer``, or of one built on it.

    Args:
        args: its ``TrainingArguments``.
        state: its ``TrainerState``.
        trainer: itself, if it could be found.
        optimizer: which trains the model, and knows the decay and the rates that were asked for.
    """
    total = state.max_steps if state.max_steps > 0 else None
    _, processes = rank_and_world_size()
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    return _told(
        by="trl" if _from_trl(trainer, args) else "transformers",
        learning_rate=args.learning_rate,
        schedule=_word(args.lr_scheduler_type),
        min_learning_rate=_least_rate(args),
        warmup_steps=None if total is None else args.get_warmup_steps(total),
        total_steps=total,
        batch_size=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        processes=processes,
        rows_a_step=rows,
        epochs=args.num_train_epochs if args.max_steps <= 0 else None,
        max_grad_norm=args.max_grad_norm or 0.0,
        weight_decay=args.weight_decay,
        optimizer=_kind(optimizer) or _word(args.optim),
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else _dtype(trainer),
        attention=_attention(trainer),
        packing=getattr(args, "packing", None),
        max_length=getattr(args, "max_length", None),
        objective=getattr(args, "loss_type", None),
        seed=args.seed,
        logging_steps=args.logging_steps,
        eval_every=args.eval_steps if _word(args.eval_strategy) == "steps" else None,
        save_every=args.save_steps if _word(args.save_strategy) == "steps" else None,
        options=plain(args.to_dict()),
    )


def training_of_lightning(trainer: Any, module: Any, optimizer: Any, total: int | None) -> dict[str, Any]:
    """The configuration of a Lightning run; its own options are the module's hyperparameters."""
    group = optimizer.param_groups[0]
    batch_size = getattr(trainer.train_dataloader, "batch_size", None)
    accumulation = trainer.accumulate_grad_batches
    schedules = [type(one.scheduler).__name__ for one in trainer.lr_scheduler_configs]
    whole = isinstance(batch_size, int) and isinstance(accumulation, int)
    return _told(
        by="lightning",
        learning_rate=_number(group.get("initial_lr", group.get("lr"))),
        schedule=", ".join(schedules) or "constant",
        total_steps=total,
        batch_size=batch_size if isinstance(batch_size, int) else None,
        accumulation=accumulation,
        processes=trainer.world_size,
        rows_a_step=batch_size * accumulation * trainer.world_size if whole else None,
        epochs=trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None,
        max_grad_norm=trainer.gradient_clip_val or 0.0,
        weight_decay=_number(group.get("weight_decay")),
        optimizer=_kind(optimizer),
        precision=str(trainer.precision),
        options=plain(dict(getattr(module, "hparams", None) or {})),
    )


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON has them, without those that are secret and those that are objects."""
    return {
        str(name): _plain_value(value)
        for name, value in options.items()
        if not _is_secret(str(name)) and _is_plain(value)
    }


def _told(**options: Any) -> dict[str, Any]:
    """Without what is not known."""
    return {name: value for name, value in options.items() if value is not None}


def _is_secret(name: str) -> bool:
    return any(name.lower().rpartition("_")[2] == word for word in _SECRETS)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain_value(one) for one in value]
    return value


def _word(value: Any) -> str:
    """An option that may be an enumeration."""
    return str(getattr(value, "value", value))


def _least_rate(args: Any) -> float | None:
    """What the schedule ends with, where it was told one."""
    told = getattr(args, "lr_scheduler_kwargs", None)
    told = told if isinstance(told, Mapping) else {}
    if told.get("min_lr_rate") is not None:
        return float(told["min_lr_rate"] * args.learning_rate)
    least = told.get("min_lr", told.get("lr_end"))
    return None if least is None else float(least)


def _number(value: Any) -> float | None:
    """A rate that may be a tensor; one on an accelerator is not read."""
    if hasattr(value, "device") and value.device.type != "cpu":
        return None
    return None if value is None else float(value)


def _kind(optimizer: Any) -> str | None:
    """The optimizer's own class, below what prepares it for several devices."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return None if inner is None else type(inner).__name__


def _dtype(trainer: Any) -> str | None:
    """Of the weights."""
    model = getattr(trainer, "model", None)
    first = next(model.parameters(), None) if model is not None else None
    return None if first is None else str(first.dtype).removeprefix("torch.")


def _attention(trainer: Any) -> str | None:
    """How the model computes attention, by transformers' name for it."""
    config = getattr(getattr(trainer, "model", None), "config", None)
    found = getattr(config, "_attn_implementation", None)
    return found if isinstance(found, str) else None


def _from_trl(trainer: Any, args: Any) -> bool:
    kinds = (*type(trainer).__mro__, *type(args).__mro__)
    return any(kind.__module__.startswith("trl.") for kind in kinds)
