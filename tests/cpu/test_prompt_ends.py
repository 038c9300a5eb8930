"""Short conversations tell the ends of prompts as the whole conversation does."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from ramify.errors import ChatTemplateError
from ramify.server.prompts.answer_opening import find_turn_opening
from ramify.server.prompts.next_turns import num_stable_chars
from ramify.server.prompts.renderer import PromptRenderer
from ramify.server.prompts.template_tests import TemplateTests
from tests.cpu.family_server import of_family, tokenizer_of
from tests.cpu.family_templates import TOOLS, FamilyTemplate
from tests.pure.server_bench import tokenizer_with

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
    num_known = num_checked_ends(renderer_of(family.name), TOOLS if family.takes_tools else None)

    assert num_known >= NUM_TALKS // 4


def num_checked_ends(renderer: PromptRenderer, all_tools: list[Any] | None) -> int:
    """Compare ends with those of whole conversations; returns how many are known."""
    num_known = 0
    for seed in range(NUM_TALKS):
        talk = renderer.tokenizer.escape_special_tokens(a_talk(seed))
        if seed % 5 == 0:
            talk[-1] = {**talk[-1], "name": "bob"}
        options = OPTIONS[seed % len(OPTIONS)]
        tools = all_tools and (all_tools[: seed % 3] or None)
        render: Callable[..., str] = partial(renderer._render, tools=tools, **options)
        end = renderer._ends.of(
            talk, tools=tools or (), add_generation_prompt=True, options=options
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
    return num_known


MESSAGE = "<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}</e>"
LOOP = "{% for m in messages %}" + MESSAGE + "{% endfor %}"
OPENING = "{% if add_generation_prompt %}<assistant>{% endif %}"


def unless(test: str) -> str:
    """A template that leaves out the messages that pass a test."""
    loop = (
        "{% for m in messages %}{% if not (" + test + ") %}" + MESSAGE + "{% endif %}{% endfor %}"
    )
    return loop + OPENING


def thinks_if(test: str) -> str:
    """A template that begins to think where a test holds."""
    return (
        LOOP
        + "{% if add_generation_prompt %}<assistant>{% if "
        + test
        + " %}<think>{% endif %}{% endif %}"
    )


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("messages", "messages[-10:]") + OPENING,
        unless("m.role == 'tool' and loop.revindex > 6"),
        unless("loop.index == 7 and not loop.last"),
        unless("m.content | length > 50 and not loop.last"),
        unless("m.content == 'Look.' and not loop.last"),
        unless("m.content[0] == 'L' and not loop.last"),
        unless("m.name == 'bob' and not loop.last"),
        unless("not m.content and not loop.last"),
        unless("not loop.first and m.content == messages[loop.index0 - 1].content"),
        LOOP.replace("m.content", "(m.content | trim if loop.last else m.content)") + OPENING,
        thinks_if("messages | length % 2 == 0"),
        thinks_if("messages | length is even"),
        thinks_if("messages | length > 6"),
        thinks_if("messages[-1].content == 'Look.'"),
        thinks_if("messages[-1].content[-9:] == '/no_think'"),
        thinks_if("tools and tools | length > 1"),
        thinks_if("tools and tools[0].function.name == 'find'"),
        "{% set word = '/no_think' %}" + thinks_if("word in messages[-1].content"),
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}" + thinks_if("ns.n > 2"),
        LOOP.replace("</e>", "</e>{{ loop.cycle('', '-') }}") + OPENING,
    ],
)
def test_an_end_is_known_only_where_it_is_that_of_the_whole(source: str) -> None:
    """Templates that count messages, measure texts, or compare them with each other."""
    num_checked_ends(PromptRenderer(tokenizer_with(source)), TOOLS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | random }}",
        "{{ cycler('a', 'b').next() }}",
        "{% if strftime_now('%Y') == '2030' %}a{% endif %}",
        "{{ messages[0].content.strip('abc') }}",
        "{% if messages[0].content is odd %}a{% endif %}",
        "{% if messages[0].name in names %}a{% endif %}",
        "{% include 'a' %}",
        "{% if",
    ],
)
def test_other_tests_are_unknown(source: str) -> None:
    """So is what no template has that we know."""
    assert TemplateTests.of([source]).is_unknown


def test_tests_of_a_template() -> None:
    """Words, whole texts, and what decides nothing."""
    source = (
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('x') }}{% endif %}"
        "{% if 'content' in m and 'aim' in m.content %}{{ m.content.split('word')[-1] }}{% endif %}"
        "{% if m.name == 'python' and m.role in ['tool', 'ipython'] %}{{ m | tojson(indent=4) }}"
        "{% endif %}{% if m.content[0] == '/' %}{{ m.content.strip('\\n') }}{% endif %}"
    )

    tests = TemplateTests.of([source])

    assert tests == TemplateTests(
        frozenset({"aim", "word", "/"}), frozenset({"python", "tool", "ipython"}), False
    )


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
        all_ends.append(ends.of(talk, tools=TOOLS, add_generation_prompt=True, options={}))

    assert None not in all_ends
    assert len(set(all_ends)) == 1
    assert num_rendered <= 3 * 4


def test_a_word_that_the_template_looks_for_tells_nothing() -> None:
    """The whole conversation is rendered."""
    function = {"name": "f", "arguments": {"x": "What is </think>?"}}
    call = {"id": "1", "type": "function", "function": function}
    question = {"role": "user", "content": "Look."}
    ends = renderer_of("qwen3")._ends
    talks: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "What is </think>?"}],
        [question, {"role": "assistant", "content": "", "tool_calls": [call]}, question],
    ]

    for talk in talks:
        assert ends.of(talk, tools=(), add_generation_prompt=True, options={}) is None
