"""Idle-time check of cache hits: recompute a sample without the cache, compare logprobs.

Sampled requests keep the logprob of each output token. If such a request read or shared a prefix,
prompt and answer are computed again later, cold, as one prompt with `prompt_logprobs`. Each logprob
must have the same bits.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from ramify.engine.request import Request
from ramify.outputs import FinishReason, TokenLogprob

logger = logging.getLogger(__name__)

MAX_PENDING = 64  # recorded hits; the oldest are dropped


@dataclass(frozen=True, slots=True)
class RecordedHit:
    """An answer that read or shared cached K/V."""

    request_id: int
    token_ids: tuple[int, ...]  # prompt and answer
    num_prompt: int
    logprobs: tuple[float, ...]  # of the answer's tokens
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A token whose logprob differs between hit and cold run: a bug in Ramify, or bad hardware."""

    request_id: int
    position: int
    warm: float
    cold: float


@dataclass(slots=True)
class HitVerifier:
    """Recorded hits to recompute, and the results so far."""

    share: float  # of requests that are sampled
    pending: deque[RecordedHit] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    running: dict[int, RecordedHit] = field(default_factory=dict)  # by id of the cold request
    num_checked: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)  # the first MAX_PENDING
    num_mismatches: int = 0

    def record(self, request: Request) -> None:
        """Record a request that ended normally, if it had a hit and a logprob for each token."""
        read, shared = request.cache_counts or (0, 0)
        complete = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if complete and read + shared and len(request.logprobs) == len(request.output_ids):
            tokens = (*request.prompt_ids, *request.output_ids)
            logprobs = tuple(token.logprob for token in request.logprobs)
            self.pending.append(
                RecordedHit(
                    request.id, tokens, len(request.prompt_ids), logprobs, request.namespace
                )
            )

    def compare(self, request_id: int, prompt_logprobs: list[TokenLogprob]) -> None:
        """Compare a cold request that has ended with its hit; skip it if it failed."""
        hit = self.running.pop(request_id)
        cold = [token.logprob for token in prompt_logprobs[hit.num_prompt - 1 :]]
        if not cold:
            return
        self.num_checked += 1
        for offset, (warm, recomputed) in enumerate(zip(hit.logprobs, cold, strict=False)):
            if warm != recomputed:
                mismatch = Mismatch(hit.request_id, hit.num_prompt + offset, warm, recomputed)
                self.num_mismatches += 1
                if len(self.mismatches) < MAX_PENDING:
                    self.mismatches.append(mismatch)
                logger.error("a cache hit changed an answer: %s; run `ramify verify`", mismatch)
                return
