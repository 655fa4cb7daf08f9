"""Data for fine-tuning: conversations and plain text in, token ids and labels out.

    sources     files, folders and hub names to rows
    messages    a row in any of the usual forms to messages
    template    a chat template's answers, found for certain or refused
    masking     messages to token ids and labels: what ``pgs inspect`` and ``pgs validate`` call too
    quarantine  rows that cannot be used, counted and kept
    mixture     the order of several sources by weight
    packing     several documents in a row, proven apart
    prepare     all of it, with an account of what became of every row

Nothing here imports torch, transformers or datasets before it is used.
"""

from __future__ import annotations

from palingenesis.sft.data.masking import IGNORED, Encoded, Masker, MaskOptions, Origin, Span, encode_text
from palingenesis.sft.data.messages import Message, normalize, text_of, tools_of
from palingenesis.sft.data.mixture import order
from palingenesis.sft.data.packing import collator, measure_isolation, pack, require_isolation
from palingenesis.sft.data.prepare import Account, Prepared, join, mix, prepare, samples_of
from palingenesis.sft.data.quarantine import SKIPPED_FILE, Quarantine
from palingenesis.sft.data.rows import BadRow, Row
from palingenesis.sft.data.sources import Source, load_rows
from palingenesis.sft.data.template import RefusedTemplate

__all__ = [
    "IGNORED",
    "SKIPPED_FILE",
    "Account",
    "BadRow",
    "Encoded",
    "MaskOptions",
    "Masker",
    "Message",
    "Origin",
    "Prepared",
    "Quarantine",
    "RefusedTemplate",
    "Row",
    "Source",
    "Span",
    "collator",
    "encode_text",
    "join",
    "load_rows",
    "measure_isolation",
    "mix",
    "normalize",
    "order",
    "pack",
    "prepare",
    "require_isolation",
    "samples_of",
    "text_of",
    "tools_of",
]
