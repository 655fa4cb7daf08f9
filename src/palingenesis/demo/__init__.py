"""The demonstration: a small language model trained twice on real conversations, once with a broken layer.

``run_demo`` is resolved late, so that looking at the options imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from palingenesis.demo.options import BROKEN_LAYER, DEFAULT_SEED, DEFAULT_STEPS, FAULTS, FEWEST_STEPS, Fault
from palingenesis.demo.result import DemoResult, DemoRun

if TYPE_CHECKING:
    from palingenesis.demo.run import run_demo

__all__ = [
    "BROKEN_LAYER",
    "DEFAULT_SEED",
    "DEFAULT_STEPS",
    "FAULTS",
    "FEWEST_STEPS",
    "DemoResult",
    "DemoRun",
    "Fault",
    "run_demo",
]


def __getattr__(name: str) -> Any:
    if name == "run_demo":
        from palingenesis.demo.run import run_demo

        return run_demo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
