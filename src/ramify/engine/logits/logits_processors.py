"""What changes a request's scores before a token is drawn: penalties, biases, allowed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.errors import DeadEndError
from ramify.params import SamplingParams

TokenBitmask = NDArray[
    np.uint8
]  # [ceil(vocab_size / 8)], token t is bit t % 8 (from below) of byte t // 8


class GrammarMatcher(Protocol):
    """Which tokens a format allows next; see `ramify.engine.logits.grammar`."""

    def advance(self, output_ids: Sequence[int]) -> bool:
        """Catch up with the output; whether the format is complete, so that nothing may follow.

        Raises:
            DeadEndError: nothing may follow, but the format is not complete.
        """
        ...

    def token_bitmasks(self, output_ids: Sequence[int], draft: Sequence[int]) -> list[TokenBitmask]:
        """Tokens allowed after the output and after each draft, as far as the drafts are allowed.

        The first is always there.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """Which tokens a request has seen, each once, and how often they are in its output."""

    ids: NDArray[np.int64]  # [distinct]
    counts: NDArray[np.int64]  # [distinct]; 0 for tokens of the prompt only
    num_output: int = 0

    @classmethod
    def of(cls, prompt_ids: Sequence[int]) -> TokenCounts:
        """Before any output."""
        ids = np.unique(np.asarray(prompt_ids, np.int64))
        return cls(ids, np.zeros(len(ids), np.int64))

    def plus(self, output_ids: Sequence[int]) -> TokenCounts:
        """With more output tokens."""
        if not output_ids:
            return self
        ids, counts = self.ids, self.counts.copy()
        for token in output_ids:
            at = np.flatnonzero(ids == token)
            if len(at):
                counts[at[0]] += 1
            else:
                ids, counts = np.append(ids, token), np.append(counts, 1)
        return TokenCounts(ids, counts, self.num_output + len(output_ids))


@dataclass(frozen=True, slots=True, eq=False)
class LogitsTransform:
    """What one step does to a request's scores; complete when made. No field is ever written to.

    Row i of the step follows the request's tokens and its first i drafts.
    """

    params: SamplingParams
    draft: tuple[int, ...]
    token_counts: TokenCounts | None  # None without penalties
    bias_ids: NDArray[np.int64]
    bias: NDArray[np.float32]
    stop_token_ids: NDArray[np.int64]  # tokens that would end the request
    num_rows_without_stop: int  # rows that may not draw one of them
    token_bitmasks: (
        tuple[TokenBitmask, ...] | None
    )  # for the first rows; later ones cannot be drawn from

    @property
    def num_rows(self) -> int:
        """Rows that tokens can be drawn from."""
        return len(self.draft) + 1 if self.token_bitmasks is None else len(self.token_bitmasks)

    def apply(self, row: NDArray[np.float32], place: int) -> NDArray[np.float32]:
        """Scores [vocab_size] of row `place`, a new array; what is not allowed is -inf."""
        row, params = row.copy(), self.params
        row[self.bias_ids] += self.bias
        if self.token_counts is not None:
            seen = self.token_counts.plus(self.draft[:place])
            scores = row[seen.ids]
            if params.repetition_penalty != 1.0:
                factor = np.float32(params.repetition_penalty)
                scores = np.where(scores < 0, scores * factor, scores / factor)
            taken = params.presence_penalty * (seen.counts > 0)
            taken += params.frequency_penalty * seen.counts
            row[seen.ids] = scores - taken.astype(np.float32)
        if self.token_bitmasks is not None:
            allowed = np.unpackbits(self.token_bitmasks[place], count=len(row), bitorder="little")
            row[allowed == 0] = -np.inf
        if place < self.num_rows_without_stop:
            kept = row[self.stop_token_ids]
            row[self.stop_token_ids] = -np.inf
            if row.max() == -np.inf:
                row[self.stop_token_ids] = kept  # a format that allows its end and nothing else
        return row


class LogitsProcessor:
    """Makes a request's `LogitsTransform` step by step. Derived from its prompt and output alone.

    So neither preemption nor a step that failed needs a word: whatever the output has become,
    the next call catches up with it.

    Args:
        stop_token_ids: tokens that end the request.
        matcher: of its structured output.
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
        self._token_counts: TokenCounts | None = None
        if params.repetition_penalty != 1.0:
            self._token_counts = TokenCounts.of(prompt_ids)
        elif params.presence_penalty or params.frequency_penalty:
            self._token_counts = TokenCounts.of(())  # the prompt does not count
        self._bias_ids = np.array([*params.biases], np.int64)
        self._bias = np.array([*params.biases.values()], np.float32)
        self._stop_token_ids = np.array(
            [one for one in sorted(stop_token_ids) if one < vocab_size], np.int64
        )
        self._num_bitmask_bytes = -(-vocab_size // 8)
        self._allowed: TokenBitmask | None = None
        if params.allowed_token_ids is not None:
            flags = np.zeros(vocab_size, bool)
            flags[list(params.allowed_token_ids)] = True
            self._allowed = np.packbits(flags, bitorder="little")
        self.advance(())

    @classmethod
    def create_if_needed(
        cls,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stop_token_ids: frozenset[int],
        vocab_size: int,
        matcher: GrammarMatcher | None = None,
    ) -> LogitsProcessor | None:
        """One for a request whose scores change at all."""
        changes = (
            matcher is not None
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.min_tokens
        )
        if not changes:
            return None
        return cls(
            prompt_ids,
            params,
            stop_token_ids=stop_token_ids,
            vocab_size=vocab_size,
            matcher=matcher,
        )

    def advance(self, output_ids: Sequence[int]) -> bool:
        """Whether the structured output is complete.

        Raises:
            DeadEndError: no token is allowed after these.
        """
        if self._matcher is None:
            return False
        if self._matcher.advance(output_ids):
            return True
        if self._allowed is not None:
            mask = self._matcher.token_bitmasks(output_ids, ())[0]
            if not np.bitwise_and(mask, self._allowed).any():
                raise DeadEndError(len(output_ids), "allowed_token_ids has none of those possible")
        return False

    def for_step(self, output_ids: Sequence[int], draft: tuple[int, ...]) -> LogitsTransform:
        """For a step that draws what follows the output, and each draft that is right."""
        if self._token_counts is not None:
            self._token_counts = self._token_counts.plus(
                output_ids[self._token_counts.num_output :]
            )
        masks: tuple[TokenBitmask, ...] | None = None
        if self._matcher is not None:
            masks = tuple(self._token_bitmasks(self._matcher, output_ids, draft))
            if self._allowed is not None:
                masks = tuple(np.bitwise_and(mask, self._allowed) for mask in masks)
                # behind a guess that leads to a dead end nothing is drawn: `advance` finds it there
                ends = (at for at, mask in enumerate(masks) if at and not mask.any())
                masks = masks[: next(ends, len(masks))]
        elif self._allowed is not None:
            masks = (self._allowed,) * (len(draft) + 1)
        return LogitsTransform(
            params=self._params,
            draft=draft,
            token_counts=self._token_counts,
            bias_ids=self._bias_ids,
            bias=self._bias,
            stop_token_ids=self._stop_token_ids,
            num_rows_without_stop=max(0, self._params.min_tokens - len(output_ids)),
            token_bitmasks=masks,
        )

    def _token_bitmasks(
        self, matcher: GrammarMatcher, output_ids: Sequence[int], draft: tuple[int, ...]
    ) -> list[TokenBitmask]:
        try:
            return matcher.token_bitmasks(output_ids, draft)
        except DeadEndError:  # `advance` was cut off by an interrupt; this one's step alone fails
            return [np.zeros(self._num_bitmask_bytes, np.uint8)]
