"""`LlguidanceMatcher`: follows one answer in its grammar, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import numpy as np

from ramify.engine.logits.logits_processors import TokenBitmask
from ramify.errors import DeadEndError, LibraryPanicError, shortened
from ramify.library_panics import panics_as_errors

if TYPE_CHECKING:
    from llguidance import LLMatcher

Matcher = TypeVar("Matcher")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Method = Callable[Concatenate[Matcher, Sequence[int], Arguments], Result]


def panic_is_dead_end(
    method: Method[Matcher, Arguments, Result],
) -> Method[Matcher, Arguments, Result]:
    """Make a matcher's method, whose first argument is the output, end that answer at a panic."""

    @wraps(method)
    def guarded(
        self: Matcher,
        output_ids: Sequence[int],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        try:
            with panics_as_errors("llguidance"):
                return method(self, output_ids, *args, **kwargs)
        except LibraryPanicError as error:
            reason = f"the format's parser gave up ({error.reason})"
            raise DeadEndError(len(output_ids), reason) from error

    return guarded


class LlguidanceMatcher:
    """The state of one answer in its grammar; each call catches up with the output it is given.

    Args:
        start: the matcher before the first token; copied, never changed.
        start_mask: tokens allowed first.
    """

    def __init__(self, start: LLMatcher, start_mask: TokenBitmask, vocab_size: int) -> None:
        self._start, self._matcher, self._vocab_size = start, start.deep_copy(), vocab_size
        self._num_known: int | None = 0  # output tokens consumed; None while that changes
        self._start_mask = self._mask = start_mask

    @panic_is_dead_end
    def advance(self, output_ids: Sequence[int]) -> bool:
        """See `ramify.engine.logits.logits_processors.GrammarMatcher`."""
        if self._num_known == len(output_ids):
            return self._num_known > 0 and self._is_complete
        num_known, self._num_known = self._num_known, None
        # A call was cut off, or the output has become shorter: begin again.
        if num_known is None or num_known > len(output_ids):
            self._matcher, num_known = self._start.deep_copy(), 0
        new = list(output_ids[num_known:])
        if new and not self._matcher.consume_tokens(new):
            raise DeadEndError(len(output_ids), self._reason("the format does not allow the last"))
        if not self._is_complete:
            self._mask = self._next_mask() if output_ids else self._start_mask
            if self._matcher.is_error() or not self._mask.any():
                raise DeadEndError(len(output_ids), self._reason("the format has no such text"))
        self._num_known = len(output_ids)
        return bool(new) and self._is_complete

    @panic_is_dead_end
    def token_bitmasks(self, output_ids: Sequence[int], draft: Sequence[int]) -> list[TokenBitmask]:
        """See `ramify.engine.logits.logits_processors.GrammarMatcher`."""
        masks = [self._next_mask() if self.advance(output_ids) else self._mask]
        num_known, self._num_known = self._num_known, None
        num_consumed = 0
        for token in draft:
            if not has_token(masks[-1], token) or not self._matcher.consume_token(token):
                break
            num_consumed += 1
            if self._is_complete:
                break  # complete: no token can follow
            mask = self._next_mask()
            if self._matcher.is_error() or not mask.any():
                break
            masks.append(mask)
        if not self._matcher.is_error() and (
            not num_consumed or self._matcher.rollback(num_consumed)
        ):
            self._num_known = num_known
        return masks

    @property
    def _is_complete(self) -> bool:
        return is_complete(self._matcher)

    def _next_mask(self) -> TokenBitmask:
        return next_mask(self._matcher, self._vocab_size)

    def _reason(self, default: str) -> str:
        return dead_end_reason(self._matcher, default)


def is_complete(matcher: LLMatcher) -> bool:
    """Whether its grammar allows nothing more, and ends here."""
    return matcher.is_stopped() and matcher.is_accepting()


def dead_end_reason(matcher: LLMatcher, default: str) -> str:
    """The reason why a matcher allows no token: a limit of llguidance, or `default`."""
    if matcher.stop_reason() in {"ParserTooComplex", "LexerTooComplex"}:
        return "the format needs more work per token than is allowed"
    if matcher.stop_reason() == "InternalError":
        return f"the format's parser gave up ({shortened(matcher.get_error().splitlines()[0])})"
    return default


def next_mask(matcher: LLMatcher, vocab_size: int) -> TokenBitmask:
    """Tokens allowed next, as the model counts ids; the tokenizer may have fewer or more."""
    bitmask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    mask = np.zeros(-(-vocab_size // 8), np.uint8)
    num_bytes = min(len(mask), len(bitmask))
    mask[:num_bytes] = bitmask[:num_bytes]
    if vocab_size % 8:
        mask[-1] &= (1 << vocab_size % 8) - 1
    return mask


def has_token(mask: TokenBitmask, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(mask[token // 8] >> (token % 8) & 1)


def compile_reason(error: str) -> str:
    """Reason of a refused grammar: the first line, and after a bad regex the line `error: …`."""
    lines = [line.strip() for line in error.splitlines()]
    details = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([shortened(lines[0]), *details[:1]])
