"""The weights that training began with, kept beside the record, for the drift of a run that is resumed."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from pathlib import Path

import torch

from palingenesis.errors import ConfigError
from palingenesis.signals.drift import Drift

# What a file raises that is damaged, or something else.
_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)

_NOT_KEPT = "the run goes on, and the record does not hold the weights that it was first started with"


def start_file(folder: Path, rank: int) -> Path:
    """Where a rank keeps its part; where nothing is sharded, rank 0 has all."""
    return folder / ("start.pt" if rank == 0 else f"start-{rank}.pt")


def keep_start(drift: Drift, file: Path) -> None:
    """Write what is known of the first weights. Waits for the device, once in a run.

    Raises:
        OSError: it cannot be written.
    """
    temporary = file.with_suffix(".tmp")
    torch.save(drift.state_dict(), temporary)
    os.replace(temporary, file)


def read_start(drift: Drift, file: Path) -> str | None:
    """Go on from the first start's weights.

    Returns:
        why that cannot be, in words; ``None`` if it can.
    """
    if not file.exists():
        return _NOT_KEPT
    try:
        _check(file)
        drift.load_state_dict(torch.load(file, weights_only=True))
    except ConfigError as error:
        return str(error)
    except _UNREADABLE as error:
        return f"{file.name} in the record cannot be read ({type(error).__name__})"
    return None


def _check(file: Path) -> None:
    """Compare the file with its own checksums, which ``torch.load`` does not: a bad bit would pass for drift.

    Raises:
        OSError, RuntimeError, zipfile.BadZipFile: it is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(damaged)
