"""What is written beside the options: their descriptions, the page, the schema and the ready-made files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.sft.config.tables import PAGE, ROOT, SCHEMA, groups, names_in, page_with_tables, schema_text

from palingenesis.sft.config import load_config

CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
FIELDS = [(group, name) for group, options in groups().items() for name in options.model_fields]


@pytest.mark.parametrize(("group", "name"), FIELDS, ids=".".join)
def test_every_option_is_described(group: str, name: str) -> None:
    description = groups()[group].model_fields[name].description
    assert description
    assert description.endswith(".")


def test_the_page_has_every_option() -> None:
    text = PAGE.read_text("utf-8")
    assert sorted(names_in(text)) == sorted(groups())
    assert text == page_with_tables(text), "run python -m tests.sft.config.tables"


def test_the_errors_in_the_page_are_the_ones_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    least = "model: {name_or_path: m}\ndata: {dataset: d}\n"
    files: list[tuple[str, list[tuple[str, str]]]] = [
        (least + "train: {learning_rat: 1}", []),
        (least + "train: {use_wandb: true}", []),
        (least + "train: {epochs: many}", []),
        ("model: {name_or_path: m}", []),
        (least + "\ntrain:\n  epochs: 2\n\n  epochs: 3", []),
        (least, [("train.seed", "-1")]),
    ]
    told = []
    for text, overrides in files:
        Path("run.yaml").write_text(text)
        with pytest.raises(ValueError, match=r".") as caught:
            load_config("run.yaml", overrides)
        told.append(str(caught.value))
    shown = re.search(r"before anything is loaded:\n\n```\n(.*?)\n```", PAGE.read_text("utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == told


def test_the_python_in_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text("utf-8")
    example = re.search(r"```yaml\n(model:.*?)```", page, re.DOTALL)
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    assert code is not None
    Path("run.yaml").write_text(example[1])
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert names["config"].changed()["model.name_or_path"] == ("Qwen/Qwen3-8B", None)


def test_the_schema_is_in_step_with_the_options() -> None:
    assert SCHEMA.read_text("utf-8") == schema_text(), "run python -m tests.sft.config.tables"


def test_the_ready_made_files_are_there() -> None:
    names = {str(path.relative_to(ROOT / "configs")) for path in CONFIGS}
    assert {"quickstart.yaml", "qwen35_4b/a100_80gb.yaml"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_ready_made_file_is_one_that_editors_understand(path: Path) -> None:
    first, second = path.read_text("utf-8").splitlines()[:2]
    assert first == f"# yaml-language-server: $schema={os.path.relpath(SCHEMA, path.parent)}"
    assert second == "#", "it says what it is for"
    config = load_config(path)
    assert path == ROOT / "configs" / "quickstart.yaml" or config.data.dataset != "demo:chatterbot"


def test_the_quickstart_downloads_nothing() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    assert config.model.name_or_path.startswith("demo:")
    assert str(config.data.dataset).startswith("demo:")
    assert str(config.data.eval_dataset).startswith("demo:")
    assert config.model.torch_dtype == "float32"
    assert config.train.max_steps is not None
    assert config.train.max_steps >= 2 * config.logging.health_tier3_every
