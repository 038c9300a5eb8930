"""Output processing: append sampled tokens, detokenize, and detect the end of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.engine.request import Request
from ramify.engine.step import SampledTokens
from ramify.errors import DeadEndError
from ramify.outputs import FinishReason


def append_sampled_tokens(
    request: Request, sampled: SampledTokens, *, num_continued: int = 0
) -> None:
    """Append sampled tokens to `request`, up to the token that ends it.

    An answer ends with a stop token, a stop string, the end of its grammar, or at `max_len`; then
    `pending_finish_reason` is set. With `max_tokens=0` nothing is appended. If the detokenizer
    raises, `request` is unchanged.

    Args:
        num_continued: first tokens after which the grammar is known to go on. It takes them at once,
            with the next one: a mask of allowed tokens after each would cost what sampling them did.
    """
    if request.params.max_tokens == 0:
        request.pending_finish_reason = FinishReason.LENGTH
        return
    tokens: list[int] = []
    num_tokens = len(request.output_ids)  # with `tokens`
    text, stop_reason, finish_reason = request.text, request.stop_reason, None
    error, detokenizer = request.error, request.detokenizer
    for token in sampled.token_ids:
        tokens.append(token)
        num_tokens += 1
        if token in request.stop_token_ids:
            finish_reason, stop_reason = FinishReason.STOP, token
            if request.params.include_stop and detokenizer is not None:
                text += detokenizer.step(token)
        else:
            if detokenizer is not None:
                num_chars = len(text)
                text += detokenizer.step(token)
                if request.stop_strings is not None:
                    text, stop = _truncate_at_stop_string(request, text, num_chars, num_tokens)
                    if stop is not None:
                        finish_reason, stop_reason = FinishReason.STOP, stop
            processor = request.logits_processor
            if finish_reason is None and processor is not None and len(tokens) > num_continued:
                finish_reason, error = _grammar_end(processor, request.output_ids, tokens)
            if finish_reason is None and len(request.prompt_ids) + num_tokens >= request.max_len:
                finish_reason = FinishReason.LENGTH
        if finish_reason is not None:
            break
    request.output_ids.extend(tokens)
    if sampled.logprobs:
        request.logprobs.extend(sampled.logprobs[: len(tokens)])
    request.text, request.stop_reason = text, stop_reason
    request.pending_finish_reason, request.error = finish_reason, error


def _grammar_end(
    processor: LogitsProcessor, output_ids: Sequence[int], tokens: Sequence[int]
) -> tuple[FinishReason | None, DeadEndError | None]:
    """Finish reason and error, if it allows nothing after an output and its new tokens; else None, None."""
    if not processor.may_end:
        return None, None
    try:
        return FinishReason.STOP if processor.advance([*output_ids, *tokens]) else None, None
    except DeadEndError as error:
        return FinishReason.ERROR, error


def flush_held_text(request: Request, reason: FinishReason) -> FinishReason:
    """Append text that the detokenizer held back; returns `reason`, or STOP for a stop string."""
    if request.detokenizer is not None and not isinstance(request.stop_reason, str):
        num_chars, text = len(request.text), request.text + request.detokenizer.finish()
        request.text, stop = _truncate_at_stop_string(
            request, text, num_chars, len(request.output_ids)
        )
        if stop is not None:
            request.stop_reason = stop
            if reason is FinishReason.LENGTH:
                return FinishReason.STOP
    return reason


def stable_len(request: Request) -> int:
    """Characters of the text up to where a stop string may begin; all if it has finished."""
    end, begin = len(request.text), request.num_chars_emitted
    if request.finish_reason is None and request.stop_strings is not None:
        end -= request.stop_strings.held_len(request.text, begin)
    return max(begin, end)


def take_stable_text(request: Request) -> str:
    """New text since the last call, of `stable_len`."""
    begin, request.num_chars_emitted = request.num_chars_emitted, stable_len(request)
    return request.text[begin : request.num_chars_emitted]


def _truncate_at_stop_string(
    request: Request, text: str, num_chars: int, num_tokens: int
) -> tuple[str, str | None]:
    """Text up to the first stop string that ends after `num_chars` characters, and that string.

    With `include_stop`, the text has the string at its end.
    """
    if request.stop_strings is None or num_tokens < request.params.min_tokens:
        return text, None
    match = request.stop_strings.find(text, num_chars)
    if match is None:
        return text, None
    begin, stop = match
    end = begin + len(stop) if request.params.include_stop else begin
    return text[:end], stop
