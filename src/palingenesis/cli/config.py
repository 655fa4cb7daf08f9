"""``pgs config --config FILE``: what a run would be told, and what of it is not the default."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palingenesis.cli.codes import OK
from palingenesis.cli.output import print_json, say
from palingenesis.cli.overrides import overrides

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig


def config(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The YAML file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
) -> int:
    """Show a configuration with every option, and which of them differ from the defaults.

    Any option can be given another value: --section.key VALUE, such as --train.learning_rate 1e-5. What is
    printed is YAML that can be used as a configuration.

    Exit code 0: it can be used, 2: it cannot.
    """
    given = overrides(context)
    if schema:
        from palingenesis.sft.config import json_schema

        print_json(json_schema())
        return OK
    if config is None:
        context.fail("Missing option '--config'")
    from palingenesis.sft.config import load_config

    resolved = load_config(config, given)
    if json:
        print_json(
            {
                "file": str(config),
                "config": resolved.model_dump(mode="json"),
                "changed": {
                    name: {"value": value, "default": default}
                    for name, (value, default) in resolved.changed().items()
                },
            }
        )
    else:
        say(_as_yaml(resolved.model_dump(mode="json")))
        say(_differences(resolved))
    return OK


def _differences(resolved: TrainConfig) -> str:
    """One comment a line, so that the whole stays YAML."""
    changed = resolved.changed()
    lines = [f"# {len(changed)} options are not at their defaults:"]
    for name, (value, default) in changed.items():
        section, option = name.split(".", 1)
        required = type(getattr(resolved, section)).model_fields[option].is_required()
        lines.append(
            f"#   {name}: {_flow(value)} ({'required' if required else f'default: {_flow(default)}'})"
        )
    return "\n".join(lines)


def _as_yaml(value: Any) -> str:
    import yaml

    # Never broken into several lines: a path is found by search, and terminals wrap by themselves.
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=2**31).rstrip("\n")


def _flow(value: Any) -> str:
    """A value on one line."""
    import yaml

    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=True, width=2**31)
    return text.removesuffix("...\n").rstrip("\n")
