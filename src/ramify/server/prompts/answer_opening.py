"""Where the answer begins in a rendered prompt: a prefill, and what the template opens of the turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ramify.errors import ChatTemplateError

TemplateMessage = Mapping[str, Any]
RenderMessages = Callable[[Sequence[TemplateMessage]], str]
PREFILL_END = "\ue0f1\ue0f2"  # two characters for private use: no template writes them


def render_prefill(render: Callable[..., str], messages: Sequence[TemplateMessage]) -> str:
    """The prompt up to the end of the last message's text, which a template may have stripped before.

    Raises:
        ChatTemplateError: the template leaves the last message out.
    """

    def render_until_end(content: str) -> str:
        last = {**messages[-1], "content": content + PREFILL_END}
        text = render([*messages[:-1], last], add_generation_prompt=False)
        end = text.rfind(PREFILL_END)
        if end < 0:
            raise ChatTemplateError(
                "the chat template does not write the last message, so its text cannot be "
                "continued; end the messages with one of the user"
            )
        return text[:end]

    prefill = str(messages[-1].get("content") or "")
    text = render_until_end(prefill)
    if not prefill[:1].isspace():
        return text
    beginning = render_until_end("")
    is_stripped = text == beginning + prefill.lstrip()
    return beginning + prefill if is_stripped else text


def find_turn_opening(
    render: RenderMessages, messages: Sequence[TemplateMessage], num_earlier: int, text: str
) -> str:
    """The end of a prompt's text after the messages before the answer's turn.

    A mark in the last message before the turn locates it: some templates write the header of the
    answer's turn, and the begin of its reasoning, with the message of the user.

    Args:
        num_earlier: messages before the answer's turn; one more is the beginning of the answer.
    """
    if not num_earlier:
        return text
    before = messages[num_earlier - 1]
    marked = {**before, "content": str(before.get("content") or "") + PREFILL_END}
    try:
        text = render([*messages[: num_earlier - 1], marked, *messages[num_earlier:]])
    except ChatTemplateError:  # this template reads the content, and does not only write it
        return ""
    _, end_mark, opening = text.rpartition(PREFILL_END)
    return opening if end_mark else ""
