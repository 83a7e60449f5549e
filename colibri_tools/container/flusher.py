"""Writes that reach the disk while a job goes on, so that the final sync is short."""

from __future__ import annotations

import os
import threading

__all__ = ["Flusher"]

FLUSH_BYTES = 256 << 20


class Flusher:
    """Syncs a file from a thread of its own each time FLUSH_BYTES more have been written.

    Pages that are on disk are dropped from the page cache: nobody reads them soon, and a memory
    cgroup counts them. An error is raised by the next `wrote` or by `stop`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unflushed = 0
        self._condition = threading.Condition()
        self._stopping = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def wrote(self, n_bytes: int) -> None:
        """Count bytes that were written. Thread-safe. Raises the OSError that a sync met."""
        with self._condition:
            if self._error is not None:
                raise self._error
            self._unflushed += n_bytes
            if self._unflushed < FLUSH_BYTES or self._stopping:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flusher", daemon=True)
                self._thread.start()
            self._condition.notify()

    def stop(self) -> None:
        """Wait for the thread. Raises the OSError that a sync met."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._wait():
            try:
                os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                self._error = error
                return

    def _wait(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._stopping or self._unflushed >= FLUSH_BYTES)
            self._unflushed = 0
            return not self._stopping
