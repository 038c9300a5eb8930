"""A growing text that knows where its end occurred in it before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_PLACES = 16  # earlier places of one pair of tokens that are compared, newest first
MAX_COMPARED = 32  # tokens that are compared at each of them


class NgramIndex:
    """What followed the end of a text when it occurred before.

    Prompt lookup (Saxena, 2023) with the hash chains of LZ77: each pair of tokens knows where it
    ended last, each place where the same pair ended before. O(1) per token, whatever the length;
    memory in proportion to the length.
    """

    __slots__ = ("_earlier", "_last", "_match", "tokens")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self._last: dict[int, int] = {}  # a pair of tokens → the latest place of its second one
        self._earlier: array[int] = array("i")  # by place: the one before with the same pair, or -1
        self._match = -1  # the text up to this place ends as the whole text does

    def extend(self, tokens: Sequence[int]) -> None:
        """The text has grown."""
        known, last, earlier, match = self.tokens, self._last, self._earlier, self._match
        place, before = len(known), known[-1] if known else -1
        known.extend(tokens)
        for token in tokens:
            if match >= 0:
                match = match + 1 if known[match + 1] == token else -1
            pair = before << 32 | token
            earlier.append(last.get(pair, -1))
            last[pair] = place
            place, before = place + 1, token
        self._match = match

    def propose(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that followed the longest end of the text that occurred before.

        Only ends of 2 tokens or more count. A text that repeats itself is repeated further.
        """
        if self._match < 0:
            self._match = self._search()
        if self._match < 0 or limit < 1:
            return ()
        period = self.tokens[self._match + 1 :][:limit]
        return tuple((period * -(-limit // len(period)))[:limit])

    def _search(self) -> int:
        """The place with the longest match, the latest of them, or -1."""
        known, end = self.tokens, len(self.tokens) - 1
        best, longest = -1, 1
        place = self._earlier[end] if end >= 0 else -1
        for _ in range(MAX_PLACES):
            if place < longest:  # no more places, or too few tokens before them for a longer match
                break
            if known[place - longest] == known[end - longest]:
                length = next(
                    (
                        back
                        for back in range(min(place + 1, MAX_COMPARED))
                        if known[place - back] != known[end - back]
                    ),
                    min(place + 1, MAX_COMPARED),
                )
                if length > longest:
                    best, longest = place, length
            place = self._earlier[place]
        return best
