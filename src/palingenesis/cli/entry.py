"""From words on the command line to an exit code, with every failure told in one line.

Exit codes: 0 healthy, 1 something was found, 2 bad input or usage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer
from typer.main import get_command

from palingenesis.cli.app import app
from palingenesis.cli.codes import BAD_INPUT, BROKEN_PIPE, INTERRUPTED, OK
from palingenesis.errors import PalingenesisError

_PROGRAM = "pgs"
#: What typer's validator puts before its own sentence.
_VALIDATOR_PREFIX = "Value error, "


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    _print_anything()
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough.
        _drop_what_is_buffered()
        return BROKEN_PIPE
    except OSError as error:
        # Errors of a file name it; one without a name comes from writing to stdout: a full disk behind `>`.
        if error.filename is not None:
            raise
        _drop_what_is_buffered()
        return _fail(
            f"the output could not be written: {error.strerror or error}; send it somewhere with room for it"
        )


def _drop_what_is_buffered() -> None:
    """Keep the interpreter from flushing, at its end, into what takes no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    try:
        code = get_command(app).main(arguments, prog_name=_PROGRAM, standalone_mode=False)
    except PalingenesisError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit:  # what typer makes of a pipe closed while a command prints
        raise BrokenPipeError from None
    except Exception as error:
        # Usage errors: their classes live in click or in typer, depending on typer's version.
        tell = getattr(error, "format_message", None)
        if tell is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{tell()}\n")
            return BAD_INPUT
        return _fail(_usage_message(error, tell()))
    return code if isinstance(code, int) else OK


def _usage_message(error: Exception, told: str) -> str:
    possible = getattr(error, "possibilities", None)
    if possible:
        told = f"{getattr(error, 'message', told)}. Did you mean {sorted(possible)[0]}?"
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", _PROGRAM)
    told = told.replace(_VALIDATOR_PREFIX, "")
    sentence = told if told.endswith((".", "?")) else f"{told}."
    return f"{sentence} See '{command} --help'."


def _fail(message: str) -> int:
    sys.stderr.write(f"{_PROGRAM}: error: {' '.join(message.split())}\n")
    return BAD_INPUT


def _print_anything() -> None:
    """Let a layer's name in any script pass through a terminal that cannot show it."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
