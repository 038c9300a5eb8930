"""Segments of a prompt stand where the template wrote the request's fields, in whatever order."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ramify.server.prompts.prompt_parts import PromptPart, text_variants, tool_part
from ramify.server.prompts.renderer import PromptRenderer
from tests.cpu.family_templates import FAMILY_TEMPLATES, FamilyTemplate
from tests.pure.server_bench import ServerBench
from tests.pure.tool_loop import SCHEMA, tokenizer_of

of_family = pytest.mark.parametrize("family", FAMILY_TEMPLATES, ids=lambda family: family.name)
FUNCTION = {"name": "find", "description": "Who lives there.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION | {"name": name}} for name in ("find", "seek")]
# It quotes a tool, and a text of the user.
QUOTE = f"You have {json.dumps(TOOLS[0])} and more. Hello there! " + "Follow the rules. " * 8


def spans(family: FamilyTemplate, messages: list[dict[str, Any]]) -> dict[str, tuple[int, str]]:
    """Start and text of each segment, of a conversation with `TOOLS`."""
    renderer = PromptRenderer(tokenizer_of(family.name))
    parts = [
        PromptPart(f"messages[{at}]", text_variants(message["content"]), role=message["role"])
        for at, message in enumerate(messages)
        if message["content"]
    ]
    prompt = renderer.chat(
        messages, [tool_part("tools[0]"), tool_part("tools[1]"), *parts], tools=TOOLS
    )
    return {
        segment.path: (
            segment.start,
            renderer.tokenizer.decode(
                prompt.ids[segment.start : segment.end], skip_special_tokens=False
            ),
        )
        for segment in prompt.segments
    }


@of_family
def test_each_message_is_found_where_it_stands(family: FamilyTemplate) -> None:
    """Also the second of two equal messages, and one that the system prompt quotes."""
    texts = [QUOTE, "Hello there!", "Good day to you.", "Hello there!"]
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]

    located = spans(family, messages)

    for at, text in enumerate(texts):
        assert text.strip() in located[f"messages[{at}]"][1]
    starts = [located[f"messages[{at}]"][0] for at in (1, 2, 3)]
    assert starts == sorted(starts)
    shown = [name for name in ("tools[0]", "tools[1]") if located[name][1]]
    if shown:  # the quoted tool is the system prompt's
        system_start, system = located["messages[0]"]
        num_system = len(tokenizer_of(family.name).encode(system, False))
        for name in shown:
            assert not system_start <= located[name][0] < system_start + num_system - 1
            assert "city" in located[name][1]


@of_family
@pytest.mark.parametrize("field", ["system", "tools"])
def test_a_difference_is_named_for_its_field(family: FamilyTemplate, field: str) -> None:
    """A changed system prompt is named, and a changed tool, by a miss in all three APIs."""

    async def main() -> list[str]:
        server = ServerBench(
            tokenizer=tokenizer_of(family.name), page_size=4, max_model_len=4096, pool_tokens=16384
        )
        segments = []
        async with server.running():
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
                explained = answer = None
                for place in ("/home/anna", "/home/bert"):
                    system = f"{path}. " + "Rules. " * 20
                    system += f"cwd: {place if field == 'system' else ''} " + "More rules. " * 20
                    parameters = json.loads(json.dumps(SCHEMA))
                    if field == "tools":
                        parameters["properties"]["city"]["description"] = f"A city in {place}."
                    function = {"name": "find", "description": "Who.", "parameters": parameters}
                    own = {"type": "string", "description": f"A city, by {path}."}
                    own_parameters = {"type": "object", "properties": {"city": own}}
                    other = function | {"name": "seek", "parameters": own_parameters}
                    body = body_of(path, system, [other, function])
                    explained = await server.post("/v1/cache/explain", body)
                    answer = await server.post(path, body)
                    assert answer.status == 200, answer.body
                assert explained is not None
                assert answer is not None
                miss = answer.json["usage"]["ramify_cache"]["miss"]
                assert miss["reason"] == "diverged"
                assert explained.json["miss"]["segment"] == miss["segment"]
                segments.append(miss["segment"])
        return segments

    if field == "tools" and "description" not in shown_tools(family):
        pytest.skip("the template writes no descriptions of parameters")

    named = asyncio.run(main())

    if field == "system":
        assert named == ["messages[0].content", "system", "instructions"]
    else:
        assert named == ["tools[1]"] * 3


def body_of(path: str, system: str, functions: list[dict[str, Any]]) -> dict[str, Any]:
    """A request with a system prompt, tools and a question."""
    question = {"role": "user", "content": "Who lives in Rome?"}
    if path == "/v1/messages":
        tools = [
            {"input_schema": f["parameters"]} | {k: f[k] for k in ("name", "description")}
            for f in functions
        ]
        return {
            "model": "tiny", "system": system, "messages": [question], "tools": tools,
            "max_tokens": 2,
        }  # fmt: skip
    if path == "/v1/responses":
        tools = [{"type": "function", "strict": False, **function} for function in functions]
        return {"instructions": system, "input": "Who?", "tools": tools, "max_output_tokens": 2}
    tools = [{"type": "function", "function": function} for function in functions]
    messages = [{"role": "system", "content": system}, question]
    return {"messages": messages, "tools": tools, "max_tokens": 2}


def shown_tools(family: FamilyTemplate) -> str:
    """What the template writes of a tool's parameters."""
    renderer = PromptRenderer(tokenizer_of(family.name))
    question = [{"role": "user", "content": "a"}]
    return renderer.chat(question, [], tools=TOOLS).text


def test_a_dropped_thought_is_not_found_where_it_is_quoted() -> None:
    """Qwen3's template drops it before the last question, which says the same."""
    [family] = [family for family in FAMILY_TEMPLATES if family.name == "qwen3"]
    thought = "I had better look it up."
    question = {"role": "user", "content": "Who?"}
    answer = {"role": "assistant", "content": "It is Ann.", "reasoning_content": thought}
    quoting = {"role": "user", "content": f"You thought: {thought}"}

    async def main() -> list[dict[str, Any]]:
        server = ServerBench(tokenizer=tokenizer_of(family.name))
        async with server.running():
            body = {"messages": [question, answer, quoting]}
            explained = await server.post("/v1/cache/explain", body)
        segments: list[dict[str, Any]] = explained.json["segments"]
        return segments

    segments = {segment["path"]: segment for segment in asyncio.run(main())}

    dropped = segments["messages[1].reasoning_content"]
    assert dropped["start"] == dropped["end"]
    assert segments["messages[1].content"]["end"] > segments["messages[1].content"]["start"]
    assert segments["messages[2].content"]["end"] > segments["messages[2].content"]["start"]
