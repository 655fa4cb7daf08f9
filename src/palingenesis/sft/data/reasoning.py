"""Where the reasoning before an answer lies in rendered text, by the marks that open and close it."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: What opens and what closes a model's reasoning, in the chat templates in use.
MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought", "<channel|>"),
)
_AT_THE_END = re.compile(
    "(?:" + "|".join(rf"{re.escape(opens)}\s*(?:{re.escape(closes)}\s*)?" for opens, closes in MARKS) + ")$"
)


@dataclass(frozen=True)
class Reasoning:
    """``start`` to ``end`` in the text, marks and the blank space after them included."""

    start: int
    end: int
    empty: bool


def find_reasoning(text: str, start: int, end: int) -> Reasoning | None:
    """The reasoning that an answer, at ``start`` to ``end`` in ``text``, begins with.

    The opening mark may stand before ``start``, where the template puts it into the prompt.
    """
    answer, before = text[start:end], start
    blank = len(answer) - len(answer.lstrip())
    while before and text[before - 1].isspace():
        before -= 1
    for opens, closes in MARKS:
        if answer.startswith(opens, blank):
            begin = blank + len(opens)
        elif text.endswith(opens, 0, before):
            begin = 0
        else:
            continue
        close = answer.find(closes, begin)
        if close < 0:
            return None
        after = close + len(closes)
        after += len(answer[after:]) - len(answer[after:].lstrip())
        return Reasoning(start, start + after, not answer[begin:close].strip())
    return None


def without_opening(prompt: str) -> str:
    """A prompt without the mark (or the empty reasoning) that asks for reasoning at its end."""
    return _AT_THE_END.sub("", prompt)


def is_mark(token: str) -> bool:
    """Whether a token only opens or closes reasoning."""
    return any(token in marks for marks in MARKS)
