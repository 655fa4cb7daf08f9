"""The estimate against the same step done for real: by the same log, and by PyTorch's profiler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.preflight.memory.made import config, made

from palingenesis.preflight.memory import estimate_memory
from palingenesis.preflight.memory.measure import peak_on_cpu
from palingenesis.preflight.memory.step import Plan, do_step
from palingenesis.preflight.memory.trace import Trace

WITHIN = 0.01
#: Of 512 bytes each, as CUDA's allocator rounds.
A_FEW_SCALARS = 4096
BF16 = {"model__torch_dtype": "bfloat16"}
CHECKPOINTED = {"train__gradient_checkpointing": True}
EAGER = {"model__attn_implementation": "eager"}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama_bf16_checkpointed": ("llama", {}, BF16 | CHECKPOINTED),
    "llama_tied_eager": ("llama", {"tie_word_embeddings": True}, EAGER),
    "llama_two_rows": ("llama", {}, {"train__per_device_batch_size": 2}),
    "llama_packed": ("llama", {}, {"data__packing": True}),
    "llama_whole_logits": ("llama", {}, {"memory__chunked_loss": False}),
    "llama_one_micro_batch": ("llama", {}, {"train__gradient_accumulation_steps": 1}),
    "llama_lora_checkpointed": ("llama", {}, CHECKPOINTED | {"model__lora": {"rank": 4}}),
    "llama_lora_bf16": ("llama", {}, BF16 | {"model__lora": {"rank": 4}}),
    "llama_adafactor": ("llama", {}, {"train__optimizer": "adafactor"}),
    "llama_sgd_without_clipping": ("llama", {}, {"train__optimizer": "sgd", "train__max_grad_norm": 0}),
    "llama_window_objective": ("llama", {}, {"plugins__info_sft": True}),
    "qwen3_tied_bf16": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, BF16),
    "gpt2": ("gpt2", {"vocab_size": 1024, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256}, {}),
    "gemma2_eager": ("gemma2", {"head_dim": 32}, EAGER),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_the_measured_peak(name: str) -> None:
    kind, sizes, options = CASES[name]
    described, settings = made(kind, **sizes), config(**options)
    estimated = estimate_memory(settings, described=described, on_cuda=False).use.peak
    assert estimated == pytest.approx(peak_on_cpu(settings, described), rel=WITHIN)


@pytest.mark.parametrize("name", ["llama", "llama_two_rows", "llama_lora_checkpointed", "qwen3_moe"])
def test_the_same_log_of_real_tensors_has_the_same_peak_of_the_same_parts(name: str) -> None:
    kind, sizes, options = CASES[name]
    described, settings = made(kind, **sizes), config(**options)
    fake = estimate_memory(settings, described=described, on_cuda=False).use
    log, _ = do_step(settings, described, Plan(on_cuda=False, real="cpu"))
    real = Trace(np.array(log.rows, dtype=np.int64)).used()
    for category, size in real.made_of.items():
        assert fake.made_of[category] == pytest.approx(size, rel=1e-3, abs=A_FEW_SCALARS), category


@pytest.mark.parametrize("name", ["llama", "llama_one_micro_batch", "llama_packed", "qwen3_tied_bf16"])
def test_the_short_trace_has_the_peak_of_the_whole_one(name: str) -> None:
    kind, sizes, options = CASES[name]
    described, settings = made(kind, **sizes), config(**options)
    whole, short = (estimate_memory(settings, described=described, whole=each).use for each in (True, False))
    assert short.peak == pytest.approx(whole.peak, abs=A_FEW_SCALARS)
    assert short.made_of == pytest.approx(whole.made_of, abs=A_FEW_SCALARS)
