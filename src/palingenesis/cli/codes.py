"""Exit codes of every command."""

from __future__ import annotations

OK = 0
FOUND = 1
BAD_INPUT = 2
#: What a shell reports for a program ended by Ctrl-C (128 + SIGINT) or by a closed pipe (128 + SIGPIPE).
INTERRUPTED = 130
BROKEN_PIPE = 141
