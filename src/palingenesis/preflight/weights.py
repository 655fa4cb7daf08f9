"""Weights that lie in a local folder, opened without reading them; a broken file is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from palingenesis.errors import ConfigError

#: What Git leaves in the place of a large file that was not fetched.
_POINTER = b"version https://git-lfs"


def weight_files(name: str) -> list[Path]:
    """The files of a model's folder; none where ``name`` is not one."""
    folder = Path(name).expanduser()
    return sorted(folder.glob("*.safetensors")) if folder.is_dir() else []


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The tensors of one file by name.

    Raises:
        ConfigError: it is not whole, or not what its name says.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.name_or_path: {path} cannot be read: {_why(path, error)}") from None


def _why(path: Path, error: Exception) -> str:
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError as unreadable:
        return f"{unreadable.strerror or unreadable}"
    if pointer:
        return "it is a pointer of Git LFS, and not the weights: run git lfs pull in its folder"
    told = " ".join(str(error).split())
    return f"it is no whole file of weights ({told}): copy or download it anew"
