"""Which options the package's source reads: ``config.train.epochs``, ``options = config.train``, and so on.

An expression stands for a group of options if it is

* ``….train`` (or another section) of something whose name says that it is a configuration,
* a group within a group: ``….lora``, or one of ``….sources``,
* a name that was assigned such an expression, or is annotated with the group's class, in this function or
  around it.

Only an attribute of such an expression counts as a reading; a word in a text and ``getattr`` do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from palingenesis.sft import config as package
from palingenesis.sft.config import LoraOptions, SourceOptions, TrainConfig

Group = type[BaseModel]
Scope = dict[str, Group]

SECTIONS: dict[str, Group] = {name: info.annotation for name, info in TrainConfig.model_fields.items()}  # type: ignore[misc]
_WITHIN: dict[tuple[str, str], Group] = {
    ("ModelOptions", "lora"): LoraOptions,
    ("DataOptions", "sources"): SourceOptions,
    ("DataOptions", "eval_sources"): SourceOptions,
}
_CLASSES: dict[str, Group] = {
    name: getattr(package, name) for name in package.__all__ if name.endswith(("Options", "TrainConfig"))
}
_CONFIGURATIONS = ("config", "_config", "settings", "_settings")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def read_in(folder: Path, leaving_out: Path) -> set[tuple[Group, str]]:
    """Every option, or property of a group, that a module under ``folder`` reads."""
    found: set[tuple[Group, str]] = set()
    for path in sorted(folder.rglob("*.py")):
        if not path.is_relative_to(leaving_out):
            found |= read_by(path.read_text("utf-8"))
    return found


def read_by(source: str) -> set[tuple[Group, str]]:
    return set(_readings(ast.parse(source), {}))


def _readings(node: ast.AST, around: Scope) -> Iterator[tuple[Group, str]]:
    scope = dict(around)
    for inner in _own(node):
        scope.update(_bound(inner, scope))
    for inner in _own(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load):
            group = _group(inner.value, scope)
            if group is not None:
                yield group, inner.attr
        if inner is not node and isinstance(inner, _FUNCTIONS):
            yield from _readings(inner, scope)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A function's nodes in the order of its lines, without what is inside functions in it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield child
        else:
            yield from _own(child)


def _bound(node: ast.AST, scope: Scope) -> Scope:
    """The names that a statement makes stand for a group."""
    if isinstance(node, ast.arg):
        return _annotated(node.arg, node.annotation)
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return _annotated(node.target.id, node.annotation)
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.NamedExpr):
        pairs = [(node.target, node.value)]
    elif isinstance(node, (ast.For, ast.comprehension)):
        pairs = [(node.target, node.iter)]
    bound: Scope = {}
    for target, value in pairs:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            inner = list(zip(target.elts, value.elts, strict=False))
        else:
            inner = [(target, value)]
        for name, expression in inner:
            group = _group(expression, scope)
            if isinstance(name, ast.Name) and group is not None:
                bound[name.id] = group
    return bound


def _annotated(name: str, annotation: ast.expr | None) -> Scope:
    """By the class that an annotation names, also within ``Sequence[SourceOptions]``."""
    words = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()
    known = sorted(word for word in words if word in _CLASSES)
    return {name: _CLASSES[known[0]]} if known else {}


def _group(node: ast.expr, scope: Scope) -> Group | None:
    if isinstance(node, ast.Name):
        return scope.get(node.id) or (TrainConfig if node.id in _CONFIGURATIONS else None)
    if isinstance(node, ast.Subscript):
        return _group(node.value, scope)
    if not isinstance(node, ast.Attribute):
        return None
    group = _group(node.value, scope)
    if group is TrainConfig:
        return SECTIONS.get(node.attr)
    if group is not None:
        return _WITHIN.get((group.__name__, node.attr))
    return TrainConfig if node.attr in _CONFIGURATIONS else None
