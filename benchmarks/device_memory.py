"""The memory estimate of ``pgs profile`` held against a card's own figures; skipped where there is no CUDA.

    python benchmarks/device_memory.py [--json FILE]

For models of 30 to 600 M parameters, each with other options: the estimated peak of one optimizer step, the
most that PyTorch had allocated in the same step done on the card, the estimated and the real reservation of
its caching allocator, and what the process holds on the card beside it (context, kernels, workspaces), for
which the margin assumes 0.6 GB. Takes less than three minutes.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import parser, save, tell_rows
from memory import configured, described

from palingenesis.preflight.memory import estimate_memory
from palingenesis.preflight.memory.measure import peak_on_cuda
from palingenesis.preflight.memory.quiet import quiet

SMALL = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LARGE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
BF16 = {"torch_dtype": "bfloat16"}
CHECKPOINTED = {"gradient_checkpointing": True}
CASES: tuple[tuple[str, str, dict[str, Any], dict[str, dict[str, Any]], dict[str, Any]], ...] = (
    ("small, fp32", "llama", SMALL, {}, {}),
    ("small, bf16, two rows", "llama", SMALL, {"model": BF16, "train": {"per_device_batch_size": 2}}, {}),
    ("small, bf16, packed", "llama", SMALL, {"model": BF16}, {"packing": True}),
    ("small, bf16, eager", "llama", SMALL, {"model": BF16 | {"attn_implementation": "eager"}}, {}),
    ("large, bf16", "qwen3", LARGE, {"model": BF16, "train": CHECKPOINTED}, {"max_seq_length": 4096}),
    ("large, bf16, stored", "qwen3", LARGE, {"model": BF16}, {"max_seq_length": 4096}),
    ("large, LoRA", "qwen3", LARGE, {"model": BF16 | {"lora": {"rank": 16}}, "train": CHECKPOINTED}, {}),
)
ENOUGH_S = 150.0


def main() -> None:
    given = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    print(torch.cuda.get_device_name())
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    for name, kind, sizes, options, data in CASES:
        if time.monotonic() - started > ENOUGH_S:
            print(f"time is up before {name!r}")
            break
        config, model = configured(options, **({"max_seq_length": 2048} | data)), described(kind, sizes)
        with quiet():
            found = estimate_memory(config, described=model)
            real = peak_on_cuda(config, model)
        fit = found.on(None)
        allocator = next(part.bytes for part in fit.margin if part.name == "allocator")
        rows.append(
            {
                "peak_mb": found.use.peak / 1e6,
                "allocated_mb": real["allocated"] / 1e6,
                "error_pct": 100 * (found.use.peak / real["allocated"] - 1),
                "reserved_estimate_mb": (found.use.peak + allocator) / 1e6,
                "reserved_mb": real["reserved"] / 1e6,
                "outside_mb": real["outside"] / 1e6,
            }
        )
        print(name)
        tell_rows(rows[-1:])
    save({"cases": {case[0]: row for case, row in zip(CASES, rows, strict=False)}}, given.json)


if __name__ == "__main__":
    main()
