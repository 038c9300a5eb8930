"""`tool_choice: "none"`: the tools stay in the prompt, which stays cached, and no call begins."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.cpu.family_templates import FAMILY_TEMPLATES, FamilyTemplate
from tests.pure.server_bench import Answer
from tests.pure.test_prompt_segments import body_of
from tests.pure.tool_loop import SCHEMA, LoopServer

FUNCTION = {"name": "find", "description": "Who lives there. " * 10, "parameters": SCHEMA}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
FAMILIES = {family.name: family for family in FAMILY_TEMPLATES}
# Openings that are one token, that are text, and a format without any.
TOKEN, TEXT, BARE = FAMILIES["deepseek_v31"], FAMILIES["qwen3"], FAMILIES["phi3"]
NEEDS_GRAMMARS = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None,
    reason="llguidance is missing: the extra 'structured'",
)
WITH_AND_WITHOUT_GRAMMARS = pytest.mark.parametrize(
    "has_grammars", [pytest.param(True, marks=NEEDS_GRAMMARS), False]
)


def request(path: str, *, forbids: bool, **fields: Any) -> dict[str, Any]:
    """A request with a tool, which may be called or not."""
    choice: Any = {"type": "none"} if path == "/v1/messages" else "none"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = body_of(path, "Be brief. " * 20, [FUNCTION]) | {limit: 300} | fields
    return body | {"tool_choice": choice} if forbids else body


def answers(
    family: FamilyTemplate,
    path: str,
    *,
    drops: bool = False,
    has_grammars: bool = True,
    **fields: Any,
) -> tuple[LoopServer, list[dict[str, Any]]]:
    """Answers of a model that tries to call: where it may, and where it must not."""

    async def main() -> tuple[LoopServer, list[dict[str, Any]]]:
        server = LoopServer(family)
        server.service.drops_forbidden_tools = drops
        if not has_grammars:
            server.core.lifecycle.grammar_compiler = None
        payloads = []
        async with server.running():
            for forbids in (False, True):
                response = await server.post(path, request(path, forbids=forbids, **fields))
                assert response.status == 200, response.body
                payloads.append(response.json)
        return server, payloads

    return asyncio.run(main())


def has_call(payload: dict[str, Any]) -> bool:
    """Whether a response of any API has a call."""
    if "choices" in payload:
        return bool(payload["choices"][0]["message"].get("tool_calls"))
    items = payload.get("content") or payload.get("output") or []
    return any(item["type"] in ("tool_use", "function_call") for item in items)


@WITH_AND_WITHOUT_GRAMMARS
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", [TOKEN, TEXT, BARE], ids=lambda family: family.name)
def test_tools_stay_and_no_call_begins(
    family: FamilyTemplate, path: str, has_grammars: bool
) -> None:
    """The prompt is that of a request that may call, and is read from the cache."""
    server, (free, bound) = answers(family, path, has_grammars=has_grammars)

    before, after = (generation.request.prompt for generation in server.ended)
    usage = server.ended[1].cache
    assert (has_call(free), has_call(bound)) == (True, False)
    assert before.ids == after.ids
    assert usage is not None
    assert usage.computed <= server.service.page_size
    output = server.ended[1].output
    assert output is not None
    openings = server.service.output_format.call_openings
    assert not any(opening in output.completions[0].text for opening in openings)
    assert any(opening in family.answer for opening in openings) == (family is not BARE)


@pytest.mark.parametrize("path", PATHS)
def test_tools_are_left_out_if_the_operator_says_so(path: str) -> None:
    """Then the prompt has no tools, and the answer is free."""
    server, (_, bound) = answers(TEXT, path, drops=True)

    assert not has_call(bound)
    assert "Who lives there." not in server.ended[1].request.prompt.text
    assert server.ended[1].request.params.banned_sequences == ()


def written(server: LoopServer) -> Sequence[int]:
    """The tokens of the last answer."""
    output = server.ended[-1].output
    assert output is not None
    return output.completions[0].token_ids


@NEEDS_GRAMMARS
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["deepseek_v31", "deepseek_v32", "qwen3", "seed_oss", "gpt_oss"])
def test_no_call_begins_character_by_character(name: str, path: str, is_streamed: bool) -> None:
    """A model that spells what begins a call cannot write its last character; all else stays."""
    family = FAMILIES[name]

    async def main() -> tuple[LoopServer, Answer]:
        server = LoopServer(family)
        encode = server.service.tokenizer.encode
        pieces = [token for character in family.answer for token in encode(character, False)]
        server.script = [*pieces, server.script[-1]]
        async with server.running():
            body = request(path, forbids=True, stream=is_streamed)
            response = await server.post(path, body)
            assert response.status == 200, response.body
        return server, response

    server, response = asyncio.run(main())

    text = server.service.tokenizer.decode(written(server), skip_special_tokens=False)
    openings = server.service.output_format.call_openings
    num_openings = sum(family.answer.count(opening) for opening in openings)
    differing = [
        token for token, own in zip(written(server), server.script, strict=False) if token != own
    ]
    assert not any(opening in text for opening in openings)
    assert len(differing) == num_openings > 0
    assert is_streamed or not has_call(response.json)


@WITH_AND_WITHOUT_GRAMMARS
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["qwen3", "llama", "phi3", "deepseek_v31"])
def test_an_answer_that_begins_no_call_stays(name: str, path: str, has_grammars: bool) -> None:
    """JSON, fences, tags and special tokens that begin no call are written as they are."""
    text = 'So: {"name": "Ann"} <tool> a < b\n```xml\n<tool_c/>\n```\n```json\n[]\n``` <think> é'
    family = replace(FAMILIES[name], answer=text)

    server, _ = answers(family, path, has_grammars=has_grammars)

    assert list(written(server)) == list(server.script)


@WITH_AND_WITHOUT_GRAMMARS
def test_words_that_the_client_bans_stay_banned(has_grammars: bool) -> None:
    """Calls are forbidden beside them."""
    server, (_, bound) = answers(TEXT, PATHS[0], has_grammars=has_grammars, bad_words=["look"])

    free, limited = (generation.request.params for generation in server.ended)
    assert set(free.banned_sequences) <= set(limited.banned_sequences)
    assert "look" in TEXT.answer
    assert "look" not in bound["choices"][0]["message"]["content"]
    assert not has_call(bound)


def test_a_format_forbids_calls_by_itself() -> None:
    """An answer that must match a pattern needs no further limits."""
    server, (_, bound) = answers(TEXT, PATHS[0], guided_choice=["yes", "no"])

    assert bound["choices"][0]["message"]["content"] in ("yes", "no")
    assert server.ended[1].request.params.banned_sequences == ()


@pytest.mark.parametrize("drops", [False, True])
def test_tools_that_are_not_allowed_stay_in_the_prompt(drops: bool) -> None:
    """`allowed_tools` keeps the prompt, and no other tool is called. Or they are left out."""
    seek = {"type": "function", "strict": False, **FUNCTION, "name": "seek"}
    body = request(PATHS[2], forbids=False)
    body["tools"] = [{"type": "web_search"}, *body["tools"], seek]
    choice = {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "seek"}],
    }  # fmt: skip

    async def main() -> tuple[LoopServer, dict[str, Any]]:
        server = LoopServer(TEXT)
        server.service.drops_forbidden_tools = drops
        async with server.running():
            assert (await server.post(PATHS[2], body)).status == 200
            response = await server.post(PATHS[2], body | {"tool_choice": choice})
            assert response.status == 200, response.body
        return server, response.json

    server, payload = asyncio.run(main())

    before, after = (generation.request.prompt for generation in server.ended)
    calls = [item for item in payload["output"] if item["type"] == "function_call"]
    assert all(call["name"] == "seek" for call in calls)
    assert (before.ids == after.ids) != drops
    tools = [segment.path for segment in after.segments if segment.path.startswith("tools")]
    assert tools == (["tools[2]"] if drops else ["tools[1]", "tools[2]"])
