"""The configuration against the model: its size, what adapters land on, updates that round away, disk.

The model is made without weights (on PyTorch's meta device); of weights that lie in a local folder a part is
read, a tensor at a time.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError, PalingenesisError
from palingenesis.findings import Finding
from palingenesis.preflight.weights import opened, weight_files

if TYPE_CHECKING:
    import torch

    from palingenesis.sft.config import TrainConfig

#: Elements of every tensor that are looked at, spread over all of it.
_SAMPLED = 65_536
#: Bytes of weights that are read from files.
_READ_BYTES = 2**28
#: Share of weights that a step of the highest learning rate leaves as they are, from which it is told, and
#: from which it is a warning: then fewer than one weight in twenty moves.
LOST_TOLD, LOST_MOST = 0.5, 0.95
#: Adapters are a few percent of a model; more is as much work as training it, in a smaller space.
_MOST_ADAPTERS = 0.2
_STATES_BYTES = {"adamw": 2.0, "adamw_8bit": 1.0, "adafactor": 0.1, "sgd": 0.0}
_WIDTH = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Made:
    """A model made without weights.

    Attributes:
        name: of its class.
        parameters: without adapters, tied ones once.
        trained: how many are trained.
        vocabulary: outputs of the LM head.
        findings: what is wrong with what is trained.
    """

    name: str
    parameters: int
    trained: int
    vocabulary: int
    findings: tuple[Finding, ...] = ()


def make_without_weights(config: TrainConfig) -> Made:
    """The model of a configuration, counted; adapters put on it where there are to be any.

    Raises:
        ConfigError: there is no such model.
    """
    import torch

    from palingenesis.preflight.memory.model import describe_model
    from palingenesis.sft.model import told, transformers_library

    described = describe_model(config)
    options: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
    try:
        with torch.device("meta"):
            model: Any = transformers_library().AutoModelForCausalLM.from_config(
                copy.deepcopy(described), **options
            )
        model.tie_weights()
    except Exception as error:  # noqa: BLE001 - models refuse configurations in dozens of ways
        raise ConfigError(
            "model.name_or_path: no model can be made from the config.json of "
            f"{config.model.name_or_path!r}: {told(error)}"
        ) from None
    name = type(model).__name__
    parameters = sum(one.numel() for one in model.parameters())
    vocabulary = int(getattr(described.get_text_config(), "vocab_size", 0))
    if config.model.lora is None:
        return Made(name, parameters, parameters, vocabulary)
    trained, found = _adapted(config, model, parameters)
    return Made(name, parameters, trained, vocabulary, tuple(found))


def _adapted(config: TrainConfig, model: Any, parameters: int) -> tuple[int, list[Finding]]:
    """How many parameters adapters have, and what is wrong with where they are."""
    import torch

    from palingenesis.sft.model import with_adapters

    lora = config.model.lora
    assert lora is not None
    names = [name for name, _ in model.named_modules() if name]
    linear = sorted(
        {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    )
    unmatched = () if isinstance(lora.targets, str) else unmatched_targets(lora.targets, names)
    found = []
    if unmatched:
        found.append(
            Finding(
                "config.lora_targets",
                "critical" if len(unmatched) == len(lora.targets) else "warning",
                f"{len(unmatched)} of {len(lora.targets)} names in model.lora.targets match no layer of "
                f"{type(model).__name__}: {', '.join(map(repr, unmatched))}",
                {"unmatched": list(unmatched), "linear_layers": linear},
                "set model.lora.targets to all-linear, or to some of " + ", ".join(linear),
            )
        )
    if unmatched and len(unmatched) == len(lora.targets):
        return 0, found
    try:
        with torch.device("meta"):
            adapted = with_adapters(config, model)
    except PalingenesisError as refused:
        refusal = Finding(
            "config.lora_targets",
            "critical",
            str(refused),
            {"linear_layers": linear},
            "set model.lora.targets to all-linear",
        )
        return 0, [*found, refusal]
    trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
    return trained, [*found, *check_trainable_share(trained, parameters, lora.rank)]


def unmatched_targets(targets: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Targets that are the name, or the end of the name, of no module: the rule that peft goes by."""
    return tuple(
        target
        for target in targets
        if not any(name == target or name.endswith(f".{target}") for name in names)
    )


def check_trainable_share(trained: int, parameters: int, rank: int) -> list[Finding]:
    """Adapters that have as many parameters as a good part of the model."""
    share = trained / parameters if parameters else 0.0
    if share <= _MOST_ADAPTERS:
        return []
    return [
        Finding(
            "config.trainable_share",
            "warning",
            f"the adapters of rank {rank} have {trained} parameters, {share:.0%} of the model's {parameters}",
            {"trained": trained, "parameters": parameters, "share": share, "rank": rank},
            f"set model.lora.rank to {max(1, int(rank * 0.05 / share))}, or model.lora to null to train "
            "every weight",
        )
    ]


# -- updates that round away -------------------------------------------------------------------------------


def lost_share(weights: Sequence[torch.Tensor], update: float) -> float:
    """The share of weights that stay as they are when so much is added to them or taken away."""
    import torch

    lost, counted = 0.0, 0
    for tensor in weights:
        flat = tensor.detach().reshape(-1)
        chosen = flat[:: max(1, -(-flat.numel() // _SAMPLED))]
        wide = chosen.float()
        # Both ways: just above a power of two, numbers below are twice as dense.
        stays = (wide + update).to(chosen.dtype).eq(chosen) & (wide - update).to(chosen.dtype).eq(chosen)
        scale = flat.numel() / max(1, chosen.numel())
        lost += float(torch.count_nonzero(stays)) * scale
        counted += flat.numel()
    return lost / counted if counted else 0.0


def check_rounding(config: TrainConfig) -> list[Finding]:
    """Weights in bfloat16 against the optimizer's steps; nothing where the weights are not local."""
    train = config.train
    if config.model.torch_dtype != "bfloat16" or train.optimizer == "sgd" or config.model.lora is not None:
        return []
    import torch

    weights = [tensor.to(torch.bfloat16) for tensor in _saved(config.model.name_or_path)]
    if not weights:
        return []
    share = lost_share(weights, train.learning_rate)
    if share < LOST_TOLD:
        return []
    return [
        Finding(
            "config.updates_round_away",
            "warning" if share >= LOST_MOST else "info",
            f"a step of train.learning_rate {train.learning_rate:g} leaves {share:.1%} of the bfloat16 "
            "weights as they are: it is less than half the distance to the next number",
            {"share": share, "learning_rate": train.learning_rate, "tensors": len(weights)},
            "set model.torch_dtype to float32, or train adapters with model.lora (their weights begin at "
            "zero)",
        )
    ]


def _saved(name: str) -> Iterator[torch.Tensor]:
    """Some rows of every matrix in a local folder, spread over all of it, the same share of each."""
    import torch

    paths = weight_files(name)
    every = max(1, sum(path.stat().st_size for path in paths) // _READ_BYTES)
    for path in paths:
        with opened(path) as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                part = file.get_slice(key)
                shape = part.get_shape()
                if len(shape) == 2 and shape[0] and shape[1]:
                    yield torch.cat([part[row : row + 1] for row in range(0, shape[0], every)])


# -- disk --------------------------------------------------------------------------------------------------


def check_disk(
    config: TrainConfig, made: Made, *, here: bool = True, free: int | None = None
) -> list[Finding]:
    """What checkpoints and the trained model take on disk, against what is free.

    Args:
        config: says where they go, and how many are kept.
        made: how large the model is.
        here: whether the run will be on this machine; another one's disk is not known.
        free: bytes that are free, other than the disk says.
    """
    train, width = config.train, _WIDTH[config.model.torch_dtype]
    saved = made.trained * width
    states = made.trained * _STATES_BYTES[train.optimizer] * (1 if train.optimizer == "adamw_8bit" else width)
    one = saved + states
    # While the newest is written, those that are kept are still there.
    needed = int(one * (train.keep_checkpoints + 1) + saved)
    there = _free(train.output_dir) if free is None else free
    if there is None or needed <= there:
        return []
    return [
        Finding(
            "config.disk",
            "critical" if here else "info",
            f"{train.keep_checkpoints} checkpoints, one being written and the model take {needed / 1e9:.1f} "
            f"GB, and {there / 1e9:.1f} GB are free at train.output_dir {train.output_dir!r}",
            {"needed_gb": needed / 1e9, "free_gb": there / 1e9, "checkpoint_gb": one / 1e9},
            "set train.output_dir to a larger disk"
            + (", or train.keep_checkpoints to 2" if train.keep_checkpoints > 2 else ""),
        )
    ]


def _free(folder: str) -> int | None:
    """Bytes free where a folder is, or will be."""
    path = Path(folder).expanduser().absolute()
    for place in (path, *path.parents):
        if place.is_dir():
            return shutil.disk_usage(place).free
    return None
