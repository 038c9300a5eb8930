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
    reusable: Counts  # shared with any earlier request, as sent
    lost: Counts  # what mending adds to `reusable`
    is_whole: NDArray[np.bool_]  # the log has all of the prompt: it can be compared and predicted

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
            is_whole=self.is_whole,
        )


def measure_reads(
    corpus: Corpus,
    verdicts: Sequence[Verdict],
    predictions: Mapping[int, Prediction],
    shared: Mapping[int, int],
) -> RequestReads:
    """The counts of all requests, in tokens as billed where usage is logged, else as counted.

    Args:
        corpus: the requests.
        verdicts: of the requests, in order.
        predictions: by the request's number.
        shared: tokens of the longest prefix that any earlier request has, by the request's number; the
            best match of a verdict, which shares most when mended, may share less as sent. What a rule
            of smaller steps reads is shared too.
    """
    num_tokens = np.array([verdict.tokens.total for verdict in verdicts], np.int64)
    reported = np.full(len(corpus), -1, np.int64)
    by_rule, reusable = np.zeros((2, len(corpus)), np.int64)
    for request, verdict in zip(corpus, verdicts, strict=True):
        usage, total, number = request.info.usage, verdict.tokens.total, request.number
        if usage.num_read is not None and usage.num_input:
            reported[number] = min(usage.num_input, usage.num_read)
        billed = predictions[number].billed
        rate = total / billed.num_input if billed.num_input else 0.0
        by_rule[number] = round(billed.num_read * rate)
        reusable[number] = max(
            round(shared[number] * rate), verdict.tokens.reusable, by_rule[number]
        )
    mended = np.array([item.tokens.reusable + item.tokens.lost for item in verdicts], np.int64)
    return RequestReads(
        num_tokens,
        reported,
        by_rule,
        reusable,
        lost=(mended - reusable).clip(min=0),
        is_whole=np.array([request.info.has_full_text for request in corpus], np.bool_),
    )
