"""What each request of a log read, could read and lost, in tokens as the corpus counts them."""

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
    """[requests] each, in the order of the corpus."""

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


def measure_reads(
    corpus: Corpus, verdicts: Sequence[Verdict], predictions: Mapping[int, Prediction]
) -> RequestReads:
    """The counts of all requests; those of usage are scaled to the corpus's count of tokens."""
    num_tokens = np.array([corpus.num_tokens(request) for request in corpus], np.int64)
    reported = np.full(len(corpus), -1, np.int64)
    by_rule = np.zeros(len(corpus), np.int64)
    for request in corpus:
        total, usage = int(num_tokens[request.number]), request.info.usage
        if usage.num_read is not None and usage.num_input:
            reported[request.number] = round(total * min(1.0, usage.num_read / usage.num_input))
        billed = predictions[request.number].billed
        if billed.num_input:
            by_rule[request.number] = round(total * billed.num_read / billed.num_input)
    scale = [
        total / verdict.tokens.total if verdict.tokens.total else 0.0
        for total, verdict in zip(num_tokens.tolist(), verdicts, strict=True)
    ]
    reusable = np.array(
        [round(v.tokens.reusable * rate) for v, rate in zip(verdicts, scale, strict=True)], np.int64
    )
    lost = np.array(
        [round(v.tokens.lost * rate) for v, rate in zip(verdicts, scale, strict=True)], np.int64
    )
    return RequestReads(num_tokens, reported, by_rule, reusable, lost)
