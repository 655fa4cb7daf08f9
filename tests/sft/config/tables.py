"""The tables of docs/configuration.md and configs/schema.json, made from the options.

python -m tests.sft.config.tables       writes both anew
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from pydantic import BaseModel

from palingenesis.sft.config import LoraOptions, SourceOptions, TrainConfig, json_schema
from palingenesis.sft.config.wording import default, expected

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"
SCHEMA = ROOT / "configs" / "schema.json"
#: What stands between these lines is written here.
_TABLE = re.compile(r"(<!-- options of (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def groups() -> dict[str, type[BaseModel]]:
    """Every group of options by the name it has in the page."""
    sections = {name: info.annotation for name, info in TrainConfig.model_fields.items()}
    return {**sections, "lora": LoraOptions, "source": SourceOptions}  # type: ignore[dict-item]


def table(group: type[BaseModel]) -> str:
    lines = ["| option | takes | default | |", "|---|---|---|---|"]
    for name, info in group.model_fields.items():
        value = "required" if info.is_required() else f"`{default(info)}`"
        lines.append(f"| `{name}` | {expected(info)} | {value} | {info.description} |")
    return "\n".join(lines)


def page_with_tables(text: str) -> str:
    known = groups()
    return _TABLE.sub(lambda match: f"{match[1]}\n{table(known[match[2]])}\n\n{match[4]}", text)


def names_in(text: str) -> list[str]:
    return [match[2] for match in _TABLE.finditer(text)]


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text("utf-8")), "utf-8")
    SCHEMA.write_text(schema_text(), "utf-8")
