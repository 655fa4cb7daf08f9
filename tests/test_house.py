"""The rules of the house: who may import torch, what is public, how modules are laid out."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "palingenesis"
MODULES = sorted(PACKAGE.rglob("*.py"))

TORCH_FREE = ("watch", "record", "report", "findings", "runlogs", "trackers")
LONGEST_FILE = 400

PUBLIC = ["Event", "Monitor", "MonitorConfig", "PalingenesisError", "__version__", "load_run"]

# Put before a program that is to run where importing any of these raises.
FORBID = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise AssertionError(f"{{name}} must not be imported here")
sys.meta_path.insert(0, Forbid())
"""


def run(program: str, *, forbid: tuple[str, ...]) -> None:
    """Run a program in a process of its own where importing ``forbid`` raises."""
    command = [sys.executable, "-c", FORBID.format(names=set(forbid)) + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_importing_the_package_imports_neither_torch_nor_numpy() -> None:
    run("import palingenesis", forbid=("torch", "numpy", "transformers", "lightning"))


@pytest.mark.parametrize("folder", [name for name in TORCH_FREE if (PACKAGE / name).is_dir()])
def test_a_torch_free_folder_imports_no_torch(folder: str) -> None:
    names = [module_name(path) for path in MODULES if path.is_relative_to(PACKAGE / folder)]
    assert names
    run("\n".join(f"import {name}" for name in names), forbid=("torch", "transformers", "lightning"))


def test_the_command_line_answers_without_torch() -> None:
    program = "sys.argv = ['pgs', '--help']\nfrom palingenesis.cli import main\nmain()"
    run(program, forbid=("torch", "transformers", "lightning"))


def test_the_library_imports_without_any_extra() -> None:
    program = "import palingenesis\nfor name in palingenesis.__all__: getattr(palingenesis, name)"
    extras = ("transformers", "trl", "accelerate", "datasets", "peft", "safetensors", "lightning", "yaml")
    run(program, forbid=(*extras, "tokenizers", "chatterbot_corpus"))


def test_the_public_names() -> None:
    import palingenesis

    assert sorted(palingenesis.__all__) == PUBLIC
    for name in palingenesis.__all__:
        assert getattr(palingenesis, name) is not None
        assert name in dir(palingenesis)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        palingenesis.nonsense  # noqa: B018


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_says_what_lives_there(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), f"{path} opens with no docstring"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_file_is_two_ideas(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= LONGEST_FILE


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in MODULES}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_package_is_typed_and_every_file_is_utf_8() -> None:
    assert (PACKAGE / "py.typed").is_file()
    for path in MODULES:
        assert "\t" not in path.read_text("utf-8"), path


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_quick_start_runs_as_it_is_written(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    (code,) = re.findall(
        r"```python\n(from palingenesis import Monitor\n.*?)```", (ROOT / page).read_text(), re.S
    )
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 1)
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": [torch.ones(2, 4)] * 3,
        "compute_loss": lambda model, batch: model(batch).mean(),
    }
    exec(code, names)

    assert (tmp_path / "pgs_run" / "report.html").is_file()
