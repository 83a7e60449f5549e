"""Texts that end a reply."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopTexts"]


class StopTexts:
    """Passes text on until one of `stops` is in it, which is never passed on, nor what follows.

    What may be the beginning of a stop is held back until it is known.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Add text; return what can be shown."""
        if self.hit:
            return ""
        self._held += text
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self.hit = True
            return self._take(min(found), drop=True)
        return self._take(len(self._held) - self._may_begin())

    def finish(self) -> str:
        """Return what was held back, when no more text comes."""
        return "" if self.hit else self._take(len(self._held))

    def _may_begin(self) -> int:
        """The length of the longest end of the text that a stop begins with."""
        longest = max(map(len, self._stops), default=0) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-n:]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0

    def _take(self, n: int, *, drop: bool = False) -> str:
        shown, self._held = self._held[:n], "" if drop else self._held[n:]
        return shown
