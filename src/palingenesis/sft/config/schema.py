"""The JSON schema of the configuration: what editors complete and check a YAML file with."""

from __future__ import annotations

from typing import Any

from palingenesis.sft.config.whole import TrainConfig


def json_schema() -> dict[str, Any]:
    """The schema, made from the options, so that it cannot fall behind them."""
    schema: dict[str, Any] = _without_titles(TrainConfig.model_json_schema())
    schema["title"] = "Configuration of pgs train"
    schema["description"] = "See docs/configuration.md of Palingenesis."
    return schema


def _without_titles(node: Any) -> Any:
    """pydantic makes a title of every name, and editors would show it in place of the description."""
    if isinstance(node, dict):
        return {
            key: _without_titles(value)
            for key, value in node.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(each) for each in node] if isinstance(node, list) else node
