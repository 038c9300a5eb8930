"""Token sequences that an output must not contain: which token may not come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class BannedSequences:
    """The sequences of `SamplingParams.banned_sequences`, by the tokens before their last.

    The last token of a sequence is banned where the output ends with the tokens before it. The
    prompt does not count. A look-up for each length of these beginnings, however many there are.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        by_start: dict[tuple[int, ...], list[int]] = {}
        for sequence in sequences:
            *start, last = sequence
            by_start.setdefault(tuple(start), []).append(last)
        self.always = by_start.pop((), [])  # banned after any output: sequences of one token
        self._by_start = by_start
        self._start_lens = sorted({len(start) for start in by_start})

    @property
    def reads_output(self) -> bool:
        """Whether `after` depends on the output."""
        return bool(self._start_lens)

    def tail(self, output_ids: Sequence[int]) -> Sequence[int]:
        """The end of an output, as much of it as decides what `after` returns."""
        return output_ids[-self._start_lens[-1] :] if self._start_lens else ()

    def after(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that may not follow an output, beside `always`."""
        banned: list[int] = []
        for start_len in self._start_lens:
            if start_len > len(output_ids):
                break
            banned += self._by_start.get(tuple(output_ids[-start_len:]), ())
        return banned


def without_tokens(mask: NDArray[np.uint8], tokens: Sequence[int]) -> NDArray[np.uint8]:
    """A copy of a token bitmask in which these tokens are forbidden."""
    mask, places = mask.copy(), np.asarray(tokens, np.int64)
    np.bitwise_and.at(mask, places >> 3, ~(1 << (places & 7)).astype(np.uint8))
    return mask
