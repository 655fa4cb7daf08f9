"""The demonstration's text: English conversations that the package chatterbot-corpus carries.

Nothing is downloaded and nothing is copied: the YAML files are read where pip has put them.
"""

from __future__ import annotations

from importlib import import_module, resources
from types import ModuleType

from palingenesis.errors import MissingExtraError

Conversation = list[str]


def require(module: str) -> ModuleType:
    """Import a module that the extra ``demo`` brings.

    Raises:
        MissingExtraError: the module, or something that it needs, is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"the demonstration needs {module!r}, which cannot be imported ({error}): "
            "pip install 'palingenesis[demo]'"
        ) from error


def load_conversations() -> list[Conversation]:
    """The English conversations of chatterbot-corpus, as lists of turns, always in the same order.

    Each comes once. The package repeats some a hundred times over; a model soon knows those by heart, and the
    loss then says more about which batch it was than about training.
    """
    yaml = require("yaml")
    folder = resources.files(require("chatterbot_corpus")) / "data" / "english"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yml")), key=lambda f: f.name)
    found = (
        tuple(str(turn) for turn in conversation)
        for file in files
        for conversation in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]
    )
    return [list(turns) for turns in dict.fromkeys(found)]
