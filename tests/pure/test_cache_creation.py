"""Messages: what counts as cache creation was written, in the body and in both ends of a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cpu.family_templates import FAMILY_TEMPLATES, FamilyTemplate
from tests.pure.server_bench import ServerBench
from tests.pure.tool_loop import PAGE_SIZE, REASONING_FAMILIES, LoopServer, ToolLoop, tokenizer_of

[MISTRAL] = [family for family in FAMILY_TEMPLATES if family.name == "mistral_v3"]
MARK = {"cache_control": {"type": "ephemeral"}}


def assert_consistent(usage: dict[str, Any], num_prompt: int) -> None:
    """All tokens of the prompt are counted once, and no more as created than were written."""
    created, cache = usage["cache_creation_input_tokens"], usage["ramify_cache"]
    assert created <= cache["written"]
    assert sum(usage["cache_creation"].values()) == created
    assert usage["cache_read_input_tokens"] == cache["read"] + cache["shared_in_flight"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + created == num_prompt
    assert cache["written"] <= cache["computed"]


def marked(body: dict[str, Any]) -> dict[str, Any]:
    """The body with a breakpoint at its last block."""
    last = body["messages"][-1]
    content = last["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    blocks = [*blocks[:-1], blocks[-1] | MARK]
    return body | {"messages": [*body["messages"][:-1], last | {"content": blocks}]}


@pytest.mark.parametrize("family", REASONING_FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("stream", [False, True])
def test_no_more_is_created_than_written(family: FamilyTemplate, stream: bool) -> None:
    """In a loop of calls with thoughts, with a breakpoint at the end of each request."""

    async def main() -> None:
        server = LoopServer(family)
        loop = ToolLoop(family, "messages", has_reasoning=True, uses_answers=False)
        async with server.running():
            for step in range(3):
                body = marked(loop.body()) | {"stream": stream}
                response = await server.post("/v1/messages", body)
                num_prompt = len(server.ended[-1].request.prompt.ids)
                if stream:
                    events = {event["type"]: event for event in response.events}
                    begun = events["message_start"]["message"]["usage"]
                    ended = events["message_delta"]["usage"]
                    assert_consistent(begun, num_prompt)
                    outputs = ("output_tokens", "output_tokens_details")
                    assert {k: v for k, v in begun.items() if k not in outputs} == {
                        k: v for k, v in ended.items() if k not in outputs
                    }
                    loop.add(step, {"content": []})
                else:
                    ended = response.json["usage"]
                    loop.add(step, response.json)
                assert_consistent(ended, num_prompt)
                assert ended["cache_creation_input_tokens"] > 0

    asyncio.run(main())


def usages_of(blocks: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Usage of two single turns with the system prompt, whose template moves it to each question."""

    async def main() -> list[dict[str, Any]]:
        server = ServerBench(tokenizer=tokenizer_of(MISTRAL.name), page_size=PAGE_SIZE)
        usages = []
        async with server.running():
            for block in blocks:
                body = {
                    "model": "tiny", "system": system, "max_tokens": 2,
                    "messages": [{"role": "user", "content": [block]}],
                }  # fmt: skip
                response = await server.post("/v1/messages", body)
                assert response.status == 200, response.body
                usages.append(response.json["usage"])
                assert_consistent(usages[-1], len(server.ended[-1].request.prompt.ids))
        return usages

    return asyncio.run(main())


def test_what_is_marked_is_written_though_the_next_turn_moves_it() -> None:
    """Mistral's template writes the system prompt into the last question."""
    block = {"type": "text", "text": "Who lives in Rome? " * 20} | MARK

    first, again = usages_of([block, block], "Be brief. " * 20)

    assert first["cache_creation_input_tokens"] > 0
    assert again["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]


def test_a_moving_system_prompt_is_shared_by_conversations() -> None:
    """Another conversation begins with the same system prompt, though no next turn does."""
    blocks = [{"type": "text", "text": f"Who lives in {city}?"} for city in ("Rome", "Paris")]

    first, other = usages_of(blocks, "Be brief. " * 20)

    assert first["ramify_cache"]["written"] > 2 * PAGE_SIZE
    assert other["cache_read_input_tokens"] == first["ramify_cache"]["written"]


def test_a_template_without_a_next_turn_caches_the_whole_prompt() -> None:
    """It takes one question, so that what is read again is the same question."""
    template = (
        "{%- if messages | length > 1 -%}{{ raise_exception('one question') }}{%- endif -%}"
        "{{- '<|user|>' + messages[0].content + '<|end|><|assistant|>' -}}"
    )
    body = {"messages": [{"role": "user", "content": "Who lives in Rome? " * 20}], "max_tokens": 2}

    async def main() -> list[dict[str, Any]]:
        server = ServerBench(chat_template=template, page_size=PAGE_SIZE)
        async with server.running():
            responses = [await server.post("/v1/chat/completions", body) for _ in range(2)]
        return [response.json["usage"] for response in responses]

    first, again = asyncio.run(main())

    num_pages = first["prompt_tokens"] // PAGE_SIZE
    assert first["ramify_cache"]["written"] == num_pages * PAGE_SIZE
    # The first token of the answer completes the page that the prompt ends in.
    assert again["ramify_cache"]["read"] == first["prompt_tokens"] - 1
