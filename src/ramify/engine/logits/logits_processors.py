"""Logits processors: bias, penalties, min_tokens, allowed and banned tokens, grammar of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.engine.logits.banned_sequences import BannedSequences, without_tokens
from ramify.engine.logits.token_counts import TokenCounter, TokenCounts
from ramify.errors import DeadEndError
from ramify.params import SamplingParams

# [ceil(vocab_size / 8)]: token t is bit t % 8 (from the least significant) of byte t // 8.
TokenBitmask = NDArray[np.uint8]


class GrammarMatcher(Protocol):
    """Which tokens a grammar allows next.

    Implemented by `grammar_matcher.LlguidanceMatcher` and `triggered_matcher.TriggeredMatcher`.
    """

    def advance(self, output_ids: Sequence[int]) -> bool:
        """Catch up with the output; returns whether the grammar is complete and ends the answer.

        Raises:
            DeadEndError: no token may follow, but the grammar is not complete.
        """

    def token_bitmasks(
        self, output_ids: Sequence[int], draft: Sequence[int]
    ) -> Sequence[TokenBitmask | None]:
        """Tokens allowed after the output, and after each draft token that is itself allowed.

        Returns:
            1 to 1 + len(draft) masks; None allows every token.
        """


@dataclass(frozen=True, slots=True, eq=False)
class LogitsTransform:
    """Changes that one step makes to a request's logits. Immutable, arrays included.

    Row i holds the logits after the request's tokens and its first i draft tokens.
    """

    params: SamplingParams
    draft: tuple[int, ...]
    token_counts: TokenCounts | None  # None without penalties
    bias_ids: NDArray[np.int32]
    bias: NDArray[np.float32]
    stop_token_ids: NDArray[np.int64]
    num_rows_without_stop: int  # the first rows, in which stop tokens are forbidden (min_tokens)
    # One per row. If there are fewer than rows, the rows after them cannot be reached.
    token_bitmasks: tuple[TokenBitmask | None, ...] | None

    @property
    def num_rows(self) -> int:
        """Number of rows that tokens can be sampled from."""
        return len(self.draft) + 1 if self.token_bitmasks is None else len(self.token_bitmasks)

    @property
    def is_identity(self) -> bool:
        """Whether `apply` changes nothing, in any row."""
        return (
            self.token_counts is None
            and not len(self.bias_ids)
            and not self.num_rows_without_stop
            and all(mask is None for mask in self.token_bitmasks or ())
            and self.num_rows == len(self.draft) + 1
        )

    def apply(self, logits: NDArray[np.float32], row: int) -> NDArray[np.float32]:
        """Transformed logits [vocab_size] of row `row`, a new array; -inf forbids a token."""
        logits, params = logits.copy(), self.params
        logits[self.bias_ids] += self.bias
        if self.token_counts is not None:
            seen = self.token_counts.plus(self.draft[:row])
            scores = logits[seen.ids]
            if params.repetition_penalty != 1.0:
                factor = np.float32(params.repetition_penalty)
                scores = np.where(scores < 0, scores * factor, scores / factor)
            penalties = params.presence_penalty * (seen.counts > 0)
            penalties += params.frequency_penalty * seen.counts
            logits[seen.ids] = scores - penalties.astype(np.float32)
        mask = None if self.token_bitmasks is None else self.token_bitmasks[row]
        if mask is not None:
            allowed = np.unpackbits(mask, count=len(logits), bitorder="little")
            logits[allowed == 0] = -np.inf
        if row < self.num_rows_without_stop:
            stop_logits = logits[self.stop_token_ids]
            logits[self.stop_token_ids] = -np.inf
            if logits.max() == -np.inf:  # the grammar allows only its end
                logits[self.stop_token_ids] = stop_logits
        return logits


class LogitsProcessor:
    """Makes the `LogitsTransform` of each step of a request, from its prompt and output alone.

    Each call catches up with the output that it is given, so preemption and failed steps need no
    roll-back here.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stop_token_ids: frozenset[int],
        vocab_size: int,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self._params, self._matcher = params, matcher
        self._counter: TokenCounter | None = None
        if params.repetition_penalty != 1.0:
            self._counter = TokenCounter(prompt_ids)
        elif params.presence_penalty or params.frequency_penalty:
            self._counter = TokenCounter()  # these penalties ignore the prompt
        biases = params.biases
        self._bias_ids = np.fromiter(biases.keys(), np.int32, len(biases))
        self._bias = np.fromiter(biases.values(), np.float32, len(biases))
        self._stop_token_ids = np.array(
            [token for token in sorted(stop_token_ids) if token < vocab_size], np.int64
        )
        self._num_bitmask_bytes = -(-vocab_size // 8)
        self._banned = BannedSequences(params.banned_sequences)
        self._allowed: TokenBitmask | None = None  # None: all tokens, after any output
        if params.allowed_token_ids is not None or params.banned_sequences:
            flags = np.full(vocab_size, params.allowed_token_ids is None)
            flags[list(params.allowed_token_ids or ())] = True
            flags[self._banned.always] = False
            self._allowed = np.packbits(flags, bitorder="little")
        self.advance(())

    @staticmethod
    def is_needed(params: SamplingParams) -> bool:
        """Whether a request with these options changes its logits."""
        return bool(
            params.structured is not None
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.banned_sequences
            or params.min_tokens
        )

    @property
    def reads_output(self) -> bool:
        """Whether a step's transform depends on the tokens of the output, not only on their number."""
        has_state = self._matcher is not None or self._counter is not None
        return has_state or self._banned.reads_output

    @property
    def may_end(self) -> bool:
        """Whether `advance` may end an answer."""
        return self._matcher is not None or self._allowed is not None

    def advance(self, output_ids: Sequence[int]) -> bool:
        """Catch up with the output; returns whether the structured output is complete.

        Raises:
            DeadEndError: no token is allowed after these.
        """
        if self._matcher is not None and self._matcher.advance(output_ids):
            return True
        allowed = self._allowed_after(output_ids)
        if allowed is not None:
            matcher = self._matcher
            mask = None if matcher is None else matcher.token_bitmasks(output_ids, ())[0]
            if not _both(allowed, mask).any():
                raise DeadEndError(
                    len(output_ids), "allowed_token_ids or bad_words leave none of those possible"
                )
        return False

    def _allowed_after(self, output_ids: Sequence[int]) -> TokenBitmask | None:
        """Tokens that `allowed_token_ids` and `banned_sequences` allow after an output; None: all."""
        if self._allowed is None:
            return None
        banned = self._banned.after(output_ids)
        return without_tokens(self._allowed, banned) if banned else self._allowed

    def for_step(
        self, output_ids: Sequence[int], draft: tuple[int, ...], *, num_late: int = 0
    ) -> LogitsTransform:
        """The transform of a step that samples after the output and after each accepted draft token.

        Args:
            num_late: tokens behind `output_ids` that are not known yet; 0 if `reads_output`.
        """
        token_counts = None if self._counter is None else self._counter.count(output_ids)
        masks: tuple[TokenBitmask | None, ...] | None = None
        if self._matcher is not None:
            try:
                masks = tuple(self._matcher.token_bitmasks(output_ids, draft))
            except DeadEndError:  # Ctrl-C cut `advance` off; only this request's step fails
                masks = (np.zeros(self._num_bitmask_bytes, np.uint8),)
        if self._allowed is not None:
            tail = self._banned.tail(output_ids)
            num_rows = len(draft) + 1 if masks is None else len(masks)
            limited = []
            for row in range(num_rows):
                allowed = self._allowed_after([*tail, *draft[:row]])
                mask = None if masks is None else masks[row]
                limited.append(mask if allowed is None else _both(allowed, mask))
            # Draw nothing after a draft token that leads to a dead end; if it is accepted,
            # `advance` raises the error.
            dead_ends = (
                row
                for row, mask in enumerate(limited)
                if row and mask is not None and not mask.any()
            )
            masks = tuple(limited[: next(dead_ends, len(limited))])
        return LogitsTransform(
            params=self._params,
            draft=draft,
            token_counts=token_counts,
            bias_ids=self._bias_ids,
            bias=self._bias,
            stop_token_ids=self._stop_token_ids,
            num_rows_without_stop=max(0, self._params.min_tokens - len(output_ids) - num_late),
            token_bitmasks=masks,
        )


def _both(allowed: TokenBitmask, mask: TokenBitmask | None) -> TokenBitmask:
    """The tokens of both masks; None is all tokens."""
    return allowed if mask is None else allowed & mask
