"""The numbers of ``pgs profile``, as JSON holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palingenesis.preflight.memory.changes import Tried
    from palingenesis.preflight.memory.estimate import Fit
    from palingenesis.preflight.memory.limits import Limit


def facts_of(
    fit: Fit,
    tried: Sequence[Tried] = (),
    limits: Sequence[Limit] = (),
    without: Fit | None = None,
    not_tried: Sequence[str] = (),
) -> dict[str, Any]:
    """Bytes by category, part of the step and source; what was tried or not; how far options can go."""
    estimate = fit.estimate
    use, config = estimate.use, estimate.config
    return {
        "model": config.model.name_or_path,
        "class": estimate.model,
        "parameters": estimate.parameters,
        "world_size": estimate.world_size,
        "strategy": estimate.strategy if estimate.world_size > 1 else None,
        "peak_bytes": use.peak,
        "peak_phase": use.phase.name.lower(),
        "peak_bytes_without_kernels": None if without is None else without.estimate.use.peak,
        "categories": {name.replace(" ", "_"): size for name, size in use.made_of.items()},
        "loss_peak_bytes": use.loss_peak,
        "peak_by_phase": {phase.name.lower(): size for phase, size in use.by_phase.items()},
        "margin": [{"name": part.name, "bytes": part.bytes, "source": part.source} for part in fit.margin],
        "total_bytes": fit.total,
        "gpu_bytes": fit.gpu_bytes,
        "headroom_bytes": fit.headroom,
        "fits": fit.fits,
        "tried": [
            {
                "options": dict(one.change.options),
                "world_size": one.change.world_size or estimate.world_size,
                "cost": one.change.cost,
                "total_bytes": one.fit.total,
                "fits": one.fits,
            }
            for one in tried
        ],
        "not_tried": list(not_tried),
        "limits": {
            limit.option: {"largest": limit.largest, "exact": limit.exact, "ended_by": limit.ended_by}
            for limit in limits
        },
        "seconds": estimate.seconds,
    }
