"""Documents in one row: whether the model keeps them apart, and what packing would save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from palingenesis.findings import Finding
from palingenesis.sft.data import measure_isolation, pack
from palingenesis.sft.hub import hub_options

if TYPE_CHECKING:
    from palingenesis.preflight.samples import Collate
    from palingenesis.sft.config import TrainConfig

#: Whether documents see each other depends on a model's code and attention, not on its size: two layers and a
#: small vocabulary show it at a fraction of the cost.
_LAYERS, _VOCABULARY = 2, 128
#: Parameters above which even that is left to the run, which tries it out on the whole model.
_MOST_PARAMETERS = 1_000_000_000
#: Samples that packing is tried out on.
_SAMPLES = 2000


def packing_saves(lengths: Sequence[int], max_length: int) -> dict[str, float]:
    """How many rows samples make, unpacked and packed, and the share of rows that packing saves."""
    from datasets import Dataset  # type: ignore[import-untyped]

    step = max(1, len(lengths) // _SAMPLES)
    chosen = [int(length) for length in lengths[::step]]
    # Packing looks at nothing but lengths.
    rows = [[0] * length for length in chosen]
    packed = len(pack(Dataset.from_dict({"input_ids": rows, "labels": rows}), max_length))
    return {"samples": len(chosen), "packed_rows": packed, "rows_saved": 1 - packed / len(chosen)}


def check_isolation(
    config: TrainConfig, *, model: Any = None, collate: Collate | None = None
) -> list[Finding]:
    """Change one of two packed documents and see that the other's outputs do not move.

    Args:
        config: says which model, and which attention.
        model: a model to try it out on, instead of a small one of the same make.
        collate: another collator, to be examined instead of training's.
    """
    named = f"with attention {config.model.attn_implementation!r}"
    off = "set data.packing to false, or model.attn_implementation to sdpa"
    try:
        model = model if model is not None else _small_model(config)
        if model is None:
            return []
        found = measure_isolation(model, collate)
    except Exception as error:  # noqa: BLE001 - whatever a model raises, it means that nothing could be shown
        told = " ".join(str(error).split())[:300] or type(error).__name__
        message = f"whether packed documents stay apart {named} could not be tried out: {told}"
        return [Finding("data.packing_unproven", "info", message, {}, off)]
    if found.holds:
        return []
    evidence = {"own": found.own, "leak": found.leak, "tolerance": found.tolerance}
    message = (
        f"packed documents see each other {named}: changing one moved the other's outputs by "
        f"{found.leak:.2g} (its own by {found.own:.2g})"
    )
    return [Finding("data.packing_leak", "critical", message, evidence, off)]


def _small_model(config: TrainConfig) -> Any:
    """A model of the same make with few layers and random weights, or nothing if it would still be large."""
    import torch
    import transformers

    from palingenesis.sft.builtin import is_builtin
    from palingenesis.sft.model import located

    if is_builtin(config.model.name_or_path):
        described: Any = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
        )
    else:
        described = transformers.AutoConfig.from_pretrained(
            located(config.model.name_or_path, "config.json"),
            trust_remote_code=config.model.trust_remote_code,
            **hub_options(config.model.name_or_path),
        )
    text = described.get_text_config()
    text.num_hidden_layers = min(_LAYERS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        # One layer of each kind there is: any of them may let documents see each other.
        kinds = list(dict.fromkeys(text.layer_types))
        text.layer_types = (kinds * _LAYERS)[: max(len(kinds), text.num_hidden_layers)]
        text.num_hidden_layers = len(text.layer_types)
    text.vocab_size = _VOCABULARY
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    make: Any = transformers.AutoModelForCausalLM.from_config
    options = {"attn_implementation": config.model.attn_implementation, "dtype": torch.float32}
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(text, **options).parameters())
    if size > _MOST_PARAMETERS:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(text, **options).eval()
