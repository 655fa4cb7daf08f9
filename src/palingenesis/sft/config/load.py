"""From a YAML file, and options given on the command line, to a checked configuration."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from palingenesis.errors import ConfigError
from palingenesis.sft.config.whole import TrainConfig
from palingenesis.sft.config.wording import nearest, sections_with, shown, takes_text, walk

#: How alike two dotted names must be, of 1, for the one to be offered for the other.
_ALIKE = 0.75
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


def load_config(path: str | os.PathLike[str], overrides: Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """Read a configuration.

    Args:
        path: a YAML file.
        overrides: dotted names and texts put over the file's values, in order: ``("train.learning_rate",
            "1e-5")``. A text is read as YAML; for an option that takes text it is that text, or null.

    Raises:
        ConfigError: no such file, no YAML, an unknown option, a value or combination that cannot work. The
            message is one line and names the file, or the override.
    """
    settings = _read(Path(path))
    for name, text in overrides:
        override(settings, name, text)
    try:
        return TrainConfig(**settings)
    except ConfigError as error:
        told = str(error)
        if any(told.startswith(f"{name}: ") for name, _ in overrides):
            raise ConfigError(f"--{told}") from None
        raise ConfigError(f"{path}: {told}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"the configuration {path} cannot be read: {error.strerror or error}; give the path of a YAML "
            "file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text (byte {error.start}): save it as UTF-8") from None
    settings = _parsed(text, str(path))
    if settings is None:
        raise ConfigError(f"{path} is empty: set at least model.name_or_path and data.dataset")
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{path}: expected sections such as 'model:' with options under them, got {shown(settings)}"
        )
    return settings


def _named(options: Any) -> Any:
    """Options with names that are text, as pydantic needs them: to YAML, `1:` and `on:` are none."""
    if isinstance(options, dict):
        return {
            name if isinstance(name, str) else shown(name): _named(value) for name, value in options.items()
        }
    return [_named(each) for each in options] if isinstance(options, list) else options


def _parsed(text: str, where: str) -> Any:
    """The value that a YAML text stands for; what is wrong with it is told in one line."""
    try:
        return _named(yaml.load(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        told = ", ".join(part for part in (error.context, error.problem) if part)
        what = "" if isinstance(error, _GivenTwice) else "this is no YAML: "
        raise ConfigError(f"{where}{place}: {what}{told}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{where}, line {line}: this is no YAML: {error.reason}") from None
    except ValueError as error:  # `!!int many`
        raise ConfigError(f"{where}: this is no YAML that can be used: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: this is nested too deep, or holds itself: use fewer levels") from None


class _GivenTwice(yaml.MarkedYAMLError):
    """One name, two values."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but a name that comes twice is an error and not the last one's."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                first = seen[key.value].start_mark.line + 1
                raise _GivenTwice(
                    problem=f"{key.value!r} is given twice, first in line {first}: keep one of them",
                    problem_mark=key.start_mark,
                )
            seen[key.value] = key
        return node


# A run called 2026-01-01 is text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def override(settings: dict[str, Any], name: str, text: str) -> None:
    check_name(name)
    parts = name.split(".")
    group = settings
    for part in parts[:-1]:
        if group.get(part) is None:  # a section that the file leaves out, or null before
            group[part] = {}
        if not isinstance(group[part], dict):
            return  # the file is wrong there, and is told so
        group = group[part]
    _, _, info = walk(TrainConfig, parts)
    verbatim = info is not None and takes_text(info) and text.strip()[:1] not in ("'", '"')
    if verbatim and text.strip() not in ("", "~", "null"):
        group[parts[-1]] = text  # a run called 12, a path with a colon
    else:
        group[parts[-1]] = _parsed(text, f"--{name}")


def check_name(name: str) -> None:
    """Refuse a dotted name that no option has.

    Raises:
        ConfigError: names the nearest one.
    """
    known = list(option_names(TrainConfig))
    if name in known:
        return
    if name in TrainConfig.model_fields:
        first = next(each for each in known if each.startswith(f"{name}."))
        raise ConfigError(f"--{name} is a whole section: set its options one by one, such as --{first}")
    told = f"there is no option --{name}"
    *above, last = name.split(".")
    owner, group, _ = walk(TrainConfig, above)
    if group == ".".join(above):
        if group in known and f"{group}.{next(iter(owner.model_fields))}" not in known:
            raise ConfigError(f"{told}: --{group} is set as a whole")
        near = nearest(TrainConfig, owner, group, last)
    else:
        same = [f"{section}.{last}" for section in sections_with(TrainConfig, last)]
        near = same or difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
    if near:
        raise ConfigError(f"{told}; did you mean --{near[0]}?")
    there = f"{group} has" if group else "the sections are"
    raise ConfigError(f"{told}; {there} {', '.join(owner.model_fields)}")


def option_names(group: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted name of every option that can be set by itself."""
    for name, info in group.model_fields.items():
        inner, _, _ = walk(group, [name])
        if prefix:
            yield prefix + name
        if inner is not group and "tuple" not in str(info.annotation):
            yield from option_names(inner, f"{prefix}{name}.")
