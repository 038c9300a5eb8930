"""New tokens of a request become text, and end it when they say so."""

from __future__ import annotations

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


def advance(request: Request, drawn: Drawn) -> tuple[int, FinishReason | None]:
    """Append the tokens that were drawn, up to the one that ends the request.

    Returns:
        how many were appended, and why the request ends, if it does.
    """
    for place, token in enumerate(drawn.token_ids):
        request.output_ids.append(token)
        if drawn.logprobs:
            request.logprobs.append(drawn.logprobs[place])
        reason = None
        if token in request.stop_ids:
            reason, request.stop_reason = FinishReason.STOP, token
        elif _finds_stop_text(request, token):
            reason = FinishReason.STOP
        elif request.shaper is not None and (end := _format_ends(request, request.shaper)):
            reason = end
        elif len(request.prompt_ids) + len(request.output_ids) >= request.max_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            return place + 1, reason
    return len(drawn.token_ids), None


def _format_ends(request: Request, shaper: Shaper) -> FinishReason | None:
    """Why nothing can follow the output, if its structure says so."""
    try:
        return FinishReason.STOP if shaper.follow(request.output_ids) else None
    except DeadEndError as error:
        request.error = error
        return FinishReason.ERROR


def finish_text(request: Request, reason: FinishReason) -> FinishReason:
    """Add what the decoder held back; the reason becomes STOP if a stop text was in it."""
    if request.decoder is not None and not isinstance(request.stop_reason, str):
        known = len(request.text)
        request.text += request.decoder.finish()
        if _cut_at_stop(request, known) and reason is FinishReason.LENGTH:
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


def _finds_stop_text(request: Request, token: int) -> bool:
    """Add the token's text; True when a stop text is complete, which is cut off."""
    if request.decoder is None:
        return False
    known = len(request.text)
    request.text += request.decoder.step(token)
    return _cut_at_stop(request, known)


def _cut_at_stop(request: Request, known: int) -> bool:
    if len(request.output_ids) < request.params.min_tokens:
        return False
    found = [
        (at, stop)
        for stop in request.params.stop
        if (at := request.text.find(stop, max(0, known - len(stop) + 1))) >= 0
    ]
    if not found:
        return False
    at, request.stop_reason = min(found)
    request.text = request.text[:at]
    return True
