"""Find stop strings in a growing text, in a time that hardly depends on how many there are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class StopStrings:
    """The stop strings of a request, sorted.

    A text that ends with several of them is looked up once: the greatest string that is not above its
    end, and that string's own beginnings, are all that can match. Both orders are kept, for what
    ends at a place and for what may begin at one.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._sorted = sorted(set(strings))
        self._reversed = sorted(string[::-1] for string in self._sorted)
        self._shorter = _longest_beginnings(self._reversed)
        self._max_len = max(map(len, self._sorted), default=0)
        self._first_chars = frozenset(string[0] for string in self._sorted)
        self._last_chars = frozenset(string[-1] for string in self._sorted)

    def find(self, text: str, num_chars: int) -> tuple[int, str] | None:
        """Where the first stop string begins that ends after `num_chars` characters, and the string.

        Of several that begin there, the shortest.
        """
        first: tuple[int, str] | None = None
        for end in range(num_chars + 1, len(text) + 1):
            if text[end - 1] not in self._last_chars:
                continue
            string = self._longest_at_end(text[max(0, end - self._max_len) : end])
            if string and (first is None or end - len(string) < first[0]):
                first = end - len(string), string
        return first

    def _longest_at_end(self, text: str) -> str:
        """The longest stop string that a text ends with; "" if none."""
        backwards = text[::-1]
        place = bisect_right(self._reversed, backwards) - 1
        while place >= 0 and not backwards.startswith(self._reversed[place]):
            place = self._shorter[place]
        return self._reversed[place][::-1] if place >= 0 else ""

    def held_len(self, text: str, num_emitted: int) -> int:
        """Length of the longest end of a text that a stop string begins with, and goes on after.

        Args:
            num_emitted: characters of the text that cannot be held any more.
        """
        for begin in range(max(num_emitted, len(text) - self._max_len + 1), len(text)):
            if text[begin] in self._first_chars:
                end = text[begin:]
                place = bisect_right(self._sorted, end)
                if place < len(self._sorted) and self._sorted[place].startswith(end):
                    return len(end)
        return 0


def _longest_beginnings(strings: list[str]) -> list[int]:
    """For each of some sorted strings, the place of the longest other that it begins with; -1: none."""
    beginnings: list[int] = []
    for place, string in enumerate(strings):
        shorter = place - 1
        while shorter >= 0 and not string.startswith(strings[shorter]):
            shorter = beginnings[shorter]
        beginnings.append(shorter)
    return beginnings
