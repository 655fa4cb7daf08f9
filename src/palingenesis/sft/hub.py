"""The hub of models and data sets: whether it answers, asked once.

Its own clients repeat a request that fails for most of a minute, file by file. Here one short request goes
ahead; where nothing answers it, what is in the local cache is still found, and nothing more is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Seconds that the one request may take.
ANSWER_SECONDS = 5.0
#: Seconds for which its outcome is taken to hold: longer than a command takes to load what it needs.
_HOLDS_SECONDS = 60.0

_known: tuple[float, bool] | None = None


def hub_answers() -> bool:
    """Whether the hub can be reached."""
    global _known
    if _known is None or time.monotonic() - _known[0] > _HOLDS_SECONDS:
        _known = (time.monotonic(), _ask())
    return _known[1]


def _ask() -> bool:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except Exception:  # noqa: BLE001 - each client of the web has errors of its own, and offline mode one more
        return False
    return True


def hub_name() -> str:
    """The hub's address, for messages."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def hub_options(where: str) -> dict[str, Any]:
    """What ``from_pretrained`` is told, so that it does not wait for a hub that does not answer.

    ``where`` is a folder, which needs nothing, or a name in the hub.
    """
    return {} if Path(where).expanduser().is_dir() or hub_answers() else {"local_files_only": True}


@contextmanager
def data_from_cache_alone() -> Iterator[None]:
    """The time in which ``datasets`` asks the hub for nothing; its functions take no option for that."""
    import datasets  # type: ignore[import-untyped]

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
