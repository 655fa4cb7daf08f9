"""Files of weights that are broken: one line, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from palingenesis.errors import ConfigError
from palingenesis.preflight.weights import opened, weight_files


def test_a_file_that_is_whole(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    (path,) = weight_files(str(tmp_path))
    with opened(path) as file:
        assert file.get_slice("a").get_shape() == [2, 3]
    assert weight_files("somebody/something") == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"12345", "no whole file of weights .*: copy or download it anew"),
        (b"", "no whole file of weights"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "run git lfs pull"),
    ],
)
def test_a_file_that_is_not(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told), opened(path):
        pass


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(200, 3)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="no whole file"), opened(path):
        pass
