"""What a log tells besides numbers: skipped steps, overflows, warnings, errors; also ranks and progress bars.

Lines of any program are looked at, so every pattern is plain text that trainers are known to write.
"""

from __future__ import annotations

import re

from palingenesis.runlogs.table import EventKind

#: Colours and other orders to a terminal.
ANSI = re.compile(
    r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)?|[()][0-9A-B]|[=>78cDEHM])"
)

#: ``[rank0]:``, ``[default1]:``, ``[Rank 3]``, ``rank=2 |``: which process wrote a line.
RANK = re.compile(r"^\W{0,8}(?:default|(?:global[ _])?rank)[ =:]?\s?(\d{1,6})\b", re.IGNORECASE)

#: A progress bar of tqdm, without a word before it: ``  3%|▎  | 30/1000 [00:05<02:41, 6.0it/s]``.
BAR = re.compile(r"^\s{0,200}\d{1,3}%\|[^|]{0,400}\|\s*(\d{1,12})/(\d{1,12}) \[")

#: Told in a log of the libraries at the start.
TOTAL = re.compile(r"Total optimization steps\s*=\s*([\d,]{1,20})|--?max[-_]steps[ =](\d{1,12})\b")

_KINDS: tuple[tuple[EventKind, str], ...] = (
    (
        "overflow",
        r"OVERFLOW!|[Gg]radient overflow|[Oo]verflow detected|found_inf|[Ff]ound inf\b|[Ff]ound NaN or "
        r"[Ii]nf",
    ),
    (
        "skipped",
        r"[Ss]kipping (?:this )?(?:step|update|batch|iteration)|[Ss]tep (?:was )?skipped|optimizer step "
        r"skipped",
    ),
    (
        "nonfinite",
        r"[Ll]oss is (?i:nan|inf|infinite|not finite|non-finite)|(?i:nan|inf) (?:detected|encountered|found)|"
        r"[Nn]on-?finite|[Nn]a[Nn] or [Ii]nf found|nan_loss|NaN loss",
    ),
    (
        "error",
        r"^Traceback \(most recent call last\)|(?:^|\s)(?:\w+\.)*\w*(?:Error|Exception): |"
        r"out of memory|OutOfMemory|\bERROR\b|\bCRITICAL\b|\bFATAL\b|Segmentation "
        r"fault|\bSIG(?:KILL|TERM|SEGV|ABRT)\b|"
        r"ncclInternalError|NCCL (?:error|timeout)|Watchdog caught collective operation timeout",
    ),
    ("warning", r"\bWARN(?:ING)?\b|\b\w*Warning: |^[Ww]arning: "),
)
_ANY = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _KINDS), re.MULTILINE)
#: Every pattern has one of these in it, in lower case; most lines have none.
_HINT = re.compile(
    "verflow|ound_inf|ound inf|ound NaN|kipp|oss is|detected|encountered|inite|nan_loss|NaN|nan "
    "|Traceback|Error|"
    "Exception|memory|OutOfM|ERROR|CRITICAL|FATAL|fault|SIG|NCCL|Watchdog|WARN|arning|OVERFLOW|inf "
    "found|Inf found"
)
#: Errors that end a process, and are not only told by it.
_FATAL = re.compile(
    r"Traceback|(?:Error|Exception)\b|out of memory|OutOfMemory|FATAL|Segmentation "
    r"fault|SIG(?:KILL|TERM|SEGV|ABRT)"
)
#: Kinds that programs tell of at the level of information.
_COUNTED = ("skipped", "overflow")
_INFO = re.compile(r"\b(?:INFO|DEBUG)\b")
#: Characters in which the level of a line stands.
_PREFIX = 120
#: Characters of a line that are kept.
_KEPT = 300


def happened(text: str) -> tuple[EventKind, str] | None:
    """What a line tells, if it does, and the line, cut to a readable length."""
    if _HINT.search(text) is None:
        return None
    found = _ANY.search(text)
    if found is None or found.lastgroup is None:
        return None
    kind: EventKind = found.lastgroup  # type: ignore[assignment]
    if kind not in _COUNTED and _INFO.search(text[:_PREFIX]):
        return None  # its own program does not take it for more
    text = " ".join(text.split())
    return kind, text if len(text) <= _KEPT else text[: _KEPT - 1] + "…"


def is_fatal(text: str) -> bool:
    """Whether an error is one that ends a process."""
    return _FATAL.search(text) is not None
