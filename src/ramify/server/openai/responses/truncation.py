"""`truncation: "auto"`: leave out the oldest turns of a conversation that exceeds the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from ramify.errors import PromptTooLongError
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.http.wire import encode_json
from ramify.server.openai.protocol import ChatMessage

MAX_ATTEMPTS = 4  # renderings with more than the last turn
TOO_LONG = "context_length_exceeded"  # code of the error for a text that no context holds

Render = Callable[[Sequence[ChatMessage], Sequence[str]], GenerationRequest]


def num_prompt_tokens(max_model_len: int, max_output_tokens: int | None) -> int:
    """Tokens of the context that a prompt may have; the rest is left for the answer.

    By default the answer gets an eighth; with `max_output_tokens` as many, but at most half.
    """
    return max_model_len - min(max_output_tokens or max_model_len // 8, max_model_len // 2)


def render_truncated(
    messages: Sequence[ChatMessage],
    names: Sequence[str],
    render: Render,
    *,
    max_tokens: int,
    max_bytes: int,
) -> tuple[GenerationRequest, int]:
    """Render a conversation without its oldest turns, if all of them have too many tokens.

    System messages at the beginning stay, and so does the last turn. A turn begins with a message of
    the user, so no result of a call is left without its call.

    Args:
        names: of the messages.
        max_tokens: of the prompt.
        max_bytes: a conversation with more bytes, as JSON, exceeds `max_tokens`.

    Returns:
        the conversation, translated, and how many messages were left out.

    Raises:
        ApiError, RequestError: as `render`; the last turn alone is too long.
    """
    messages, names = list(messages), list(names)
    roles = [message.role for message in messages]
    num_fixed = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    turns = [i for i, role in enumerate(roles) if role == "user" and i > num_fixed]
    # the bytes before each message, as JSON
    offsets = list(accumulate((len(encode_json(message)) for message in messages), initial=0))

    def first_turn_after(offset: float) -> int:
        index = bisect_left(turns, offset, key=lambda turn: offsets[turn])
        return turns[min(index, len(turns) - 1)]

    start = num_fixed  # the first message that is not left out
    num_over = offsets[-1] - max_bytes
    if turns and num_over > 0:
        start = first_turn_after(offsets[num_fixed] + num_over)
    for attempt in range(MAX_ATTEMPTS + 1):
        shortened = messages[:num_fixed] + messages[start:]
        is_last = not turns or start == turns[-1]
        try:
            request = render(shortened, names[:num_fixed] + names[start:])
            num_tokens = len(request.prompt.ids)
            if num_tokens <= max_tokens or is_last:
                return request, start - num_fixed
            excess = 1 - max_tokens / num_tokens
        except (ApiError, PromptTooLongError) as error:
            if is_last or (isinstance(error, ApiError) and error.code != TOO_LONG):
                raise
            excess = 0.5
        if attempt == MAX_ATTEMPTS - 1:
            start = turns[-1]
        else:
            num_kept = offsets[num_fixed] + offsets[-1] - offsets[start]
            start = first_turn_after(offsets[start] + excess * num_kept)
    raise AssertionError("the last attempt returns or raises")
