"""N-gram index of one request's tokens, for prompt-lookup decoding."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_CANDIDATES = 16  # earlier occurrences of the last token pair to compare, newest first
MAX_COMPARED = 32  # tokens compared at each


class NgramIndex:
    """Token ids of one request, and where their last n tokens occurred before.

    Prompt lookup (Saxena, 2023) with the hash chains of LZ77: a dict maps each token pair to its
    last occurrence, and each occurrence points to the one before. O(1) per token, whatever the
    length; memory is linear in the length.
    """

    __slots__ = ("_earlier", "_last", "_match", "tokens")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self._last: dict[int, int] = {}  # token pair → last index of its second token
        self._earlier: array[int] = array("i")  # index → previous index with the same pair, or -1
        self._match = -1  # index at which an earlier occurrence of the last n tokens ends, or -1

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        all_tokens, last, earlier, match = self.tokens, self._last, self._earlier, self._match
        index, previous = len(all_tokens), all_tokens[-1] if all_tokens else -1
        all_tokens.extend(tokens)
        for token in tokens:
            if match >= 0:
                match = match + 1 if all_tokens[match + 1] == token else -1
            pair = previous << 32 | token
            earlier.append(last.get(pair, -1))
            last[pair] = index
            index, previous = index + 1, token
        self._match = match

    def propose(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that followed the longest earlier occurrence of the last n tokens.

        Empty if there is none with n >= 2. If the occurrence is closer than `limit` tokens to the
        end, the tokens since then are repeated.
        """
        if self._match < 0:
            self._match = self._search()
        if self._match < 0 or limit < 1:
            return ()
        period = self.tokens[self._match + 1 :][:limit]
        return tuple((period * -(-limit // len(period)))[:limit])

    def _search(self) -> int:
        """The index at which the longest match ends, the latest if several do; -1 if none."""
        tokens, end = self.tokens, len(self.tokens) - 1
        best, longest = -1, 1
        candidate = self._earlier[end] if end >= 0 else -1
        for _ in range(MAX_CANDIDATES):
            if candidate < longest:  # none left, or too few tokens before it for a longer match
                break
            if tokens[candidate - longest] == tokens[end - longest]:
                limit = min(candidate + 1, MAX_COMPARED)
                length = next(
                    (
                        back
                        for back in range(limit)
                        if tokens[candidate - back] != tokens[end - back]
                    ),
                    limit,
                )
                if length > longest:
                    best, longest = candidate, length
            candidate = self._earlier[candidate]
        return best
