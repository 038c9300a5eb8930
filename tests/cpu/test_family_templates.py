"""Every family's chat template, tool calls and thinking, through both official clients."""

from __future__ import annotations

import json
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState

from ramify.models.configs.families import FAMILIES
from ramify.server.model_dialects import OutputFormat, detect
from ramify.server.model_dialects.events import ArgumentsDelta, CallStart, TextDelta
from ramify.server.prompts.renderer import PromptRenderer
from tests.cpu.family_server import (
    QUESTION,
    SYSTEM,
    Family,
    called,
    of_family,
    reference,
    tokenizer_of,
)
from tests.cpu.family_templates import (
    ARGUMENTS,
    FAMILY_TEMPLATES,
    TOOL,
    TOOLS,
    FamilyTemplate,
    Messages,
)
from tests.cpu.thinker import run
from tests.pure.test_role_order import CONVERSATIONS, chat_messages, words


def conversations(family: FamilyTemplate) -> list[Messages]:
    """A result, and a further turn after it."""
    later = [
        {"role": "assistant", "content": "Ann does."},
        {"role": "user", "content": "And in Oslo?"},
    ]
    return [called(family), [*called(family), *later]]


def test_every_native_family_has_a_template() -> None:
    """Each row of the native families is in this table."""
    named = {name for family in FAMILY_TEMPLATES for name in family.model_types}

    assert {family.model_type for family in FAMILIES.values()} <= named


@of_family
def test_formats_are_detected(family: FamilyTemplate) -> None:
    """Each template shows its own formats: none of the look-alikes'."""
    form = detect("\n".join(family.templates.values()))

    assert (form.calls.name, form.reasoning.name) == (family.calls, family.reasoning)


@of_family
def test_no_order_of_roles_is_lost_or_refused(family: FamilyTemplate) -> None:
    """A late system message, an answer first, messages of one role in a row: each text is there."""
    renderer = PromptRenderer(tokenizer_of(family.name))
    for name, roles in CONVERSATIONS.items():
        if "call" in roles:
            continue
        text = renderer.chat(chat_messages(roles), []).text

        assert [text.count(word) for word in words(roles)] == [1] * len(roles), name


def format_of(family: FamilyTemplate) -> OutputFormat:
    return detect("\n".join(family.templates.values()), special_tokens=family.special_tokens)


@of_family
def test_look_alikes_are_read_as_meant_or_as_text(family: FamilyTemplate) -> None:
    """Any family's answer is its call, or its text is kept; never half of a call."""
    form = format_of(family)
    for writer in FAMILY_TEMPLATES:
        parser = form.new_parser(["find"], prompt_end="")
        events = [*parser.feed(writer.answer), *parser.feed("", is_last=True)]

        arguments = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        if any(isinstance(event, CallStart) for event in events):
            assert json.loads(arguments) == ARGUMENTS, writer.name
            assert "Rome" not in text, writer.name
        else:
            assert not arguments, writer.name
            assert "Rome" in text, writer.name


@of_family
def test_prompts_are_those_of_transformers(family: FamilyTemplate) -> None:
    """Tools, calls, results, a system prompt and turns, as the template expects them."""
    renderer = Family(family).service.prompt_renderer

    for messages in conversations(family):
        ours = renderer.chat(messages, [], tools=TOOLS, template_options=family.options)
        theirs = reference(family, messages, with_tools=True, **family.options)
        assert ours.text == theirs
        assert list(ours.ids) == list(tokenizer_of(family.name).encode(theirs, False))
    assert renderer.conventions.writes_tools == family.takes_tools


class ThroughClients:
    """The same conversation through both clients: what each answers, and what each prompt was."""

    def __init__(self, family: FamilyTemplate) -> None:
        self.family, self.bench = family, Family(family)
        variables = self.bench.service.tokenizer.chat_template_names
        assert set(family.options) <= variables
        self.chat = {
            "model": "tiny",
            "tools": TOOLS,
            "max_tokens": 600,
            "extra_body": {"chat_template_kwargs": dict(family.options)},
        }
        function = TOOL["function"]
        assert isinstance(function, dict)
        self.message: dict[str, Any] = {
            "model": "tiny",
            "system": SYSTEM["content"],
            "tools": [{"name": "find", "input_schema": function["parameters"]}],
            "max_tokens": 600,
        }
        self.message["tools"][0]["description"] = function["description"]
        if family.options:
            self.message["thinking"] = {"type": "enabled", "budget_tokens": 1024}

    async def ask_openai(self, client: Any, messages: Messages, *, stream: bool) -> Any:
        """The message of a chat completion, whole or put together from its chunks."""
        body = self.chat | {"messages": messages}
        if not stream:
            return (await client.chat.completions.create(**body)).choices[0].message
        state = ChatCompletionStreamState()
        async for chunk in await client.chat.completions.create(**body, stream=True):
            state.handle_chunk(chunk)
        return state.get_final_completion().choices[0].message

    async def ask_anthropic(self, client: Any, messages: Messages, *, stream: bool) -> Any:
        """The content of a message."""
        body = self.message | {"messages": messages}
        if not stream:
            return (await client.messages.create(**body)).content
        async with client.messages.stream(**body) as events:
            return (await events.get_final_message()).content

    def check_openai(self, message: Any) -> None:
        """Thoughts, text and the call of the family's answer."""
        assert (getattr(message, "reasoning_content", None) or "") == self.family.thought
        assert (message.content or "") == self.family.text
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("find", ARGUMENTS)

    def check_anthropic(self, content: Any) -> None:
        """Likewise, as blocks."""
        parts = [
            (block.type, getattr(block, "thinking", None) or getattr(block, "text", None))
            for block in content
        ]
        thought = [("thinking", self.family.thought)] if self.family.thought else []
        text = [("text", self.family.text)] if self.family.text else []
        assert parts == [*thought, *text, ("tool_use", None)]
        assert (content[-1].name, content[-1].input) == ("find", ARGUMENTS)

    async def talk(self) -> None:
        """Ask, check the answer, send it back with a result, check the prompt."""
        question = {"role": "user", "content": QUESTION}
        async with self.bench.clients() as (openai, anthropic):
            for stream in (False, True):
                message = await self.ask_openai(openai, [SYSTEM, question], stream=stream)
                self.check_openai(message)
                [call] = message.tool_calls
                answer = message.model_dump(exclude_none=True)
                result = {"role": "tool", "tool_call_id": call.id, "content": "Ann."}
                await self.ask_openai(openai, [SYSTEM, question, answer, result], stream=False)
                self.check_prompt(call.id)

                content = await self.ask_anthropic(anthropic, [question], stream=stream)
                self.check_anthropic(content)
                id_ = content[-1].id
                blocks = [block.model_dump(exclude_none=True) for block in content]
                block = {"type": "tool_result", "tool_use_id": id_, "content": "Ann."}
                history: Messages = [
                    question,
                    {"role": "assistant", "content": blocks},
                    {"role": "user", "content": [block]},
                ]
                await self.ask_anthropic(anthropic, history, stream=False)
                self.check_prompt(id_)

    def check_prompt(self, id_: str) -> None:
        """The last prompt is what transformers renders."""
        messages = called(self.family, id_)
        options = self.family.options
        assert self.bench.prompt == reference(self.family, messages, with_tools=True, **options)


@of_family
def test_calls_and_thoughts_through_both_clients(family: FamilyTemplate) -> None:
    """Whole and streamed: thoughts, text and a call; sent back, they and a result are in the prompt."""
    run(ThroughClients(family).talk())
