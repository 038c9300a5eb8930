"""Counts of the tokens that a request has had, for its penalties."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """The distinct tokens of a request, and how often each is in its output."""

    ids: NDArray[np.int32]  # [D]
    counts: NDArray[np.int32]  # [D], 0 for tokens that only the prompt has

    def plus(self, draft: Sequence[int]) -> TokenCounts:
        """The counts with the tokens of a draft added."""
        if not draft:
            return self
        ids, counts = self.ids, self.counts.copy()
        # A search for each token: look-ups would need all ids in a dictionary, for a few tokens.
        for token in draft:
            matches = np.flatnonzero(ids == token)
            if len(matches):
                counts[matches[0]] += 1
            else:
                ids = np.append(ids, np.int32(token))
                counts = np.append(counts, np.int32(1))
        return TokenCounts(ids, counts)


class TokenCounter:
    """Counts the tokens of one output as it grows.

    Args:
        prompt_ids: tokens that are among the distinct ones before the output has them.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._index_of = {token: index for index, token in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = array("i", self._index_of)
        self._counts = array("i", [0]) * len(self._ids)
        self._num_output = 0  # output tokens counted so far

    def count(self, output_ids: Sequence[int]) -> TokenCounts:
        """The counts with an output that begins with the tokens counted so far."""
        index_of, ids, counts = self._index_of, self._ids, self._counts
        for token in output_ids[self._num_output :]:
            index = index_of.setdefault(token, len(ids))
            if index == len(ids):
                ids.append(token)
                counts.append(0)
            counts[index] += 1
            self._num_output += 1
        return TokenCounts(np.array(ids), np.array(counts))
