"""New tokens of a request become text, and end it when they say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ramify.engine.request import Request
from ramify.engine.shaping import Shaper
from ramify.engine.step import Drawn
from ramify.errors import DeadEndError
from ramify.params import FinishReason


class TextDecoder(Protocol):
    """Turns one request's tokens into text as they come."""

    def step(self, token_id: int) -> str:
        """The text that this token completes; it may be empty."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


def advance(request: Request, drawn: Drawn) -> None:
    """Append the tokens that were drawn, up to the one that ends the request; sets `ending`.

    All at once, at the end: a decoder that raises half-way has changed nothing but itself.
    """
    tokens: list[int] = []
    text, stop_reason, ending = request.text, request.stop_reason, None
    error, num_known = request.error, len(request.output_ids)
    for token in drawn.token_ids:
        tokens.append(token)
        num_tokens = num_known + len(tokens)
        if token in request.stop_ids:
            ending, stop_reason = FinishReason.STOP, token
        else:
            if request.decoder is not None:
                known, more = len(text), request.decoder.step(token)
                text, found = _cut_at_stop(request, text + more, known, num_tokens)
                if found is not None:
                    ending, stop_reason = FinishReason.STOP, found
            if ending is None and request.shaper is not None:
                ending, error = _format_ends(request.shaper, [*request.output_ids, *tokens])
            if ending is None and len(request.prompt_ids) + num_tokens >= request.max_len:
                ending = FinishReason.LENGTH
        if ending is not None:
            break
    request.output_ids.extend(tokens)
    request.logprobs.extend(drawn.logprobs[: len(tokens)])
    request.text, request.stop_reason = text, stop_reason
    request.ending, request.error = ending, error


def _format_ends(
    shaper: Shaper, output_ids: Sequence[int]
) -> tuple[FinishReason | None, DeadEndError | None]:
    """Why nothing can follow an output, if its structure says so, and whether that is an error."""
    try:
        return FinishReason.STOP if shaper.follow(output_ids) else None, None
    except DeadEndError as error:
        return FinishReason.ERROR, error


def finish_text(request: Request, reason: FinishReason) -> FinishReason:
    """Add what the decoder held back; the reason becomes STOP if a stop text was in it."""
    if request.decoder is not None and not isinstance(request.stop_reason, str):
        known, text = len(request.text), request.text + request.decoder.finish()
        request.text, found = _cut_at_stop(request, text, known, len(request.output_ids))
        if found is not None:
            request.stop_reason = found
            if reason is FinishReason.LENGTH:
                return FinishReason.STOP
    return reason


def take_text(request: Request) -> str:
    """Text that nothing can change any more and that was not taken before.

    An end that may be the beginning of a stop text is kept back until the request has ended.
    """
    end = len(request.text)
    if request.finish_reason is None and request.params.stop:
        end -= max((_overlap(request.text, stop) for stop in request.params.stop), default=0)
    begin, request.num_taken = request.num_taken, max(request.num_taken, end)
    return request.text[begin:end]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _cut_at_stop(
    request: Request, text: str, known: int, num_tokens: int
) -> tuple[str, str | None]:
    """A text without the first stop text that is complete since `known`, and that stop text."""
    if num_tokens < request.params.min_tokens:
        return text, None
    found = [
        (at, stop)
        for stop in request.params.stop
        if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0
    ]
    if not found:
        return text, None
    at, stop = min(found)
    return text[:at], stop
