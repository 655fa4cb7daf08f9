"""Formats of logs that are read line by line, one file each; ``base.py`` says what a format is.

Which format a log has is found by content (``palingenesis.runlogs.detect``), in the order of
``LINE_FORMATS``.
"""

from __future__ import annotations

from collections.abc import Callable

from palingenesis.runlogs.formats import (
    deepspeed,
    jsonl,
    llamafactory,
    llmc,
    megatron,
    nanochat,
    nanogpt,
    nanotron,
    olmo,
    ours,
    pairs,
    plain,
    swift,
    table,
    torchtitan,
    torchtune,
    transformers,
)
from palingenesis.runlogs.formats.base import LineFormat

#: Of two that take as many lines, the earlier one.
LINE_FORMATS: tuple[LineFormat, ...] = (
    ours.FORMAT,
    swift.FORMAT,
    llamafactory.FORMAT,
    transformers.FORMAT,
    jsonl.FORMAT,
    megatron.FORMAT,
    nanotron.FORMAT,
    torchtune.FORMAT,
    torchtitan.FORMAT,
    llmc.FORMAT,
    nanogpt.FORMAT,
    nanochat.FORMAT,
    olmo.FORMAT,
    deepspeed.FORMAT,
    pairs.FORMAT,
    plain.TWO,
    plain.ONE,
)

#: Make a format of a header, where a line is one.
HEADED: tuple[Callable[[str], LineFormat | None], ...] = (table.headed,)
