"""Other libraries kept off the terminal while a command of ours speaks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """The time in which other libraries' bars and information stay off the terminal."""
    import datasets  # type: ignore[import-untyped]
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    hub = logging.getLogger("huggingface_hub")  # it tells of every attempt
    before = hub.level
    hub.setLevel(logging.ERROR)
    theirs.set_verbosity(logging.ERROR)
    theirs.disable_progress_bar()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        hub.setLevel(before)
        theirs.set_verbosity(level)
        theirs.enable_progress_bar()  # type: ignore[no-untyped-call]
        datasets.enable_progress_bars()
