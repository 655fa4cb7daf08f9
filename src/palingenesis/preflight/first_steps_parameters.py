"""What the first optimizer steps must do to parameters: reach them, and move them.

Like :mod:`palingenesis.preflight.first_steps_checks`, these take what they look at as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from palingenesis.findings import Finding
from palingenesis.preflight.sanity_model import lost_share

_NAMED = 10
#: A step of an adaptive optimizer may be so much shorter than its learning rate.
_SHORTER = 0.1


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Those that are trained, by name, tied ones once."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def gradients_of(model: torch.nn.Module, run: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """The gradients that ``run`` leaves, kept on the CPU; the model has none before and after."""
    model.zero_grad(set_to_none=True)
    run()
    found = {
        name: one.grad.detach().to("cpu", copy=True)
        for name, one in trained_parameters(model).items()
        if one.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def check_gradients(model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> list[Finding]:
    """That everything trained has a gradient. One of zeros is one: adapters begin with some."""
    trained = trained_parameters(model)
    without = [name for name in trained if name not in gradients]
    if not without:
        return []
    adapters = all("lora_" in name for name in without)
    fix = "set train.gradient_checkpointing to false, or call model.enable_input_require_grads() first"
    if not adapters:
        fix = "see that nothing detaches them, and that requires_grad is set only where it is meant"
    return [
        Finding(
            "first_step.no_gradient",
            "critical",
            f"{len(without)} of {len(trained)} trained parameters have no gradient after a backward pass, "
            f"such as {without[0]!r}",
            {"parameters": without[:_NAMED], "count": len(without), "trained": len(trained)},
            fix,
        )
    ]


def check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Finding]:
    """That the optimizer has the parameters that the model trains, and no others."""
    trained = trained_parameters(model)
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    own = {id(one) for one in model.parameters()}
    lacking = [name for name, one in trained.items() if id(one) not in held]
    strangers = len(held - own)
    if not lacking and not strangers:
        return []
    return [
        Finding(
            "first_step.optimizer_stale",
            "critical",
            f"the optimizer lacks {len(lacking)} of {len(trained)} trained parameters"
            + (f", such as {lacking[0]!r}," if lacking else "")
            + f" and holds {strangers} that the model does not have",
            {"lacking": lacking[:_NAMED], "count": len(lacking), "strangers": strangers},
            "make the optimizer after the last change to the model (moved, adapted, tied, wrapped): with pgs "
            "train set model.compile and model.use_liger_kernel to false, and report it",
        )
    ]


def fingerprints(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Two sums over the bits of each trained parameter, which any change changes."""
    return {name: _fingerprint(one.detach()) for name, one in trained_parameters(model).items()}


def _fingerprint(tensor: torch.Tensor) -> tuple[int, int]:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(kinds[tensor.element_size()]).flatten()
    first = second = 0
    for part in bits.split(1 << 24):
        wide = part.long()
        first += int(wide.sum())
        second += int((wide * wide).sum())  # wraps around, which is as good
    return first, second


def check_moves(
    model: torch.nn.Module,
    before: Mapping[str, tuple[int, int]],
    gradients: Mapping[str, float],
    *,
    learning_rate: float,
    steps: int,
    adaptive: bool = True,
) -> list[Finding]:
    """That every trained parameter is another one after some steps.

    Args:
        model: after the steps.
        before: its fingerprints before them.
        gradients: the largest absolute gradient that each parameter had in them.
        learning_rate: that the steps had.
        steps: how many.
        adaptive: whether steps are about as long as the learning rate, and not times the gradient (SGD).
    """

    def rounds(name: str) -> bool:
        update = _SHORTER * learning_rate * (1.0 if adaptive else gradients[name])
        return lost_share([trained[name]], update) > 1 - 1e-6

    after = fingerprints(model)
    trained = trained_parameters(model)
    stays = [name for name, one in before.items() if after[name] == one]
    unused = [name for name in stays if gradients.get(name, 0.0) == 0.0]
    rounded = [name for name in stays if name not in unused and rounds(name)]
    still = [name for name in stays if name not in unused and name not in rounded]
    found = [] if not still else [_still(still, len(before), steps)]
    found += [] if not unused else [_unused(unused, len(before), steps)]
    return [*found, *([_rounded(rounded, len(before), steps, learning_rate)] if rounded else [])]


def _still(names: Sequence[str], of: int, steps: int) -> Finding:
    return Finding(
        "first_step.stays",
        "critical",
        f"{len(names)} of {of} trained parameters are the same after {steps} steps though they have "
        f"gradients, such as {names[0]!r}",
        {"parameters": names[:_NAMED], "count": len(names), "steps": steps},
        "make the optimizer after the last change to the model, and see that it holds these parameters",
    )


def _unused(names: Sequence[str], of: int, steps: int) -> Finding:
    return Finding(
        "first_step.zero_gradient",
        "warning",
        f"{len(names)} of {of} trained parameters had gradients of zero alone in {steps} steps, such as "
        f"{names[0]!r}",
        {"parameters": names[:_NAMED], "count": len(names), "steps": steps},
        "look whether the data reaches them (experts that no token chooses, a part for images); otherwise "
        "name the layers to train in model.lora.targets",
    )


def _rounded(names: Sequence[str], of: int, steps: int, learning_rate: float) -> Finding:
    return Finding(
        "first_step.rounds_away",
        "info",
        f"{len(names)} of {of} trained parameters, such as {names[0]!r}, are the same after {steps} steps: "
        "every one of their updates is less than their number format can hold",
        {"parameters": names[:_NAMED], "count": len(names), "learning_rate": learning_rate},
        "set model.torch_dtype to float32, if they are meant to learn",
    )
