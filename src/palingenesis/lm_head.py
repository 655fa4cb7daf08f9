"""What transformers' models do to the output of their LM head before they call it logits."""

from __future__ import annotations

from typing import Any

# Names under which configurations hold what logits are multiplied by; `logits_scaling` divides, but for one.
_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_MULTIPLIES_BY_SCALING = "hyperclovax"


def after_head(model: Any) -> dict[str, float | None]:
    """``scale`` and ``soft_cap`` of a model, by its configuration.

    Logits are ``z · scale`` and then ``soft_cap · tanh(z / soft_cap)``, where ``z`` is the head's output.
    """
    config = model.config.get_text_config()
    scale = 1.0
    for name in _MULTIPLIERS:
        if getattr(config, name, None) is not None:
            scale = float(getattr(config, name))
            break
    else:
        divisor = getattr(config, "logits_scaling", None)
        if divisor is not None:
            scale = float(divisor if config.model_type == _MULTIPLIES_BY_SCALING else 1 / divisor)
    return {"scale": scale, "soft_cap": getattr(config, "final_logit_softcapping", None)}
