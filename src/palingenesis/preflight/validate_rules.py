"""Findings that are made whenever something was seen in samples: how bad it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from palingenesis.events import Severity

#: Share of samples from which odd text is a warning, and not just told.
SHARE_ODD_TEXT = 0.005


@dataclass(frozen=True)
class Rule:
    """What a count under the id ``check`` means. ``told`` is put after the number of samples."""

    check: str
    severity: Severity
    told: str
    fix: str
    #: Share of samples below which it is only told.
    share: float

    @property
    def by_template(self) -> bool:
        """Whether the chat template decides it, where training's own collator is used."""
        return self.fix.startswith("set model.chat_template")


def finding(check: str, severity: Severity, told: str, fix: str, share: float = 0.0) -> Rule:
    """A finding that is made whenever something was seen, ``info`` below a share of samples."""
    return Rule(check, severity, told, fix, share)


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
        "bear loss on every token, the user's included",
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
        share=SHARE_ODD_TEXT,
    ),
    finding(
        "data.control_characters",
        "warning",
        "hold control characters",
        "remove them from the rows, then set data.dataset to the mended file",
        share=SHARE_ODD_TEXT,
    ),
)
