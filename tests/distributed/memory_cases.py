"""The memory of a step that two real processes do together, as each of them sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.preflight.memory.made import config, llama

from palingenesis.preflight.memory.measure import peak_by_log, peak_on_cpu

MEASUREMENTS = 4

#: By name, the options of each.
STEPS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel__strategy": "ddp"},
    "fsdp2": {"parallel__strategy": "fsdp2"},
    "fsdp2_checkpointed": {
        "parallel__strategy": "fsdp2",
        "train__gradient_accumulation_steps": 1,
        "train__gradient_checkpointing": True,
    },
}


def _case(name: str) -> Callable[[], dict[str, Any]]:
    def case() -> dict[str, Any]:
        settings, ranks = config(**STEPS[name]), 2
        use = peak_by_log(settings, llama(), ranks=ranks)
        measured = None
        if name == "ddp":  # gloo's threads let go of what they copied when they come to it: never too early
            measured = min(peak_on_cpu(settings, llama(), ranks=ranks) for _ in range(MEASUREMENTS))
        return {"peak": use.peak, "made_of": use.made_of, "measured": measured}

    return case


CASES = {2: {name: _case(name) for name in STEPS}}
