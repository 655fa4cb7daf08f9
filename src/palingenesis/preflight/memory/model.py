"""The real model class of a run, made from its configuration alone: no weights are read.

Everything that decides about memory is as ``pgs train`` makes it: number format, attention, adapters,
checkpointing, the head that is read in chunks.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError
from palingenesis.sft.builtin import build_model, build_tokenizer, is_builtin
from palingenesis.sft.hub import hub_answers, hub_name, hub_options
from palingenesis.sft.model import located, require_causal, told, transformers_library, with_adapters

if TYPE_CHECKING:
    import torch

    from palingenesis.preflight.memory.sharding import Splitter
    from palingenesis.sft.config import TrainConfig

#: Attention that needs its own kernels, and is traced as PyTorch's where they are not installed: both keep
#: the output and a log-sum-exp a row, and neither forms a mask or repeats keys and values.
_OWN_KERNELS = ("flash_attention_2", "flash_attention_3")
_STAND_IN = "palingenesis_without_mask"


def describe_model(config: TrainConfig) -> Any:
    """The model's own configuration: a ``PreTrainedConfig``.

    Raises:
        ConfigError: there is none, or it is that of no causal language model.
    """
    name = config.model.name_or_path
    if is_builtin(name):
        made = build_model(
            name, build_tokenizer(name), seed=config.train.seed, max_length=config.data.max_seq_length
        )
        return made.config
    where = located(name, "config.json")
    transformers = transformers_library()
    try:
        found = transformers.AutoConfig.from_pretrained(
            where,
            trust_remote_code=config.model.trust_remote_code,
            **hub_options(where),
        )
    except Exception as error:  # noqa: BLE001 - files and the hub fail in dozens of ways, all told in one line
        raise ConfigError(_no_description(name, where, error)) from None
    require_causal(found, name)
    return found


def _no_description(name: str, where: str, error: Exception) -> str:
    if Path(where).is_dir():
        return f"model.name_or_path: the config.json in {name!r} cannot be used: {told(error)}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    if not hub_answers():
        first = f"{hub_name()} does not answer"
    return (
        f"model.name_or_path: {name!r} is no local folder, and its configuration could not be had from the "
        f"hub ({first}): give a folder that holds its config.json (that file is enough) with "
        "--model.name_or_path DIR"
    )


def make_model(config: TrainConfig, described: Any, splitter: Splitter | None = None) -> torch.nn.Module:
    """The model in training mode, on whatever device and in whatever mode the caller has set.

    Args:
        config: the run's.
        described: the model's configuration.
        splitter: splits it over ranks, where that is wanted.

    Raises:
        ConfigError: it cannot be made so.
    """
    import copy

    import torch

    from palingenesis.sft.head import read_head_inside

    options = config.model
    transformers = transformers_library()
    try:
        model: Any = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(described),
            dtype=getattr(torch, options.torch_dtype),
            attn_implementation=attention_traced(options.attn_implementation),
            trust_remote_code=options.trust_remote_code,
        )
    except Exception as error:  # noqa: BLE001 - models refuse configurations in dozens of ways
        raise ConfigError(
            f"model.name_or_path: no model can be made from the config.json of {options.name_or_path!r}: "
            f"{told(error)}"
        ) from None
    inner = model
    if splitter is not None:
        splitter.split(model)  # before there are adapters, as where weights are loaded
    if options.lora is not None:
        model = with_adapters(config, model)
    _checkpoint(model, config)
    chunks = config.memory.loss_num_chunks if config.memory.chunked_loss else 1
    read_head_inside(inner, chunks=chunks)
    trained: torch.nn.Module = model
    return trained.train()


def attention_traced(name: str) -> str:
    """The attention to trace for one that is configured."""
    if name not in _OWN_KERNELS:
        return name
    utils = transformers_library().utils
    available = getattr(utils, f"is_{name.replace('attention', 'attn')}_available", None)
    if available is not None and available():
        return name
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import flash_attention_mask

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, None, **more)

    AttentionInterface.register(_STAND_IN, attend)
    AttentionMaskInterface.register(_STAND_IN, flash_attention_mask)
    return _STAND_IN


def _checkpoint(model: Any, config: TrainConfig) -> None:
    """Activation checkpointing as the trainer switches it on."""
    if not config.train.gradient_checkpointing:
        return
    kwargs = {"use_reentrant": False}
    if config.model.lora is not None:
        model.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            if hasattr(model, "activation_checkpointing_enable"):
                model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
            else:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        except ValueError as error:
            raise ConfigError(
                f"train.gradient_checkpointing is true and {type(model).__name__} does not support it "
                f"({told(error)}): set it to false"
            ) from None
