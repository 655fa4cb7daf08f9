"""What was given to ``Monitor``, checked before anything is opened: one line for whatever cannot work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from palingenesis.errors import ConfigError

GRADIENTS = ("raw", "clipped", "unknown", "released")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that cannot work.

    Args:
        given: the arguments of ``Monitor`` by name.

    Raises:
        ConfigError: says what was given, what was expected and what to do.
    """
    model, out, start = given["model"], given["out"], given["start_step"]
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r:.60} is no torch.nn.Module: pass the model that is trained")
    if out is not None and not isinstance(out, str | os.PathLike):
        raise ConfigError(f"out={out!r} is no path: give a folder, or None to keep no record")
    if start is not None and (isinstance(start, bool) or not isinstance(start, int) or start < 0):
        raise ConfigError(f"start_step={start!r} cannot be used: give the number of the last step, 0 or more")
    last = given["max_steps"]
    if last is not None and (isinstance(last, bool) or not isinstance(last, int) or last < 1):
        raise ConfigError(
            f"max_steps={last!r} cannot be used: give the number of the run's last step, or None"
        )
    if given["training"] is not None and not isinstance(given["training"], Mapping):
        raise ConfigError(f"training={given['training']!r:.60} is no mapping: pass options by name, or None")
    if given["scaler"] is not None and not hasattr(given["scaler"], "is_enabled"):
        raise ConfigError(
            f"scaler={given['scaler']!r:.60} is no torch.amp.GradScaler: pass that, or leave it out"
        )
    for name, of in (("on_event", "event"), ("on_reading", "reading"), ("on_row", "row")):
        if given[name] is not None and not callable(given[name]):
            raise ConfigError(f"{name}={given[name]!r} cannot be called: pass a function of one {of}")
    if given["gradients"] not in GRADIENTS:
        raise ConfigError(
            f"gradients={given['gradients']!r} cannot be used: give one of {', '.join(GRADIENTS)}"
        )
    if given["resume"] and given["overwrite"]:
        raise ConfigError("resume=True and overwrite=True exclude each other: give one of them")
