"""What is counted for the kernels of linear attention, held against flash-linear-attention's own code.

    pip install fla-core triton einops      # no GPU is needed
    python benchmarks/linear_attention.py [--json FILE]

``pgs profile`` counts what the kernels of the gated delta rule allocate without calling them. Here the same
steps are traced through the package's own Python code, which allocates and saves every tensor there is, with
its kernels launched into nothing. The two peaks, and the error; bytes should not differ.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from common import parser, save
from memory import SIZES, configured, described

from palingenesis.preflight.memory import estimate_memory, linear_attention
from palingenesis.preflight.memory.quiet import quiet

LINEAR = SIZES | {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
CASES: tuple[tuple[str, dict[str, dict[str, Any]], dict[str, Any]], ...] = (
    ("fp32", {}, {"max_seq_length": 2048}),
    ("fp32, 1,000 tokens", {}, {"max_seq_length": 1000}),
    ("checkpointing", {"train": {"gradient_checkpointing": True}}, {"max_seq_length": 2048}),
    ("bf16, two rows", {
        "model": {"torch_dtype": "bfloat16"}, "train": {"per_device_batch_size": 2},
    }, {"max_seq_length": 2048}),
    ("packed", {}, {"max_seq_length": 2048, "packing": True}),
)  # fmt: skip


def theirs() -> Any:
    """The package's function, whose kernels do nothing from now on."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    for kind in (Autotuner, Heuristics, JITFunction):
        kind.run = lambda *_, **__: None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def call(query: Any, key: Any, value: Any, g: Any, beta: Any, **more: Any) -> Any:
        taken = {name: more.get(name) for name in ("use_qk_l2norm_in_kernel", "cu_seqlens")}
        return chunk_gated_delta_rule(query, key, value, g=g, beta=beta, **taken)

    return call


def main() -> None:
    arguments = parser(__doc__).parse_args()
    try:
        function = theirs()
    except ImportError as error:
        print(f"{error}: pip install fla-core triton einops; nothing was compared")
        return
    figures: dict[str, Any] = {}
    print(f"{'options':<22} {'ours':>10} {'theirs':>10} {'error':>9}")
    for name, options, data in CASES:
        config, model = configured(options, **data), described("qwen3_5_text", LINEAR)
        with quiet():
            ours = estimate_memory(config, described=model).use.peak
            with mock.patch.object(linear_attention, "_delta_rule", function):
                measured = estimate_memory(config, described=model).use.peak
        error = 100 * (ours / measured - 1)
        figures[name] = {"ours": ours, "theirs": measured, "error_pct": error}
        print(f"{name:<22} {ours / 1e6:>7.2f} MB {measured / 1e6:>7.2f} MB {error:>+8.3f}%")
    save(figures, arguments.json)


if __name__ == "__main__":
    main()
