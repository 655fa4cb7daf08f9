"""Palingenesis watches a PyTorch training run and says which layer broke, when, and by how much.

    from palingenesis import Monitor

    mon = Monitor(model, optimizer)
    for batch in loader:
        loss = model(batch).loss
        loss.backward()
        mon.step(loss)                    # after backward, before optimizer.step()
        optimizer.step(); optimizer.zero_grad()
    mon.close()

The names below are resolved when they are first used, so that importing the package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palingenesis.config import MonitorConfig
    from palingenesis.errors import PalingenesisError
    from palingenesis.events import Event
    from palingenesis.monitor import Monitor
    from palingenesis.record.reader import load_run

    __version__: str

__all__ = ["Event", "Monitor", "MonitorConfig", "PalingenesisError", "__version__", "load_run"]

_HOMES = {
    "Event": "palingenesis.events",
    "Monitor": "palingenesis.monitor",
    "MonitorConfig": "palingenesis.config",
    "PalingenesisError": "palingenesis.errors",
    "load_run": "palingenesis.record.reader",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("palingenesis")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
