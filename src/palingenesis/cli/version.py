"""``pgs version``: which versions are installed."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from palingenesis.cli.codes import OK
from palingenesis.cli.output import print_json, say

#: What a report of a problem should name.
_PACKAGES = ("palingenesis", "torch", "numpy", "transformers", "trl", "lightning")


def version(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Show the versions of palingenesis and of what it works with."""
    versions = {name: _version(name) for name in _PACKAGES}
    versions["python"] = platform.python_version()
    if json:
        print_json(versions)
    else:
        for name, found in versions.items():
            say(f"{name} {found or 'not installed'}")
    return OK


def _version(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None
