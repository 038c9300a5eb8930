"""What each request of a log read, could read and lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.corpus import Corpus
from ramify.analysis.providers.prompts import Prediction
from ramify.analysis.verdicts import Verdict

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestReads:
    """[requests] each, in the order of the corpus; all of a request are in the same tokens."""

    num_tokens: Counts  # of the prompt
    reported: Counts  # by usage; -1 unknown
    by_rule: Counts
    reusable: Counts  # shared with an earlier request, as sent
    lost: Counts  # what mending adds to `reusable`

    @property
    def has_usage(self) -> NDArray[np.bool_]:
        """[requests]."""
        return self.reported >= 0

    @property
    def num_read(self) -> Counts:
        """By usage where the log has it, else by rule."""
        return np.where(self.has_usage, self.reported, self.by_rule)

    def as_counted(self, corpus: Corpus) -> RequestReads:
        """The same in tokens as the corpus counts them, which the segments of a prompt add up to."""
        counted = np.array([corpus.num_tokens(request) for request in corpus], np.int64)
        rate = counted / np.maximum(self.num_tokens, 1)

        def scale(counts: Counts) -> Counts:
            return np.rint(counts * rate).astype(np.int64)

        return RequestReads(
            num_tokens=counted,
            reported=np.where(self.has_usage, scale(self.reported), -1),
            by_rule=scale(self.by_rule),
            reusable=scale(self.reusable),
            lost=scale(self.lost),
        )


def measure_reads(
    corpus: Corpus, verdicts: Sequence[Verdict], predictions: Mapping[int, Prediction]
) -> RequestReads:
    """The counts of all requests, in tokens as billed where usage is logged, else as counted."""
    num_tokens = np.array([verdict.tokens.total for verdict in verdicts], np.int64)
    reported = np.full(len(corpus), -1, np.int64)
    by_rule = np.zeros(len(corpus), np.int64)
    for request in corpus:
        usage, total = request.info.usage, int(num_tokens[request.number])
        if usage.num_read is not None and usage.num_input:
            reported[request.number] = min(usage.num_input, usage.num_read)
        billed = predictions[request.number].billed
        if billed.num_input:
            by_rule[request.number] = round(total * billed.num_read / billed.num_input)
    return RequestReads(
        num_tokens,
        reported,
        by_rule,
        reusable=np.array([verdict.tokens.reusable for verdict in verdicts], np.int64),
        lost=np.array([verdict.tokens.lost for verdict in verdicts], np.int64),
    )
