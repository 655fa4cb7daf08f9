"""The errors a user can cause, and nothing else.

    PalingenesisError
    ├── ConfigError        an option has a value that cannot work
    ├── LayerError         the model holds nothing to watch, or the patterns match nothing
    ├── MonitorClosedError step() or close() after close()
    ├── RecordError        a run folder that cannot be read or written as asked
    │   ├── RecordExistsError   the folder already holds a run
    │   └── RecordBusyError     another process is writing to the folder
    ├── RunLogError        a log that cannot be read, or that holds no loss
    └── MissingExtraError  a feature needs a package that is not installed

Every message is one line and says what was given, what was expected and what to do; the command
line prints it as it is and exits with 2.
"""

from __future__ import annotations


class PalingenesisError(Exception):
    """Base of every error that a user can cause and mend."""


class ConfigError(PalingenesisError, ValueError):
    """An option has a value that cannot work."""


class LayerError(PalingenesisError, ValueError):
    """The model holds nothing to watch, or the patterns given match nothing."""


class MonitorClosedError(PalingenesisError, RuntimeError):
    """``step()`` or ``close()`` was called after ``close()``."""


class RecordError(PalingenesisError):
    """A run folder cannot be read or written as asked."""


class RecordExistsError(RecordError):
    """The folder already holds a run, and neither ``resume`` nor ``overwrite`` was asked for."""


class RecordBusyError(RecordError):
    """Another process is writing to the folder."""


class RunLogError(PalingenesisError):
    """A log of a trainer cannot be read, is of no known format, or holds no loss."""


class MissingExtraError(PalingenesisError, ImportError):
    """A feature needs a package that is not installed; the message names the extra."""
