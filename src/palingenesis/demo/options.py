"""What can be chosen in the demonstration, and its defaults; free of torch, for the command line."""

from __future__ import annotations

from typing import Literal, get_args

from palingenesis.errors import ConfigError

Fault = Literal["no_gradient", "exploding", "none"]
FAULTS: tuple[str, ...] = get_args(Fault)

BROKEN_LAYER = "model.layers.2.mlp.down_proj"

CHECK_EVERY = 5
# More than the monitor's default: a check here is only a few steps, and in the first fifty the attention of
# an untrained model wakes, with query and key gradients that grow more than tenfold. That is no fault.
CHECKS_BEFORE_ALARMS = 12
# Room for the baseline and two checks more on either side of the fault, which comes half-way.
FEWEST_STEPS = 2 * CHECK_EVERY * (CHECKS_BEFORE_ALARMS + 2)
DEFAULT_STEPS = 200
DEFAULT_SEED = 0
# Steps at either end of a run whose mean loss is shown: that of one step is that of one batch.
LOSS_WINDOW = 10


def check_options(steps: int, fault: str) -> None:
    """Refuse what could not show anything.

    Raises:
        ConfigError: too few steps for an alarm, or a fault that is not known.
    """
    if steps < FEWEST_STEPS:
        raise ConfigError(
            f"steps={steps} is too short for an alarm to ring: the demonstration needs {FEWEST_STEPS} or more"
        )
    if fault not in FAULTS:
        raise ConfigError(f"fault={fault!r} is not known: choose one of {', '.join(FAULTS)}")
