"""A document token by token: its text, whose turn it is, whether it bears loss, and what is odd about it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palingenesis.preflight.samples import Document, Reader
from palingenesis.sft.data import IGNORED, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What a decoder gives for bytes that are no whole character yet.
_UNFINISHED = "\ufffd"
TEMPLATE, TEXT, UNKNOWN = "template", "text", "?"


@dataclass(frozen=True)
class Token:
    """One token of a document.

    Attributes:
        text: the characters it adds. Of tokens that make up one character, the first has it, or the last.
        piece: the token as the vocabulary has it.
        role: whose turn: system, user, assistant or tool; ``template`` for what the chat template writes
            around them, ``text`` for plain text, ``?`` where it is not certain.
        turn: number of the message, from 1; 0 where there is none.
        loss: whether it bears loss.
        special: whether it is one of the tokenizer's own tokens.
        note: what is odd: a merge over the border of what is trained, or one that was taken apart.
    """

    position: int
    text: str
    piece: str
    id: int
    role: str
    turn: int
    loss: bool
    special: bool
    document: int
    position_id: int
    note: str = ""


@dataclass(frozen=True)
class _Turn:
    start: int
    end: int
    role: str
    number: int


def tokens_of(document: Document, reader: Reader, *, number: int = 1, start: int = 0) -> list[Token]:
    """The tokens of a document, which is the ``number``-th of its row and begins there at ``start``."""
    tokenizer = reader.tokenizer
    ids = [int(token) for token in document.ids]
    origin = document.sample.encoded.origin
    turns: list[_Turn] = []
    if origin is None:
        texts, elsewhere = _decoded(tokenizer, ids), TEXT
    else:
        texts = _from_text(origin, len(ids))
        turns, all_found = _turns(document, reader, origin)
        elsewhere = TEMPLATE if all_found else UNKNOWN
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    pieces: Any = tokenizer.convert_ids_to_tokens(ids)
    found = []
    for at, (token, text, label) in enumerate(zip(ids, texts, document.labels, strict=True)):
        role, turn, note = elsewhere, 0, ""
        if origin is not None:
            span = origin.offsets[at]
            role, turn = _whose(span, turns) or (elsewhere, 0)
            note = _note(span, origin)
        found.append(
            Token(
                position=start + at,
                text=text,
                piece=str(pieces[at]),
                id=token,
                role=role,
                turn=turn,
                loss=int(label) != IGNORED,
                special=token in special,
                document=number,
                position_id=int(document.positions[at]),
                note=note,
            )
        )
    return found


def runs_of(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Unbroken runs of tokens of one document that all bear loss, or all do not."""
    run: list[Token] = []
    for token in tokens:
        if run and (run[-1].loss, run[-1].document) != (token.loss, token.document):
            yield run
            run = []
        run.append(token)
    if run:
        yield run


def _from_text(origin: Origin, count: int) -> list[str]:
    """Every character of the text once: with the first token that holds it."""
    texts, shown = [], 0
    for start, end in origin.offsets[:count]:
        # What lies between two tokens is what the tokenizer drops: it goes with the token that follows.
        texts.append(origin.text[min(shown, start) : end] if end > shown else "")
        shown = max(shown, end)
    return texts


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens goes with the last of them."""
    texts: list[str] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = str(tokenizer.decode(waiting, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if text.endswith(_UNFINISHED) and len(waiting) < 4:
            texts.append("")
            continue
        texts.append(text)
        waiting = []
    return texts


def _turns(document: Document, reader: Reader, origin: Origin) -> tuple[list[_Turn], bool]:
    """Where each message stands in the text, in order, and whether that is known of every one."""
    messages, tools = document.sample.messages, document.sample.tools
    masker = reader.require_masker()
    trained = {span.index: span for span in origin.spans}
    turns, all_found = [], True
    for index, message in enumerate(messages):
        if index in trained:
            place: tuple[int, int] | None = (trained[index].start, trained[index].end)
        else:
            place = masker.place_of_content(origin.text, messages, index, tools=tools)
        if place is not None:
            turns.append(_Turn(*place, message.role, index + 1))
        all_found &= place is not None
    return sorted(turns, key=lambda turn: turn.start), all_found


def _whose(span: tuple[int, int], turns: Sequence[_Turn]) -> tuple[str, int] | None:
    """The turn that holds most of a token, if any does."""
    start, end = span
    at = bisect_right([turn.start for turn in turns], start) - 1
    best: tuple[str, int] | None = None
    most = 0
    for turn in turns[max(at, 0) : at + 2]:
        shared = min(end, turn.end) - max(start, turn.start)
        if shared > most:
            best, most = (turn.role, turn.number), shared
    return best


def _note(span: tuple[int, int], origin: Origin) -> str:
    start, end = span
    borders = {border for trained in origin.spans for border in (trained.start, trained.end)}
    if any(start < border < end for border in borders):
        return "reaches over the border of what is trained"
    if start in origin.cuts:
        return "taken apart from the prompt's last token, which it would be joined with"
    return ""
