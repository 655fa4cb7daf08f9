"""The time in which other libraries keep their remarks to themselves."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """No information, progress bars or deprecations of transformers and peft; errors are still told."""
    from palingenesis.sft.model import transformers_library

    theirs = transformers_library().utils.logging
    level = theirs.get_verbosity()
    theirs.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(level)
