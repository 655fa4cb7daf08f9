"""From counts to findings: which of what was seen is worth a person's time, and what to do about it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from palingenesis.events import Severity
from palingenesis.findings import Finding
from palingenesis.preflight.checks.setup import ENLARGE, ModelFacts
from palingenesis.preflight.checks.text import SCRIPTS
from palingenesis.preflight.samples import Split
from palingenesis.preflight.tally import NAMED, Seen, Tally
from palingenesis.preflight.validate_rules import COLLATOR, MEND, ODD, OWN_COLLATOR, RULES, Rule

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig

#: Share of loss-bearing tokens below which most of the computing goes into context.
LEAST_LOSS = 0.02
#: Share of padding from which packing is worth a thought.
MOST_PADDING = 0.4
#: A sample is far from the rest if its length is beyond so many robust deviations, of logarithms, from the
#: median, and so many times as long.
FAR_DEVIATIONS, FAR_TIMES = 6.0, 10.0
#: A script is far from the rest if it is that of few samples while another is that of nearly all.
RARE_SCRIPT, MAIN_SCRIPT = 0.02, 0.9
#: Samples below which nothing is far from the rest.
FEWEST = 50


@dataclass(frozen=True)
class Judge:
    """Makes findings of the counts of one split."""

    config: TrainConfig
    tally: Tally
    split: Split
    facts: ModelFacts
    pad_is_end: bool = False
    own_collator: bool = False

    def findings(self) -> Iterator[Finding]:
        """All of them."""
        yield from self.seen()
        for judge in (
            self._too_many_bad,
            self._cut,
            self._little_loss,
            self._copies,
            self._too_long,
            self._outside,
            self._far_lengths,
            self._far_scripts,
        ):
            yield from judge()

    def seen(self) -> Iterator[Finding]:
        """Those that are made wherever something was seen, however few rows were looked at."""
        for rule in RULES:
            if seen := self.tally.seen.get(rule.check):
                yield self._by_rule(seen, rule)
        yield from self._no_loss()
        yield from self._missing_field()

    # -- words -----------------------------------------------------------------------------------------------

    def _rows(self) -> int:
        return self.tally.rows.total()

    def _samples(self) -> str:
        return "evaluation samples" if self.split == "eval" else "samples"

    def _evidence(self, places: Sequence[tuple[str, int]], **numbers: Any) -> dict[str, Any]:
        return _evidence(self.tally, self.split, places, **numbers)

    def _by_rule(self, seen: Seen, rule: Rule) -> Finding:
        share = seen.count / max(self._rows(), 1)
        severity = rule.severity
        if rule.odd is not None:
            severity = ODD.severity(seen.count, self._rows(), rule.odd)
        message = f"{seen.count} of {self._rows()} {self._samples()} {rule.told}"
        if seen.example:
            message += f"; line {seen.places[0][1]}: {seen.example}"
        numbers: dict[str, Any] = {"count": seen.count, "share": share}
        fix = OWN_COLLATOR if self.own_collator and rule.by_collator else rule.fix
        if rule.check == "masking.end_of_turn_untrained" and self.pad_is_end:
            numbers["pad_is_end_of_turn"] = True
            fix = (
                "the token that ends answers also pads, and the collator masks it wherever it stands: take a "
                "collator that masks by attention_mask, or give the tokenizer a pad_token of its own and "
                "set model.name_or_path to where it is saved"
            )
        return Finding(rule.check, severity, message, self._evidence(seen.places, **numbers), fix)

    # -- one concern each ------------------------------------------------------------------------------------

    def _no_loss(self) -> Iterator[Finding]:
        seen = self.tally.seen.get("masking.no_loss_tokens")
        if seen is None:
            return
        lost = dict(self.tally.lost)
        fixes = {
            "truncation": self._make_room(),
            "weights": "give an answer of the row a weight of 1, or delete the row from data.dataset",
            "turns": "set data.last_turn_only to false",
            "collator": OWN_COLLATOR if self.own_collator else COLLATOR,
        }
        most = max(lost, key=lambda cause: lost[cause])
        severity: Severity = "critical" if "collator" in lost or seen.count == self._rows() else "warning"
        yield Finding(
            "masking.no_loss_tokens",
            severity,
            f"{seen.count} of {self._rows()} {self._samples()} have no token that bears loss "
            f"(lost by {', '.join(f'{cause}: {count}' for cause, count in lost.items())})",
            self._evidence(seen.places, count=seen.count, share=seen.count / self._rows(), lost=lost),
            fixes[most],
        )

    def _missing_field(self) -> Iterator[Finding]:
        seen = self.tally.seen.get("data.missing_field")
        if seen is None:
            return
        likely = self.tally.proposals.most_common(1)
        proposal = likely[0][0] if likely else "set data.messages_field to the field that holds the messages"
        yield Finding(
            "data.missing_field",
            "warning",
            f"{seen.count} of {self._rows()} {self._samples()} lack a field and are left out; "
            f"line {seen.places[0][1]}: {seen.example}",
            self._evidence(seen.places, count=seen.count, fields=dict(self.tally.fields.most_common(20))),
            f"{proposal}, or {MEND}",
        )

    def _too_many_bad(self) -> Iterator[Finding]:
        allowed = self.config.preprocess.max_bad_rows_pct
        for source, rows in self.tally.rows.items():
            bad = 100 * (rows - self.tally.used[source]) / rows
            if bad > allowed:
                yield Finding(
                    "data.too_many_bad_rows",
                    "critical",
                    f"{bad:.3g}% of the rows of {source} are left out, and training allows {allowed:g}%",
                    {"split": self.split, "source": source, "percent": bad, "allowed": allowed},
                    f"mend the rows, or set preprocess.max_bad_rows_pct to {np.ceil(bad):g}",
                )

    def _cut(self) -> Iterator[Finding]:
        count = self.tally.answers_cut
        if not count:
            return
        share = count / self._rows()
        yield Finding(
            "data.answers_cut",
            ODD.severity(count, self._rows(), ODD.cut),
            f"{count} of {self._rows()} {self._samples()} ({share:.1%}) lose an answer, or the end of one, "
            f"to data.max_seq_length {self.config.data.max_seq_length}",
            self._evidence(
                self.tally.cut_places,
                count=count,
                share=share,
                lost_all=self.tally.lost["truncation"],
                longest=self.tally.longest_cut,
            ),
            self._make_room(),
        )

    def _make_room(self) -> str:
        """What is to be done about rows that are cut."""
        longest, positions = self.tally.longest_cut, self.facts.positions
        if positions is None or longest <= positions:
            return f"set data.max_seq_length to {longest}"
        if (self.config.data.max_seq_length or 0) >= positions:
            return (
                f"shorten the rows: data.max_seq_length {positions} is all that the model has positions for"
            )
        return f"set data.max_seq_length to {positions}, which is all the model has, and shorten the rest"

    def _little_loss(self) -> Iterator[Finding]:
        length, loss = _array(self.tally.length), _array(self.tally.loss)
        total = int(length.sum())
        share = int(loss.sum()) / total if total else 1.0
        if share < LEAST_LOSS:
            yield Finding(
                "masking.little_loss",
                "info",
                f"{share:.2%} of the tokens bear loss: the rest of the computing goes into context",
                {"split": self.split, "share": share, "tokens": total},
                "shorten the context, or set data.packing to true to waste nothing beside it",
            )

    def _copies(self) -> Iterator[Finding]:
        groups = copies(_array(self.tally.content))
        extra = sum(len(group) - 1 for group in groups)
        if not extra:
            return
        count = len(self.tally.content)
        yield Finding(
            "data.duplicates",
            ODD.severity(extra, count, ODD.copies),
            f"{extra} of {count} {self._samples()} ({extra / count:.1%}) are copies of another one",
            self._evidence(
                [self._place(index) for group in groups[:5] for index in group[:4]],
                count=extra,
                share=extra / count,
            ),
            "delete the copies from data.dataset, unless more weight for them is wanted",
        )

    def _too_long(self) -> Iterator[Finding]:
        length, positions = _array(self.tally.length), self.facts.positions
        if positions is None:
            return
        long = np.flatnonzero(length > positions)
        if len(long):
            yield Finding(
                "data.longer_than_model",
                "warning",
                f"{len(long)} of {len(length)} {self._samples()} have up to {length.max()} tokens, and the "
                f"model has positions for {positions}",
                self._evidence([self._place(i) for i in long[:NAMED]], count=len(long), positions=positions),
                f"set data.max_seq_length to {positions}",
            )

    def _outside(self) -> Iterator[Finding]:
        vocabulary = self.facts.vocabulary
        if vocabulary is not None and self.tally.largest_id >= vocabulary:
            yield Finding(
                "tokenizer.ids_outside_embedding",
                "critical",
                f"the data has token {self.tally.largest_id} and the model's embedding has {vocabulary} rows",
                {"split": self.split, "largest_id": self.tally.largest_id, "vocabulary": vocabulary},
                ENLARGE,
            )

    def _far_lengths(self) -> Iterator[Finding]:
        whole = _array(self.tally.whole).astype(float)
        if len(whole) < FEWEST:
            return
        logs = np.log(whole)
        middle = float(np.median(logs))
        spread = 1.4826 * float(np.median(np.abs(logs - middle)))
        limit = max(FAR_DEVIATIONS * spread, float(np.log(FAR_TIMES)))
        far = np.flatnonzero(np.abs(logs - middle) > limit)
        if len(far):
            yield Finding(
                "data.far_lengths",
                "info",
                f"{len(far)} {self._samples()} have lengths far from the rest, up to {whole[far].max():g} "
                f"tokens where half have at most {np.exp(middle):.0f}",
                self._evidence([self._place(i) for i in far[:NAMED]], count=len(far)),
                "look at them with pgs inspect --index; data.max_seq_length cuts the long ones",
            )

    def _far_scripts(self) -> Iterator[Finding]:
        script = _array(self.tally.script)
        written = script[script < len(SCRIPTS) - 1]
        if len(written) < FEWEST:
            return
        counts = Counter(written.tolist())
        main, most = counts.most_common(1)[0]
        rare = {number for number, count in counts.items() if count < RARE_SCRIPT * len(written)}
        if most < MAIN_SCRIPT * len(written) or not rare:
            return
        far = np.flatnonzero(np.isin(script, list(rare)))
        yield Finding(
            "data.far_scripts",
            "info",
            f"{len(far)} {self._samples()} are written in {', '.join(SCRIPTS[n] for n in sorted(rare))}, and "
            f"{most} of {len(written)} in {SCRIPTS[main]}",
            self._evidence([self._place(i) for i in far[:NAMED]], count=len(far)),
            "look at them with pgs inspect --index; delete them from data.dataset if they are not wanted",
        )

    def _place(self, index: int) -> tuple[str, int]:
        return _place(self.tally, index)


def leaked(train: Tally, held_out: Tally) -> list[Finding]:
    """Evaluation samples that are trained on."""
    known = np.unique(_array(train.content))
    same = np.flatnonzero(np.isin(_array(held_out.content), known))
    if not len(same):
        return []
    count = len(held_out.content)
    places = [_place(held_out, index) for index in same[:NAMED]]
    return [
        Finding(
            "data.eval_leak",
            "warning",
            f"{len(same)} of {count} evaluation samples ({len(same) / count:.1%}) are trained on as well, so "
            "eval/loss measures memory",
            _evidence(held_out, "eval", places, count=len(same), share=len(same) / count),
            "set data.eval_dataset to rows that data.dataset does not have",
        )
    ]


def questions_known(train: Tally, held_out: Tally) -> int:
    """Evaluation samples whose question, with all that precedes it, is trained on, whatever the answer."""
    asked = _array(held_out.prompt)
    return int(np.isin(asked[asked != 0], np.unique(_array(train.prompt))).sum())


def _evidence(
    tally: Tally, split: Split, places: Sequence[tuple[str, int]], **numbers: Any
) -> dict[str, Any]:
    """Where, then how many: lines of the one file, or lines by source."""
    by_source: dict[str, list[int]] = defaultdict(list)
    for source, line in places[:NAMED]:
        by_source[source].append(line)
    lines: Any = dict(by_source)
    if len(tally.rows) == 1 and by_source:
        (lines,) = by_source.values()
    where = {"lines": lines} if by_source else {}
    return {"split": split, **where, **numbers}


def _place(tally: Tally, index: int) -> tuple[str, int]:
    return tally.sources[tally.source[index]], tally.line[index]


def copies(hashes: NDArray[Any]) -> list[list[int]]:
    """Groups of equal ones, by index, the group that begins first first."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    groups = [group.tolist() for group in np.split(order, edges) if len(group) > 1]
    return sorted(groups)


def _array(values: Any) -> NDArray[Any]:
    return np.asarray(values)
