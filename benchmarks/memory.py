"""How exact the memory estimate of ``pgs profile`` is on the CPU, and how long a model of 4 billion takes.

    python benchmarks/memory.py [--json FILE]

For small models of several families, each with another set of options: the estimated peak of one optimizer
step, the peak of the same step done for real as PyTorch's profiler saw it (every allocation, those inside
kernels included), and the error. The same for FSDP2, for one rank among others that are made up and exchange
nothing, and for DDP on two processes. Then the seconds for models of the sizes of Qwen3 4B and Qwen3.5 4B
with rows of 8,192 tokens, of wall clock and of CPU. Takes about three minutes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from common import parser, save, tell

from palingenesis.preflight.memory import estimate_memory
from palingenesis.preflight.memory.measure import peak_on_cpu
from palingenesis.preflight.memory.quiet import quiet
from palingenesis.sft.config import TrainConfig

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
GPT2 = {"vocab_size": 4096, "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 512}
QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN35_4B = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
#: Name, model type, its sizes, and options that differ from fp32 without checkpointing.
CASES: tuple[tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]], ...] = (
    ("Llama, sdpa", "llama", SIZES, {}),
    ("Llama, bf16, checkpointing", "llama", SIZES, {
        "model": {"torch_dtype": "bfloat16"}, "train": {"gradient_checkpointing": True},
    }),
    ("Llama, eager, tied", "llama", SIZES | {"tie_word_embeddings": True}, {
        "model": {"attn_implementation": "eager"},
    }),
    ("Llama, two rows", "llama", SIZES, {"train": {"per_device_batch_size": 2}}),
    ("Llama, packed", "llama", SIZES, {"data": {"packing": True}}),
    ("Llama, whole logits", "llama", SIZES, {"memory": {"chunked_loss": False}}),
    ("Llama, LoRA, checkpointing", "llama", SIZES, {
        "model": {"lora": {"rank": 8}}, "train": {"gradient_checkpointing": True},
    }),
    ("Llama, LoRA, bf16", "llama", SIZES, {"model": {"lora": {"rank": 8}, "torch_dtype": "bfloat16"}}),
    ("Llama, adafactor", "llama", SIZES, {"train": {"optimizer": "adafactor"}}),
    ("Llama, sgd, InfoSFT", "llama", SIZES, {"train": {"optimizer": "sgd"}, "plugins": {"info_sft": True}}),
    ("Qwen3, tied, bf16", "qwen3", SIZES | {"head_dim": 32, "tie_word_embeddings": True}, {
        "model": {"torch_dtype": "bfloat16"},
    }),
    ("GPT-2, sdpa", "gpt2", GPT2, {}),
    ("GPT-2, eager, checkpointing", "gpt2", GPT2, {
        "model": {"attn_implementation": "eager"}, "train": {"gradient_checkpointing": True},
    }),
    ("Gemma 2, eager", "gemma2", SIZES | {"head_dim": 32}, {"model": {"attn_implementation": "eager"}}),
    ("Gemma 3, sliding window", "gemma3_text", SIZES | {"head_dim": 32, "sliding_window": 128}, {}),
    ("Qwen3 MoE", "qwen3_moe", SIZES | {
        "head_dim": 32, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
    }, {}),
    ("Mixtral", "mixtral", SIZES | {"num_local_experts": 4}, {}),
    ("Qwen3.5, linear attention", "qwen3_5_text", SIZES | {
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }, {}),
)  # fmt: skip
FSDP2 = {"parallel": {"strategy": "fsdp2"}}
#: Name, its ranks, the model's sizes, options.
SPREAD: tuple[tuple[str, int, dict[str, Any], dict[str, dict[str, Any]]], ...] = (
    ("FSDP2", 2, SIZES, FSDP2),
    ("FSDP2, tied", 4, SIZES | {"tie_word_embeddings": True}, FSDP2),
    ("FSDP2, bf16, checkpointing", 3, SIZES, FSDP2 | {
        "model": {"torch_dtype": "bfloat16"}, "train": {"gradient_checkpointing": True},
    }),
    ("FSDP2, one micro-batch", 8, SIZES, FSDP2 | {"train": {"gradient_accumulation_steps": 1}}),
    ("DDP", 2, SIZES, {}),
    ("DDP, bf16, checkpointing", 2, SIZES, {
        "model": {"torch_dtype": "bfloat16"}, "train": {"gradient_checkpointing": True},
    }),
)  # fmt: skip


def configured(options: dict[str, dict[str, Any]], **data: Any) -> TrainConfig:
    """fp32, no checkpointing, two micro-batches, unless the options say otherwise."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": "made here", "torch_dtype": "float32"},
        "data": {"dataset": "none", "max_seq_length": 512, **data},
        "train": {"gradient_checkpointing": False, "gradient_accumulation_steps": 2},
    }
    for section, values in options.items():
        settings[section] = settings.get(section, {}) | values
    return TrainConfig(**settings)


def described(kind: str, sizes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **sizes)


def measured_on(ranks: int, options: dict[str, dict[str, Any]], sizes: dict[str, Any]) -> int:
    """The peak of one rank: under FSDP2 the others are made up, under DDP they are processes."""
    config, model = configured(options), described("llama", sizes)
    if config.parallel.strategy == "fsdp2":
        return peak_on_cpu(config, model, ranks=ranks)
    import torch

    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, options, sizes, folder)
        torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
        return max(int(file.read_text()) for file in Path(folder).glob("peak-*"))


def _rank(rank: int, ranks: int, options: dict[str, Any], sizes: dict[str, Any], folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    with quiet():
        peak = peak_on_cpu(configured(options), described("llama", sizes), ranks=ranks)
    (Path(folder) / f"peak-{rank}").write_text(str(peak))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    arguments = parser(__doc__).parse_args()
    figures: dict[str, Any] = {"cases": {}}
    print(f"{'model and options':<30} {'estimate':>10} {'measured':>10} {'error':>9}   peak in")
    worst = 0.0
    with quiet():
        for name, kind, sizes, options in CASES:
            config, model = configured(options), described(kind, sizes)
            found = estimate_memory(config, described=model, on_cuda=False)
            measured = peak_on_cpu(config, model)
            error = 100 * (found.use.peak / measured - 1)
            worst = max(worst, abs(error))
            figures["cases"][name] = {"estimate": found.use.peak, "measured": measured, "error_pct": error}
            print(
                f"{name:<30} {found.use.peak / 1e6:>7.2f} MB {measured / 1e6:>7.2f} MB {error:>+8.3f}%"
                f"   {found.use.phase.name.lower()}"
            )
        print(f"largest error {worst:.3f}%\n")
        for name, ranks, sizes, options in SPREAD:
            found = estimate_memory(
                configured(options), described=described("llama", sizes), world_size=ranks, on_cuda=False
            )
            measured = measured_on(ranks, options, sizes)
            error = 100 * (found.use.peak / measured - 1)
            worst = max(worst, abs(error))
            label = f"{name}, {ranks} ranks"
            figures["cases"][label] = {"estimate": found.use.peak, "measured": measured, "error_pct": error}
            print(
                f"{label:<38} {found.use.peak / 1e6:>7.2f} MB {measured / 1e6:>7.2f} MB {error:>+8.3f}%"
                f"   {found.use.phase.name.lower()}"
            )
        print(f"largest error {worst:.3f}%\n")
        config = configured(
            {"model": {"torch_dtype": "bfloat16"}, "train": {"gradient_checkpointing": True}},
            max_seq_length=8192,
        )
        for name, kind, sizes in (
            ("Qwen3 4B", "qwen3", QWEN3_4B),
            ("Qwen3.5 4B", "qwen3_5_text", QWEN35_4B),
        ):
            wall, cpu = time.perf_counter(), time.process_time()
            found = estimate_memory(config, described=described(kind, sizes))
            seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            print(f"the sizes of {name} ({found.parameters / 1e9:.2f} billion), rows of 8,192 tokens")
            tell({"peak_gb": found.use.peak / 1e9, **seconds})
            figures[name] = {"peak": found.use.peak, **seconds}
    figures["worst_error_pct"] = worst
    save(figures, arguments.json)


if __name__ == "__main__":
    main()
