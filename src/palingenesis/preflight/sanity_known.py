"""What a configuration is judged by, and what has to be known of the run for it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SanityLimits:
    """What a configuration is judged by. Sources are in the catalog, with each finding."""

    full_rates: tuple[tuple[float, float], ...] = (
        (1e7, 2e-2),
        (5e8, 2e-3),
        (3e9, 5e-4),
        (3e10, 1e-4),
        (math.inf, 5e-5),
    )
    """Parameters up to which a model takes at most a learning rate, every weight trained."""
    lora_rate: float = 5e-3
    """Highest learning rate for adapters, whatever the size."""
    far: float = 10.0
    """Times a highest rate that makes the finding critical."""
    least_full_rate: float = 2e-7
    """Lowest learning rate with every weight trained."""
    least_lora_rate: float = 1e-5
    """Lowest learning rate for adapters."""
    least_sgd_rate: float = 1e-4
    """Lowest learning rate for SGD, whose steps are the gradient itself."""
    least_rows: int = 4
    """Rows of an optimizer step below which the gradient is mostly noise."""
    least_steps: int = 20
    """Optimizer steps below which a run is too short for its schedule."""
    warmup: float = 0.3
    """Largest share of the run in which the learning rate only rises."""
    passes: float = 6.0
    """Times that the data may be gone over."""
    logits_gb: float = 4.0
    """Whole logits of a micro-batch, in GB, from which they should not exist."""
    chunk_gb: float = 4.0
    """Logits of one chunk, in GB."""
    long_run: int = 100
    """Optimizer steps from which it hurts to lose a run."""
    evaluation: float = 1.0
    """Time of evaluation, as a multiple of that of training."""


@dataclass(frozen=True)
class Known:
    """What is known of a run besides its configuration; ``None`` where it is not.

    Attributes:
        parameters: of the model, without adapters.
        vocabulary: tokens that the LM head predicts.
        rows: rows of an epoch that training uses, after packing.
        eval_rows: rows of an evaluation.
        world_size: processes that train together.
    """

    parameters: int | None = None
    vocabulary: int | None = None
    rows: int | None = None
    eval_rows: int | None = None
    world_size: int = 1

    @property
    def unknown(self) -> list[str]:
        """What was left out for want of a number, in words."""
        left_out = []
        if self.parameters is None:
            left_out.append("the learning rate against the model's size")
        if self.vocabulary is None:
            left_out.append("the size of the logits")
        if self.rows is None:
            left_out.append("passes over the data")
        return left_out
