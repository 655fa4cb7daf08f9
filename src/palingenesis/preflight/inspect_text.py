"""An inspection on a terminal and in a pipe: colour where there is any, and marks that need none."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palingenesis.preflight.inspect import Inspection, Shown
from palingenesis.preflight.tokens import Token, runs_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_LOSS, _LOSS_SPECIAL, _MASKED, _SPECIAL, _QUIET = (
    "black on green",
    "bold black on green",
    "default",
    "cyan",
    "dim",
)
#: Widest token in the table.
_WIDEST = 40


@dataclass(frozen=True)
class Marks:
    """What stands for what cannot be seen."""

    opens: str
    closes: str
    newline: str
    tab: str
    space: str
    ascii: bool


UNICODE = Marks("⟦", "⟧", "↵", "⇥", "·", False)
ASCII = Marks("[[", "]]", "\\n", "\\t", "\\s", True)


def print_inspection(found: Inspection, console: Console, *, ascii: bool = False, table: bool = True) -> None:
    """All of it."""
    marks = ASCII if ascii else UNICODE

    def put(text: Text) -> None:
        if console.is_terminal:
            console.print(text, highlight=False, soft_wrap=True)
        else:
            console.print(text.plain, markup=False, highlight=False, soft_wrap=True)

    from rich.text import Text

    put(
        Text.assemble(
            (f"{found.model}; answers found by: {found.method}. ", _QUIET),
            (f"{marks.opens}loss{marks.closes}", _LOSS),
            (" bears loss, the rest is masked", _QUIET),
        )
    )
    for number, shown in enumerate(found.shown, start=1):
        put(Text())
        put(Text(_heading(number, shown), "bold"))
        put(_body(shown, marks))
        if table:
            put(Text())
            _put_table(shown, marks, found.packed, put)
    for refused in found.refused:
        put(Text())
        told = f"{refused.file} line {refused.line} is not trained on: {refused.problem.reason}"
        put(Text(_plain(told, marks), "yellow"))


def _heading(number: int, shown: Shown) -> str:
    count, loss = len(shown.tokens), shown.loss_tokens
    share = loss / count if count else 0.0
    cut = ", cut at data.max_seq_length" if shown.truncated else ""
    if len(shown.places) == 1:
        where = shown.places[0]
    else:
        where = "; ".join(f"{at}: {place}" for at, place in enumerate(shown.places, start=1))
    return f"sample {number} ({shown.title}): {loss} of {count} tokens bear loss ({share:.0%}){cut}; {where}"


def _body(shown: Shown, marks: Marks) -> Text:
    from rich.text import Text

    text = Text()
    document = 1
    for run in runs_of(shown.tokens):
        if run[0].document != document:
            document = run[0].document
            text.append(f"\n--- document {document} ---\n", _QUIET)
        loss = run[0].loss
        if loss:
            text.append(marks.opens, _LOSS)
        for at, token in enumerate(run):
            shown_text = visible(token.text, marks, edges=edges_of(run, at), lines=True)
            text.append(shown_text, _style(token))
        if loss:
            text.append(marks.closes, _LOSS)
    return text


def _style(token: Token) -> str:
    if token.loss:
        return _LOSS_SPECIAL if token.special else _LOSS
    return _SPECIAL if token.special else _MASKED


def _put_table(shown: Shown, marks: Marks, packed: bool, put: Callable[[Text], None]) -> None:
    from rich.text import Text

    texts = [_cell(token, marks) for token in shown.tokens]
    width = min(max((len(text) for text in texts), default=5), _WIDEST)
    extra = f" {'doc':>4} {'pos id':>6}" if packed else ""
    put(Text(f"{'position':>8} {'token':<{width}} {'id':>7} {'turn':<14} {'':<6}{extra}", _QUIET))
    for token, text in zip(shown.tokens, texts, strict=True):
        turn = f"{token.turn} {token.role}" if token.turn else token.role
        extra = f" {token.document:>4} {token.position_id:>6}" if packed else ""
        note = f"  ! {token.note}" if token.note else ""
        word = "LOSS" if token.loss else "masked"
        line = f"{token.position:>8} {text:<{width}} {token.id:>7} {turn:<14} {word:<6}{extra}{note}"
        put(Text(line.rstrip(), "green" if token.loss else _SPECIAL if token.special else _QUIET))


def _cell(token: Token, marks: Marks) -> str:
    # Bytes of a character in the middle of it have no text of their own: the vocabulary's spelling then.
    shown = (
        visible(token.text, marks, edges=(True, True)) if token.text else f"<{_plain(token.piece, marks)}>"
    )
    return shown if len(shown) <= _WIDEST else shown[: _WIDEST - 3] + "..."


def edges_of(run: Sequence[Token], at: int) -> tuple[bool, bool]:
    """Whether blanks before and after the ``at``-th token of a run are to be marked, being overlooked."""
    before = run[at - 1] if at else None
    after = run[at + 1] if at + 1 < len(run) else None
    return (
        before is None or before.special,
        after is None or after.special or after.text.startswith("\n"),
    )


def visible(
    text: str, marks: Marks = UNICODE, *, edges: tuple[bool, bool] = (False, False), lines: bool = False
) -> str:
    """``text`` with everything seen: line breaks and tabs marked, control and zero-width characters spelled.

    Args:
        text: any.
        marks: what stands for what.
        edges: whether to mark spaces at the beginning, and at the end.
        lines: break the line after the mark of a line break.
    """
    shown = []
    inner_start = len(text) - len(text.lstrip(" ")) if edges[0] else 0
    inner_end = len(text.rstrip(" ")) if edges[1] else len(text)
    for at, letter in enumerate(text):
        if letter == "\n":
            shown.append(marks.newline + ("\n" if lines else ""))
        elif letter == "\t":
            shown.append(marks.tab)
        elif letter == " ":
            shown.append(letter if inner_start <= at < inner_end else marks.space)
        elif unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp", "Co", "Cs", "Cn") or (
            letter.isspace() or (marks.ascii and not letter.isascii())
        ):
            shown.append(letter.encode("unicode_escape").decode("ascii"))
        else:
            shown.append(letter)
    return "".join(shown)


def _plain(text: str, marks: Marks) -> str:
    return visible(text, marks) if marks.ascii else text
