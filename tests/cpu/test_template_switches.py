"""Switches of thoughts, documents, and calls that a family's chat template does not take as they come."""

from __future__ import annotations

from typing import Any

import pytest

from ramify.server.prompts.renderer import PromptRenderer
from tests.cpu.family_server import (
    QUESTION,
    SYSTEM,
    Family,
    called,
    reference,
    tokenizer_of,
)
from tests.cpu.family_templates import FAMILY_TEMPLATES, TOOLS, FamilyTemplate, Messages
from tests.cpu.thinker import run
from tests.pure.server_bench import tokenizer_with

DOCUMENTS = [
    {"doc_id": "1", "title": "Rome", "text": "Ann lives in Rome."},
    {"doc_id": "2", "title": "Oslo", "text": "Bo lives in Oslo."},
]
ASKED: Messages = [SYSTEM, {"role": "user", "content": QUESTION}]


def named(*names: str) -> Any:
    """The families of these names as parameters."""
    chosen = [family for family in FAMILY_TEMPLATES if family.name in names]
    assert len(chosen) == len(names)
    return pytest.mark.parametrize("family", chosen, ids=lambda family: family.name)


SWITCHED = [family.name for family in FAMILY_TEMPLATES if family.switch]
READERS = [family.name for family in FAMILY_TEMPLATES if family.takes_documents]


@named(*SWITCHED)
def test_thoughts_are_switched_in_both_apis(family: FamilyTemplate) -> None:
    """By the template's own variable, by an effort, and by `thinking`: the same prompts as transformers'."""
    switch = family.switch
    effort, budget = switch == "reasoning_effort", switch == "thinking_budget"
    on, off = ("high", "none") if effort else (512, 0) if budget else (True, False)
    chat: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 4}
    message = chat | {"messages": ASKED[1:], "system": SYSTEM["content"]}

    async def main() -> None:
        bench = Family(family)
        async with bench.clients() as (openai, anthropic):
            for value in (on, off):
                wanted = reference(family, ASKED, **{switch: value})
                variables = {"chat_template_kwargs": {switch: value}}
                await openai.chat.completions.create(**chat, extra_body=variables)
                assert bench.prompt == wanted
                if budget and value:
                    await openai.chat.completions.create(
                        **chat, extra_body={"thinking_budget": value}
                    )
                else:
                    await openai.chat.completions.create(
                        **chat, reasoning_effort="high" if value == on else "none"
                    )
                assert bench.prompt == wanted
                if effort:
                    fields: dict[str, Any] = {"extra_body": {"output_config": {"effort": value}}}
                elif value:
                    tokens = value if budget else 1024
                    fields = {"thinking": {"type": "enabled", "budget_tokens": tokens}}
                else:
                    fields = {"thinking": {"type": "disabled"}}
                await anthropic.messages.create(**message, **fields)
                assert bench.prompt == wanted

    run(main())


@named(*READERS)
def test_documents_are_in_the_prompt(family: FamilyTemplate) -> None:
    """A chat request's documents reach the template that takes them."""
    wanted = rag(family)

    async def main() -> None:
        bench = Family(family)
        async with bench.clients() as (openai, _):
            await openai.chat.completions.create(
                model="tiny", messages=ASKED, max_tokens=4, extra_body={"documents": DOCUMENTS}
            )
            assert bench.prompt == wanted

    run(main())


def rag(family: FamilyTemplate) -> str:
    """The prompt with documents; with several templates, callers of transformers name the one."""
    options = {"chat_template": family.templates["rag"]} if "rag" in family.templates else {}
    return reference(family, ASKED, documents=DOCUMENTS, **options)


@named("qwen3", "gemma3")
def test_documents_are_refused_where_no_template_takes_them(family: FamilyTemplate) -> None:
    """One line that says what to do instead."""

    async def main() -> Any:
        bench = Family(family)
        async with bench.running():
            body = {"messages": ASKED, "documents": ["Ann lives in Rome."]}
            return await bench.post("/v1/chat/completions", body)

    response = run(main())

    assert response.status == 400
    assert response.json["error"]["param"] == "documents"
    assert "send them in a message" in response.json["error"]["message"]


@named("gemma2", "phi3", "olmo2")
def test_tools_without_a_place_are_warned_of(family: FamilyTemplate) -> None:
    """The model does not see them, and the response says so; the call is read all the same."""

    async def main() -> Any:
        bench = Family(family)
        async with bench.running():
            body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 600}
            return await bench.post("/v1/chat/completions", body)

    response = run(main())

    [choice] = response.json["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "find"
    assert "the model does not see them" in response.headers["x-ramify-warning"]


def rendered(family: FamilyTemplate, messages: Messages) -> str:
    renderer = Family(family).service.prompt_renderer
    return renderer.chat(messages, [], tools=TOOLS).text


def two_calls() -> Messages:
    """Two calls in one message, and their results in the other order."""
    system, user, answer, result = called(FAMILY_TEMPLATES[0], "abcdefgh1")
    call = answer["tool_calls"][0]
    function = {"name": "find", "arguments": {"city": "Oslo"}}
    calls = [call, {**call, "id": "abcdefgh2", "function": function}]
    second = {**result, "tool_call_id": "abcdefgh2", "content": "Bo."}
    return [system, user, {**answer, "tool_calls": calls}, second, result]


@named("llama", "gpt_oss")
def test_calls_are_split_where_a_message_has_one(family: FamilyTemplate) -> None:
    """Each call is a message of its own, and its own result follows it."""
    system, user, answer, second, first = two_calls()
    split = [
        {**answer, "tool_calls": [call], "content": ""} for call in answer["tool_calls"]
    ]  # fmt: skip

    text = rendered(family, [system, user, answer, second, first])

    ordered = [system, user, split[0], first, split[1], second]
    assert text == reference(family, ordered, with_tools=True)


@named("qwen2", "mistral_v3", "granite4")
def test_parallel_calls_stay_one_message_elsewhere(family: FamilyTemplate) -> None:
    """Templates that write several calls get them as they come."""
    messages = two_calls()

    assert rendered(family, messages) == reference(family, messages, with_tools=True)


@named("mistral_v3")
def test_ids_of_other_servers_are_shortened(family: FamilyTemplate) -> None:
    """A call and its result keep the same id, of nine letters and digits, for any id of a client."""
    long = called(family, "toolu_01A09q90qw90lq917835lq9")

    text = rendered(family, long)

    short = text.partition('"id": "')[2][:9]
    assert short.isalnum()
    assert text == reference(family, called(family, short), with_tools=True)


@named("mistral_v3")
def test_different_ids_stay_different(family: FamilyTemplate) -> None:
    """Results are not confused."""
    chat = Family(family).service.prompt_renderer.chat
    texts = {chat(called(family, f"call_{number}"), []).text for number in range(50)}

    assert len(texts) == 50


@named("gpt_oss")
def test_thoughts_and_text_before_a_call_are_joined(family: FamilyTemplate) -> None:
    """gpt-oss's template refuses both in a message with a call: nothing of them is lost."""
    messages = called(family)
    messages[2]["content"] = "I look it up."
    joined = called(family)
    joined[2]["reasoning_content"] += "\nI look it up."

    assert rendered(family, messages) == reference(family, joined, with_tools=True)


@named("gemma2", "starcoder2")
def test_a_system_prompt_alone_is_the_users(family: FamilyTemplate) -> None:
    """Without any message of the user, the system prompt is the first."""
    text = rendered(family, [SYSTEM])

    alone = [{**SYSTEM, "role": "user"}]
    assert text == tokenizer_of(family.name).apply_chat_template(alone)


@named("deepseek_v3", "deepseek_r1")
def test_text_and_a_call_are_both_written(family: FamilyTemplate) -> None:
    """Templates that write calls only of a message without content get the text as another one."""
    messages = called(family)
    messages[2]["content"] = "I look it up."
    system, user, answer, result = called(family)
    text = {"role": "assistant", "content": "I look it up."}

    wanted = reference(family, [system, user, text, answer, result], with_tools=True)
    assert rendered(family, messages) == wanted


def test_results_are_named_where_the_template_asks_for_names() -> None:
    """Clients leave out the name of a tool's result: it is that of the call."""
    template = """{%- for message in messages %}
        {%- if message.role == 'tool' and message.name is not defined %}
            {{- raise_exception('Tool response must contain name') }}
        {%- endif %}
        {{- message.role + ' ' + (message.name or '') + ': ' + message.content }}
        {%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}
    {%- endfor %}"""
    renderer = PromptRenderer(tokenizer_with(template))

    text = renderer.chat(called(FAMILY_TEMPLATES[0]), []).text

    assert "tool find: Ann." in text
