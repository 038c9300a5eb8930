"""New tokens of a request become text, and end it when they say so."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.engine.request import Request
from ramify.engine.step import SampledTokens
from ramify.errors import DeadEndError
from ramify.params import FinishReason


def append_sampled_tokens(request: Request, sampled: SampledTokens) -> None:
    """Append the tokens that were drawn, up to the one that ends the request.

    Sets `pending_finish_reason`. All at once, at the end: a decoder that raises half-way has changed nothing but itself.
    """
    tokens: list[int] = []
    text, stop_reason, ending = request.text, request.stop_reason, None
    error, num_known = request.error, len(request.output_ids)
    for token in sampled.token_ids:
        tokens.append(token)
        num_tokens = num_known + len(tokens)
        if token in request.stop_token_ids:
            ending, stop_reason = FinishReason.STOP, token
        else:
            if request.detokenizer is not None:
                known, more = len(text), request.detokenizer.step(token)
                text, found = _truncate_at_stop_string(request, text + more, known, num_tokens)
                if found is not None:
                    ending, stop_reason = FinishReason.STOP, found
            if ending is None and request.logits_processor is not None:
                ending, error = _grammar_end(
                    request.logits_processor, [*request.output_ids, *tokens]
                )
            if ending is None and len(request.prompt_ids) + num_tokens >= request.max_len:
                ending = FinishReason.LENGTH
        if ending is not None:
            break
    request.output_ids.extend(tokens)
    request.logprobs.extend(sampled.logprobs[: len(tokens)])
    request.text, request.stop_reason = text, stop_reason
    request.pending_finish_reason, request.error = ending, error


def _grammar_end(
    processor: LogitsProcessor, output_ids: Sequence[int]
) -> tuple[FinishReason | None, DeadEndError | None]:
    """Why nothing can follow an output, if its structure says so, and whether that is an error."""
    try:
        return FinishReason.STOP if processor.advance(output_ids) else None, None
    except DeadEndError as error:
        return FinishReason.ERROR, error


def flush_held_text(request: Request, reason: FinishReason) -> FinishReason:
    """Add what the decoder held back; the reason becomes STOP if a stop text was in it."""
    if request.detokenizer is not None and not isinstance(request.stop_reason, str):
        known, text = len(request.text), request.text + request.detokenizer.finish()
        request.text, found = _truncate_at_stop_string(
            request, text, known, len(request.output_ids)
        )
        if found is not None:
            request.stop_reason = found
            if reason is FinishReason.LENGTH:
                return FinishReason.STOP
    return reason


def take_stable_text(request: Request) -> str:
    """Text that nothing can change any more and that was not taken before.

    An end that may be the beginning of a stop text is kept back until the request has ended.
    """
    end = len(request.text)
    if request.finish_reason is None and request.params.stop:
        end -= max(
            (_partial_stop_len(request.text, stop) for stop in request.params.stop), default=0
        )
    begin, request.num_chars_emitted = (
        request.num_chars_emitted,
        max(request.num_chars_emitted, end),
    )
    return request.text[begin:end]


def _partial_stop_len(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _truncate_at_stop_string(
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
