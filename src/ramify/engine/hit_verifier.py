"""Hits computed again while the engine has nothing else to do: does the promise hold in service?

A sample of the requests keeps the log probability of each token it drew. One that read or shared a
prefix is asked again later, cold, as a prompt of all its tokens; each log probability must be the
very same number.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from ramify.engine.request import Request
from ramify.outputs import FinishReason, TokenLogprob

logger = logging.getLogger(__name__)

MAX_PENDING = 64  # answers that wait for a quiet moment; the oldest give way


@dataclass(frozen=True, slots=True)
class RecordedHit:
    """An answer whose beginning was not computed for it."""

    request_id: int
    token_ids: tuple[int, ...]  # prompt and answer
    num_prompt: int
    logprobs: tuple[float, ...]  # of the answer's tokens
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A token whose log probability a hit has changed: a bug in Ramify, or a broken machine."""

    request_id: int
    position: int
    warm: float
    cold: float


@dataclass(slots=True)
class HitVerifier:
    """What is to be computed again, and what came of it so far."""

    share: float  # of the requests
    pending: deque[RecordedHit] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    running: dict[int, RecordedHit] = field(default_factory=dict)  # by the id of the second request
    num_checked: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)  # the first ones
    num_mismatches: int = 0

    def record(self, request: Request) -> None:
        """A request has ended; keep it if it says anything."""
        read, shared = request.cache_counts or (0, 0)
        complete = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if complete and read + shared and len(request.logprobs) == len(request.output_ids):
            tokens = (*request.prompt_ids, *request.output_ids)
            logprobs = tuple(one.logprob for one in request.logprobs)
            self.pending.append(
                RecordedHit(
                    request.id, tokens, len(request.prompt_ids), logprobs, request.namespace
                )
            )

    def compare(self, request_id: int, prompt_logprobs: list[TokenLogprob]) -> None:
        """The second request has ended: compare. Too few scores, after a failed step, say nothing."""
        hit = self.running.pop(request_id)
        cold = [one.logprob for one in prompt_logprobs[hit.num_prompt - 1 :]]
        if not cold:
            return
        self.num_checked += 1
        for place, (warm, other) in enumerate(zip(hit.logprobs, cold, strict=False)):
            if warm != other:
                found = Mismatch(hit.request_id, hit.num_prompt + place, warm, other)
                self.num_mismatches += 1
                if len(self.mismatches) < MAX_PENDING:
                    self.mismatches.append(found)
                logger.error("a cache hit changed an answer: %s; run `ramify verify`", found)
                return
