"""The tokenizer and the model of a run, loaded as configured, or refused in one line.

Both come from a folder, from the hub, or are made on the spot (``sft/builtin.py``). What a model cannot do is
found here, before any data is read: a tokenizer without chat template or with more tokens than the model has,
weights that are missing, a number format that the device does not have, sharding without processes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError, MissingExtraError
from palingenesis.sft.builtin import build_model, build_tokenizer, is_builtin
from palingenesis.sft.data import require_isolation
from palingenesis.sft.hub import hub_answers, hub_name, hub_options
from palingenesis.sft.stream import evaluation_sources, training_sources

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from palingenesis.sft.config import TrainConfig

log = logging.getLogger("palingenesis")

#: Tokens that families keep for padding, for tokenizers that have one and do not say so.
PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|padding|>", "<|endoftext|>")
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "config.json")
_LONGEST_TOLD = 400


def load_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, with a chat template if any source holds conversations, and a token for padding.

    Raises:
        ConfigError: it cannot be loaded, or lacks what the run needs.
        MissingExtraError: a package is missing.
    """
    name = config.model.name_or_path
    tokenizer: Any
    if is_builtin(name):
        tokenizer = build_tokenizer(name)
    else:
        where = located(name, *_TOKENIZER_FILES)
        transformers = transformers_library()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                where, trust_remote_code=config.model.trust_remote_code, **hub_options(where)
            )
        except Exception as error:  # noqa: BLE001 - files and the hub fail in dozens of ways, all told in one line
            raise ConfigError(_not_loaded("the tokenizer of", name, error)) from None
    if config.model.chat_template is not None:
        tokenizer.chat_template = _read_template(config.model.chat_template)
    sources = [*training_sources(config), *evaluation_sources(config)]
    if not tokenizer.chat_template and any(source.mode == "sft" for source in sources):
        raise ConfigError(
            f"the tokenizer of {name!r} has no chat template: set model.chat_template to a file with one, or "
            "take the model's instruct version; for plain text set the mode of every source to pretrain"
        )
    _ensure_padding(tokenizer, name)
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def load_model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | PeftModel:
    """The model to train: in its number format, on its device, sharded, with adapters, as configured.

    Raises:
        ConfigError: it cannot be loaded, or cannot be trained as configured.
        MissingExtraError: a package is missing.
    """
    import torch

    _require_format(config.model.torch_dtype)
    if config.model.use_liger_kernel:
        _require_liger()
    sharding = _sharding(config)
    model = _loaded(config, tokenizer, sharding)
    _require_vocabulary(tokenizer, model)
    _check_positions(config, model)
    if torch.cuda.is_available() and not sharding:
        model.to(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
    if config.model.use_liger_kernel:
        _apply_liger(model)
    trained: PreTrainedModel | PeftModel = (
        model if config.model.lora is None else with_adapters(config, model)
    )
    if config.data.packing:
        require_isolation(trained)
    if config.model.compile:
        # The head stays outside: the objectives call it themselves, a chunk of tokens at a time.
        model.base_model.compile()
    return trained


# -- the tokenizer -----------------------------------------------------------------------------------------


def located(name: str, *files: str) -> str:
    """The folder, which has one of ``files``, or the name to look up in the hub.

    What is meant as a path is not looked up there: the error would speak of the network.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in files):
            held = "adapters alone" if (path / "adapter_config.json").is_file() else f"no {files[0]}"
            raise ConfigError(
                f"model.name_or_path: the folder {name!r} holds {held}; one with the whole model is needed"
            )
        return str(path)
    if path.is_file():
        raise ConfigError(
            f"model.name_or_path: {name!r} is a file; the folder that holds the model is needed"
        )
    if name.startswith((".", "/", "~")):
        raise ConfigError(f"model.name_or_path: there is no folder {name!r}")
    return name


def _read_template(path: str) -> str:
    try:
        text = Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"model.chat_template: {path} cannot be read: {told}") from None
    if not text.strip():
        raise ConfigError(f"model.chat_template: {path} is empty; a Jinja template is needed")
    return text


def _ensure_padding(tokenizer: Any, name: str) -> None:
    if tokenizer.pad_token_id is not None:
        return
    there, template = tokenizer.get_vocab(), str(tokenizer.chat_template or "")
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    free = (token for token in PAD_TOKENS if token in there and token not in used and token not in template)
    chosen = next(free, tokenizer.eos_token)
    if chosen is None:
        raise ConfigError(
            f"the tokenizer of {name!r} has neither a token for padding nor one that ends a text: set "
            "pad_token in its tokenizer_config.json"
        )
    tokenizer.pad_token = chosen
    log.info("the tokenizer of %r names no token for padding: %r is used", name, chosen)


def _require_vocabulary(tokenizer: Any, model: Any) -> None:
    """See that the model has a row for every token that can come up."""
    rows = int(model.get_input_embeddings().num_embeddings)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    added, template = tokenizer.get_added_vocab(), str(tokenizer.chat_template or "")
    named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    # Some tokenizers know a token more than their text model, for images; rows that hold it are left out.
    lacking = sorted(
        (index, token)
        for token, index in vocabulary.items()
        if index >= rows and (token not in added or token in template or token in named)
    )
    if lacking:
        index, token = lacking[0]
        raise ConfigError(
            f"the tokenizer has {len(lacking)} tokens that the model does not, such as {token!r} (number "
            f"{index}; the model's embedding has {rows} rows): take the tokenizer that belongs to the model, "
            "or enlarge the embedding and save the model anew"
        )


def _check_positions(config: TrainConfig, model: Any) -> None:
    """Longer rows than a model has positions for: an error where they are a table, else a warning."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = config.data.max_seq_length
    if known is None or (length is not None and length <= known):
        return
    if _has_position_table(model, known):
        raise ConfigError(
            f"data.max_seq_length is {'null' if length is None else length} and the model has a table of "
            f"{known} positions: set data.max_seq_length to {known} or less"
        )
    if length is not None:
        log.warning(
            "data.max_seq_length is %d and the model has positions for %d tokens: set it to at most that if "
            "the data has longer rows",
            length,
            known,
        )


def _has_position_table(model: Any, positions: int) -> bool:
    """Whether positions are looked up, as in GPT-2, and not computed. OPT's table has two rows more."""
    import torch

    words = model.get_input_embeddings()
    tables = (one for one in model.modules() if isinstance(one, torch.nn.Embedding) and one is not words)
    return any(positions <= table.num_embeddings <= positions + 2 for table in tables)


# -- the model ---------------------------------------------------------------------------------------------


def _loaded(config: TrainConfig, tokenizer: Any, sharding: dict[str, Any]) -> Any:
    import torch

    name, options = config.model.name_or_path, config.model
    if is_builtin(name):
        made: Any = build_model(
            name, tokenizer, seed=config.train.seed, max_length=config.data.max_seq_length
        )
        # Loaded from its own weights it becomes what any other model is: in its format, sharded or not.
        load, given = type(made).from_pretrained, {"config": made.config, "state_dict": made.state_dict()}
        where = None
    else:
        load, given = transformers_library().AutoModelForCausalLM.from_pretrained, {}
        where = located(name, "config.json")
        given |= {"trust_remote_code": options.trust_remote_code, **hub_options(where)}
    try:
        if where is not None:
            require_causal(transformers_library().AutoConfig.from_pretrained(where, **given), name)
        model, found = load(
            where,
            dtype=getattr(torch, options.torch_dtype),
            attn_implementation=options.attn_implementation,
            output_loading_info=True,
            **given,
            **sharding,
        )
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - files, kernels and the hub fail in dozens of ways
        raise ConfigError(_not_loaded("the model", name, error)) from None
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"model.name_or_path: {name!r} lacks {len(missing)} of {type(model).__name__}'s weights, such as "
            f"{missing[0]!r}, which would begin as random numbers: a causal language model is needed"
        )
    return model


def require_causal(described: Any, name: str) -> None:
    """See that the model predicts the next token from those before it."""
    from transformers.models.auto import modeling_auto

    made_for = set(described.architectures or ())
    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    own_code = "AutoModelForCausalLM" in (getattr(described, "auto_map", None) or {})
    known = described.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    only_masked = bool(made_for) and made_for <= masked - causal
    if described.is_encoder_decoder or only_masked or not (known or own_code):
        kind = ", ".join(sorted(made_for)) or described.model_type
        raise ConfigError(
            f"model.name_or_path: {name!r} is a {kind}; a causal language model is needed, such as "
            "LlamaForCausalLM"
        )


def _require_format(dtype: str) -> None:
    import torch

    if dtype != "bfloat16" or not torch.cuda.is_available():
        return
    # What torch calls emulation is slower than fp32.
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"model.torch_dtype is bfloat16, which {torch.cuda.get_device_name()} cannot compute in: set "
            "model.torch_dtype to float32"
        )


def _sharding(config: TrainConfig) -> dict[str, Any]:
    """What ``from_pretrained`` is told so that every process keeps its shard; empty for whole models."""
    if config.parallel.strategy != "fsdp2":
        return {}
    processes = os.environ.get("WORLD_SIZE", "")
    if not processes.isdigit() or int(processes) < 2:
        raise ConfigError(
            "parallel.strategy is fsdp2, which shards over several processes, and this is "
            f"{'one' if processes else 'one that no launcher started'}: start it with `torchrun "
            "--nproc_per_node=2 -m palingenesis train --config FILE`, or set parallel.strategy to ddp"
        )
    transformers = transformers_library()
    try:
        kind = transformers.distributed.configuration_utils.DistributedConfig
        return {"distributed_config": kind(fsdp_size=int(processes))}
    except (AttributeError, TypeError):
        raise ConfigError(
            f"parallel.strategy is fsdp2, which transformers {transformers.__version__} cannot do: install a "
            "newer one with pip install -U transformers, or set parallel.strategy to ddp"
        ) from None


def with_adapters(config: TrainConfig, model: Any) -> Any:
    """The model with LoRA adapters, the same on every process."""
    import torch

    try:
        import peft
    except ImportError as error:
        raise MissingExtraError(
            f"model.lora needs 'peft', which cannot be imported ({error}): pip install 'palingenesis[sft]'"
        ) from error
    lora = config.model.lora
    assert lora is not None
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    kind: Any = peft.LoraConfig  # its annotations allow whole alphas alone
    try:
        adapters = kind(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
        with torch.random.fork_rng():
            torch.manual_seed(config.train.seed)
            adapted = peft.get_peft_model(model, adapters)
    except Exception as error:  # noqa: BLE001 - names that match nothing, layers that take no adapter
        raise ConfigError(f"model.lora with targets {targets!r} cannot be added: {told(error)}") from None
    if isinstance(model.get_output_embeddings(), peft.tuners.tuners_utils.BaseTunerLayer):
        raise ConfigError(
            f"model.lora: targets {targets!r} put an adapter on the LM head, which TRL does not train: leave "
            "the head out of model.lora.targets"
        )
    return adapted


def _require_liger() -> None:
    import torch

    if not transformers_library().utils.is_liger_kernel_available():
        raise ConfigError(
            "model.use_liger_kernel needs the package liger-kernel: pip install liger-kernel, or set it to "
            "false"
        )
    if not torch.cuda.is_available():
        raise ConfigError("model.use_liger_kernel needs a CUDA device, and there is none: set it to false")


def _apply_liger(model: Any) -> None:
    """Its kernels for what is inside a block; the loss is computed by the objectives."""
    apply = transformers_library().integrations.liger.apply_liger_kernel
    try:
        apply(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})
    except Exception as error:  # noqa: BLE001 - another library's kernels may refuse a model for any reason
        raise ConfigError(
            f"model.use_liger_kernel cannot be applied to {type(model).__name__}: {told(error)}; set it to "
            "false"
        ) from None


# -- words -------------------------------------------------------------------------------------------------


def _not_loaded(what: str, name: str, error: Exception) -> str:
    local = Path(name).expanduser().is_dir() or is_builtin(name)
    if not local and not hub_answers():
        return (
            f"model.name_or_path: {what} {name!r} could not be had: there is no such folder, and the hub "
            f"({hub_name()}) does not answer and left nothing of it in the local cache: give a folder with "
            "--model.name_or_path DIR"
        )
    where = "" if local else " (no local folder, so a hub name)"
    # Families that cap attention scores have no fast kernel for it, and say so at length.
    text = str(error).lower()  # sizes of attention heads that do not go together are none of a kernel's
    kernel = what == "the model" and "attention" in text and "attention heads" not in text
    attention = "; set model.attn_implementation to eager" if kernel else ""
    return f"model.name_or_path: {what} {name!r}{where} could not be loaded: {told(error)}{attention}"


def told(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_TOLD else text[:_LONGEST_TOLD] + " …"


def transformers_library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            f"training needs 'transformers', which cannot be imported ({error}): pip install "
            "'palingenesis[sft]'"
        ) from error
    return transformers
