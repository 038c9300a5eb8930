"""Token sequences that an output must not contain: which token may not come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class BannedSequences:
    """The sequences of `SamplingParams.banned_sequences`, by the token before their last.

    The last token of a sequence is banned where the output ends with the tokens before it. The
    prompt does not count.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._always: list[int] = []  # sequences of one token
        self._by_previous: dict[int, list[tuple[list[int], int]]] = {}
        self._max_start = 0  # tokens of an output that can matter
        for sequence in sequences:
            *start, last = sequence
            if start:
                self._by_previous.setdefault(start[-1], []).append((start, last))
                self._max_start = max(self._max_start, len(start))
            else:
                self._always.append(last)

    def tail(self, output_ids: Sequence[int]) -> Sequence[int]:
        """The end of an output, as much of it as decides what `after` returns."""
        return output_ids[-self._max_start :] if self._max_start else ()

    def after(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that may not follow an output."""
        if not output_ids:
            return self._always
        starts = self._by_previous.get(output_ids[-1], ())
        return self._always + [
            last for start, last in starts if list(output_ids[-len(start) :]) == start
        ]


def without_tokens(mask: NDArray[np.uint8], tokens: Sequence[int]) -> NDArray[np.uint8]:
    """A copy of a token bitmask in which these tokens are forbidden."""
    mask = mask.copy()
    for token in tokens:
        mask[token >> 3] &= ~np.uint8(1 << (token & 7))
    return mask
