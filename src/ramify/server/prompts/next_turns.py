"""How much of a prompt later prompts begin with as well: of a next turn, or a new conversation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import takewhile

from ramify.server.prompts.answer_opening import TemplateMessage

PLACEHOLDER = "\u2042"  # an asterism, for texts whose place in a rendered prompt is looked up
REASONING = {"reasoning_content": PLACEHOLDER}
ANSWER = {"role": "assistant", "content": PLACEHOLDER}
QUESTION = {"role": "user", "content": PLACEHOLDER}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": PLACEHOLDER,
            "type": "function",
            "function": {"name": PLACEHOLDER, "arguments": {PLACEHOLDER: PLACEHOLDER}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": PLACEHOLDER, "content": PLACEHOLDER}
# What may follow a prompt, with reasoning and without.
CALL_TURNS = ((CALL | REASONING, RESULT), (CALL, RESULT))
TEXT_TURNS = ((ANSWER, QUESTION), (ANSWER | REASONING, QUESTION))


def num_stable_chars(
    text: str,
    render: Callable[[Sequence[TemplateMessage]], str | None],
    messages: Sequence[TemplateMessage],
    *,
    has_tools: bool,
) -> int:
    """Characters that a next turn's prompt begins with as well, whatever the answer is.

    The most of what any next turn shares, or a new conversation with the same system prompt: templates
    that keep reasoning within a loop of tools drop it before the next question of the user. All if the
    template refuses every next turn.

    Args:
        text: the prompt of `messages`.
        render: returns the prompt of a conversation; None if the template refuses it.
        has_tools: the answer may call a tool.
    """

    def num_shared(conversation: Sequence[TemplateMessage]) -> int | None:
        later = render(conversation)
        return None if later is None else common_prefix(text, later)

    num_stable: int | None = None
    for turn in (*CALL_TURNS, *TEXT_TURNS) if has_tools else TEXT_TURNS:
        shared = num_shared([*messages, *turn])
        if shared == len(text):
            return shared
        if shared is not None:
            num_stable = max(num_stable or 0, shared)
    if num_stable is None:
        return len(text)
    # Some templates move the system prompt to the last question.
    system = takewhile(lambda message: message["role"] == "system", messages)
    return max(num_stable, num_shared([*system, QUESTION]) or 0)


def common_prefix(left: str | array[int], right: str | array[int]) -> int:
    """Length of the common prefix of two texts or token sequences. O(log n) comparisons."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
