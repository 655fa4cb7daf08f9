"""``--section.key value``: any option of the configuration, on every command that takes ``--config``.

A command takes part with ``context_settings=TAKES_OVERRIDES``, a ``typer.Context`` and::

    load_config(path, overrides(context))
"""

from __future__ import annotations

import difflib

import typer

#: Leaves what typer does not know to :func:`overrides`.
TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def overrides(context: typer.Context) -> list[tuple[str, str]]:
    """The dotted names and the texts given for them, in order; anything else is wrong usage.

    ``--train.epochs 2``, ``--train.epochs=2`` and, for every underscore, a hyphen.
    """
    found: list[tuple[str, str]] = []
    words = iter(context.args)
    for word in words:
        option, has_value, value = word.partition("=")
        if not word.startswith("--"):
            context.fail(f"Got unexpected extra argument ({word})")
        name = option[2:].replace("-", "_")
        if "." not in name:
            context.fail(f"No such option: {option}{_near(context, option)}")
        if not has_value:
            given = next(words, None)
            if given is None or _is_override(given):
                context.fail(f"Option {option} needs a value: {option} VALUE")
            value = given
        found.append((name, value))
    return found


def _is_override(word: str) -> bool:
    return word.startswith("--") and "." in word.partition("=")[0]


def _near(context: typer.Context, option: str) -> str:
    known = [each for parameter in context.command.params for each in parameter.opts]
    near = difflib.get_close_matches(option, known, n=1)
    return f". Did you mean {near[0]}?" if near else ". Options of the configuration are --section.key VALUE"
