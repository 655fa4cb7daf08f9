"""Findings that are made whenever something was seen in samples: how bad it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from palingenesis.events import Severity


@dataclass(frozen=True)
class OddRows:
    """From where on rows that training takes, and that look wrong, are a warning and not just told.

    One rule for all of them: they are a warning from ``fewest`` rows on that are also a share of what was
    looked at. So one odd row is told, among ten rows as among ten thousand: it says nothing of the rest.
    Rows that training leaves out are counted exactly, and masks that are wrong come from a template or a
    collator, which does the same to the next row: for those one is enough. The numbers are conventions.
    """

    fewest: int = 2
    """Rows that are a warning, if they are share enough."""

    text: float = 0.005
    """Share with text that was decoded wrongly, or with control characters."""

    cut: float = 0.01
    """Share that loses an answer, or the end of one, to the greatest length."""

    copies: float = 0.02
    """Share of samples that are copies of another one."""

    def severity(self, count: int, of: int, share: float) -> Severity:
        """How bad ``count`` odd rows of ``of`` are, if a share of ``share`` is a warning."""
        return "warning" if count >= self.fewest and count >= share * of else "info"


ODD = OddRows()


@dataclass(frozen=True)
class Rule:
    """What a count under the id ``check`` means. ``told`` is put after the number of samples."""

    check: str
    severity: Severity
    told: str
    fix: str
    #: Of what training takes although it looks odd, the share from which it is a warning.
    odd: float | None

    @property
    def by_collator(self) -> bool:
        """Whether a collator that was given decides it: else the chat template, or training's own."""
        return self.fix == COLLATOR or self.fix.startswith("set model.chat_template")


def finding(check: str, severity: Severity, told: str, fix: str, odd: float | None = None) -> Rule:
    """A finding that is made whenever something was seen; ``odd`` makes it go by :class:`OddRows`."""
    return Rule(check, severity, told, fix, odd)


MEND = "mend or delete the rows (preprocess.max_bad_rows_pct: 0 makes training refuse them)"
COLLATOR = "train with the collator of palingenesis.sft.data, or set data.packing to false to narrow it down"
OWN_COLLATOR = (
    "mend the collator that was given: its labels are to be the token ids of the answers and -100 everywhere "
    "else; or train with that of palingenesis.sft.data"
)
RULES = (
    finding(
        "masking.labels_shifted",
        "critical",
        "have labels that are not the token at their place: models shift labels themselves",
        COLLATOR,
    ),
    finding(
        "masking.header_trained",
        "critical",
        "train the header before the answer, which is given when the model is used",
        "set model.chat_template to a template whose generation prompt ends where the answer begins",
    ),
    finding(
        "masking.round_trip",
        "critical",
        "train a text that is not the assistant's messages",
        "set model.chat_template to a template with {% generation %} marks around answers",
    ),
    finding(
        "masking.all_loss",
        "critical",
        "bear loss on all of their text, the user's included",
        "set model.chat_template to a template with {% generation %} marks around answers",
    ),
    finding(
        "masking.end_of_turn_untrained",
        "critical",
        "do not train the token that ends the answer, so the model does not learn to stop",
        "set model.chat_template to a template that ends answers with a token of its own",
    ),
    finding("masking.pad_trained", "critical", "stand in rows whose padding bears loss", COLLATOR),
    finding(
        "masking.rows_refused",
        "warning",
        "are left out because of the chat template",
        "set model.chat_template to a template that takes them, or mend the rows",
    ),
    finding(
        "tokenizer.double_bos",
        "critical",
        "begin with two beginning-of-text tokens",
        "set model.chat_template to a template without bos_token, or let the tokenizer add none",
    ),
    finding(
        "tokenizer.missing_bos",
        "warning",
        "do not begin with the beginning-of-text token that the tokenizer puts before any other text",
        "set model.chat_template to a template that begins with bos_token",
    ),
    finding(
        "data.packing_leak",
        "critical",
        "are packed with positions that do not begin at 0: they see what comes before them",
        "set data.packing to false",
    ),
    finding("data.broken_json", "warning", "are no JSON and are left out", MEND),
    finding("data.bad_value", "warning", "hold something of the wrong kind and are left out", MEND),
    finding(
        "data.role_order",
        "warning",
        "have messages in an order that no conversation has and are left out",
        MEND,
    ),
    finding("data.empty_answer", "warning", "have an answer without text and are left out", MEND),
    finding("data.control_token", "warning", "hold a control token in their text and are left out", MEND),
    finding(
        "data.mojibake",
        "warning",
        "hold text that was decoded wrongly",
        "decode the rows anew (ftfy mends most), then set data.dataset to the mended file",
        odd=ODD.text,
    ),
    finding(
        "data.control_characters",
        "warning",
        "hold control characters",
        "remove them from the rows, then set data.dataset to the mended file",
        odd=ODD.text,
    ),
)
