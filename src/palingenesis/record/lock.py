"""One writer to a folder, whichever process it lives in.

The operating system holds the lock, so a killed process leaves none behind. Some shared file systems have no
locks; there the run goes on without one, and says so.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

from filelock import FileLock, Timeout

from palingenesis.errors import RecordBusyError
from palingenesis.record.format import LOCK_FILE

_log = logging.getLogger("palingenesis")

_NO_LOCKS_HERE = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})


class FolderLock:
    """Held from construction to :meth:`release`.

    Raises:
        RecordBusyError: another writer holds the folder.
        OSError: the lock file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        # Not thread-local: the thread that closes a monitor need not be the one that made it.
        self._lock: FileLock | None = FileLock(self._path, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RecordBusyError(
                f"another monitor is writing to {folder}: wait for it to end, or choose another folder"
            ) from None
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS_HERE:
                raise
            self._lock = None
            _log.warning(
                "the file system of %s has no locks: make sure that no other run writes there", folder
            )
        self._identity = self._identify()

    def is_in_place(self) -> bool:
        """Whether the lock file is still the one that was locked, so that others would meet it."""
        return self._lock is None or self._identify() == self._identity

    def _identify(self) -> tuple[int, int] | None:
        try:
            there = os.stat(self._path)
        except OSError:
            return None
        return there.st_dev, there.st_ino

    def release(self) -> None:
        if self._lock is None:
            return
        if self.is_in_place():
            # Before releasing, so that only our own lock file can be hit; where an open file cannot be
            # removed it stays behind, empty and harmless.
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._lock.release()
        self._lock = None
