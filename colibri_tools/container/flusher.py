"""Writes that reach the disk while a job goes on, and a journal that says which ones did."""

from __future__ import annotations

import errno
import os
import threading

from colibri_tools.container.journal import Entry, Journal

__all__ = ["Flusher"]

FLUSH_BYTES = 256 << 20


class Flusher:
    """Syncs a file from a thread of its own each time FLUSH_BYTES more have been written.

    Entries finished before a sync are journaled after it. Pages that are on disk are dropped from
    the page cache: nobody reads them soon, and a memory cgroup counts them.

    An error is raised by the next call, and by every one after it: after a failed sync the system
    may forget which pages it lost, so a later success would prove nothing.
    """

    def __init__(self, fd: int, journal: Journal) -> None:
        self._fd = fd
        self._journal = journal
        self._pending: list[Entry] = []
        self._unflushed = 0
        self._condition = threading.Condition()
        self._stopping = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def wrote(self, n_bytes: int) -> None:
        """Count bytes that were written. Thread-safe. Raises the OSError that a sync met."""
        with self._condition:
            self._check()
            self._unflushed += n_bytes
            if self._unflushed < FLUSH_BYTES or self._stopping:
                return
            if self._thread is None:
                self._thread = self._start()
            self._condition.notify()

    def finished(self, entry: Entry) -> None:
        """Remember a tensor or block whose bytes have all been written. Thread-safe."""
        with self._condition:
            self._pending.append(entry)

    def stop(self) -> None:
        """Wait for the thread. Raises the OSError that a sync met."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._check()

    def flush(self) -> None:
        """Sync, then journal what was finished before. Raises OSError."""
        self._check()
        with self._condition:
            pending, self._pending = self._pending, []
        try:
            os.fdatasync(self._fd)
            self._journal.append(pending)
        except OSError as error:
            self._error = error
            raise

    def sync(self) -> None:
        """Sync the file with its size and nothing else. Raises OSError."""
        self._check()
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._error = error
            raise

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="flusher", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a thread that the system does not grant
            raise OSError(errno.EAGAIN, "can't start a thread (ulimit -a)") from error
        return thread

    def _run(self) -> None:
        while self._wait():
            try:
                self.flush()
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                self._error = error
                return

    def _wait(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._stopping or self._unflushed >= FLUSH_BYTES)
            self._unflushed = 0
            return not self._stopping
