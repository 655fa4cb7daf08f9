"""What an option takes, and what was wrong with a value, in one line each."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_LONGEST_VALUE = 60
#: What pydantic puts before a validator's own words.
_RAISED_HERE = "Value error, "
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}


def one_line(error: ValidationError, root: type[BaseModel]) -> str:
    """The first thing that was wrong, and how many more there are."""
    # An unknown name first: it is often the reason why another one is missing.
    errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    told: dict[str, str] = {}
    for each in errors:
        name, sentence = _sentence(each, root)
        told.setdefault(name, sentence)  # each part of a union complains by itself
    return and_more(list(told.values()))


def and_more(sentences: Sequence[str]) -> str:
    more = len(sentences) - 1
    return f"{sentences[0]} (and {more} more)" if more else sentences[0]


def _sentence(error: Any, root: type[BaseModel]) -> tuple[str, str]:
    """The dotted name that an error is about, and the error in words."""
    loc = error["loc"]
    if error["type"] == "extra_forbidden":
        owner, name, _ = walk(root, loc[:-1])
        return f"{name}.{loc[-1]}", unknown(root, owner, name, str(loc[-1]))
    owner, name, info = walk(root, loc)
    if info is None:  # options that do not work together
        return name, str(error["msg"]).removeprefix(_RAISED_HERE)
    if error["type"] == "missing":
        return name, _missing(name, info)
    value = error["input"]
    if name in root.model_fields:
        return name, f"{name}: expected options under it, got {shown(value)}"
    quotes = isinstance(value, (bool, int, float)) and takes_text(info)
    advice = ": put it in quotes" if quotes else "" if info.is_required() else f"; default: {default(info)}"
    return name, f"{name}: expected {expected(info)}, got {shown(value)}{advice}"


def _missing(name: str, info: FieldInfo) -> str:
    group = _group(info.annotation)
    while group is not None:  # of a section that is missing, what it must hold
        inner, info = next(each for each in group.model_fields.items() if each[1].is_required())
        name, group = f"{name}.{inner}", _group(info.annotation)
    told = str(info.description).replace("`", "").rstrip(".")
    return f"{name} is missing: {told[0].lower()}{told[1:]}"


def walk(root: type[BaseModel], loc: Iterable[int | str]) -> tuple[type[BaseModel], str, FieldInfo | None]:
    """The group of options that a location leads into, its written name, and the option it ends at."""
    owner, name, info = root, "", None
    for part in loc:
        if isinstance(part, int):
            if isinstance(info, FieldInfo) and _group(info.annotation) is not None:
                name += f"[{part}]"
            continue
        if part not in owner.model_fields:  # pydantic's name for a part of a union
            break
        info = owner.model_fields[part]
        name = f"{name}.{part}" if name else part
        owner = _group(info.annotation) or owner
    return owner, name, info


def unknown(root: type[BaseModel], owner: type[BaseModel], group: str, name: str) -> str:
    """What to say of a name that a group of options does not have."""
    told = f"{group} has no option {name!r}" if group else f"there is no section {name!r}"
    guesses = nearest(root, owner, group, name)
    if guesses:
        return f"{told}; did you mean {guesses[0]!r}?"
    return f"{told}; {'it has' if group else 'there are'} {', '.join(owner.model_fields)}"


def nearest(root: type[BaseModel], owner: type[BaseModel], group: str, name: str) -> list[str]:
    """Dotted names that may have been meant by one that a group does not have, the likeliest first."""
    close = difflib.get_close_matches(name.replace("-", "_"), list(owner.model_fields), n=1)
    here = [f"{group}.{each}" if group else each for each in close]
    elsewhere = [f"{each}.{name}" for each in sections_with(root, name)]
    # In a source, `dataset_split` means the source's own.
    return [*here, *elsewhere] if group and group not in root.model_fields else [*elsewhere, *here]


def sections_with(root: type[BaseModel], name: str) -> list[str]:
    """The sections that have an option of this name."""
    groups = {section: _group(info.annotation) for section, info in root.model_fields.items()}
    return [section for section, group in groups.items() if group and name in group.model_fields]


def expected(info: FieldInfo) -> str:
    """What an option takes: "a whole number (at least 1) or null"."""
    words = [_kind(each, info.metadata) for each in _parts(info.annotation)]
    return " or ".join(words)


def default(info: FieldInfo) -> str:
    """The default, as it is written in YAML."""
    value = info.get_default(call_default_factory=False)
    return shown(list(value) if isinstance(value, tuple) else value).strip('"')


def shown(value: object) -> str:
    """A value in one line, as YAML could write it, however long and whatever it is."""
    try:
        line = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text; lists that hold themselves
        line = repr(value)
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST_VALUE else line[: _LONGEST_VALUE - 1] + "…"


def _kind(annotation: Any, metadata: Sequence[Any]) -> str:
    if get_origin(annotation) is Literal:
        choices = ", ".join(shown(each) for each in get_args(annotation))
        return f"one of {choices}" if len(get_args(annotation)) > 1 else choices
    group = _group(annotation)
    if get_origin(annotation) is tuple:
        return f"a list of mappings ({', '.join(group.model_fields)})" if group else "a list of names"
    if group is not None:
        return f"a mapping ({', '.join(group.model_fields)})"
    if annotation not in (int, float):
        return _KINDS[annotation]
    bounds = [
        f"{words} {getattr(each, key)}" for key, words in _BOUNDS for each in metadata if hasattr(each, key)
    ]
    return f"{_KINDS[annotation]} ({', '.join(bounds)})" if bounds else _KINDS[annotation]


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, without what is said about them."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(_bare(each) for each in members)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _group(annotation: Any) -> type[BaseModel] | None:
    """The group of options that an annotation is, or holds a list of."""
    for part in _parts(annotation):
        inner = get_args(part)[0] if get_origin(part) is tuple else part
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner
    return None


def takes_text(info: FieldInfo) -> bool:
    """Whether any text will do, and not only one of a few words."""
    return str in _parts(info.annotation)
