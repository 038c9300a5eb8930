"""Short conversations tell the ends of prompts as the whole conversation does."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ramify.errors import ChatTemplateError
from ramify.server.prompts.answer_opening import find_turn_opening
from ramify.server.prompts.next_turns import num_stable_chars
from ramify.server.prompts.renderer import PromptRenderer
from tests.cpu.family_server import of_family, tokenizer_of
from tests.cpu.family_templates import TOOLS, FamilyTemplate

NUM_TALKS = 40
# Some of them are words that templates look for, or write themselves.
TEXTS = (
    "Look.",
    " Look.\n",
    "a",
    "user",
    "assistant\n",
    "",
    "\n",
    'x: "1"\n',
    "<think>no</think>yes",
    "<tool_response>\n1\n</tool_response>",
    "[TOOL_CALLS]",
    "/no_think",
    "Who is <b>it</b>? " * 20,
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": False},
    {"thinking": True},
    {"enable_thinking": True, "reasoning_effort": "low"},
)


@cache
def renderer_of(name: str) -> PromptRenderer:
    return PromptRenderer(tokenizer_of(name))


def a_talk(seed: int) -> list[dict[str, Any]]:
    """Messages of an agent or a chat: system prompt, questions, thoughts, calls and results."""
    draw = random.Random(seed)
    pick = partial(draw.choice, TEXTS if seed % 2 else TEXTS[:3])
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.7:
        messages.append({"role": "system", "content": pick()})
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": pick()})
        for _ in range(draw.choice((0, 0, 1, 5))):
            calls = [
                {
                    "id": f"abcdefgh{number}",
                    "type": "function",
                    "function": {"name": "find", "arguments": draw.choice(({}, {"city": pick()}))},
                }
                for number in range(draw.randint(1, 3))
            ]
            answer = {"role": "assistant", "content": pick(), "tool_calls": calls}
            messages += [answer | ({"reasoning_content": pick()} if draw.random() < 0.3 else {})]
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": pick()} for call in calls
            ]
        if draw.random() < 0.8:
            answer = {"role": "assistant", "content": pick()}
            messages += [answer | ({"reasoning_content": pick()} if draw.random() < 0.3 else {})]
    if messages[-1]["role"] == "assistant" and draw.random() < 0.9:
        messages.append({"role": "user", "content": pick()})
    return messages


@of_family
def test_the_end_of_a_prompt_is_that_of_its_shape(family: FamilyTemplate) -> None:
    """The header of the answer's turn, and whether the next turn's prompt begins with all of it."""
    renderer, num_known = renderer_of(family.name), 0
    for seed in range(NUM_TALKS):
        talk = renderer.tokenizer.escape_special_tokens(a_talk(seed))
        options = OPTIONS[seed % len(OPTIONS)]
        tools = TOOLS if family.takes_tools and seed % 3 else None
        render: Callable[..., str] = partial(renderer._render, tools=tools, **options)
        end = renderer._ends.of(
            talk, has_tools=bool(tools), add_generation_prompt=True, options=options
        )
        try:
            text = render(talk)
        except ChatTemplateError:
            continue
        if end is None:
            continue
        num_known += 1
        if end.is_stable:
            may_call = bool(tools) or any(message["role"] == "tool" for message in talk)
            try_render = partial(renderer._try_render, tools=tools, **options)
            assert num_stable_chars(text, try_render, talk, has_tools=may_call) == len(text), seed
        opening = end.opening_of(text, talk[-1])
        if opening is not None:
            assert opening == find_turn_opening(render, talk, len(talk), text), seed

    assert num_known >= NUM_TALKS // 4


def test_the_end_is_found_without_the_texts() -> None:
    """A conversation that grows by calls and results needs no further renderings."""
    renderer = renderer_of("qwen3")
    num_rendered = 0

    def render(messages: Any, **options: Any) -> str:
        nonlocal num_rendered
        num_rendered += 1
        return renderer._render(messages, **options)

    ends = type(renderer._ends)(render, renderer.tokenizer.chat_template_sources)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    all_ends = []
    for number in range(20):
        talk.append({"role": "assistant", "content": "", "tool_calls": [call]})
        talk.append({"role": "tool", "tool_call_id": "1", "content": f"Result {number}."})
        all_ends.append(ends.of(talk, has_tools=True, add_generation_prompt=True, options={}))

    assert None not in all_ends
    assert len(set(all_ends)) == 1
    assert num_rendered <= 3 * 4


def test_a_word_that_the_template_looks_for_tells_nothing() -> None:
    """The whole conversation is rendered."""
    talk = [{"role": "user", "content": "What is </think>?"}]

    end = renderer_of("qwen3")._ends.of(
        talk, has_tools=False, add_generation_prompt=True, options={}
    )

    assert end is None
